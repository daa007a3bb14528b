"""The root of the project, from which a benchmark names its files."""

from pathlib import Path

import pytest


@pytest.fixture
def _at_root_with_threads_kept(monkeypatch, restored_threads):
    """The shipped configuration names its models from the project's root; benchmarks set torch's threads."""
    monkeypatch.chdir(Path(__file__).parents[2])

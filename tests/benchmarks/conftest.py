"""The root of the project, from which a benchmark names its files."""

from pathlib import Path

import pytest
import torch


@pytest.fixture
def _at_root_with_threads_kept(monkeypatch):
    """The shipped configuration names its models from the project's root; benchmarks set torch's threads."""
    monkeypatch.chdir(Path(__file__).parents[2])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

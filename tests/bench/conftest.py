"""The shipped tiny pair on the example documents, for benchmarks that run for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specextend import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def at_root_with_threads_kept(monkeypatch):
    """The shipped configuration names its models from the project's root; benchmarks set torch's threads."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.load(
        ROOT / "configs" / "tiny-random.yaml", [f"input.path={ROOT / 'examples' / 'govreport.parquet'}"]
    )

"""What is tested is compiled."""

import pytest


@pytest.fixture(autouse=True)
def _own_kernel_cache(tmp_path, monkeypatch):
    """No kernel of an earlier run is taken."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

"""The environment of every test: set before anything imports ray."""

from __future__ import annotations

import os

import pytest

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # despite its name: listen on loopback only, on Linux too
    RAY_AUTH_MODE="disabled",  # or ray.init() writes a token into the home folder
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ADDRESS="local",  # never a left-over cluster
    RAY_DEDUP_LOGS="0",
    RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=str(80 << 20),
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory):
    """Step costs are measured in tests and kept by none; nobody's own are read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

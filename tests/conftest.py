"""The environment of every test: set before anything imports ray."""

import gc
import os
import sys
from functools import cache

import pytest
from hypothesis import settings

from tests.hub_server import serving

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # despite its name: listen on loopback only, on Linux too
    RAY_AUTH_MODE="disabled",  # or ray.init() writes a token into the home folder
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ADDRESS="local",  # never a left-over cluster
    RAY_DEDUP_LOGS="0",
    RAY_metrics_report_interval_ms="1000",  # a test waits for them
    RAY_worker_niceness="0",  # Ray's own 15 lets workers starve while other tests compute
    RAY_timeout_ms_task_wait_for_death_info="30000",  # after Ray's own 1000 a busy machine's dead are out of reach
    RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=str(80 << 20),
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
settings.register_profile("any machine", deadline=None)  # a busy machine makes no example wrong
settings.load_profile("any machine")


@pytest.fixture(scope="module", autouse=True)
def _fast_collection():
    """Leave what is there before a module's tests out of the garbage collections that `tests.alive` makes."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory):
    """Step costs are measured in tests and kept for this session; nobody's own are read.

    A process that has the engine keeps the first ones: beside other tests no machine is quiet, and every engine would
    spend seconds on measuring again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if module := sys.modules.get("specextend.decoding.measurements"):
            patch.setattr(module, "measure_undisturbed", lambda measure: (measure(), True))
        yield


@pytest.fixture(scope="session")
def local_ray():
    """One Ray for all tests of a process: starting one takes five seconds.

    Its workers say nothing here: what one prints at its end would stand in what a later test's command printed.
    """
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "ignore_reinit_error": True}
    ray.init(address="local", num_cpus=4, **options)
    yield
    ray.shutdown()


@pytest.fixture
def restored_threads():
    """A test that sets the number of torch's threads gives it back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hugging Face Hub on loopback, and an empty cache in front of it."""
    from huggingface_hub import constants  # it reads the environment when it is imported

    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield hub


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Name of a family -> its tiny pair, written once a process. Nobody writes into a pair's folders."""
    from tests.tiny_models import FAMILIES, write_pair

    return cache(lambda name: write_pair(tmp_path_factory.mktemp(name), FAMILIES[name]))


@pytest.fixture(scope="session")
def pair(pairs):
    """The pair that most tests take."""
    return pairs("llama")


@pytest.fixture(scope="session")
def spelling_pair(tmp_path_factory):
    """One whose tokens are bytes and runs of JSON."""
    from tests.tiny_models import FAMILIES, spelling_tokenizer, write_pair

    folder = tmp_path_factory.mktemp("spelling")
    return write_pair(folder, FAMILIES["llama"], vocab_size=320, tokenizer=spelling_tokenizer)


@pytest.fixture(scope="session")
def looping_pair(tmp_path_factory):
    """One whose target soon goes in circles."""
    from tests.tiny_models import write_looping_pair

    return write_looping_pair(tmp_path_factory.mktemp("looping"))


@pytest.fixture(scope="session")
def references(pairs):
    """(family, prompt length, new tokens, options) -> transformers' greedy output for `random_prompt`, made once."""
    from tests import reference_outputs, tiny_models

    load = cache(lambda family: tiny_models.load_reference(pairs(family)))
    return cache(
        lambda family, length, max_new_tokens, **options: reference_outputs.generate(
            load(family), tiny_models.random_prompt(length), max_new_tokens, **options
        )
    )

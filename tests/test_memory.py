"""Memory that a dry run plans, against what an engine of the same configuration holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specextend.decoding.cache import KVCache
from specextend.loading import check_memory, memory_bytes
from specextend.models import load_target
from specextend.pairing import check_pair
from tests.tiny_models import PUBLISHED, tiny_config, tiny_engine


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Every cache that is made from now on."""
    made: list[KVCache] = []
    build = KVCache.__init__

    def build_and_note(cache: KVCache, *shape: object) -> None:
        build(cache, *shape)
        made.append(cache)

    monkeypatch.setattr(KVCache, "__init__", build_and_note)
    return made


@pytest.mark.parametrize("draft", ["good", "eagle", "reduced", "copy", "ngram", "merged-eagle", PUBLISHED[0]])
def test_planned_caches_are_those_of_the_engine(pairs, draft: str, caches: list[KVCache]):
    """Nobody learns in the night that the draft's caches did not fit beside the target's."""
    pair = pairs("llama")
    config = tiny_config(pair, draft)
    planned = memory_bytes(config, check_pair(config.target, config.active_draft))
    engine = tiny_engine(pair, draft)
    assert sum(cache.stored.nbytes for cache in caches) == planned["target_cache"] + planned["draft_caches"]
    assert engine.target.cache.stored.nbytes == planned["target_cache"]
    assert (planned["draft_weights"] > 0) == (draft != "ngram")


def test_planned_weights_are_those_that_are_loaded(pairs):
    """Counted without a file of weights; tied ones once."""
    for family in ("llama", "qwen2-tied"):
        config = tiny_config(pairs(family), "ngram")
        planned = memory_bytes(config, check_pair(config.target, None))
        loaded = load_target(config.target, "eager")
        assert planned["target_weights"] == sum(weight.nbytes for weight in loaded.parameters())


def test_a_mode_without_a_draft_plans_for_none(pairs):
    """The configuration may name one."""
    config = tiny_config(pairs("llama"), "eagle", decoding__mode="autoregressive")
    planned = memory_bytes(config, check_pair(config.target, None))
    assert planned["draft_weights"] == planned["draft_caches"] == 0


def test_a_device_without_room_to_measure_its_limits_works_on(pairs, monkeypatch):
    """A figure of the report is no reason to lose a worker; any other failure is one."""
    engine = tiny_engine(pairs("llama"), "ngram")
    assert engine.limits()

    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr("specextend.decoding.engine.load_limits", lambda *_: fail(torch.OutOfMemoryError("no room")))
    assert engine.limits() is None
    monkeypatch.setattr("specextend.decoding.engine.load_limits", lambda *_: fail(RuntimeError("a broken device")))
    with pytest.raises(RuntimeError, match="a broken device"):
        engine.limits()


def test_a_gpu_that_can_never_hold_a_worker_is_refused_at_once(pairs, monkeypatch):
    """With what it would take; half a GPU holds half as much."""
    config = tiny_config(pairs("llama"), "eagle")
    facts = check_pair(config.target, config.active_draft)
    needed = sum(memory_bytes(config, facts).values())
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, int(1.5 * needed)))
    check_memory(config, facts, gpu)
    check_memory(config, facts, torch.device("cpu"))
    shared = config.model_copy(update={"job": replace(config.job, gpus_per_worker=0.5)})
    with pytest.raises(ValueError, match=r"a worker needs .* GiB of GPU memory .* lower decoding\.cache_gib"):
        check_memory(shared, facts, gpu)

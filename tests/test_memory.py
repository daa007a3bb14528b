"""Memory that a dry run plans, against what an engine of the same configuration holds."""

from types import SimpleNamespace

import pytest
import torch

from specextend.decoding.cache import KVCache
from specextend.decoding.device import traits_of
from specextend.decoding.layers import CompiledLinear
from specextend.models.loading import (
    GIB,
    check_memory,
    load_cached_target,
    load_engine,
    memory_bytes,
    rows_per_sequence,
    target_rows,
    with_batch_size,
)
from specextend.models.pairing import check_pair
from specextend.proof.prover import Kernels
from tests.tiny_models import (
    PUBLISHED,
    of_length,
    random_prompt,
    request,
    tiny_config,
    tiny_engine,
    write_wide_target,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def caches(monkeypatch):
    """Every cache that is made from now on."""
    made = []
    build = KVCache.__init__

    def build_and_note(cache, *shape):
        build(cache, *shape)
        made.append(cache)

    monkeypatch.setattr(KVCache, "__init__", build_and_note)
    return made


@pytest.mark.parametrize("draft", ["good", "eagle", "reduced", "copy", "ngram", "merged-eagle", PUBLISHED[0]])
def test_planned_caches_are_those_of_the_engine(pair, draft, caches):
    """Nobody learns in the night that the draft's caches did not fit beside the target's."""
    config = tiny_config(pair, draft)
    planned = memory_bytes(config, check_pair(config.target, config.active_draft))
    engine = tiny_engine(pair, draft)
    assert sum(cache.stored.nbytes for cache in caches) == planned["target_cache"] + planned["draft_caches"]
    assert engine.target.cache.stored.nbytes == planned["target_cache"]
    assert (planned["draft_weights"] > 0) == (draft != "ngram")


@pytest.mark.parametrize(
    "family, scheme, dtype",
    [
        ("llama", None, "float32"),
        ("qwen2-tied", None, "float32"),
        (None, "int8", "float32"),
        (None, "int4", "float32"),
        (None, "int8", "bfloat16"),
    ],
)
def test_planned_weights_are_those_that_are_loaded(pairs, tmp_path, family, scheme, dtype):
    """Counted without a file of weights; tied ones once, scales and, of a compiled layer, sums of groups, too."""
    pair = pairs(family) if family else write_wide_target(tmp_path)
    config = tiny_config(pair, "ngram", target__quantize=scheme, target__dtype=dtype)
    planned = memory_bytes(config, check_pair(config.target, None))
    target, _ = load_cached_target(config, 64, Kernels())
    tensors = [*target.model.parameters()]
    if dtype == "bfloat16":
        packed = [each for each in target.model.model.layers.modules() if isinstance(each, CompiledLinear)]
        assert packed
        tensors += [part for each in packed for part in (each.packed, each.scales, each.bias)]
    held = sum(each.nbytes for weight in tensors for each in parts_of(weight))
    assert planned["target_weights"] == held


def parts_of(weight):
    """The tensors of a weight, quantized or not."""
    names = ("qdata", "scale", "scale_and_zero")
    return [getattr(weight, name) for name in names if hasattr(weight, name)] or [weight]


def test_a_device_without_room_to_measure_its_limits_works_on(pair, monkeypatch):
    """A figure of the report is no reason to lose a worker; any other failure is one."""
    engine = tiny_engine(pair, "ngram")
    assert engine.limits()
    errors = iter([torch.OutOfMemoryError("no room"), RuntimeError("a broken device")])

    def fail(*_):
        raise next(errors)

    monkeypatch.setattr("specextend.decoding.engine.load_limits", fail)
    assert engine.limits() is None
    with pytest.raises(RuntimeError, match="a broken device"):
        engine.limits()


def test_a_gpu_that_can_never_hold_a_worker_is_refused_at_once(pair, monkeypatch):
    """With what it would take; half a GPU holds half as much."""
    whole, shared, none = (tiny_config(pair, "eagle", job__gpus_per_worker=share) for share in (1, 0.5, 0))
    facts = check_pair(whole.target, whole.active_draft)
    needed = sum(memory_bytes(whole, facts).values())
    card = SimpleNamespace(total_memory=int(1.5 * needed))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    check_memory(whole, facts)
    check_memory(none, facts)
    with pytest.raises(ValueError, match=r"a worker needs .* GiB of GPU memory .* lower decoding\.cache_gib"):
        check_memory(shared, facts)


MEAN = 900
LONGEST = 2000
"""Tokens of documents: of one as long as the mean, and of the longest."""


def batch_config(pair, size, num_rows, gpus=1):
    """A configuration of a batch, whose cache has so many rows at most."""
    cache_gib = num_rows * check_pair(tiny_config(pair).target, None).kv_bytes_per_token("float32") / GIB
    options = {"decoding__max_batch_size": size, "decoding__cache_gib": cache_gib, "job__gpus_per_worker": gpus}
    return tiny_config(pair, "eagle", **options)


@pytest.mark.parametrize(
    "gpus, documents, expected",
    [(0, 100, traits_of(CPU).largest_batch), (0, 3, 3), (1, 100, 32), (1, 23, 23), (1, 1, 1)],
)
def test_the_batch_is_as_many_mean_documents_as_the_cache_holds(pair, gpus, documents, expected):
    """By the longest, one of a hundred pages leaves a card for 23 others to three of them."""
    config = batch_config(pair, "auto", documents * rows_per_sequence(batch_config(pair, 1, 1), MEAN) + 255, gpus)
    facts = check_pair(config.target, config.active_draft)
    assert with_batch_size(config, facts, None, (MEAN, MEAN)).decoding.batch_size == expected
    three = batch_config(pair, "auto", 3 * rows_per_sequence(config, LONGEST))
    assert with_batch_size(three, facts, None, (MEAN, LONGEST)).decoding.batch_size > 3
    number = batch_config(pair, 7, 100)
    assert with_batch_size(number, facts, 0) is number, "a number is the user's"


@pytest.mark.parametrize("documents", [30, 9, 2.5, 1])
def test_the_cache_is_what_a_gpu_has_left(pair, documents):
    """Whatever the file says, so that a smaller card needs no other file; nothing of it lies idle.

    One that does not hold the longest document is refused: that document would become an error row.
    """
    wanted = batch_config(pair, "auto", 10**6)
    facts = check_pair(wanted.target, wanted.active_draft)
    fitting = batch_config(pair, int(documents), int(documents * rows_per_sequence(wanted, MEAN)))
    budget = sum(memory_bytes(fitting, facts).values()) / 0.95
    chosen = with_batch_size(wanted, facts, int(budget) + 1, (MEAN, LONGEST))
    taken = sum(memory_bytes(chosen, facts).values()) / 0.95
    assert chosen.decoding.batch_size == int(documents)
    assert target_rows(chosen, facts) >= rows_per_sequence(wanted, LONGEST)
    assert 0.99 * budget < taken
    assert (taken <= budget) == (documents > 1)


def most_active(engine, lengths, max_new_tokens):
    """Decode; return how many sequences were active at most when the engine asked for another one."""
    active = []

    def coming():
        for number, length in enumerate(lengths):
            active.append(engine.num_active)
            yield request(str(number), random_prompt(length, number), max_new_tokens)

    assert len(list(engine.generate(coming()))) == len(lengths)
    return max(active)


def test_a_batch_has_as_many_documents_as_its_cache_has_room_for(pair):
    """Short ones together, a long one alone beside few."""
    engine = load_engine(batch_config(pair, 32, 2048, gpus=0))
    most = most_active(engine, [*[41] * 20, 1700, *[41] * 19], 12)
    assert most == 8, "2,048 rows are eight regions of 256"


@pytest.mark.parametrize("draft", ["good", "merged-eagle"])
def test_what_a_draft_sees_takes_no_more_memory_than_a_full_batch_can_use(draft, pair, caches):
    """It was as large as all keys of the draft, of which a retrieval shows one in eight; the batch runs as before.

    A small LM reads what it sees, and has no other rows.
    """
    engine = tiny_engine(pair, draft, decoding__max_batch_size=3, decoding__max_new_tokens=32)
    of_target, *of_draft = (cache.stored.shape[3] for cache in caches)
    assert 3 * min(of_draft) < 2 * of_target
    assert len(of_draft) == (1 if draft == "good" else 2)
    assert most_active(engine, range(1000, 1007), 32) == 2, "the third joins when it is asked for"


def test_an_output_for_which_a_draft_has_no_room_is_refused(pair):
    """In a line that says what to set; others go on."""
    engine = tiny_engine(pair, "eagle", decoding__max_new_tokens=16, decoding__max_batch_size=1)
    errors = {}
    done = engine.generate([of_length(40, 1900), of_length(700, 16)], errors.__setitem__)
    assert [each.request_id for each in done] == ["700"]
    assert "raise decoding.max_new_tokens" in str(errors["40"])

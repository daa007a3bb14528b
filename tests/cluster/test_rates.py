"""Rates of a pair: what is fitted to decoded documents, and what is kept of them for later."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specextend.cluster.messages import Done
from specextend.cluster.rates import (
    MAX_COSTS,
    MIN_RUN_DOCUMENTS,
    CostSample,
    DocumentCost,
    Rates,
    find_rates,
    fit_rates,
    keep_rates,
    pair_key,
)
from specextend.config import RunConfig
from specextend.decoding.kept import cache_folder
from specextend.stats import DecodingStats

HASHES = {"target": "1", "tokenizer": "2", "draft": "3"}
SUMS = ("num_prompt_tokens", "num_output_tokens", "max_new_tokens", "prefill_s", "decode_s")
CPU, GPU = "AMD EPYC 7B13", "NVIDIA H200"


def costs_of(*lengths: int) -> list[DocumentCost]:
    """Documents whose seconds are exactly those of lines over the length."""
    return [
        DocumentCost(length, 50, 100, length * (1e-3 + 1e-6 * length), 50 * (2e-2 + 1e-6 * (length + 25)))
        for length in lengths
    ]


def fitted(costs: list[DocumentCost], **told: object) -> Rates | None:
    return fit_rates(costs, **({"start_s": 3.0, "device": CPU, "origin": "a calibration", "measured_at": 1.0} | told))


def config(**sections: dict[str, object]) -> RunConfig:
    least = {
        "input": {"path": "/in"},
        "output": {"path": "/out"},
        "target": {"model": "owner/target"},
        "draft": {"kind": "model", "model": "owner/draft"},
    }
    return RunConfig.from_values(least | sections)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


def test_rates_that_are_lines_are_found_again():
    """Without noise two lengths show what a token costs at any other."""
    rates = fitted(costs_of(1000, 4000, 8000))
    assert rates.prefill == pytest.approx((1e-3, 1e-6))
    assert rates.decode == pytest.approx((2e-2, 1e-6))
    assert rates.output_share == 0.5
    assert rates.spread_s == pytest.approx(0.0, abs=1e-9)


def test_a_document_in_parts_costs_what_its_requests_cost_as_documents():
    """Attention grows with the length of a part; a book in fifty parts was taken for one prompt of fifty times that."""
    parts = [replace(cost, **{name: 9 * getattr(cost, name) for name in SUMS}) for cost in costs_of(1000, 4000, 8000)]
    rates = fitted([replace(cost, num_requests=9) for cost in parts])
    assert rates.prefill == pytest.approx((1e-3, 1e-6))
    assert rates.decode == pytest.approx((2e-2, 1e-6))
    assert rates.spread_s == pytest.approx(0.0, abs=1e-9)
    chunked = {"prompt": {"length_policy": "chunk"}}
    keys = [pair_key(config(**chunked, chunks={"tokens": tokens}), HASHES) for tokens in (500, 900)]
    assert keys[0] != keys[1], "larger parts have shorter summaries for their length"


def test_fitted_rates_add_up_to_the_seconds_that_were_measured():
    """Lines per token give a short document the weight of a long one; the sum must be right all the same."""
    costs = [*costs_of(1000, 4000), DocumentCost(500, 100, 100, 2.0, 9.0)]
    rates = fitted(costs)
    prompts, limits = np.array([(cost.num_prompt_tokens, cost.max_new_tokens) for cost in costs], dtype=float).T
    expected_s = rates.prefill_s(prompts, np.ones(3)) + rates.decode_s(prompts, limits, np.ones(3))
    assert expected_s.sum() == pytest.approx(sum(cost.prefill_s + cost.decode_s for cost in costs))
    assert rates.spread_s > 0


def test_a_cost_holds_every_phase():
    """What a phase takes and nobody counts would be missing from every forecast."""
    phases = dict.fromkeys(("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s"), 1.0)
    done = Done({"num_requests": 3}, DecodingStats(num_prompt_tokens=9, num_output_tokens=5, **phases))
    assert DocumentCost.of(done, 7) == DocumentCost(9, 5, 7, prefill_s=2.0, decode_s=4.0, num_requests=3)


def test_a_prompt_that_took_over_another_one_costs_as_much_as_one_that_was_read():
    """Three questions about each document tonight must not promise a fast night for tomorrow's other corpus."""
    stats = DecodingStats(num_prompt_tokens=4000, num_cached_tokens=3900, num_output_tokens=5, prefill_s=0.1)
    assert DocumentCost.of(Done({"num_requests": 1}, stats), 7).prefill_s == pytest.approx(0.1 * 40)


def test_one_document_shows_nothing():
    """A spread needs two."""
    assert fitted(costs_of(1000)) is None
    assert fitted([*costs_of(1000), DocumentCost(0, 0, 100, 0.0, 0.0)]) is None


def test_kept_rates_are_those_of_the_device(own_folder: Path):
    """A laptop's say nothing about the night on eight GPUs, which a plan for elsewhere may use all the same."""
    key = pair_key(config(), HASHES)
    assert find_rates(key, CPU) is None
    on_cpu, on_gpu = fitted(costs_of(1000, 2000)), fitted(costs_of(1000, 2000), device=GPU, measured_at=2.0)
    assert keep_rates(key, on_gpu)
    assert keep_rates(key, on_cpu)
    assert find_rates(key, CPU) == on_cpu
    assert find_rates(key, None) == on_gpu, "the newest"
    assert find_rates(key, "another") is None
    newer = replace(on_cpu, measured_at=3.0)
    keep_rates(key, newer)
    assert find_rates(key, CPU) == newer


@pytest.mark.parametrize(
    "sections",
    [
        {"tree": {"nodes": 5}},
        {"decoding": {"max_batch_size": 2}},
        {"decoding": {"max_new_tokens": 10}},
        {"cache": {"policy": "full"}},
        {"prompt": {"instruction": "In one word?"}},
        {"job": {"cpus_per_worker": 2}},
        {"target": {"model": "owner/target", "dtype": "float32"}},
        {"draft": {"kind": "model", "model": "owner/draft", "ngram": True}},
    ],
    ids=str,
)
def test_other_options_have_other_rates(sections: dict[str, dict[str, object]]):
    """A forecast by the rates of something else would be wrong, and nobody would know."""
    assert pair_key(config(**sections), HASHES) != pair_key(config(), HASHES)


@pytest.mark.parametrize(
    "sections",
    [
        {"output": {"path": "/elsewhere"}},
        {"job": {"workers": 8}},
        {"decoding": {"seed": 1}},
        {"target": {"model": "/a/copy"}},
        {"report": {"price_per_worker_hour": 2.0}},
    ],
    ids=str,
)
def test_what_does_not_change_the_speed_keeps_the_rates(sections: dict[str, dict[str, object]]):
    """More workers are why somebody asks for a forecast; the weights are known by their hashes."""
    assert pair_key(config(**sections), HASHES) == pair_key(config(), HASHES)


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:40], lambda text: text.replace("0.001", "NaN"), lambda text: text.replace("mean_s", "x")],
)
def test_damaged_rates_are_none(own_folder: Path, damage: Callable[[str], str]):
    """The file is in a cache: somebody's half-written one must not end a run."""
    key = pair_key(config(), HASHES)
    keep_rates(key, replace(fitted(costs_of(1000, 2000)), prefill=(0.001, 0.0)))
    [path] = own_folder.iterdir()
    path.write_text(damage(path.read_text()))
    assert find_rates(key, CPU) is None
    assert find_rates(key, None) is None
    assert keep_rates(key, fitted(costs_of(1000, 2000)))
    assert json.loads(path.read_text())


def sampled(number: int, *devices: str) -> CostSample:
    sample = CostSample()
    for at, device in enumerate(devices):
        sample.worker_ready(device, 4.0 + at)
    for cost in costs_of(*range(1000, 1000 + number)):
        sample.offer(cost)
    return sample


def test_a_run_leaves_rates_of_its_documents():
    """The next run of the pair has its forecast for nothing."""
    rates = sampled(3 * MAX_COSTS, CPU, CPU).rates(connect_s=2.0, origin="run 0000000a", measured_at=1.0)
    assert (rates.device, rates.origin, rates.start_s) == (CPU, "run 0000000a", 6.0)
    assert rates.num_documents == MAX_COSTS, "a sample of a million documents is enough, and fits into memory"
    assert rates.prefill == pytest.approx((1e-3, 1e-6), rel=0.01)


def test_a_short_run_or_one_on_several_devices_leaves_none():
    """Three error rows that were done again must not replace the rates of a night."""
    told = {"connect_s": 2.0, "origin": "run", "measured_at": 1.0}
    assert sampled(MIN_RUN_DOCUMENTS - 1, CPU).rates(**told) is None
    assert sampled(MIN_RUN_DOCUMENTS, CPU, GPU).rates(**told) is None
    assert sampled(MIN_RUN_DOCUMENTS, CPU).rates(**told) is not None

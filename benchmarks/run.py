"""Run a benchmark: all variants in turn on every document, in a single process."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from rapidfuzz.distance import LCSseq

from benchmarks.benchmark import Benchmark
from benchmarks.documents import PromptGroup, choose_documents
from benchmarks.needles import replay_probes
from benchmarks.peers import PEERS, Output, Peer
from benchmarks.verdicts import judge_summaries
from specextend import Request, RunConfig, SamplingParams, load_engine
from specextend.core import is_loop
from specextend.decoding.device import device_name
from specextend.folders import code_commit, package_version
from specextend.stats import DecodingStats

Say = Callable[[str], None]
"""Receives progress messages."""
Row = dict[str, Any]
Result = dict[str, Any]
WARM_UP_TOKENS = 16
"""Maximum tokens of a variant's warm-up."""
_PACKAGES = ("specextend", "torch", "transformers", "xllamacpp", "openvino-genai")
_COUNTED = ("mean_acceptance_length", "retrieval_coverage", "num_spec_steps", "num_plain_steps")
_PHASES = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s")


class Variant(Protocol):
    """A way to decode documents."""

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode prompts together; return counts and seconds, and the tokens of each."""


Tokens = list[list[int]]


def run(benchmark: Benchmark, say: Say, keep: Callable[[Result], None]) -> Result:
    """Run a benchmark and return the result as JSON values.

    Args:
        keep: Receives the result so far after each round.

    Raises:
        ValueError: An option, a model or the documents cannot be used.
    """
    configs = benchmark.configs()
    first = next(iter(configs.values()))
    use_configured_threads(first)
    result: Result = {**describe(benchmark, first), "rows": []}
    if benchmark.probes:
        for rows in replay_probes(benchmark, configs, say):
            result["rows"] += rows
            keep(result)
        return result
    if benchmark.verdicts:
        for rows in judge_summaries(benchmark, configs, say):
            result["rows"] += rows
            keep(result)
        return result
    groups = choose_documents(benchmark, [*configs.values()])
    variants: dict[str, Variant] = {}
    for name, config in configs.items():
        say(f"loading {name}")
        peer = benchmark.peers.get(name)
        variants[name] = EngineVariant(config) if peer is None else PeerVariant(PEERS[peer](config))
    result["kernels"] = {
        name: each.kernels for name, each in variants.items() if isinstance(each, EngineVariant)
    }
    for rows in run_rounds(benchmark, variants, groups, say):
        result["rows"] += rows
        keep(result)
    return result


def run_rounds(
    benchmark: Benchmark, variants: Mapping[str, Variant], groups: Sequence[PromptGroup], say: Say
) -> Iterator[list[Row]]:
    """Warm up, then yield the rows of each round: a group of documents on every variant.

    The order of variants rotates, so that a slowing machine affects all of them.
    """
    names, shortest = [*variants], min(groups, key=lambda group: max(map(len, group.prompts)))
    for name, variant in variants.items():
        say(f"warming up {name}")
        variant.measure(shortest.prompts, benchmark, min(WARM_UP_TOKENS, benchmark.max_new_tokens))
    rounds = [*product(range(benchmark.repeats), groups)]
    for number, (repeat, group) in enumerate(rounds):
        first = number % len(names)
        found = {
            name: variants[name].measure(group.prompts, benchmark, benchmark.max_new_tokens)
            for name in names[first:] + names[:first]
        }
        where = {"documents": group.doc_ids, "bucket": group.bucket, "repeat": repeat}
        expected = found[benchmark.base][1]
        yield [
            {
                "variant": name,
                **where,
                **found[name][0],
                **describe_tokens(found[name][1], expected),
            }
            for name in names
        ]
        seconds = ", ".join(f"{name} {found[name][0]['wall_s']:.1f} s" for name in names)
        say(f"{number + 1}/{len(rounds)} {', '.join(group.doc_ids)}: {seconds}")


def describe_tokens(outputs: Tokens, expected: Tokens) -> Row:
    """Count tokens, and compare outputs with the base and with loops."""
    pairs = [*zip(outputs, expected, strict=True)]
    return {
        "num_output_tokens": sum(map(len, outputs)),
        "loops": any(map(is_loop, outputs)),
        "equals_base": outputs == expected,
        "first_equals_base": [tokens[:1] for tokens in outputs]
        == [tokens[:1] for tokens in expected],
        "rouge_l": fmean(2 * LCSseq.similarity(a, b) / max(1, len(a) + len(b)) for a, b in pairs),
    }


class EngineVariant:
    """Our engine with a configuration."""

    def __init__(self, config: RunConfig) -> None:
        self._engine = load_engine(config)

    @property
    def kernels(self) -> str:
        """Name the attention kernels chosen by the engine, the most frequent first."""
        attend = self._engine.target.attend
        choices = getattr(attend, "choices", None)
        chosen = [*choices.values()] if choices else [attend.__name__.removeprefix("attend_")]
        return ", ".join(sorted(set(chosen), key=lambda name: (-chosen.count(name), name)))

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode in batches of the configured size, measured by the engine's statistics."""
        sampling: SamplingParams = benchmark.sampling_params
        requests = [
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
        begin = time.perf_counter()
        completions = sorted(
            self._engine.generate(requests), key=lambda completion: int(completion.request_id)
        )
        wall_s = time.perf_counter() - begin
        stats = DecodingStats()
        for completion in completions:
            stats.add(completion.stats)
        counted = {name: getattr(stats, name) for name in (*_COUNTED, *_PHASES)}
        num_steps = stats.num_spec_steps + stats.num_plain_steps
        row = _row(prompts, len(prompts), num_steps, wall_s, stats.decode_s, stats.total_s)
        return row | counted, [completion.token_ids for completion in completions]


class PeerVariant:
    """A peer, with documents in sequence or in batches, by its configuration."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode greedily, as checked by the benchmark."""
        begin = time.perf_counter()
        outputs: list[Output] = self._peer.generate(prompts, max_new_tokens)
        wall_s = time.perf_counter() - begin
        sums = {
            name: sum(getattr(each, name) for each in outputs)
            for name in ("num_first_tokens", "num_steps", "decode_s", "total_s")
        }
        return _row(prompts, wall_s=wall_s, **sums), [each.token_ids for each in outputs]


def _row(
    prompts: Sequence[list[int]],
    num_first_tokens: int,
    num_steps: int,
    wall_s: float,
    decode_s: float,
    total_s: float,
) -> Row:
    return {
        "num_documents": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_first_tokens": num_first_tokens,
        "num_steps": num_steps,
        "wall_s": wall_s,
        "decode_s": decode_s,
        "total_s": total_s,
    }


def use_configured_threads(config: RunConfig) -> None:
    """Set torch's threads as in a worker of the job, on a CPU."""
    if config.job.device == "cpu":
        cores = config.job.cpus_per_worker
        torch.set_num_threads((os.cpu_count() or 1) if cores == "auto" else cores)


def describe(benchmark: Benchmark, config: RunConfig) -> Result:
    """Describe the conditions of the figures: benchmark, models, machine and versions."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {
        "benchmark": benchmark.model_dump(mode="json"),
        "target": Path(config.target.model).name,
        "dtype": config.target.dtype,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(torch.device(config.job.device)),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "versions": {
            "python": platform.python_version(),
            **{name: each for name, each in versions.items() if each},
        },
        "commit": code_commit(),
    }

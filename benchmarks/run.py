"""Runs a benchmark: every variant in turn on every document, in one process, as rows of counts and
seconds.
"""

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
from specextend import Request, RunConfig, SamplingParams, load_engine
from specextend.core import is_loop
from specextend.decoding.device import device_name
from specextend.shipped import code_commit, package_version
from specextend.stats import DecodingStats

Say = Callable[[str], None]
"""Takes one line of progress."""
Row = dict[str, Any]
Result = dict[str, Any]
WARM_UP_TOKENS = 16
"""Most tokens that a variant decodes before it is measured."""
_PACKAGES = ("specextend", "torch", "transformers", "xllamacpp", "openvino-genai")
_COUNTED = ("mean_acceptance_length", "retrieval_coverage", "num_spec_steps", "num_plain_steps")
_PHASES = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s")


class Variant(Protocol):
    """One way to decode documents."""

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode prompts that are handed over together; return counts and seconds, and the tokens
        of each.
        """


Tokens = list[list[int]]


def run(benchmark: Benchmark, say: Say, keep: Callable[[Result], None]) -> Result:
    """Measure, and return the result as JSON values; `keep` gets it after each round, whole as far
    as it is.

    Raises ValueError, mostly before anything is loaded, if an option, a model or the documents
    cannot be used.
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
    """Warm up every variant, then yield the rows of each round: one group of documents on every
    variant.

    In each round another variant goes first, so that a machine that slows down slows all of them.
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
    """Count the tokens, and say whether an output ends in a loop, and whether all are those of the
    base.
    """
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
    """Our engine in one configuration."""

    def __init__(self, config: RunConfig) -> None:
        """Load the models. Raises ValueError if they cannot be served."""
        self._engine = load_engine(config)

    @property
    def kernels(self) -> str:
        """Name the attention kernels that the engine's start found fastest, the most frequent
        first.
        """
        attend = self._engine.target.attend
        choices = getattr(attend, "choices", None)
        chosen = [*choices.values()] if choices else [attend.__name__.removeprefix("attend_")]
        return ", ".join(sorted(set(chosen), key=lambda name: (-chosen.count(name), name)))

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode as many prompts at a time as the configuration says, and measure by the engine's
        statistics.
        """
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
    """A peer, which takes one document after the other, or as many as its configuration says."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def measure(
        self, prompts: Sequence[list[int]], benchmark: Benchmark, max_new_tokens: int
    ) -> tuple[Row, Tokens]:
        """Decode prompts greedily, as the benchmark has checked."""
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
    """Make the counts and seconds that every variant has, summed over documents but for the wall
    clock.
    """
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
    """Let torch use as many threads as a worker of the job has, if the device is a CPU."""
    if config.job.device == "cpu":
        cores = config.job.cpus_per_worker
        torch.set_num_threads((os.cpu_count() or 1) if cores == "auto" else cores)


def describe(benchmark: Benchmark, config: RunConfig) -> Result:
    """Describe what a reader must know to judge the figures: the benchmark, the models, the
    machine, the versions.
    """
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

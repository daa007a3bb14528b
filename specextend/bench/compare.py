"""`compare`: measurements of the same documents on every side, and the figures computed from them.

Figures are speeds, ratios for each document, agreement of the tokens, the parts of a decoding step, and shares of what
the machine can do. Documents whose output ends in a loop are a group of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from specextend.bench.measurement import Measurement, Side
from specextend.bench.sides import (
    SideName,
    default_sides,
    describe_sides,
    draft_name,
    load_side,
    side_config,
)
from specextend.bench.workload import (
    BenchDocument,
    BenchOptions,
    Say,
    bench_documents,
    describe,
    say_what_is_missing,
    use_configured_threads,
)
from specextend.config import RunConfig
from specextend.decoding.limits import MachineLimits, ModelWork, count_work, measure_limits
from specextend.decoding.stopping import is_loop
from specextend.models import DTYPES, resolve_device, skeleton
from specextend.report.statistics import Spread, bucket_name, spread, spread_json
from specextend.stats import PHASES, DecodingStats, ratio

WARM_UP_TOKENS = 16
"""Most tokens that a side decodes before it is measured."""
SPEEDS = ("decode_tokens_per_s", "end_to_end_tokens_per_s")
BASES = ("autoregressive", "transformers", "transformers-lookup", "llama.cpp")
"""Sides to which every other side is compared."""
ALSO = (("specextend", "tree"),)
"""Further pairs: the first side is compared to the second."""


def compare(
    config: RunConfig, options: BenchOptions, say: Say, sides: Sequence[SideName] | None = None
) -> dict[str, Any]:
    """Measure `sides`, by default all that the configuration can run, and return figures as JSON values.

    Raises ValueError if the input, a model or an option cannot be used.
    """
    sides = sides or default_sides(config)
    described = describe_sides(config, sides)
    use_configured_threads(config)
    own = [side_config(config, name) for name in sides]
    documents = bench_documents(config, options, [side for side in own if side is not None])
    say_what_is_missing(options, documents, say)
    header = describe(config, options, documents) | {
        "configured_draft": None if config.draft is None else draft_name(config.draft),
        "sides": described,
    }
    say("measuring the machine's limits")
    device, dtype = resolve_device(config.target.device), DTYPES[config.target.dtype]
    machine = Machine(measure_limits(device, dtype), count_work(skeleton(config.target), dtype))
    loaded: dict[str, Side] = {}
    for name in sides:
        say(f"loading {name}")
        loaded[name] = load_side(name, config)
    records = [*run_rounds(loaded, documents, options.max_new_tokens, say)]
    return {"kind": "compare", **header, **figures(records, machine)}


@dataclass(frozen=True, slots=True)
class Machine:
    """Pairs what the machine can do at most with what the target asks of it."""

    limits: MachineLimits
    work: ModelWork


@dataclass(frozen=True, slots=True)
class Record:
    """The measurements of one document on every side."""

    document: BenchDocument
    measurements: dict[str, Measurement]

    @property
    def loops(self) -> bool:
        """Return True if the output of the first base that was run, or else of the first side, ends in a loop."""
        plain = next((name for name in BASES if name in self.measurements), next(iter(self.measurements)))
        return is_loop(self.measurements[plain].token_ids)


def run_rounds(
    sides: Mapping[str, Side], documents: Sequence[BenchDocument], max_new_tokens: int, say: Say
) -> Iterator[Record]:
    """Warm up every side on the shortest document, then measure every document on every side.

    Every document runs on all sides in turn, and each time another side goes first, so that a machine that slows down
    slows all of them.
    """
    shortest = min(documents, key=lambda document: len(document.prompt_token_ids))
    for name, side in sides.items():
        say(f"warming up {name}")
        side.run(shortest.prompt_token_ids, min(WARM_UP_TOKENS, max_new_tokens))
    for index, document in enumerate(documents):
        measurements = {
            name: sides[name].run(document.prompt_token_ids, max_new_tokens) for name in rotated([*sides], index)
        }
        say(f"{index + 1}/{len(documents)} {document.doc_id}: {_speeds(measurements)} tokens/s")
        yield Record(document, {name: measurements[name] for name in sides})


def rotated(names: list[str], index: int) -> list[str]:
    """Return the names in their order, beginning with another one for each index."""
    first = index % len(names)
    return names[first:] + names[:first]


def _speeds(measurements: Mapping[str, Measurement]) -> str:
    return ", ".join(
        f"{name} {measured.decode_tokens_per_s or 0:.1f}" for name, measured in sorted(measurements.items())
    )


def figures(records: Sequence[Record], machine: Machine) -> dict[str, Any]:
    """Compute the figures of each length bucket, of all documents and of the loops, and the agreement of greedy tokens.

    A document whose output ends in a loop is in the group `loops` only; agreement is counted over all documents.
    """
    names = [*records[0].measurements]
    buckets = sorted({record.document.bucket for record in records})
    steady, loops = ([record for record in records if record.loops is wanted] for wanted in (False, True))
    groups = {bucket_name(bucket): [r for r in steady if r.document.bucket == bucket] for bucket in buckets}
    by_bucket = {name: _group(group, names, machine) for name, group in groups.items()}
    return {
        "machine": asdict(machine),
        "all": _group(steady, names, machine),
        "buckets": by_bucket,
        "loops": _group(loops, names, machine) if loops else None,
        "lowest_bucket": {
            pair: lowest_bucket(by_bucket, pair) for pair in by_bucket[bucket_name(buckets[0])]["ratios"]
        },
        "agreement": {f"{a}/{b}": agreement(records, a, b) for a, b in _compared(names)},
        "documents": [_document(record) for record in records],
    }


def speed_ratios(records: Iterable[Record], a: str, b: str, speed: str) -> Spread | None:
    """Compute the spread over documents of side a's speed divided by side b's on the same document."""
    return spread(
        ratio(x, y) if x is not None and y is not None else None
        for record in records
        for x, y in [(getattr(record.measurements[a], speed), getattr(record.measurements[b], speed))]
    )


def lowest_bucket(by_bucket: Mapping[str, Any], pair: str) -> dict[str, Any]:
    """Find, for each speed, the bucket with the lowest median ratio; None if no bucket has a ratio."""
    lowest: dict[str, Any] = {}
    for speed in SPEEDS:
        ratios = {name: group["ratios"][pair][speed] for name, group in by_bucket.items()}
        medians = {name: measured["median"] for name, measured in ratios.items() if measured is not None}
        name = min(medians, key=medians.__getitem__, default=None)
        lowest[speed] = None if name is None else {"bucket": name, "median": medians[name]}
    return lowest


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token in which two outputs differ, or None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def agreement(records: Sequence[Record], a: str, b: str) -> dict[str, Any]:
    """Count the documents with equal tokens, and say where the others first differ.

    In fp32 any difference is an error of ours; in bf16 kernels round differently, and a near tie may fall either way.
    """
    found = [
        (record.document.doc_id, first_difference(record.measurements[a].token_ids, record.measurements[b].token_ids))
        for record in records
    ]
    differences = {doc_id: index for doc_id, index in found if index is not None}
    return {"documents": len(found), "equal": len(found) - len(differences), "first_differences": differences}


def total_stats(records: Iterable[Record], name: str) -> DecodingStats | None:
    """Sum the counts and seconds of one side; None if it has none."""
    total = DecodingStats()
    for record in records:
        stats = record.measurements[name].stats
        if stats is None:
            return None
        total.add(stats)
    return total


def read_share(records: Sequence[Record], name: str, machine: Machine) -> float | None:
    """Compute the share of the memory bandwidth that a side's steps reach if each reads what a plain step must.

    That is the weights once and the cache at its mean length.
    """
    measured = [(len(record.document.prompt_token_ids), record.measurements[name]) for record in records]
    num_bytes = sum(each.num_steps * machine.work.step_bytes(num + len(each.token_ids) / 2) for num, each in measured)
    return ratio(num_bytes / machine.limits.read_bytes_per_s, sum(each.decode_s for _, each in measured))


def matrix_share(records: Sequence[Record], name: str, machine: Machine) -> float | None:
    """Compute the share of the matrix rate that a side's prefill reaches."""
    num_flop = sum(machine.work.prefill_flop(len(record.document.prompt_token_ids)) for record in records)
    return ratio(num_flop / machine.limits.flop_per_s, sum(record.measurements[name].prefill_s for record in records))


def step_ms(stats: DecodingStats) -> dict[str, float | None]:
    """Compute the milliseconds of a decoding step by phase; `draft` includes the pass over the prompt's last token."""
    steps = stats.num_spec_steps + stats.num_plain_steps
    phases = ("draft_s", "verify_s", "retrieval_s")
    each = {name.removesuffix("_s"): ratio(1e3 * getattr(stats, name), steps) for name in phases}
    return {**each, "whole": ratio(1e3 * stats.decode_s, steps)}


def _group(records: Sequence[Record], names: Sequence[str], machine: Machine) -> dict[str, Any]:
    """Compute the figures of some documents, of which there may be none."""
    return {
        "documents": len(records),
        "sides": {name: _side(records, name, machine) for name in names},
        "ratios": {
            f"{a}/{b}": {speed: spread_json(speed_ratios(records, a, b, speed)) for speed in SPEEDS}
            for a, b in _pairs(names)
        },
    }


def _side(records: Sequence[Record], name: str, machine: Machine) -> dict[str, Any]:
    measured = [record.measurements[name] for record in records]
    side: dict[str, Any] = {
        "output_tokens": sum(len(each.token_ids) for each in measured),
        **{speed: spread_json(spread(getattr(each, speed) for each in measured)) for speed in SPEEDS},
        "total_s": spread_json(spread(each.total_s for each in measured)),
        "tokens_per_step": ratio(
            sum(each.num_decoded_tokens for each in measured), sum(each.num_steps for each in measured)
        ),
        "read_share": read_share(records, name, machine),
        "matrix_share": matrix_share(records, name, machine),
    }
    stats = total_stats(records, name) if records else None
    return side if stats is None else side | _counted(stats)


def _counted(stats: DecodingStats) -> dict[str, Any]:
    """Compute the figures that only our engine's statistics give."""
    busy = sum(getattr(stats, phase) for phase in PHASES)
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_plain_steps": stats.num_plain_steps,
        "num_fallbacks": stats.num_fallbacks,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "retrieval_coverage": stats.retrieval_coverage,
        "step_ms": step_ms(stats),
        "time_shares": {phase.removesuffix("_s"): ratio(getattr(stats, phase), busy) for phase in PHASES},
    }


def _document(record: Record) -> dict[str, Any]:
    document = record.document
    return {
        "doc_id": document.doc_id,
        "bucket": bucket_name(document.bucket),
        "num_prompt_tokens": len(document.prompt_token_ids),
        "loops": record.loops,
        "sides": {name: _measured(measured) for name, measured in record.measurements.items()},
    }


def _measured(measured: Measurement) -> dict[str, Any]:
    stats = measured.stats
    return {
        "num_output_tokens": len(measured.token_ids),
        "num_first_tokens": measured.num_first_tokens,
        "num_steps": measured.num_steps,
        "decode_s": measured.decode_s,
        "total_s": measured.total_s,
        **{speed: getattr(measured, speed) for speed in SPEEDS},
        "mean_acceptance_length": None if stats is None else stats.mean_acceptance_length,
    }


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    over_bases = [(a, b) for b in BASES if b in names for a in names if a != b]
    return over_bases + [(a, b) for a, b in ALSO if a in names and b in names]


def _compared(names: Sequence[str]) -> list[tuple[str, str]]:
    """Choose the pairs whose tokens are compared: each side with the first base that was run."""
    pairs = _pairs(names)
    return [pair for pair in pairs if pair[1] == pairs[0][1] or pair in ALSO]

"""`trees`: tree sizes (nodes x depth x threshold), each against plain decoding on the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from specextend.bench.compare import (
    SPEEDS,
    Record,
    agreement,
    run_rounds,
    speed_ratios,
    step_ms,
    total_stats,
)
from specextend.bench.measurement import Side
from specextend.bench.sides import load_side
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
from specextend.decoding.decoding_options import TreeOptions
from specextend.report.statistics import spread, spread_json


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeGrid:
    """Tree sizes to try, in every combination."""

    nodes: tuple[int, ...] = (8, 16, 24)
    depths: tuple[int, ...] = (4, 6)
    thresholds: tuple[float, ...] = (0.05, 0.1)

    def trees(self) -> list[TreeOptions]:
        """List every combination. Raises ValueError if one is impossible."""
        combinations = product(self.nodes, self.depths, self.thresholds)
        return [TreeOptions(nodes=nodes, depth=depth, threshold=threshold) for nodes, depth, threshold in combinations]


def trees(config: RunConfig, options: BenchOptions, grid: TreeGrid, say: Say) -> dict[str, Any]:
    """Measure each tree, and return figures as JSON values, the fastest tree first.

    Plain decoding runs beside every tree, so that trees measured minutes apart can be compared by their ratios.
    """
    use_configured_threads(config)
    sizes = grid.trees()
    documents = bench_documents(config, options)
    say_what_is_missing(options, documents, say)
    header = describe(config, options, documents)
    plain = load_side("autoregressive", config)
    points = []
    for number, tree in enumerate(sizes, start=1):
        say(f"tree {number}/{len(sizes)}: {tree}")
        points.append(_measure(config, tree, plain, documents, options.max_new_tokens, say))
    points.sort(key=lambda point: -_median(point))
    return {"kind": "trees", **header, "points": points}


def _measure(
    config: RunConfig,
    tree: TreeOptions,
    plain: Side,
    documents: Sequence[BenchDocument],
    max_new_tokens: int,
    say: Say,
) -> dict[str, Any]:
    side = load_side("specextend", config.model_copy(update={"tree": tree}))
    records = [*run_rounds({"autoregressive": plain, "specextend": side}, documents, max_new_tokens, say)]
    return asdict(tree) | point(records)


def point(records: Sequence[Record]) -> dict[str, Any]:
    """Compute the figures of one tree."""
    stats = total_stats(records, "specextend")
    assert stats is not None, "our engine counts"
    ratios = {speed: speed_ratios(records, "specextend", "autoregressive", speed) for speed in SPEEDS}
    speeds = spread(record.measurements["specextend"].decode_tokens_per_s for record in records)
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "decode_tokens_per_s": spread_json(speeds),
        "ratios": {name: spread_json(measured) for name, measured in ratios.items()},
        "step_ms": step_ms(stats),
        "agreement": agreement(records, "specextend", "autoregressive"),
    }


def _median(point: dict[str, Any]) -> float:
    measured = point["ratios"]["decode_tokens_per_s"]
    return 0.0 if measured is None else measured["median"]

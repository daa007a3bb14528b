"""Which tree is fastest here: nodes x depth x threshold, each against plain decoding on the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from specextend.bench.compare import BenchOptions, bench_documents, describe
from specextend.bench.documents import BenchDocument
from specextend.bench.environment import use_configured_threads
from specextend.bench.figures import SPEEDS, agreement, speed_ratios, step_ms, total_stats
from specextend.bench.measurement import Side
from specextend.bench.rounds import Record, Say, run_rounds
from specextend.bench.sides import load_side
from specextend.config import RunConfig
from specextend.decoding.options import TreeOptions
from specextend.report.spread import spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The trees to try."""

    nodes: tuple[int, ...] = (8, 16, 24)
    depths: tuple[int, ...] = (4, 6)
    thresholds: tuple[float, ...] = (0.05, 0.1)

    def trees(self) -> list[TreeOptions]:
        """Every combination. Raises ValueError for one that cannot be."""
        combinations = product(self.nodes, self.depths, self.thresholds)
        return [TreeOptions(nodes=nodes, depth=depth, threshold=threshold) for nodes, depth, threshold in combinations]


def sweep(config: RunConfig, options: BenchOptions, grid: Grid, say: Say) -> dict[str, Any]:
    """Measure each tree; figures as JSON values, the fastest first.

    Plain decoding runs beside every tree, so that trees measured minutes apart compare by their ratios.
    """
    use_configured_threads(config)
    trees = grid.trees()
    documents = bench_documents(config, options)
    header = describe(config, options, documents)
    plain = load_side("autoregressive", config)
    points = []
    for number, tree in enumerate(trees, start=1):
        say(f"tree {number}/{len(trees)}: {tree}")
        points.append(_measure(config, tree, plain, documents, options.max_new_tokens, say))
    points.sort(key=lambda point: -_median(point))
    return {"kind": "sweep", **header, "points": points}


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
    """The figures of one tree."""
    stats = total_stats(records, "specextend")
    assert stats is not None, "our engine counts"
    ratios = {speed: speed_ratios(records, "specextend", "autoregressive", speed) for speed in SPEEDS}
    speeds = spread(record.measurements["specextend"].decode_tokens_per_s for record in records)
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_histogram": stats.acceptance_histogram,
        "decode_tokens_per_s": None if speeds is None else asdict(speeds),
        "ratios": {name: None if measured is None else asdict(measured) for name, measured in ratios.items()},
        "step_ms": step_ms(stats),
        "agreement": agreement(records, "specextend", "autoregressive"),
    }


def _median(point: dict[str, Any]) -> float:
    measured = point["ratios"]["decode_tokens_per_s"]
    return 0.0 if measured is None else measured["median"]

"""The cost of a step in seconds: measured at the start, and corrected by every step that is taken.

A forward of n rows behind a prefix of L tokens takes `a_n + b_n * L`: its linear layers, and attention over the prefix.

Shapes: `T` rows of a forward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, linear_regression
from typing import Literal

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.decoding_options import AttentionOptions, TreeOptions
from specextend.decoding.graphs import Graphs
from specextend.decoding.measurements import kept_or_measured
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import tree_mask

Line = tuple[float, float]
"""(a, b) of `a + b * length`, seconds and seconds per token."""
DraftPhase = Literal["propose", "absorb"]
Clock = Callable[[], float]

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows of a forward that are measured; a number in between costs as much as the next larger one."""
LENGTHS = (512, 6000, 2048)
"""Tokens of prefix, in the order of measuring; the last is left out on a slow machine."""
BUDGET_S = 1.2
"""Seconds after which no further length of prefix is measured."""
_RUNS = 2
_WARM_UP = 4
"""Number of first measurements, of which the smallest is taken."""
_QUICKLY, _SLOWLY = 0.1, 0.05
"""Weights of a new measurement in a running average."""
_OUTLIER = 2.0
"""Factor by which a measurement may exceed what was expected; more is cut off, so that one slow step does not stop
speculation."""


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit the least-squares line through (length, seconds); a flat one where noise would make it fall or start below 0.

    No two lengths are equal.
    """
    lengths, seconds = zip(*points, strict=True)
    slope = max(0.0, linear_regression(lengths, seconds).slope) if len(points) > 1 else 0.0
    first = fmean(seconds) - slope * fmean(lengths)
    return (first, slope) if first > 0 else (fmean(seconds), 0.0)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Lines of one pair on one device."""

    lines: Mapping[TreeAttention, Mapping[int, Line]]
    """Tree attention -> rows of a forward, ascending -> line. One row is a plain step."""

    @property
    def sizes(self) -> list[int]:
        """Return the numbers of rows that were measured, ascending."""
        return list(next(iter(self.lines.values())))

    def size_for(self, num_rows: int) -> int:
        """Return the smallest measured size that holds `num_rows`; the largest if none does."""
        return next((size for size in self.sizes if size >= num_rows), self.sizes[-1])

    def seconds(self, tree: TreeAttention, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the time of a forward of `num_rows` rows of each sequence behind its prefix, with one tree attention.

        Linear layers see all sequences' rows at once; attention is done for one after the other.
        """
        lines, total = self.lines[tree], len(lengths) * num_rows
        beyond = max(1.0, total / self.sizes[-1])
        return lines[self.size_for(total)][0] * beyond + lines[self.size_for(num_rows)][1] * sum(lengths)

    def tree_attention(self, num_rows: int, lengths: Sequence[int]) -> TreeAttention:
        """Return the faster kind: dense saves a kernel call and a merge, hybrid saves time per token of prefix."""
        return min(self.lines, key=lambda tree: self.seconds(tree, num_rows, lengths))


class StepCosts:
    """A cost table with corrections from this engine's own steps.

    What slows the machine down slows every step down, so one pace serves all of them: it is learned from each step that
    is taken, and holds for those that are not. What is left is learned slowly for each size of batch and tree.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._pace = _Average(_QUICKLY, 1.0, 1)  # the table counts as the first measurement
        self._corrections: dict[tuple[int, int], _Average] = {}  # (sequences, size), beside the pace
        self._drafting: dict[DraftPhase, dict[int, _Average]] = {"propose": {}, "absorb": {}}  # at pace 1

    def verify_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the time of a verification of `num_rows` rows (1: a plain step) of each sequence."""
        correction = self._corrections.get((len(lengths), self.table.size_for(num_rows)))
        return self._pace.value * (correction.value if correction else 1.0) * self._expected_s(num_rows, lengths)

    def draft_s(self, num_sequences: int) -> float:
        """Return the time of drafting for `num_sequences`, by the nearest number seen so far; 0 if there is none."""
        return self._pace.value * sum(_nearest(seen, num_sequences) for seen in self._drafting.values())

    def observe_verify(self, num_rows: int, lengths: Sequence[int], seconds: float) -> None:
        """Record the time of a verification."""
        key = len(lengths), self.table.size_for(num_rows)
        correction = self._corrections.setdefault(key, _Average(_SLOWLY, 1.0, 1))
        ratio = seconds / self._expected_s(num_rows, lengths)
        self._pace.add(ratio / correction.value)
        correction.add(ratio / self._pace.value)

    def observe_draft(self, phase: DraftPhase, num_sequences: int, seconds: float) -> None:
        """Record the time of drafting for `num_sequences` at once."""
        self._drafting[phase].setdefault(num_sequences, _Average(_SLOWLY)).add(seconds / self._pace.value)

    def _expected_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        return self.table.seconds(self.table.tree_attention(num_rows, lengths), num_rows, lengths)


@dataclass(slots=True)
class _Average:
    """A running average that begins with the smallest of the first values, because first calls build kernels."""

    weight: float
    """Weight of a new value."""
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= _WARM_UP:
            self.value = min(self.value, value) if self.count > 1 else value
        else:
            likely = min(max(value, self.value / _OUTLIER), self.value * _OUTLIER)
            self.value += self.weight * (likely - self.value)


def _nearest(seen: Mapping[int, _Average], num_sequences: int) -> float:
    if not seen:
        return 0.0
    return seen[min(seen, key=lambda number: (abs(number - num_sequences), number))].value


def choose_sizes(num_nodes: int, *, fixed: bool, max_batch_size: int) -> list[int]:
    """Choose the numbers of rows to measure, ascending from 1: those that steps can have, up to `SIZES`.

    `num_nodes` is the largest tree, the root not counted; with `fixed`, trees have no other size.
    """
    rows = num_nodes + 1
    all_rows = max(rows, min(rows * max_batch_size, SIZES[-1]))
    smaller = {1} if fixed else {size for size in SIZES if size < rows}
    return sorted({*smaller, rows, all_rows, *(size for size in SIZES if rows < size < all_rows)})


def measure(
    target: CachedModel,
    kinds: Sequence[TreeAttention],
    sizes: Sequence[int],
    lengths: Sequence[int],
    graphs: Graphs,
    clock: Clock = time.perf_counter,
) -> CostTable:
    """Measure steps of each kind and size behind prefixes of several lengths. Steps go through `graphs`.

    It writes to the front of the target's cache, so no request may be running.
    """
    begin = clock()
    num_rows = max(lengths) + max(sizes)
    target.cache.stored[..., :num_rows, :] = 0  # fresh memory may hold NaN, and costs nothing until it is written
    points: dict[tuple[TreeAttention, int], list[tuple[int, float]]] = defaultdict(list)
    for length in lengths:
        if points and clock() - begin > BUDGET_S:
            break
        for kind, size in product(kinds, sizes):
            step = partial(time_step, target, kind, size, length, graphs, clock)
            if (kind, size) not in points:  # the first calls of a size build what later ones use
                for _ in range(graphs.num_warm_ups):
                    step()
            points[kind, size].append((length, min(step() for _ in range(_RUNS))))
    return CostTable({kind: {size: fit_line(points[kind, size]) for size in sizes} for kind in kinds})


@torch.inference_mode()
def time_step(
    target: CachedModel,
    kind: TreeAttention,
    size: int,
    length: int,
    graphs: Graphs,
    clock: Clock = time.perf_counter,
) -> float:
    """Time one verification of a chain of `size` rows behind `length` tokens; with one row it is a plain step."""

    def choose(token_ids: Tensor, parents: Tensor, start: Tensor, rows: Tensor) -> tuple[Tensor]:
        mask = tree_mask(parents, size) if size > 1 else None
        places = start, rows
        plan = AttentionPlan([0], [length + size], size, mask, tree=kind, on_device=places, captured=graphs.capturing)
        return (target.logits(target.forward(token_ids, rows, plan)).max(-1).indices,)

    begin = clock()
    parents = torch.arange(-1, size - 1, device=target.device).unsqueeze(0)
    start = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    [chosen] = graphs.run(f"step {kind}", choose, torch.zeros_like(parents), parents, start, length + parents + 1)
    chosen.tolist()  # waits for the device
    return clock() - begin


def load_step_costs(
    target: CachedModel, tree: TreeOptions, attention: AttentionOptions, max_batch_size: int, graphs: Graphs
) -> StepCosts | None:
    """Return the costs of steps, read from disk or measured now; None if the options choose nothing by them.

    graphs: the engine's; the times of captured steps are kept apart. Measuring writes to the target's cache, so no
    request may be running.
    """
    fixed, kinds = tree.nodes != "auto", attention.tree_kinds
    if fixed and len(kinds) == 1:
        return None
    sizes = choose_sizes(tree.most_nodes, fixed=fixed, max_batch_size=max_batch_size)
    longest = max(1, target.cache.rows.num_free - sizes[-1])
    lengths = [*dict.fromkeys(min(length, longest) for length in LENGTHS)]
    key = target.timing_key() | {"backend": target.attend.__name__, "graphs": graphs.enabled}
    key |= {"kinds": [*kinds], "sizes": sizes, "lengths": lengths}
    kept = kept_or_measured("step-costs", key, lambda: measure(target, kinds, sizes, lengths, graphs).lines)
    graphs.clear()
    lines = {kind: {int(size): tuple(line) for size, line in each.items()} for kind, each in kept.items()}
    return StepCosts(CostTable(lines))  # in JSON, keys are strings and tuples lists

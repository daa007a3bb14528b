"""Measuring what steps cost, at start-up: seconds of work, kept per device and model (`tuning_file.py`).

Shapes: `T` rows of a forward.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.model import CachedModel
from specextend.decoding.step_costs import CostTable, fit_line
from specextend.decoding.tree import tree_mask

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of a forward that are told apart; between two of them the larger one's cost is taken."""
LENGTHS = (512, 6000, 2048)
"""Prefixes, in the order of measuring; the last is left out on a slow machine."""
BUDGET_S = 3.0
"""Seconds after which no further prefix is begun."""
_RUNS = 2
_BUSY = 1.1


@dataclass(frozen=True, slots=True)
class Grid:
    """What to measure."""

    kinds: tuple[TreeAttention, ...]
    sizes: tuple[int, ...]
    """Rows, ascending, from 1."""
    lengths: tuple[int, ...]
    """Tokens of prefix."""


def make_grid(kinds: tuple[TreeAttention, ...], num_nodes: int, *, fixed: bool, max_batch_size: int, room: int) -> Grid:
    """The sizes that steps can have, and prefixes that fit.

    `num_nodes` of a tree at most, the root not counted; `fixed`: trees have no other size. `room`: rows of the cache
    that one sequence can use.
    """
    rows = num_nodes + 1
    all_rows = max(rows, min(rows * max_batch_size, SIZES[-1]))
    smaller = {1} if fixed else {size for size in SIZES if size < rows}
    sizes = sorted({*smaller, rows, all_rows, *(size for size in SIZES if rows < size < all_rows)})
    longest = max(1, room - sizes[-1])
    return Grid(kinds, tuple(sizes), tuple(dict.fromkeys(min(length, longest) for length in LENGTHS)))


def measure(target: CachedModel, grid: Grid, clock: Callable[[], float] = time.perf_counter) -> tuple[CostTable, bool]:
    """The table, and whether the machine was quiet enough for it to be kept.

    Writes to the front of the target's cache, which must be in use by nobody.
    """
    begin = clock()
    num_rows = max(grid.lengths) + grid.sizes[-1]
    for stored in (target.cache.keys, target.cache.values):
        stored[:, :num_rows] = 0  # fresh memory may hold NaN, and costs nothing to read until it is written
    seconds: dict[tuple[TreeAttention, int], list[tuple[int, float]]] = defaultdict(list)
    spreads = []
    for length in grid.lengths:
        if seconds and clock() - begin > BUDGET_S:
            break
        for kind in grid.kinds:
            for size in grid.sizes:
                runs = [_time_step(target, kind, size, length, clock) for _ in range(1 + _RUNS)][1:]
                seconds[kind, size].append((length, min(runs)))
                spreads.append(max(runs) / min(runs))
    lines = {kind: {size: _line(seconds[kind, size]) for size in grid.sizes} for kind in grid.kinds}
    return CostTable(lines), median(spreads) < _BUSY


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    return fit_line([length for length, _ in points], [seconds for _, seconds in points])


@torch.inference_mode()
def _time_step(target: CachedModel, kind: TreeAttention, size: int, length: int, clock: Callable[[], float]) -> float:
    """Seconds of one verification of a chain of `size` rows behind `length` tokens."""
    begin = clock()
    token_ids = torch.zeros(1, size, dtype=torch.int64, device=target.device)
    parents = torch.arange(-1, size - 1, device=target.device).unsqueeze(0)
    mask = tree_mask(parents, size) if size > 1 else None
    plan = AttentionPlan([0], [length + size], size, mask, tree=kind)
    hidden = target.forward(token_ids, length + parents + 1, plan)
    target.logits(hidden).max(-1).indices.tolist()  # waits for the device
    return clock() - begin

"""Measurement of step costs at start-up. They are kept for the device and the model (`kept.py`).

Shapes: `T` rows of a forward.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specextend.attention.backends import KERNELS_VERSION, cpu_kernels
from specextend.attention.measured import Cell, MeasuredAttention, make_cells, measure_attention
from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.decoding_options import AttentionOptions, TreeOptions
from specextend.decoding.device import device_name
from specextend.decoding.graphs import Graphs
from specextend.decoding.kept import keep_value, measure_undisturbed, read_kept
from specextend.decoding.model import CachedModel
from specextend.decoding.step_costs import CostTable, StepCosts, fit_line
from specextend.decoding.tree import tree_mask

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of rows of a forward that are measured; a number in between costs as much as the next larger one."""
LENGTHS = (512, 6000, 2048)
"""Tokens of prefix, in the order of measuring; the last is left out on a slow machine."""
BUDGET_S = 1.2
"""Seconds after which no further length of prefix is measured."""
_RUNS = 2
_BUSY = 1.1

_KIND, _ATTENTION_KIND = "step-costs", "attention"
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclass(frozen=True, slots=True)
class TuningGrid:
    """The combinations to measure."""

    kinds: tuple[TreeAttention, ...]
    sizes: tuple[int, ...]
    """Rows, ascending, from 1."""
    lengths: tuple[int, ...]
    """Tokens of prefix."""
    largest_tree: int = SIZES[-1]
    """Rows of one tree at most; more rows are those of a batch, and attention is no matter of them."""

    def cells(self) -> list[tuple[TreeAttention, int]]:
        """List what to measure: each kind of attention where a tree can have that size, otherwise the first one."""
        return [
            (kind, size)
            for kind in self.kinds
            for size in self.sizes
            if kind == self.kinds[0] or 1 < size <= self.largest_tree
        ]


def make_grid(
    kinds: tuple[TreeAttention, ...], num_nodes: int, *, fixed: bool, max_batch_size: int, room: int
) -> TuningGrid:
    """Choose the sizes that steps can have, and prefixes that fit.

    `num_nodes` is the largest tree, the root not counted; with `fixed`, trees have no other size. `room` is the number
    of cache rows that one sequence can use.
    """
    rows = num_nodes + 1
    all_rows = max(rows, min(rows * max_batch_size, SIZES[-1]))
    smaller = {1} if fixed else {size for size in SIZES if size < rows}
    sizes = sorted({*smaller, rows, all_rows, *(size for size in SIZES if rows < size < all_rows)})
    longest = max(1, room - sizes[-1])
    return TuningGrid(kinds, tuple(sizes), tuple(dict.fromkeys(min(length, longest) for length in LENGTHS)), rows)


def measure(
    target: CachedModel, grid: TuningGrid, graphs: Graphs, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostTable, bool]:
    """Measure the table; return it, and True if the machine was quiet enough to keep it. Steps go through `graphs`.

    It writes to the front of the target's cache, so no request may be running.
    """
    begin = clock()
    num_rows = max(grid.lengths) + grid.sizes[-1]
    target.cache.stored[..., :num_rows, :] = 0  # fresh memory may hold NaN, and costs nothing until it is written
    seconds: dict[tuple[TreeAttention, int], list[tuple[int, float]]] = defaultdict(list)
    spreads = []
    for length in grid.lengths:
        if seconds and clock() - begin > BUDGET_S:
            break
        for kind, size in grid.cells():
            step = partial(time_step, target, kind, size, length, graphs, clock)
            if (kind, size) not in seconds:  # the first calls of a size build what later ones use
                for _ in range(graphs.num_warm_ups):
                    step()
            runs = [step() for _ in range(_RUNS)]
            seconds[kind, size].append((length, min(runs)))
            spreads.append(max(runs) / min(runs))
    measured = {cell: _line(points) for cell, points in seconds.items()}
    lines = {
        kind: {size: measured.get((kind, size), measured[grid.kinds[0], size]) for size in grid.sizes}
        for kind in grid.kinds
    }
    return CostTable(lines), median(spreads) < _BUSY


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    return fit_line([length for length, _ in points], [seconds for _, seconds in points])


@torch.inference_mode()
def time_step(
    target: CachedModel,
    kind: TreeAttention,
    size: int,
    length: int,
    graphs: Graphs,
    clock: Callable[[], float] = time.perf_counter,
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
    room = target.cache.rows.num_free
    grid = make_grid(kinds, tree.most_nodes, fixed=fixed, max_batch_size=max_batch_size, room=room)
    key = describe(target, graphs=graphs.enabled)
    if (kept := read_table(key, grid)) is not None:
        return StepCosts(kept)
    table, is_quiet = measure_undisturbed(lambda: measure(target, grid, graphs))
    graphs.clear()
    if is_quiet:
        write_table(key, grid, table)
    return StepCosts(table)


def load_fastest(target: CachedModel) -> MeasuredAttention:
    """Return the attention backend that takes the fastest kernel for each call, by what is kept or measured now.

    For a target on a CPU. Measuring writes to its cache, so no request may be running.
    """
    kernels = cpu_kernels(target.head_dim, target.dtype)
    cells = make_cells(target.cache.rows.num_free)
    key = _device_key(target) | {"kernels": [*kernels], "cells": [[*cell] for cell in cells]}
    if (kept := _checked_choices(read_kept(_ATTENTION_KIND, key), cells, kernels)) is not None:
        return MeasuredAttention(kernels, kept)
    stored, num_heads = target.cache.stored, target.config.num_attention_heads
    stored[..., : max(length for _, _, length in cells), :] = 0
    with torch.inference_mode():
        choices, is_quiet = measure_undisturbed(lambda: measure_attention(stored, num_heads, kernels, cells))
    if is_quiet:
        keep_value(_ATTENTION_KIND, key, [choices[cell] for cell in cells])
    return MeasuredAttention(kernels, choices)


def _checked_choices(kept: Any, cells: list[Cell], kernels: Container[str]) -> dict[Cell, str] | None:
    """Return the kept names as choices; None unless there is a known kernel for each cell."""
    known = isinstance(kept, list) and all(isinstance(name, str) and name in kernels for name in kept)
    if not known or len(kept) != len(cells):
        return None
    return dict(zip(cells, kept, strict=True))


def describe(target: CachedModel, *, graphs: bool) -> dict[str, Any]:
    """Return everything that a step's time depends on, as JSON values: the device, its software, the model's shape.

    Among the software: the attention backend, the layers, and whether steps are replayed from captured graphs.
    """
    layers = "kernels" if target.kernels is not None else "torch"
    return _device_key(target) | {"backend": target.attend.__name__, "layers": layers, "graphs": graphs}


def _device_key(target: CachedModel) -> dict[str, Any]:
    return {
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels_version": KERNELS_VERSION,
        "dtype": str(target.dtype),
        "linears": target.linears,
        "head_dim": target.head_dim,
        **{name: getattr(target.config, name) for name in _SHAPE},
    }


def read_table(key: Mapping[str, Any], grid: TuningGrid) -> CostTable | None:
    """Read the table for `key` (JSON values that name device and model) and `grid`; None if there is no usable one."""
    lines = read_kept(_KIND, _full_key(key, grid))
    try:
        return CostTable(
            {kind: {size: _checked_line(lines[kind][str(size)]) for size in grid.sizes} for kind in grid.kinds}
        )
    except (ValueError, KeyError, TypeError):
        return None


def write_table(key: Mapping[str, Any], grid: TuningGrid, table: CostTable) -> bool:
    """Write a table; return False if the folder cannot be written."""
    return keep_value(_KIND, _full_key(key, grid), table.lines)


def _full_key(key: Mapping[str, Any], grid: TuningGrid) -> dict[str, Any]:
    return {**key, "kinds": [*grid.kinds], "sizes": [*grid.sizes], "lengths": [*grid.lengths]}


def _checked_line(values: Any) -> tuple[float, float]:
    constant, slope = (float(value) for value in values)
    if not (0 <= constant < math.inf and 0 <= slope < math.inf and constant + slope > 0):
        raise ValueError(f"no line: {values}")
    return constant, slope

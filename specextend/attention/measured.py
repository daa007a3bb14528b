"""The choice among a CPU's attention kernels, by measurement on the machine that runs them.

Shapes: `L` layers, `T` queries, `S` keys, `H` query heads, `K` key heads, `R` cache rows, `D` head size.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specextend.attention.plan import Attend, KeySpan

NUM_QUERIES = (1, 4, 16, 64, 512)
"""Queries of a call: a plain step, trees of several sizes, a chunk of a prompt."""
NUM_KEYS = (1024, 6144)
LONG_CALL = 64
"""Queries above which only the smaller number of keys is measured."""
_RUNS = 3
_HOPELESS = 3.0
"""Factor over the best first run above which a kernel is not run again."""

Cell = tuple[bool, int, int]
"""Whether keys are masked, number of queries, number of keys."""


@dataclass(slots=True)
class MeasuredAttention:
    """A backend that calls the kernel which was fastest for such a call."""

    kernels: Mapping[str, Attend]
    choices: Mapping[Cell, str]
    """Name of the fastest kernel in each cell."""
    _queries: dict[bool, list[int]] = field(init=False)
    _keys: dict[tuple[bool, int], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        cells = sorted(self.choices)
        self._queries = {masked: sorted({t for m, t, _ in cells if m == masked}) for masked in (False, True)}
        self._keys = {(m, t): [length for *at, length in cells if at == [m, t]] for m, t, _ in cells}

    @property
    def __name__(self) -> str:
        """Return a name that tells one set of choices from another, in the order of the cells."""
        return "measured " + " ".join(name for _, name in sorted(self.choices.items()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        """Attend as `Attend` says."""
        name = self.choice(span.mask is not None, q.shape[1], max(span.lengths))
        return self.kernels[name](q, k, v, span, scale)

    def choice(self, masked: bool, num_queries: int, num_keys: int) -> str:
        """Return the kernel for a call, by the smallest cell that holds it, or the largest that was measured."""
        masked = masked and bool(self._queries[True])
        queries = _holding(self._queries[masked], num_queries)
        return self.choices[masked, queries, _holding(self._keys[masked, queries], num_keys)]


def _holding(sizes: Sequence[int], number: int) -> int:
    return sizes[min(bisect_left(sizes, number), len(sizes) - 1)]


def make_cells(num_rows: int) -> list[Cell]:
    """List the calls to measure in a cache of `num_rows` rows, trees with a mask and without one."""
    lengths = tuple(dict.fromkeys(min(length, num_rows) for length in NUM_KEYS))
    return [
        (masked, num_queries, length)
        for num_queries in NUM_QUERIES
        for length in (lengths if num_queries <= LONG_CALL else lengths[:1])
        for masked in (False, True)
        if num_queries <= length and not (masked and (num_queries == 1 or num_queries > LONG_CALL))
    ]


def measure_attention(
    stored: Tensor,
    num_heads: int,
    kernels: Mapping[str, Attend],
    cells: Sequence[Cell],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Cell, str]:
    """Find the name of the fastest kernel in each cell.

    stored [L, 2, K, R, D] is the cache that the calls read, one layer after the other; it must hold finite values. The
    kernels take turns, so that a machine that is busy for a while slows all of them.
    """
    return {cell: _fastest(stored, num_heads, kernels, cell, clock) for cell in cells}


def _fastest(
    stored: Tensor, num_heads: int, kernels: Mapping[str, Attend], cell: Cell, clock: Callable[[], float]
) -> str:
    masked, num_queries, length = cell
    head_dim = stored.shape[-1]
    q = torch.zeros(1, num_queries, num_heads, head_dim, dtype=stored.dtype)
    mask = torch.ones(1, num_queries, num_queries, dtype=torch.bool).tril() if masked else None
    calls = 0

    def run(kernel: Attend) -> float:
        nonlocal calls
        span = KeySpan([0], [length], mask=mask, needs_lse=num_queries > 1 and not masked)
        begin = clock()
        for _ in range(2):
            calls += 1
            keys, values = stored[calls % len(stored)]
            kernel(q, keys, values, span, head_dim**-0.5)
        return clock() - begin

    for kernel in kernels.values():  # the first call of a shape builds what later ones use
        run(kernel)
    first = {name: run(kernel) for name, kernel in kernels.items()}
    best = {name: seconds for name, seconds in first.items() if seconds <= _HOPELESS * min(first.values())}
    for _ in range(_RUNS - 1):
        for name in best:
            best[name] = min(best[name], run(kernels[name]))
    return min(best, key=lambda name: best[name])

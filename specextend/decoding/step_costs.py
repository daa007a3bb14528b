"""The cost of a step in seconds: measured at start-up (`tuning.py`), and corrected by every step that is taken.

A forward of n rows behind a prefix of L tokens takes `a_n + b_n * L`: its linear layers, and attention over the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specextend.attention.plan import TreeAttention

Line = tuple[float, float]
"""(a, b) of `a + b * length`, seconds and seconds per token."""
DraftPhase = Literal["propose", "absorb"]

_WARM_UP = 4
"""Number of first measurements, of which the smallest is taken."""
_QUICKLY, _SLOWLY = 0.1, 0.05
"""Weights of a new measurement in a running average."""
_OUTLIER = 2.0
"""Factor by which a measurement may exceed what was expected; more is cut off, so that one slow step does not stop
speculation."""


def fit_line(lengths: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit the least-squares line through the points; a flat one where noise would make it fall or start below 0."""
    mean_length, mean_s = sum(lengths) / len(lengths), sum(seconds) / len(seconds)
    spread = sum((length - mean_length) ** 2 for length in lengths)
    together = sum((length - mean_length) * (s - mean_s) for length, s in zip(lengths, seconds, strict=True))
    slope = max(0.0, together / spread) if spread else 0.0
    first = mean_s - slope * mean_length
    return (first, slope) if first > 0 else (mean_s, 0.0)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Lines of one pair on one device."""

    lines: Mapping[TreeAttention, Mapping[int, Line]]
    """Tree attention -> rows of a forward, ascending -> line. One row is a plain step, the same in both."""

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
    distance: Callable[[int], tuple[int, int]] = lambda number: (abs(number - num_sequences), number)  # noqa: E731
    return seen[min(seen, key=distance)].value if seen else 0.0

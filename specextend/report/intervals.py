"""Intervals of 95% for shares: of one sample, and of a sample drawn by strata."""

import math
from collections.abc import Iterable
from typing import NamedTuple

_Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95%."""


class Stratum(NamedTuple):
    """Counts of a group from which rows were drawn at random."""

    rows: int
    drawn: int
    hits: int


def wilson(share: float, rows: float) -> list[float]:
    """Return Wilson's interval for the share of `rows` independent rows (may be infinite)."""
    spread = _Z * math.sqrt(share * (1 - share) / rows + _Z**2 / (4 * rows**2))
    middle = share + _Z**2 / (2 * rows)
    return [
        max(0.0, (middle - spread) / (1 + _Z**2 / rows)),
        min(1.0, (middle + spread) / (1 + _Z**2 / rows)),
    ]


def stratified(strata: Iterable[Stratum]) -> tuple[float, list[float]]:
    """Estimate the share of hits in all strata with a drawn row.

    Returns:
        The share by size of strata, and its interval: Wilson's of each stratum, corrected for
        small strata, joined by MOVER (Zou, Huang and Zhang 2009).
    """
    known = [each for each in strata if each.drawn]
    total = sum(each.rows for each in known)
    share = below = above = 0.0
    for rows, drawn, hits in known:
        size = drawn * (rows - 1) / (rows - drawn) if rows > drawn else math.inf
        low, high = wilson(hits / drawn, size)
        share += rows * hits / drawn / total
        below += (rows / total * (hits / drawn - low)) ** 2
        above += (rows / total * (high - hits / drawn)) ** 2
    return share, [max(0.0, share - math.sqrt(below)), min(1.0, share + math.sqrt(above))]

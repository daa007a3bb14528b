"""What a column of numbers says: how many, the middle, the ends, how far apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of n values; `sd` is the sample's standard deviation, None for fewer than two."""

    n: int
    median: float
    mean: float
    min: float
    max: float
    sd: float | None

    def __str__(self) -> str:
        return f"{self.median:.2f} (n={self.n}, {self.min:.2f}-{self.max:.2f})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are there; None where there is none."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return Spread(
        n=len(present),
        median=statistics.median(present),
        mean=statistics.fmean(present),
        min=min(present),
        max=max(present),
        sd=statistics.stdev(present) if len(present) > 1 else None,
    )

"""Statistics over documents: length buckets, sums and their ratios, and spreads."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from specextend.stats import PHASES, ratio

SMALLEST = 512
"""Upper bound in tokens of the smallest bucket."""
SUMS = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_dropped_tokens",
    "num_spec_steps",
    "num_plain_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_retrievals",
    "num_fallbacks",
    "num_hybrid_steps",
    "num_memory_retries",
    "decode_s",
    "total_s",
    *PHASES,
)
COLUMNS = (*SUMS, "attempts", "acceptance_histogram", "retrieval_coverage", "retrieval_churn")
"""Columns of a summary row that a tally reads."""


def bucket_of(num_prompt_tokens: int) -> int:
    """Return the upper bound of a prompt's bucket: the smallest power of two, at least 512, that holds it."""
    return max(SMALLEST, 1 << (num_prompt_tokens - 1).bit_length())


def bucket_name(bucket: int) -> str:
    """Name a bucket by its upper bound: `512`, `1K`, `2K`, ..."""
    return f"{bucket // 1024}K" if bucket >= 1024 else str(bucket)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, mean and range of n values; `sd` is the sample's standard deviation, None for fewer than two values."""

    n: int
    median: float
    mean: float
    min: float
    max: float
    sd: float | None

    def __str__(self) -> str:
        return f"{self.median:.2f} (n={self.n}, {self.min:.2f}-{self.max:.2f})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Compute the spread of the values that are not None; None if there are none."""
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


def spread_json(measured: Spread | None) -> dict[str, Any] | None:
    """Convert a spread to JSON values."""
    return None if measured is None else asdict(measured)


@dataclass(slots=True)
class Tally:
    """Sums over finished documents, and the ratios that follow from them."""

    num_documents: int = 0
    num_tried_again: int = 0
    """Documents that took a second attempt or more."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry j is the number of steps that accepted j draft tokens."""
    coverage_sum: float = 0.0
    """Summed over retrievals."""
    churn_sum: float = 0.0
    """Summed over retrievals, from the second one of each document."""
    num_churns: int = 0

    def add(self, rows: pa.Table) -> None:
        """Add summary rows (COLUMNS)."""
        self.num_documents += len(rows)
        self.num_tried_again += int(_sum(pc.greater(rows["attempts"], 1)))
        for name in SUMS:
            self.sums[name] += _sum(rows[name])
        for histogram in rows["acceptance_histogram"].drop_null().to_pylist():
            self._add_histogram(histogram)
        retrievals = rows["num_retrievals"]
        self.coverage_sum += _sum(pc.multiply(rows["retrieval_coverage"], retrievals))
        # A row with one retrieval has no churn: null, and left out of both sums.
        self.churn_sum += _sum(pc.multiply(rows["retrieval_churn"], pc.subtract(retrievals, 1)))
        self.num_churns += int(_sum(pc.subtract(retrievals.filter(rows["retrieval_churn"].is_valid()), 1)))

    def _add_histogram(self, histogram: list[int]) -> None:
        self.acceptance_histogram += [0] * (len(histogram) - len(self.acceptance_histogram))
        for accepted, steps in enumerate(histogram):
            self.acceptance_histogram[accepted] += steps

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return the tokens per speculative step, including the bonus token."""
        extra = ratio(self.sums["num_accepted_tokens"], self.sums["num_spec_steps"])
        return None if extra is None else 1 + extra

    @property
    def accepted_at_least(self) -> list[float]:
        """Return the share of speculative steps that accepted at least j draft tokens, for j from 0."""
        histogram = self.acceptance_histogram
        return (
            [sum(histogram[accepted:]) / sum(histogram) for accepted in range(len(histogram))] if sum(histogram) else []
        )

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Return the share of verified draft tokens that were accepted."""
        return ratio(self.sums["num_accepted_tokens"], self.sums["num_draft_tokens"])

    @property
    def mean_tree_size(self) -> float | None:
        """Return the draft tokens verified per speculative step."""
        return ratio(self.sums["num_draft_tokens"], self.sums["num_spec_steps"])

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Return the tokens per second of a sequence, from its first token to its last."""
        return ratio(self.sums["num_output_tokens"] - self.num_documents, self.sums["decode_s"])

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """Return the output tokens per second of a sequence, including prefill."""
        return ratio(self.sums["num_output_tokens"], self.sums["total_s"])

    @property
    def busy_s(self) -> float:
        """Return the seconds that workers spent on these documents."""
        return sum(self.sums[name] for name in PHASES)

    @property
    def tokens_per_busy_s(self) -> float | None:
        """Return the output tokens per second of a worker: higher than the other two if it decodes batches."""
        return ratio(self.sums["num_output_tokens"], self.busy_s)

    @property
    def time_shares(self) -> dict[str, float | None]:
        """Return the share of the workers' time that each phase took."""
        return {name.removesuffix("_s"): ratio(self.sums[name], self.busy_s) for name in PHASES}

    @property
    def retrieval_coverage(self) -> float | None:
        """Return the mean share of the target's attention on rows that the draft may see."""
        return ratio(self.coverage_sum, self.sums["num_retrievals"])

    @property
    def retrieval_churn(self) -> float | None:
        """Return the mean change of the selection from one retrieval to the next."""
        return ratio(self.churn_sum, self.num_churns)


def _sum(column: pa.ChunkedArray) -> float:
    """Sum the values that are not null; 0 if there are none."""
    return pc.sum(column).as_py() or 0

"""Counts and seconds summed over documents; every ratio is a division of two of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from specextend.stats import ratio

PHASES = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s")
"""Shares of the workers' time."""
SUMS = (
    "num_prompt_tokens",
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
"""What a tally reads of a summary row."""


@dataclass(slots=True)
class Tally:
    """Sums over documents done."""

    num_documents: int = 0
    num_tried_again: int = 0
    """Documents done at a second attempt or a later one."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry j: steps that accepted j draft tokens."""
    coverage_sum: float = 0.0
    """Over retrievals."""
    churn_sum: float = 0.0
    """Over retrievals from each document's second."""
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
        """Tokens per speculative step, the bonus token counted."""
        extra = ratio(self.sums["num_accepted_tokens"], self.sums["num_spec_steps"])
        return None if extra is None else 1 + extra

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted nodes per verified node."""
        return ratio(self.sums["num_accepted_tokens"], self.sums["num_draft_tokens"])

    @property
    def mean_tree_size(self) -> float | None:
        """Verified draft tokens of a speculative step."""
        return ratio(self.sums["num_draft_tokens"], self.sums["num_spec_steps"])

    @property
    def decode_tokens_per_s(self) -> float | None:
        """A sequence's tokens after its first per second from first to last."""
        return ratio(self.sums["num_output_tokens"] - self.num_documents, self.sums["decode_s"])

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """A sequence's output tokens per second, prefill included."""
        return ratio(self.sums["num_output_tokens"], self.sums["total_s"])

    @property
    def busy_s(self) -> float:
        """Seconds that workers spent on these documents."""
        return sum(self.sums[name] for name in PHASES)

    @property
    def tokens_per_busy_s(self) -> float | None:
        """Output tokens per second of a worker: above the two others where it decodes a batch."""
        return ratio(self.sums["num_output_tokens"], self.busy_s)

    @property
    def time_shares(self) -> dict[str, float | None]:
        """Each phase's share of the workers' time."""
        return {name.removesuffix("_s"): ratio(self.sums[name], self.busy_s) for name in PHASES}

    @property
    def retrieval_coverage(self) -> float | None:
        """Mean share of the target's attention on rows that the draft may see."""
        return ratio(self.coverage_sum, self.sums["num_retrievals"])

    @property
    def retrieval_churn(self) -> float | None:
        """Mean change of the selection from one retrieval to the next."""
        return ratio(self.churn_sum, self.num_churns)


def _sum(column: pa.ChunkedArray) -> float:
    """Sum of the values that are not null; 0 for none."""
    return pc.sum(column).as_py() or 0

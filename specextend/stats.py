"""Counts and seconds of a request, and the minimum work of a model.

Ratios are derived, so sums over requests stay correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from statistics import median
from typing import Any, Literal, get_args

Phase = Literal["prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s"]
"""A phase of decoding, named as its `DecodingStats` field."""
PHASES: tuple[Phase, ...] = get_args(Phase)


def ratio(numerator: float, denominator: float | None) -> float | None:
    """Return `numerator / denominator`; None if the denominator is 0 or None."""
    return numerator / denominator if denominator else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return `n`, `median`, `min` and `max` of a non-empty sequence."""
    return {"n": len(values), "median": median(values), "min": min(values), "max": max(values)}


_JUDGED_DOCUMENTS = 16
_JUDGED_STEPS = 32
_DOUBTED_RATE = 0.3
"""Rate of accepted first tokens that raises doubt; fitting drafts have about 0.75."""


@dataclass(slots=True)
class DecodingStats:
    """Counts and seconds of a request.

    `ttft_s` (start of prefill to first token) and `decode_s` (first to last token) are wall clock.
    `prefill_s` to `other_s` are shares of engine time: sums over requests give the busy time.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken over from another prompt."""
    num_output_tokens: int = 0
    num_spec_steps: int = 0
    num_plain_steps: int = 0
    num_draft_tokens: int = 0
    """Verified nodes, without the root."""
    num_accepted_tokens: int = 0
    """Accepted nodes, without the bonus token and before the cut at a stop."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """Steps by accepted nodes; depth + 1 entries."""
    num_network_steps: int = 0
    """Speculative steps with proposals of the draft network."""
    num_first_accepted: int = 0
    """Network steps with a correct first token."""
    num_retrievals: int = 0
    retrieval_coverage_sum: float = 0.0
    """Sum over retrievals of the target's attention share on visible rows."""
    retrieval_churn_sum: float = 0.0
    """Sum of `1 - |A and B| / |A or B|` over consecutive retrievals with chunks A and B."""
    num_fallbacks: int = 0
    """Pauses of the draft."""
    num_hybrid_steps: int = 0
    """Steps with hybrid tree attention; the others used dense attention."""
    num_forwards: float = 0.0
    """Forwards, divided among the sequences of each batch."""
    num_memory_retries: int = 0
    """Restarts because memory ran out."""
    ttft_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    draft_prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    retrieval_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds from the start of prefill to the last token."""
        return self.ttft_s + self.decode_s

    @property
    def step_s(self) -> float:
        """Return the seconds of decoding steps, without prefill."""
        return self.draft_s + self.verify_s + self.retrieval_s + self.other_s

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return tokens per speculative step, bonus token included; None without such steps."""
        extra = ratio(self.num_accepted_tokens, self.num_spec_steps)
        return None if extra is None else 1.0 + extra

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Return accepted per verified nodes."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def retrieval_coverage(self) -> float | None:
        """Return the mean attention share of the target on the rows visible to the draft."""
        return ratio(self.retrieval_coverage_sum, self.num_retrievals)

    @property
    def retrieval_churn(self) -> float | None:
        """Return the mean change of chunks between retrievals."""
        return (
            ratio(self.retrieval_churn_sum, self.num_retrievals - 1)
            if self.num_retrievals > 1
            else None
        )

    @property
    def output_tokens_per_s(self) -> float | None:
        """Return output tokens per second, prefill included."""
        return ratio(self.num_output_tokens, self.total_s)

    def doubt(self, draft_kind: str | None, num_documents: int) -> str:
        """Warn if the draft hardly fits its target; else return an empty string."""
        num_steps = self.num_network_steps
        is_known = num_documents >= _JUDGED_DOCUMENTS and num_steps >= _JUDGED_STEPS
        if not is_known or self.num_first_accepted >= _DOUBTED_RATE * num_steps:
            return ""
        name = "head" if draft_kind == "eagle" else "draft"
        return (
            f"{self.num_first_accepted / num_steps:.2f} of the {name}'s first tokens were accepted "
            f"({num_steps:,} steps), about 0.75 is usual: is this {name} for this target?"
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> DecodingStats:
        """Return the counts and seconds of an output row."""
        known = {name: row[name] for spec in fields(cls) if row.get(name := spec.name) is not None}
        stats = cls(**known)
        stats.retrieval_coverage_sum = (row["retrieval_coverage"] or 0.0) * stats.num_retrievals
        stats.retrieval_churn_sum = (row["retrieval_churn"] or 0.0) * (stats.num_retrievals - 1)
        return stats

    def add(self, other: DecodingStats) -> None:
        """Add the counts and seconds of `other`."""
        for name in (spec.name for spec in fields(self)):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if isinstance(mine, list):
                setattr(self, name, [*map(sum, zip_longest(mine, theirs, fillvalue=0))])
            else:
                setattr(self, name, mine + theirs)


@dataclass(frozen=True)
class ModelWork:
    """Minimum bytes and operations of plain decoding with a model."""

    weight_bytes: int
    """Weights read by a step."""
    kv_bytes_per_token: int
    layer_parameters: int
    """Weights passed by every prompt token."""
    head_parameters: int
    """Weights passed only by the last prompt token."""
    attention_flop_per_pair: int
    """Operations per pair of attending and attended token, over all layers."""

    def prefill_flop(self, num_tokens: float, num_prompts: float, num_pairs: float) -> float:
        """Count operations of prompts; `num_pairs` counts attended tokens, self included."""
        products = 2 * (num_tokens * self.layer_parameters + num_prompts * self.head_parameters)
        return products + self.attention_flop_per_pair * num_pairs

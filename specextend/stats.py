"""Counts and seconds of one request, and the work that a model takes at least.

Ratios are derived, so sums over requests stay right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from statistics import median
from typing import Any, Literal, get_args

Phase = Literal["prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s"]
"""A phase of decoding: the field of `DecodingStats` to which its seconds are charged."""
PHASES: tuple[Phase, ...] = get_args(Phase)


def ratio(numerator: float, denominator: float | None) -> float | None:
    """Return `numerator / denominator`; None if the denominator is 0 or None."""
    return numerator / denominator if denominator else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return `n`, `median`, `min` and `max` of values, of which there must be one."""
    return {"n": len(values), "median": median(values), "min": min(values), "max": max(values)}


_JUDGED_DOCUMENTS = 16
_JUDGED_STEPS = 32
_DOUBTED_RATE = 0.3
"""Documents and steps after which a draft is judged, and the rate of accepted first tokens below
which it is doubted: drafts that fit their target have about 0.75.
"""


@dataclass(slots=True)
class DecodingStats:
    """Counts and seconds of one request.

    `ttft_s` (from the start of prefill to the first token) and `decode_s` (from the first token to
    the last) are wall clock. `prefill_s` to `other_s` are shares of the engine's time: a batched
    step is divided equally among its sequences, so they add up over requests to the engine's busy
    time.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens at the prompt's start that the target had read for another prompt, and did not read
    again.
    """
    num_output_tokens: int = 0
    num_spec_steps: int = 0
    num_plain_steps: int = 0
    num_draft_tokens: int = 0
    """Verified nodes, without the root."""
    num_accepted_tokens: int = 0
    """Accepted nodes, without the bonus token; counted before the cut at a stop."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry j is the number of steps that accepted j nodes; there are depth + 1 entries."""
    num_network_steps: int = 0
    """Speculative steps in which the draft network proposed, not n-grams alone."""
    num_first_accepted: int = 0
    """Steps of these whose first decided token the network had proposed."""
    num_retrievals: int = 0
    """Retrievals, including the one at the end of prefill."""
    retrieval_coverage_sum: float = 0.0
    """Sum over retrievals of the share of the target's attention on visible rows."""
    retrieval_churn_sum: float = 0.0
    """Sum over retrievals from the second on of `1 - |A and B| / |A or B|`, where A and B are the
    chunks that it and the retrieval before it chose by score.
    """
    num_fallbacks: int = 0
    """Times that its draft was given up for a while."""
    num_hybrid_steps: int = 0
    """Speculative steps whose tree attention was hybrid; that of the others was dense."""
    num_forwards: float = 0.0
    """Verifications by the target, each divided among the sequences of its batch; over requests
    they add up to those that the engine ran.
    """
    num_memory_retries: int = 0
    """Number of times that the request was started again because memory ran out."""
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
        """Return the seconds of decoding steps: everything but the two prefills."""
        return self.draft_s + self.verify_s + self.retrieval_s + self.other_s

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return the tokens per speculative step, including the bonus token; None if there was no
        such step.
        """
        extra = ratio(self.num_accepted_tokens, self.num_spec_steps)
        return None if extra is None else 1.0 + extra

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Return the accepted nodes per verified node."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def retrieval_coverage(self) -> float | None:
        """Return the mean share of the target's attention on the rows that the draft may see."""
        return ratio(self.retrieval_coverage_sum, self.num_retrievals)

    @property
    def retrieval_churn(self) -> float | None:
        """Return the mean change of the selection from one retrieval to the next."""
        return (
            ratio(self.retrieval_churn_sum, self.num_retrievals - 1)
            if self.num_retrievals > 1
            else None
        )

    @property
    def output_tokens_per_s(self) -> float | None:
        """Return the output tokens per second, including prefill."""
        return ratio(self.num_output_tokens, self.total_s)

    def doubt(self, draft_kind: str | None, num_documents: int) -> str:
        """Return a warning that a draft hardly fits its target; empty without evidence.

        Args:
            draft_kind: `draft.kind`.
            num_documents: Documents that these counts are the sum of.
        """
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
        """Return the counts and seconds that a row of the output holds."""
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
    """The bytes and operations that plain decoding with a model takes at least."""

    weight_bytes: int
    """Weights that a step reads."""
    kv_bytes_per_token: int
    layer_parameters: int
    """Weights of the linear layers that every token of a prompt passes."""
    head_parameters: int
    """Weights of the last layer, which only the prompt's last token passes."""
    attention_flop_per_pair: int
    """Of a token and one that it attends to, in all layers."""

    def prefill_flop(self, num_tokens: float, num_prompts: float, num_pairs: float) -> float:
        """Count the floating-point operations of prompts. num_pairs: of a token with itself or one
        before it.
        """
        products = 2 * (num_tokens * self.layer_parameters + num_prompts * self.head_parameters)
        return products + self.attention_flop_per_pair * num_pairs

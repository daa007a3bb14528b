"""One running request, and the stopwatch that charges the engine's time to requests."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from specextend.core import Agreement, Completion, FinishReason, Request
from specextend.decoding.cache import Region
from specextend.decoding.retrieval import CachePolicy
from specextend.decoding.sampling import Penalties, choice_gap
from specextend.decoding.speculation import Speculation
from specextend.decoding.stopping import StopChecker
from specextend.stats import DecodingStats, Phase


@dataclass(slots=True)
class Sequence:
    """The state of a request between two steps."""

    request: Request
    slot: int
    """Its place in the batch; the drafter identifies the sequence by it."""
    region: Region
    """Its rows of the target's cache."""
    stopper: StopChecker
    policy: CachePolicy
    started_at: float
    """`perf_counter()` at the start of prefill."""
    drafts: bool
    """True if a draft reads along, whether it proposes now or not."""
    penalties: Penalties | None
    """What it may not repeat, or less; None if its request has no penalties."""
    first_token_at: float = 0.0
    length: int = 0
    """Committed tokens: those that the target has read."""
    root_token_id: int = -1
    """The last token the target chose; it stands at position `length`."""
    finish_reason: FinishReason | None = None
    speculation: Speculation = field(default_factory=Speculation)
    undrafted: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Steps that the draft has not absorbed yet: newly decided tokens, and the features [n, F] before each."""
    stats: DecodingStats = field(default_factory=DecodingStats)
    num_equal_tokens: int = 0
    """Tokens that were those of `request.audit_of`, up to the first difference."""
    gap: float | None = None
    """How far apart the two tokens were at the first difference, in logits."""

    @property
    def first_new_row(self) -> int:
        """Return the cache row behind the committed ones."""
        return self.region.start + self.length

    @property
    def is_greedy(self) -> bool:
        """Return True if every token is the likeliest one, and the logits serve nothing else."""
        return self.request.sampling.temperature == 0 and self.penalties is None and self.request.audit_of is None

    def take_over(self, count: int) -> None:
        """Count the first tokens of the prompt as read, because their cache rows are copied."""
        self.length = self.stats.num_cached_tokens = count

    def push(self, token_ids: list[int], now: float) -> None:
        """Append tokens that the target decided, record the times, and check whether they end the sequence."""
        if self.stats.num_output_tokens == 0:
            self.first_token_at = now
            self.stats.ttft_s = now - self.started_at
        self.root_token_id = token_ids[-1]
        if self.penalties is not None:
            self.penalties.extend(token_ids)
        self.finish_reason = self.stopper.push(token_ids)
        self.stats.num_output_tokens = len(self.stopper.token_ids)
        self.stats.decode_s = now - self.first_token_at

    def audit(self, logits: Tensor, position: Tensor, token_id: int) -> None:
        """Compare a token of a plain decoding with that of `request.audit_of`, unless an earlier one differed.

        `logits` [V] are those that it was chosen from, `position` [] its own.
        """
        expected = self.request.audit_of
        if expected is None or self.gap is not None or self.num_equal_tokens == len(expected):
            return
        if token_id == (other := expected[self.num_equal_tokens]):
            self.num_equal_tokens += 1
        else:
            self.gap = choice_gap(logits, position, self.request.sampling, token_id, other)

    def catch_up(self) -> tuple[list[int], Tensor]:
        """Return all that the draft has not absorbed, as one piece, and count it as absorbed."""
        token_ids = [token_id for new, _ in self.undrafted for token_id in new]
        features = torch.cat([features for _, features in self.undrafted])
        self.undrafted.clear()
        return token_ids, features

    def count_step(
        self, num_draft_tokens: int, num_accepted: int, num_levels: int, *, batch_size: int, hybrid: bool
    ) -> None:
        """Count a verification: of a tree, or a plain step if `num_draft_tokens` is 0."""
        stats = self.stats
        self.policy.count_step()
        stats.num_forwards += 1 / batch_size
        if num_draft_tokens == 0:
            stats.num_plain_steps += 1
            return
        if not stats.acceptance_histogram:
            stats.acceptance_histogram = [0] * (num_levels + 1)
        stats.num_spec_steps += 1
        stats.num_hybrid_steps += hybrid
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_tokens += num_accepted
        stats.acceptance_histogram[num_accepted] += 1

    def completion(self) -> Completion:
        """Return the finished request's completion."""
        assert self.finish_reason is not None
        agreement = None if self.request.audit_of is None else Agreement(self.num_equal_tokens, self.gap)
        stopper = self.stopper
        return Completion(
            self.request.request_id, stopper.token_ids, stopper.text, self.finish_reason, self.stats, agreement
        )


class Stopwatch:
    """Charges every second of the engine to a phase of the sequences that it worked for, in equal shares."""

    def __init__(self) -> None:
        self.mark = perf_counter()
        """The moment up to which time is charged."""

    def restart(self) -> float:
        """Charge the time since the mark to no sequence; return the current time."""
        self.mark = perf_counter()
        return self.mark

    def charge(self, phase: Phase, sequences: Items[Sequence]) -> float:
        """Charge the time since the mark to a phase of these sequences; return the current time."""
        now = perf_counter()
        for sequence in sequences:
            stats = sequence.stats
            setattr(stats, phase, getattr(stats, phase) + (now - self.mark) / len(sequences))
        self.mark = now
        return now

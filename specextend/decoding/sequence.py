"""One running request, its end, and the stopwatch that charges the engine's time to requests.

A sequence ends with its EOS, with the token that completes a stop string or a loop, or at its full
length.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specextend.core import MIN_STOP_TOKENS, Completion, FinishReason, Request, Scored, ends_in_loop
from specextend.decoding.cache import Region
from specextend.decoding.device import upload
from specextend.decoding.grammar import Grammar
from specextend.decoding.retrieval import CachePolicy
from specextend.decoding.sampling import Penalties, choose_tokens, lead_of
from specextend.decoding.speculation import Speculation
from specextend.stats import DecodingStats, Phase

_BROKEN = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet one
_LONGEST_CHARACTER = 4  # bytes, each of which can be a token
Nodes = tuple[Items[int], Items[int]]
"""Token ids and parents of the nodes of a tree."""


class StopChecker:
    """Consumes the tokens of one sequence as they are decided, and says when it ends.

    Only if there are stop strings, text is decoded before the end: with each token the last few,
    which are enough to hold any of them. The text of the first of these may be another than in the
    whole, so a find is confirmed there.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        stop: tuple[str, ...],
        max_new_tokens: int,
        *,
        stop_repetition: bool = False,
    ):
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._stop = stop
        self._max_new_tokens = max_new_tokens
        self._stop_repetition = stop_repetition
        added = tokenizer.added_tokens_decoder.items() if stop else ()
        self._special = {token_id for token_id, token in added if token.special}
        self._recent: list[int] = []  # the last tokens, without special ones
        self._num_recent = _LONGEST_CHARACTER * (2 + max(map(len, stop), default=0))

    def push(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Append the next tokens up to the sequence's end; return why it ends, if it does."""
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token_id)
            if token_id in self._eos_token_ids or self._completes_stop(token_id):
                self.finish_reason = "stop"
            elif self._stop_repetition and ends_in_loop(self.token_ids, MIN_STOP_TOKENS):
                self.finish_reason = "repetition"
            elif len(self.token_ids) >= self._max_new_tokens:
                self.finish_reason = "length"
        return self.finish_reason

    @property
    def text(self) -> str:
        """Return the text so far, without special tokens, the EOS and the stop string."""
        ends_with_eos = bool(self.token_ids) and self.token_ids[-1] in self._eos_token_ids
        text = _decode(self._tokenizer, self.token_ids[:-1] if ends_with_eos else self.token_ids)
        if self.finish_reason != "stop" or ends_with_eos:
            return text
        return text[: _find(text, self._stop)]

    def _completes_stop(self, token_id: int) -> bool:
        """Return True if the last token completes a stop string."""
        if not self._stop or token_id in self._special:
            return False
        self._recent = [*self._recent[-self._num_recent :], token_id]
        recent = _decode(self._tokenizer, self._recent).rstrip(_BROKEN)
        if _find(recent, self._stop) is None:
            return False
        return _find(_decode(self._tokenizer, self.token_ids), self._stop) is not None


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    """Return where the earliest stop string begins; None without one."""
    return min((start for string in stop if (start := text.find(string)) >= 0), default=None)


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Decode `token_ids` as they are, without special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


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
    grammar: Grammar | None
    """What may follow; None if its request has no schema."""
    length: int = 0
    """Committed tokens: those that the target has read."""
    root_token_id: int = -1
    """The last token the target chose; it stands at position `length`."""
    is_doubted: bool = False
    """True if logits of the last step were not finite. NaN at a drafted token reaches its
    neighbours in the tree, too: a plain step tells whose they are.
    """
    is_broken: bool = False
    """True if it cannot go on, because the target's logits are not finite."""
    speculation: Speculation = field(default_factory=Speculation)
    undrafted: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Steps that the draft has not absorbed yet: newly decided tokens, and the features [n, F]
    before each.
    """
    stats: DecodingStats = field(default_factory=DecodingStats)
    leads: list[float] = field(default_factory=list)
    """Those of its completion."""
    log_probs: list[float] = field(default_factory=list)
    """Those of the tokens decided so far."""
    scored: list[Scored] = field(default_factory=list)
    """The values of choices made so far."""

    @property
    def is_greedy(self) -> bool:
        """Return True if every token is the likeliest one, and the logits serve nothing else."""
        return self.request.sampling.temperature == 0 and not (
            self.is_adjusted or self.request.keeps_leads or self.request.keeps_log_probs
        )

    @property
    def is_adjusted(self) -> bool:
        """Return True if tokens are chosen from other logits than the target's own."""
        return self.penalties is not None or self.grammar is not None

    @property
    def has_ended(self) -> bool:
        """Return True if no further token follows."""
        return self.is_broken or self.stopper.finish_reason is not None

    @property
    def num_left(self) -> int:
        """Return the number of tokens that the output has room for."""
        return self.request.max_new_tokens - len(self.stopper.token_ids)

    def settle(
        self, logits: Tensor, scores: Tensor, positions: Tensor, chosen: Tensor, nodes: Nodes
    ) -> Tensor:
        """Return tokens [N] behind each node of a tree that its grammar allows, -1 where it leads
        nowhere, and note a lead.

        `chosen` [N] are tokens by `scores`, the penalised logits, without a grammar.
        """
        sampling = self.request.sampling
        grammar = self.grammar
        if grammar is None:
            self._note_lead(scores, positions, chosen)
            return chosen
        is_likely = not (self.penalties or sampling.leaves_out or self.request.keeps_leads)
        likely = chosen.tolist() if is_likely else None

        def choose(node: int) -> int:
            """Choose behind a node where the grammar stands. What is chosen of all tokens is the
            choice of fewer.
            """
            if likely is not None and grammar.allows(likely[node]):
                return int(likely[node])
            row = slice(node, node + 1)
            allowed = grammar.mask(logits[row], scores[row])
            [chosen] = choose_tokens(allowed[None], positions[None, row], [sampling])
            self._note_lead(allowed, positions[row], chosen)
            return int(chosen)

        reached = grammar.follow(*nodes, choose)
        return upload(torch.tensor(reached + [-1] * (len(logits) - len(reached))), logits.device)

    def _note_lead(self, scores: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """Note the lead of the first of `chosen` tokens [N] by scores [N, V], if it is asked
        for.
        """
        if self.request.keeps_leads:
            self.leads.append(
                lead_of(scores[0], positions[0], self.request.sampling, int(chosen[0]))
            )

    def push(self, token_ids: list[int], now: float) -> None:
        """Append tokens that the target decided, record the times, and check whether they end the
        sequence.
        """
        if self.stats.num_output_tokens == 0:
            self.stats.ttft_s = now - self.started_at
        self.root_token_id = token_ids[-1]
        if self.penalties is not None:
            self.penalties.extend(token_ids)
        if self.grammar is not None:
            self.grammar.extend(token_ids)
        self.stopper.push(token_ids)
        self.stats.num_output_tokens = len(self.stopper.token_ids)
        self.stats.decode_s = now - self.started_at - self.stats.ttft_s

    def catch_up(self) -> tuple[list[int], Tensor]:
        """Return all that the draft has not absorbed, as one piece, and count it as absorbed."""
        token_ids = [token_id for new, _ in self.undrafted for token_id in new]
        features = torch.cat([features for _, features in self.undrafted])
        self.undrafted.clear()
        return token_ids, features

    def count_step(
        self,
        num_draft_tokens: int,
        num_accepted: int,
        num_levels: int,
        *,
        batch_size: int,
        hybrid: bool,
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

    def count_first(
        self, token_ids: list[int], num_accepted: int, drafted: Mapping[int, set[int]] | None
    ) -> None:
        """Count a step with a tree by whether the draft network proposed the first of its
        `token_ids`.

        Args:
            drafted: As `Drafter.drafted`.
        """
        if drafted is None:
            is_right = num_accepted > 0
        elif self.slot in drafted:
            is_right = bool(drafted[self.slot].intersection(token_ids[:1]))
        else:
            return
        self.stats.num_network_steps += 1
        self.stats.num_first_accepted += is_right

    def completion(self) -> Completion:
        """Return the finished request's completion."""
        stopper = self.stopper
        assert stopper.finish_reason is not None
        return Completion(
            self.request.request_id,
            stopper.token_ids,
            stopper.text,
            stopper.finish_reason,
            self.stats,
            tuple(self.leads),
            tuple(self.scored),
            tuple(self.log_probs[: len(stopper.token_ids)]),
        )


def choose(
    sequences: Items[Sequence], logits: Tensor, positions: Tensor, trees: Items[Nodes]
) -> Tensor:
    """Choose tokens [B, N] behind each node of the trees of sequences; under a grammar -1 where
    none leads.

    Args:
        logits: The target's [B, N, V].
        positions: Positions [B, N] of the tokens chosen.
        trees: Nodes of each sequence's tree; asked for by penalties and grammars only.
    """
    scores = logits
    if any(each.penalties for each in sequences):
        pairs = zip(sequences, logits, trees, strict=True)
        scores = torch.stack(
            [
                each.penalties.apply(own, *nodes) if each.penalties else own.float()
                for each, own, nodes in pairs
            ]
        )
    chosen = choose_tokens(scores, positions, [each.request.sampling for each in sequences])
    rows = zip(sequences, logits, scores, positions, chosen, trees, strict=True)
    return torch.stack([sequence.settle(*row) for sequence, *row in rows])


class Stopwatch:
    """Charges every second of the engine to a phase of the sequences that it worked for, in equal
    shares.
    """

    def __init__(self) -> None:
        self.mark = perf_counter()
        """The moment up to which time is charged."""

    def restart(self) -> None:
        """Charge the time since the mark to no sequence."""
        self.mark = perf_counter()

    def charge(self, phase: Phase, sequences: Items[Sequence]) -> float:
        """Charge the time since the mark to a phase of these sequences; return the current time."""
        now = perf_counter()
        for sequence in sequences:
            stats = sequence.stats
            setattr(stats, phase, getattr(stats, phase) + (now - self.mark) / len(sequences))
        self.mark = now
        return now

"""A running request: its state, the record of its draft, its end, and a stopwatch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specextend.core import MIN_STOP_TOKENS, Completion, FinishReason, Request, Scored, ends_in_loop
from specextend.decoding.cache import Region
from specextend.decoding.device import upload
from specextend.decoding.grammar import Grammar
from specextend.decoding.retrieval import CachePolicy
from specextend.decoding.sampling import Penalties, choose_tokens, lead_of
from specextend.stats import DecodingStats, Phase

FIRST_PAUSE = 16
"""Steps before a paused draft is tried again; doubled after each failed try."""
LONGEST_PAUSE = 256
TRIAL_STEPS = 2
"""Least speculative steps of a try."""
PROBATION_STEPS = 16
"""Speculative steps of a successful try."""
LEAST_TRUST = 1.0
_TRUST = 4.0
"""Initial weight of a prior, in accepted tokens. It fades as evidence does."""
_MEMORY = 0.92
_AGED = 0.25
_BROKEN = "\ufffd"
"""Replacement for bytes of an incomplete character."""
_LONGEST_CHARACTER = 4
"""Most bytes, and so tokens, of a character."""
Nodes = tuple[Sequence[int], Sequence[int]]


class StopChecker:
    """Collects the tokens of a sequence and finds its end.

    A sequence ends with its EOS, with the token that completes a stop string or a loop, or at its
    full length. For stop strings, each token is decoded with the last few tokens. The first of them
    may read differently there, so the whole text confirms a match.
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
        """Append tokens up to the end of the sequence; return the reason of the end, if any."""
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
        """The text so far without special tokens, EOS and stop string."""
        ends_with_eos = bool(self.token_ids) and self.token_ids[-1] in self._eos_token_ids
        text = _decode(self._tokenizer, self.token_ids[:-1] if ends_with_eos else self.token_ids)
        if self.finish_reason != "stop" or ends_with_eos:
            return text
        return text[: _find(text, self._stop)]

    def _completes_stop(self, token_id: int) -> bool:
        if not self._stop or token_id in self._special:
            return False
        self._recent = [*self._recent[-self._num_recent :], token_id]
        recent = _decode(self._tokenizer, self._recent).rstrip(_BROKEN)
        if _find(recent, self._stop) is None:
            return False
        return _find(_decode(self._tokenizer, self.token_ids), self._stop) is not None


def _find(text: str, stop: tuple[str, ...]) -> int | None:
    return min((start for string in stop if (start := text.find(string)) >= 0), default=None)


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class Evidence(NamedTuple):
    """Decayed sums over steps."""

    num_steps: float = 0.0
    num_rows: float = 0.0
    expected: float = 0.0
    """Path probabilities of the verified nodes."""
    accepted: float = 0.0

    def calibration(self, trust: float, prior: float) -> float:
        """Return accepted over expected tokens, with a prior."""
        return (self.accepted + trust * prior) / (self.expected + trust)

    def gain(self, trust: float, prior: float) -> float:
        """Return the expected accepted tokens of a step; 0 at first."""
        return (
            self.calibration(trust, prior) * self.expected / self.num_steps
            if self.num_steps
            else 0.0
        )

    @property
    def rows(self) -> float:
        """Mean rows of a step; 1 at first."""
        return self.num_rows / self.num_steps if self.num_steps else 1.0

    def times(self, weight: float) -> "Evidence":
        """Return all sums times a weight."""
        return Evidence(*(weight * each for each in self))

    def after(self, memory: float, *step: float) -> "Evidence":
        """Return the sums after a step (rows, expected, accepted)."""
        return Evidence(*(memory * old + new for old, new in zip(self, (1.0, *step), strict=True)))


@dataclass(slots=True)
class Speculation:
    """The record of a sequence's draft, and its pauses."""

    active: bool = True
    prior: float = 1.0
    evidence: Evidence = field(default_factory=Evidence)
    idle: Evidence = field(default_factory=Evidence)
    promised: list[float] = field(default_factory=list)
    """Path probabilities of the draft tokens of the last whole tree."""
    worth_s: float = 0.0
    """Seconds of plain steps for the same tokens, by `StepCosts`."""
    _trust: float = _TRUST
    _run: int = 0
    _pause: int = FIRST_PAUSE // 2
    _wait: int = 0

    @property
    def calibration(self) -> float:
        """Accepted over promised tokens: of the draft, or of n-grams in a pause."""
        if self.active:
            return self.evidence.calibration(self._trust, self.prior)
        return self.idle.calibration(LEAST_TRUST, 1.0)

    @property
    def gain(self) -> float:
        """Expected accepted tokens of a step with the draft."""
        return self.evidence.gain(self._trust, self.prior)

    @property
    def idle_gain(self) -> float:
        """Accepted tokens of a step in a pause, forced ones included."""
        return self.idle.accepted / self.idle.num_steps if self.idle.num_steps else 0.0

    @property
    def on_trial(self) -> bool:
        """Return True if the next step must speculate for a try."""
        return self.active and self._run < TRIAL_STEPS

    @property
    def pause_is_over(self) -> bool:
        """Return True if a try is due."""
        return not self.active and self._wait <= 0

    def observe(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a speculative step; `expected` sums the path probabilities of its nodes."""
        self._trust = max(LEAST_TRUST, _MEMORY * self._trust)
        self.evidence = self.evidence.after(_MEMORY, num_rows, expected, accepted)
        self._run += 1

    def observe_idle(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a step in a pause, see `observe`."""
        self.idle = self.idle.after(_MEMORY, num_rows, expected, accepted)
        self.promised = []
        self._wait -= 1

    def pause(self) -> None:
        """Begin a pause."""
        in_vain = self._run < PROBATION_STEPS
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if in_vain else FIRST_PAUSE
        self.active = False
        self._wait = self._pause
        self.promised = []

    def resume(self) -> None:
        """End a pause."""
        self.active = True
        self._run = 0
        self.promised = []
        self.evidence = self.evidence.times(_AGED)


@dataclass(slots=True)
class RunningSequence:
    """The state of a request between two steps."""

    request: Request
    slot: int
    """Place in the batch, and name for the drafter."""
    region: Region
    stopper: StopChecker
    policy: CachePolicy
    started_at: float
    """`perf_counter()` at the start of prefill."""
    drafts: bool
    """True if a draft reads along, even in a pause."""
    penalties: Penalties | None
    grammar: Grammar | None
    length: int = 0
    """Committed tokens, which the target has read."""
    root_token_id: int = -1
    """Last token of the target's choice, at position `length`."""
    is_doubted: bool = False
    """Whether logits of the last step were not finite. NaN at a drafted token reaches its
    neighbours in the tree, so a plain step follows.
    """
    is_broken: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    undrafted: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Steps unread by the draft: decided tokens, and the features [n, F] before each."""
    stats: DecodingStats = field(default_factory=DecodingStats)
    leads: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    verdicts: tuple[float | None, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Return True if only the likeliest token of each row matters."""
        return self.request.sampling.temperature == 0 and not (
            self.is_adjusted or self.request.keeps_leads or self.request.keeps_log_probs
        )

    @property
    def is_adjusted(self) -> bool:
        """Return True if penalties or a grammar change the target's logits."""
        return self.penalties is not None or self.grammar is not None

    @property
    def has_ended(self) -> bool:
        """Return True if no further token follows."""
        return self.is_broken or self.stopper.finish_reason is not None

    @property
    def num_left(self) -> int:
        """Tokens left for the output."""
        return self.request.max_new_tokens - len(self.stopper.token_ids)

    def settle(
        self, logits: Tensor, scores: Tensor, positions: Tensor, chosen: Tensor, nodes: Nodes
    ) -> Tensor:
        """Apply the grammar to chosen tokens, and note a lead; return [N], -1 outside the grammar.

        Args:
            logits: The target's [N, V].
            scores: Penalised logits [N, V].
            positions: Positions [N] of the chosen tokens.
            chosen: Tokens [N] by `scores`, without the grammar.
        """
        sampling = self.request.sampling
        grammar = self.grammar
        if grammar is None:
            self._note_lead(scores, positions, chosen)
            return chosen
        is_likely = not (self.penalties or sampling.leaves_out or self.request.keeps_leads)
        likely = chosen.tolist() if is_likely else None

        def choose(node: int) -> int:
            # an allowed choice among all tokens is the choice among the allowed ones
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
        if self.request.keeps_leads:
            self.leads.append(
                lead_of(scores[0], positions[0], self.request.sampling, int(chosen[0]))
            )

    def push(self, token_ids: list[int], now: float) -> None:
        """Append decided tokens, record the times, and look for the end."""
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
        """Return and forget the tokens unread by the draft and their features [n, F]."""
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
        """Count a verification; without draft tokens it is a plain step."""
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
        """Count a speculative step, and whether the draft proposed its first token."""
        if drafted is None:
            is_right = num_accepted > 0
        elif self.slot in drafted:
            is_right = bool(drafted[self.slot].intersection(token_ids[:1]))
        else:
            return
        self.stats.num_network_steps += 1
        self.stats.num_first_accepted += is_right

    def completion(self) -> Completion:
        """Return the completion of the finished request."""
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
            self.verdicts,
        )


def choose(
    sequences: Sequence[RunningSequence], logits: Tensor, positions: Tensor, trees: Sequence[Nodes]
) -> Tensor:
    """Choose a token after each node of the trees; return [B, N], -1 after nodes outside a grammar.

    Args:
        logits: The target's [B, N, V].
        positions: Positions [B, N] of the chosen tokens.
        trees: Nodes of each tree, needed only for penalties and grammars.
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
    """Charges the engine's time to phases of sequences, in equal shares."""

    def __init__(self) -> None:
        self.mark = perf_counter()

    def restart(self) -> None:
        """Charge the time since the mark to nobody."""
        self.mark = perf_counter()

    def charge(self, phase: Phase, sequences: Sequence[RunningSequence]) -> float:
        """Charge the time since the mark to a phase of sequences; return the current time."""
        now = perf_counter()
        for sequence in sequences:
            stats = sequence.stats
            setattr(stats, phase, getattr(stats, phase) + (now - self.mark) / len(sequences))
        self.mark = now
        return now

"""Adaptive speculation: which sequences speculate in the next step, and with how large trees.

The evidence of a sequence is what its draft promised, how much of that was accepted, and in how large trees. New
sequences begin with the `Experience` of those before them, so that a run finds out once, not once a document.
`who_speculates` and `best_size` decide in plain numbers, by the costs of `step_costs.py`; `Adaptive` asks them for the
running batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specextend.decoding.device import download
from specextend.decoding.step_costs import StepCosts
from specextend.decoding.tree import DraftTrees, prune

if TYPE_CHECKING:
    from specextend.decoding.sequence import Sequence as Running

FIRST_PAUSE = 16
"""Plain steps before speculation is tried again; doubled after each try that did not last."""
LONGEST_PAUSE = 256
TRIAL_STEPS = 2
"""Speculative steps that a try takes at least, whatever they bring."""
PROBATION_STEPS = 16
"""Speculative steps after which a try counts as a success, so that the next pause is a short one."""
ALLOWED_LOSS = 0.02
"""Share of all decoding time that speculation may lose: by tries, or by going on where plain steps are as fast."""
DOUBT = 0.1
"""Gain that must be expected beyond plain steps after more than that was lost: estimates that were too good before."""
LARGEST_CREDIT = 4.0
"""Tokens of gain that count towards later tries: a draft that paid yesterday must not lose for hours today."""
LARGEST_DEBT = 8.0
"""Tokens of loss that have to be earned back before the next try: one held-up step must not end all tries."""
KNOWN_STEPS = 8
"""Speculative steps of all sequences from which on new ones need no try of their own."""
_MEMORY = 0.92
"""Weight of a step's evidence one step later."""
_LONG_MEMORY = 0.99
"""The same for the experience of all sequences."""
_TRUST = 4.0
"""Initial weight of what was known before the first step, in accepted tokens; it fades as evidence does."""
_LEAST_TRUST = 1.0
_AGED = 0.25
"""Weight after a pause of the evidence from before it."""
_HANDICAP = 0.2
"""Tokens by which the gain of a paused sequence is reduced: resuming it costs a forward of the draft."""


@dataclass(slots=True)
class TrackRecord:
    """Sums over speculative steps, of which each counts a little less than the one after it."""

    memory: float
    num_steps: float = 0.0
    num_rows: float = 0.0
    """Rows of verifications."""
    expected: float = 0.0
    """Path probabilities of the verified nodes, by the draft."""
    accepted: float = 0.0
    """Nodes that were accepted."""

    def add(self, num_rows: float, expected: float, accepted: float) -> None:
        """Record a speculative step."""
        self.num_steps = self.memory * self.num_steps + 1
        self.num_rows = self.memory * self.num_rows + num_rows
        self.expected = self.memory * self.expected + expected
        self.accepted = self.memory * self.accepted + accepted

    def mean(self) -> TrackRecord:
        """Return the same for one step alone, with the memory of a sequence."""
        sums = self.num_rows, self.expected, self.accepted
        return TrackRecord(_MEMORY, 1.0, *(value / self.num_steps for value in sums))

    def age(self) -> None:
        """Let what comes after a pause count for more."""
        for name in ("num_steps", "num_rows", "expected", "accepted"):
            setattr(self, name, _AGED * getattr(self, name))


@dataclass(slots=True)
class Speculation:
    """The evidence of one sequence's steps. Lives as long as its request."""

    active: bool = True
    """True while the draft proposes; otherwise steps are plain."""
    prior: float = 1.0
    """The calibration before the first step."""
    evidence: TrackRecord = field(default_factory=lambda: TrackRecord(_MEMORY))
    promised: list[float] = field(default_factory=list)
    """Path probabilities of the draft tokens of its last whole tree."""
    _trust: float = _TRUST
    _run: int = 0  # speculative steps since the last pause
    _pause: int = FIRST_PAUSE // 2
    _wait: int = 0  # plain steps until the next try

    @property
    def calibration(self) -> float:
        """Return accepted tokens over those that the draft's probabilities promised."""
        return (self.evidence.accepted + self._trust * self.prior) / (self.evidence.expected + self._trust)

    @property
    def gain(self) -> float:
        """Return the accepted tokens to expect from a speculative step."""
        seen = self.evidence
        return self.calibration * seen.expected / seen.num_steps if seen.num_steps else 0.0

    @property
    def num_rows(self) -> float:
        """Return the mean rows of its verifications; 1 if there was none yet."""
        return self.evidence.num_rows / self.evidence.num_steps if self.evidence.num_steps else 1.0

    @property
    def on_trial(self) -> bool:
        """Return True if the next step must speculate because a try has begun."""
        return self.active and self._run < TRIAL_STEPS

    @property
    def pause_is_over(self) -> bool:
        """Return True if it is paused, and it is time to try again."""
        return not self.active and self._wait <= 0

    def observe(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a speculative step; `expected` is the sum of the path probabilities of the verified nodes."""
        self._trust = max(_LEAST_TRUST, _MEMORY * self._trust)
        self.evidence.add(num_rows, expected, accepted)
        self._run += 1

    def observe_plain(self) -> None:
        """Record a plain step."""
        self._wait -= 1

    def pause(self) -> None:
        """Take plain steps from now on."""
        in_vain = self._run < PROBATION_STEPS
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if in_vain else FIRST_PAUSE
        self.active, self._wait = False, self._pause

    def resume(self) -> None:
        """Speculate again."""
        self.active, self._run = True, 0
        self.evidence.age()


@dataclass(slots=True)
class Experience:
    """The evidence of all sequences, and the account that their tries are paid from."""

    balance: float = 0.0
    """Tokens won by speculation minus its cost in plain steps, and `ALLOWED_LOSS` of all tokens."""
    evidence: TrackRecord = field(default_factory=lambda: TrackRecord(_LONG_MEMORY))
    num_steps: int = 0
    """Speculative steps so far."""

    @property
    def is_known(self) -> bool:
        """Return True if new sequences can do without a try."""
        return self.num_steps >= KNOWN_STEPS

    @property
    def in_credit(self) -> bool:
        """Return True if speculation has not lost more than it may."""
        return self.balance >= 0

    def begin(self) -> Speculation:
        """Make the state of a new sequence, which expects what was seen so far."""
        if not self.is_known:
            return Speculation()
        seen = self.evidence
        prior = (seen.accepted + _LEAST_TRUST) / (seen.expected + _LEAST_TRUST)
        return Speculation(prior=prior, evidence=seen.mean(), _run=TRIAL_STEPS)

    def observe(self, num_rows: int, expected: float, accepted: int, cost: float) -> None:
        """Record a speculative step of a sequence.

        `cost` is its share of the time that the step, drafting included, took beyond a plain step, in plain steps.
        """
        self.num_steps += 1
        self.evidence.add(num_rows, expected, accepted)
        self._book(1 + accepted, accepted - cost)

    def observe_plain(self) -> None:
        """Record a plain step of a sequence."""
        self._book(1, 0.0)

    def _book(self, num_tokens: int, gain: float) -> None:
        balance = self.balance + ALLOWED_LOSS * num_tokens + gain
        self.balance = max(-LARGEST_DEBT, min(balance, LARGEST_CREDIT))


def who_speculates(
    states: Sequence[Speculation],
    verify_s: Callable[[float], float],
    draft_s: Callable[[int], float],
    *,
    in_credit: bool,
) -> set[int]:
    """Choose the sequences of a batch that speculate next: the set that brings most tokens per second.

    `verify_s(rows)` is the time of a verification of so many rows of each sequence, 1 being a plain step, and
    `draft_s(k)` that of drafting for k of them. All sequences wait for the largest verification of the batch, so
    speculation may pay for one of them only because it pays for another.

    In credit, paused sequences try again when their pause is over, and steps are plain if speculation would lose more
    than `ALLOWED_LOSS`. Out of credit, no try begins, and speculation must be expected to win more than `DOUBT`.
    """
    forced = [state.on_trial or (in_credit and state.pause_is_over) for state in states]
    gains = [
        state.gain - (0 if state.active or is_forced else _HANDICAP)
        for state, is_forced in zip(states, forced, strict=True)
    ]
    order = sorted(range(len(states)), key=lambda b: (not forced[b], -gains[b]))
    tokens = list(accumulate((gains[b] for b in order), initial=float(len(states))))
    seconds = list(accumulate((verify_s(states[b].num_rows) for b in order), initial=0.0))

    def rate(count: int) -> float:
        if not count:
            return tokens[0] / verify_s(1) * (1 - ALLOWED_LOSS if in_credit else 1 + DOUBT)
        return tokens[count] / (seconds[count] / count + draft_s(count))

    best = max(range(sum(forced), len(states) + 1), key=rate)
    return set(order[:best])


def best_size(probabilities: Sequence[Sequence[float]], sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """Choose the number of rows of a verification, including the root, that brings most tokens per second.

    `probabilities` are each sequence's calibrated path probabilities in falling order; `seconds(rows)` is the time of
    the whole step for one of the ascending `sizes`.
    """
    largest = 1 + max((len(each) for each in probabilities), default=0)
    enough = next((size for size in sizes if size >= largest), sizes[-1])

    def rate(size: int) -> float:
        return sum(1 + sum(each[: size - 1]) for each in probabilities) / seconds(size)

    return max((size for size in sizes if size <= enough), key=rate)


class Adaptive:
    """Decides for the running batch; the evidence of each sequence is kept in `Sequence.speculation`.

    Costs and experience last as long as the engine. They decide how fast its output comes, never what it is.
    """

    def __init__(self, costs: StepCosts, num_nodes: int, *, reads_late: bool = False) -> None:
        """Take the measured costs, and the largest number of nodes of a tree, not counting the root.

        `reads_late`: trees are sized by what the sequences' trees promised one step before, so that the host need not
        wait for a draft.
        """
        self.costs = costs
        self._reads_late = reads_late
        self._promises: tuple[list[Running], Tensor] = [], torch.empty(0, 0)
        self._experience = Experience()
        self._num_settled = 0  # steps since the last decision, if all pause and none is to try again
        self._sizes = [size for size in costs.table.sizes if size <= num_nodes + 1]

    def begin(self, num_tokens: int, running: Sequence[Running]) -> Speculation:
        """Make the state of a new sequence of `num_tokens` tokens that joins the `running` ones.

        Where speculation is known not to pay, it begins with plain steps.
        """
        new = self._experience.begin()
        if self._experience.is_known:
            states = [new, *(sequence.speculation for sequence in running)]
            if 0 not in self._choose(states, [num_tokens, *(sequence.length for sequence in running)]):
                new.pause()
        return new

    def prune(self, trees: DraftTrees, drafting: list[Running], lengths: list[int]) -> DraftTrees:
        """Cut the trees of the `drafting` sequences to the size that brings the batch most tokens per second.

        `lengths` has one entry for every sequence of the step. While a sequence tries speculation again, the size is
        never 1, because a plain step would give no evidence.
        """
        promises = trees.log_probs[:, 1:].exp()
        self._promises = drafting, download(promises) if self._reads_late else promises
        if not self._reads_late:
            self._read_promises()
        if not all(each.speculation.promised for each in drafting):
            return trees
        draft_s = self.costs.draft_s(len(drafting))
        trying = any(sequence.speculation.on_trial for sequence in drafting)
        size = best_size(
            [_calibrated(each.speculation.promised, each.speculation.calibration) for each in drafting],
            self._sizes[1:] if trying else self._sizes,
            lambda rows: draft_s + self.costs.verify_s(rows, lengths),
        )
        return prune(trees, size)

    def _read_promises(self) -> None:
        """Give each sequence the path probabilities of its last whole tree."""
        drafting, promises = self._promises
        self._promises = [], torch.empty(0, 0)
        for sequence, promised in zip(drafting, promises.tolist(), strict=True):
            sequence.speculation.promised = promised

    def observe(
        self,
        sequences: list[Running],
        lengths: list[int],
        trees: DraftTrees,
        accepted: list[int],
        verify_s: float,
    ) -> None:
        """Record a step: `lengths` before it, its trees, `accepted` draft tokens, seconds of its verification."""
        num_rows = trees.num_nodes
        if self._reads_late:
            self._read_promises()
        self.costs.observe_verify(num_rows, lengths, verify_s)
        num_drafting = sum(sequence.speculation.active for sequence in sequences)
        plain_s = self.costs.verify_s(1, lengths)
        beyond_s = self.costs.verify_s(num_rows, lengths) + self.costs.draft_s(num_drafting) - plain_s
        for sequence, number in zip(sequences, accepted, strict=True):
            if sequence.speculation.active:
                expected = sum(sorted(sequence.speculation.promised, reverse=True)[: num_rows - 1])
                sequence.speculation.observe(num_rows, expected, number)
                share = beyond_s / plain_s * len(sequences) / num_drafting
                self._experience.observe(num_rows, expected, number, share)
            else:
                sequence.speculation.observe_plain()
                self._experience.observe_plain()

    def decide(self, sequences: list[Running]) -> None:
        """Decide which of the sequences that go on speculate in the next step."""
        states = [sequence.speculation for sequence in sequences]
        tries = self._experience.in_credit and any(state.pause_is_over for state in states)
        is_settled = not tries and not any(state.active for state in states)
        self._num_settled = (self._num_settled + 1) % FIRST_PAUSE if is_settled else 0
        if self._num_settled:
            return
        lengths = [sequence.length for sequence in sequences]
        chosen = self._choose(states, lengths)
        for b, sequence in enumerate(sequences):
            if sequence.speculation.active and b not in chosen:
                sequence.speculation.pause()
                sequence.stats.num_fallbacks += 1
            elif not sequence.speculation.active and b in chosen:
                sequence.speculation.resume()

    def _choose(self, states: list[Speculation], lengths: list[int]) -> set[int]:
        """Choose among sequences of these lengths; a size between two measured ones is interpolated."""
        seconds = [self.costs.verify_s(size, lengths) for size in self._sizes]
        return who_speculates(
            states,
            lambda num_rows: float(np.interp(num_rows, self._sizes, seconds)),
            self.costs.draft_s,
            in_credit=self._experience.in_credit,
        )


def _calibrated(promised: Sequence[float], calibration: float) -> Sequence[float]:
    """Return the calibrated path probabilities of the draft tokens, in falling order."""
    return sorted((min(1.0, calibration * p) for p in promised), reverse=True)

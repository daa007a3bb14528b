"""Decisions on speculation, in plain numbers: which sequences speculate in the next step, and with how large trees.

The evidence of a sequence is what its draft promised, how much of that was accepted, and in how large trees. New
sequences begin with the `Experience` of those before them, so that a run finds out once, not once a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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

    def charge(self, cost: float) -> None:
        """Take from the account what else speculation cost, in plain steps."""
        self._book(0, -cost)

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

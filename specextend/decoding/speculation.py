"""When to speculate, and how much: decisions of one step, in plain numbers.

All costs are relative to a plain step of the same batch, so that seconds cancel: a *load* of 1.4 is a step that takes
1.4 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

FIRST_PAUSE = 16
"""Plain steps before speculation is tried again; twice as many after each try in vain."""
LONGEST_PAUSE = 256
TRIAL_STEPS = 2
"""Steps that a try takes whatever they bring."""
PROBATION_STEPS = 16
"""A try that lasts as long was not in vain."""
ALLOWED_LOSS = 0.02
"""Share of a sequence's decoding time that speculation may have lost when it is tried again, or lose by going on."""
_MEMORY = 0.92
"""What a step's evidence weighs one step later."""
_TRUST = 4.0
"""Accepted tokens' worth of belief in the draft's own probabilities at first; it fades as evidence does."""
_LEAST_TRUST = 1.0
_AGED = 0.25
"""What evidence from before a pause weighs after it."""
_HANDICAP = 0.2
"""Tokens that a paused sequence must bring more than one that speculates: coming back costs a forward of the draft."""


@dataclass(slots=True)
class Speculation:
    """What one sequence's steps have shown. Lives as long as its request."""

    active: bool = True
    """True while the draft proposes; otherwise steps are plain."""
    balance: float = 0.0
    """Tokens won by speculation minus its cost in plain steps."""
    num_tokens: int = 0
    """Tokens decided so far."""
    _trust: float = _TRUST
    _accepted: float = 0.0
    _expected: float = 0.0
    _load: float = 0.0
    _steps: float = 0.0
    _run: int = 0  # speculative steps since the last pause
    _pause: int = FIRST_PAUSE // 2
    _wait: int = 0  # plain steps until the next try

    @property
    def calibration(self) -> float:
        """Return accepted tokens over those that the draft's probabilities promised; 1 if nothing was measured yet."""
        return (self._accepted + self._trust) / (self._expected + self._trust)

    @property
    def gain(self) -> float:
        """Return the accepted tokens to expect of a speculative step."""
        return self.calibration * self._expected / self._steps if self._steps else 0.0

    @property
    def load(self) -> float:
        """Return the mean load of its verifications; 1 if nothing was measured yet."""
        return self._load / self._steps if self._steps else 1.0

    @property
    def is_forced(self) -> bool:
        """Return True if the next step must speculate: at the start, and when a pause is over."""
        if self.active:
            return self._run < TRIAL_STEPS
        return self._wait <= 0 and self.balance + ALLOWED_LOSS * self.num_tokens >= 0

    def observe(self, expected: float, accepted: int, load: float, cost: float) -> None:
        """Record a speculative step.

        `expected` is the sum of its nodes' path probabilities, `load` that of the verification, and `cost` this
        sequence's share of the time that the step, drafting included, took beyond a plain one, in plain steps.
        """
        self._trust = max(_LEAST_TRUST, _MEMORY * self._trust)
        self._accepted = _MEMORY * self._accepted + accepted
        self._expected = _MEMORY * self._expected + expected
        self._load = _MEMORY * self._load + load
        self._steps = _MEMORY * self._steps + 1
        self._run += 1
        self.num_tokens += 1 + accepted
        self.balance += accepted - cost

    def observe_plain(self) -> None:
        """Record a plain step."""
        self.num_tokens += 1
        self._wait -= 1

    def pause(self) -> None:
        """Take plain steps from now on."""
        in_vain = self._run < PROBATION_STEPS
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if in_vain else FIRST_PAUSE
        self.active, self._wait = False, self._pause

    def resume(self, cost: float) -> None:
        """Speculate again; `cost` is the time the draft needs to catch up, in plain steps."""
        self.active, self._run = True, 0
        self.balance -= cost
        for name in ("_accepted", "_expected", "_load", "_steps"):
            setattr(self, name, _AGED * getattr(self, name))


def who_speculates(states: Sequence[Speculation], draft_load: Callable[[int], float]) -> set[int]:
    """Choose the sequences of a batch that speculate next: the set that brings most tokens per second.

    `draft_load(k)` is the load of drafting for k of them. All sequences wait for the verification of any, so it may
    pay for one because it pays for another. If speculation would lose more than `ALLOWED_LOSS`, all steps are plain.
    """
    forced = [state.is_forced for state in states]
    gains = [state.gain - (0 if state.active or state.is_forced else _HANDICAP) for state in states]
    order = sorted(range(len(states)), key=lambda b: (not forced[b], -gains[b]))
    tokens = list(accumulate((gains[b] for b in order), initial=float(len(states))))
    loads = list(accumulate((states[b].load for b in order), initial=0.0))

    def rate(count: int) -> float:
        return tokens[count] / (loads[count] / count + draft_load(count)) if count else tokens[0] * (1 - ALLOWED_LOSS)

    best = max(range(sum(forced), len(states) + 1), key=rate)
    return set(order[:best])


def best_size(probabilities: Sequence[Sequence[float]], sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """Choose the rows of a verification, root included, that bring most tokens per second.

    `probabilities` are each sequence's calibrated path probabilities in falling order; `seconds(rows)` is the time of
    the whole step for one of the ascending `sizes`.
    """
    largest = 1 + max((len(each) for each in probabilities), default=0)
    enough = next((size for size in sizes if size >= largest), sizes[-1])

    def rate(size: int) -> float:
        return sum(1 + sum(each[: size - 1]) for each in probabilities) / seconds(size)

    return max((size for size in sizes if size <= enough), key=rate)

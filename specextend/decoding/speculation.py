"""Decisions on speculation, in plain numbers: which sequences speculate in the next step, and with how large trees.

All costs are relative to a plain step of the same batch, so that seconds cancel: a *load* of 1.4 is a step that takes
1.4 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

FIRST_PAUSE = 16
"""Plain steps before speculation is tried again; doubled after each try that did not last."""
LONGEST_PAUSE = 256
TRIAL_STEPS = 2
"""Speculative steps that a try takes at least, whatever they bring."""
PROBATION_STEPS = 16
"""Speculative steps after which a try counts as a success, so that the next pause is a short one."""
ALLOWED_LOSS = 0.02
"""Share of a sequence's decoding time that speculation may have lost when it is tried again, or lose by going on."""
_MEMORY = 0.92
"""Weight of a step's evidence one step later."""
_TRUST = 4.0
"""Initial weight of the draft's own probabilities, in accepted tokens; it fades as evidence does."""
_LEAST_TRUST = 1.0
_AGED = 0.25
"""Weight after a pause of the evidence from before it."""
_HANDICAP = 0.2
"""Tokens by which the gain of a paused sequence is reduced: resuming it costs a forward of the draft."""


@dataclass(slots=True)
class Speculation:
    """The evidence of one sequence's steps. Lives as long as its request."""

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
        """Return the accepted tokens to expect from a speculative step."""
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

        `expected` is the sum of its nodes' path probabilities, `load` the load of the verification, and `cost` this
        sequence's share of the time that the step, including drafting, took beyond a plain step, in plain steps.
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

    `draft_load(k)` is the load of drafting for k of them. All sequences wait for the largest verification of the batch,
    so speculation may pay for one of them only because it pays for another. If speculation would lose more than
    `ALLOWED_LOSS`, all steps are plain.
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
    """Choose the number of rows of a verification, including the root, that brings most tokens per second.

    `probabilities` are each sequence's calibrated path probabilities in falling order; `seconds(rows)` is the time of
    the whole step for one of the ascending `sizes`.
    """
    largest = 1 + max((len(each) for each in probabilities), default=0)
    enough = next((size for size in sizes if size >= largest), sizes[-1])

    def rate(size: int) -> float:
        return sum(1 + sum(each[: size - 1]) for each in probabilities) / seconds(size)

    return max((size for size in sizes if size <= enough), key=rate)

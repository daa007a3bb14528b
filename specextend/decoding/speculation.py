"""Adaptive speculation: which sequences speculate in the next step, and how large their trees are.

`Adaptive` decides for the running batch, by the costs of steps (`StepCosts`) and the record of each
draft (`Speculation`). New sequences begin with the `Experience` of earlier sequences. `Payoff`
compares whole documents.

A forward of n rows after L tokens takes `a_n + b_n * L`: linear layers, and attention to the
prefix. `measurements.py` measures both at the start, and every step corrects them.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specextend.decoding.decoding_options import (
    DECIDED_DOCUMENTS,
    LEAST_SPEEDUP,
    TRIAL_DOCUMENTS,
)
from specextend.decoding.device import download
from specextend.decoding.retrieval import REFRESH_EVERY
from specextend.decoding.sequence import (
    FIRST_PAUSE,
    LEAST_TRUST,
    TRIAL_STEPS,
    Evidence,
    RunningSequence,
    Speculation,
)
from specextend.decoding.tree import DraftTrees, prune
from specextend.stats import DecodingStats, ratio

_log = logging.getLogger(__name__)

Line = tuple[float, float]
"""(a, b) of `a + b * length`, in seconds."""
DraftPhase = Literal["propose", "absorb"]

ALLOWED_LOSS = 0.02
"""Share of decoding time for tries and for drafts as fast as plain steps."""
DOUBT = 0.1
"""Least expected gain after larger losses, since estimates were too good."""
LARGEST_CREDIT = 1.0
"""Most tokens of gain for later tries: no document pays for the losses of another."""
LARGEST_DEBT = 8.0
"""Most tokens of loss before the next try: a slow step does not end all tries."""
KNOWN_STEPS = 8
"""Speculative steps after which new sequences need no try."""
_LONG_MEMORY = 0.99
"""Decay per step of the evidence of all sequences."""
_HANDICAP = 0.2
"""Tokens that a paused sequence gains less, since the draft must catch up."""
_WORTH_A_THOUGHT = 0.5
"""Least promise of a node in a pause, as a share of its cost."""
LOOK_AROUND = 16
"""Steps between two trees of a neighbouring size, which refresh its cost."""
FIRST_READING_STEPS = 32
"""Steps in which a draft's first reading is expected to pay."""
_READING_MEMORY = 0.998
"""Decay per step of readings and drafted steps."""
_WARM_UP = 4
"""First measurements of a cost; the smallest counts."""
_QUICKLY = 0.1
_SLOWLY = 0.05
_OUTLIER = 2.0
"""Largest factor of a measurement over its expectation."""

TURN = 8
"""Steps of a turn, in which all sequences draft or none does."""
TURNS = 4
"""Turns of a trial per plain turn."""
_PLAIN_TURNS = 2
"""Least plain turns of a decision."""
_CLEAR_SPEEDUP = 1.1
"""Speed-up after which a trial needs no further plain turns."""
_HELD_UP = 4.0
"""Largest factor between a step and its likely time."""


class StepCosts:
    """Times of steps of a pair on a device.

    A pace, learned quickly, scales all times, because a busy machine slows every step. Corrections
    for each size of batch and tree are learned slowly.
    """

    def __init__(self, lines: Mapping[int, Line]):
        """Take the lines of forwards by rows, ascending; one row is a plain step."""
        self.lines = lines
        self.sizes = list(lines)
        self._pace = _Average(_QUICKLY, 1.0, 1)  # the lines count as the first measurement
        self._corrections: dict[tuple[int, int], _Average] = {}
        """By sequences and size, relative to the pace."""
        self._drafting: dict[DraftPhase, dict[tuple[int, int], _Average]] = {
            "propose": {},
            "absorb": {},
        }
        """By sequences and width, at pace 1."""
        self._reading = _Average(_SLOWLY)
        """Seconds of a draft's reading, at pace 1."""
        self._reading_s = 0.0
        """Decayed sum of these seconds."""
        self._num_drafted = float(FIRST_READING_STEPS)
        """Decayed number of drafted steps."""

    def size_for(self, num_rows: int) -> int:
        """Return the smallest measured size for `num_rows`, or else the largest."""
        return next((size for size in self.sizes if size >= num_rows), self.sizes[-1])

    def verify_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the seconds of a verification of `num_rows` of each sequence."""
        correction = self._corrections.get((len(lengths), self.size_for(num_rows)))
        return (
            self._pace.value
            * (correction.value if correction else 1.0)
            * self.measured_s(num_rows, lengths)
        )

    def measured_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the seconds of a verification without corrections.

        Linear layers take the rows of all sequences at once, attention one sequence after the
        other.
        """
        total = len(lengths) * num_rows
        beyond = max(1.0, total / self.sizes[-1])
        of_all, _ = self.lines[self.size_for(total)]
        _, of_prefix = self.lines[self.size_for(num_rows)]
        return of_all * beyond + of_prefix * sum(lengths)

    def draft_s(self, num_sequences: int, width: int = 0) -> float:
        """Return the seconds of drafting by the nearest measured case; 0 without measurements.

        They include a share of readings. `width` is 0 unless trees are captured.
        """

        def distance(seen: tuple[int, int]) -> tuple[int, int, int]:
            number, nodes = seen
            num_rows = abs(number * nodes - num_sequences * width)
            return num_rows, abs(number - num_sequences), number

        phases = sum(
            seen[min(seen, key=distance)].value for seen in self._drafting.values() if seen
        )
        reading = num_sequences * self._reading_s / self._num_drafted
        return self._pace.value * (phases + reading)

    def observe_verify(self, num_rows: int, lengths: Sequence[int], seconds: float) -> None:
        """Record the seconds of a verification."""
        key = len(lengths), self.size_for(num_rows)
        correction = self._corrections.setdefault(key, _Average(_SLOWLY, 1.0, 1))
        ratio = seconds / self.measured_s(num_rows, lengths)
        self._pace.add(ratio / correction.value)
        correction.add(ratio / self._pace.value)

    def observe_draft(
        self, phase: DraftPhase, num_sequences: int, seconds: float, width: int = 0
    ) -> None:
        """Record the seconds of a phase, with the arguments of `draft_s`."""
        seen = self._drafting[phase].setdefault((num_sequences, width), _Average(_SLOWLY))
        seen.add(seconds / self._pace.value)

    def reading_s(self) -> float:
        """Return the seconds of a draft's reading after a retrieval."""
        return self._pace.value * self._reading.value

    def observe_reading(self, num_sequences: int, seconds: float) -> None:
        """Record the seconds of a reading."""
        self._reading.add(seconds / num_sequences / self._pace.value)
        self._reading_s += seconds / self._pace.value

    def count_drafted(self, num_sequences: int) -> None:
        """Count a step of drafting sequences, which pays for their reading."""
        self._reading_s *= _READING_MEMORY**num_sequences
        self._num_drafted = self._num_drafted * _READING_MEMORY**num_sequences + num_sequences


@dataclass(slots=True)
class _Average:
    """A running average after the least of the first values, since first calls build kernels."""

    weight: float
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= _WARM_UP:
            self.value = min(self.value, value) if self.count > 1 else value
        else:
            likely = min(max(value, self.value / _OUTLIER), self.value * _OUTLIER)
            self.value += self.weight * (likely - self.value)


@dataclass(slots=True)
class Experience:
    """The evidence of all sequences, and the account of their tries."""

    balance: float = 0.0
    """Tokens won by drafts over plain steps, plus `ALLOWED_LOSS` of all tokens."""
    evidence: Evidence = field(default_factory=Evidence)
    by_length: dict[int, Evidence] = field(default_factory=lambda: defaultdict(Evidence))
    """Evidence by the binary digits of the sequence's length."""
    idle: Evidence = field(default_factory=Evidence)
    """Steps in pauses."""
    num_steps: int = 0

    @property
    def is_known(self) -> bool:
        """Return True if new sequences need no try."""
        return self.num_steps >= KNOWN_STEPS

    @property
    def in_credit(self) -> bool:
        """Return True if speculation has lost no more than allowed."""
        return self.balance >= 0

    def begin(self, length: int) -> Speculation:
        """Return a new sequence's record, with a prior from similar lengths."""
        idle = self.idle.times(1 / max(1.0, self.idle.num_steps))
        if not self.is_known:
            return Speculation(idle=idle)
        alike = self.by_length[length.bit_length()]
        seen = alike if alike.num_steps >= KNOWN_STEPS else self.evidence
        return Speculation(
            prior=seen.calibration(LEAST_TRUST, 1.0),
            evidence=seen.times(1 / seen.num_steps),
            idle=idle,
            _run=TRIAL_STEPS,
        )

    def observe(
        self, length: int, num_rows: int, expected: float, accepted: int, cost: float
    ) -> None:
        """Record a speculative step; plain steps would decide `cost` tokens in the draft's time."""
        self.num_steps += 1
        step = (num_rows, expected, accepted)
        digits = length.bit_length()
        self.evidence = self.evidence.after(_LONG_MEMORY, *step)
        self.by_length[digits] = self.by_length[digits].after(_LONG_MEMORY, *step)
        self.book(1 + accepted, accepted - cost)

    def observe_idle(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a step in a pause."""
        self.idle = self.idle.after(_LONG_MEMORY, num_rows, expected, accepted)
        self.book(1 + accepted, 0.0)

    def book(self, num_tokens: int, gain: float) -> None:
        """Book decided tokens, and the gain of a draft in tokens."""
        balance = self.balance + ALLOWED_LOSS * num_tokens + gain
        self.balance = max(-LARGEST_DEBT, min(balance, LARGEST_CREDIT))


def who_speculates(
    states: Sequence[Speculation],
    verify_s: Callable[[float], float],
    draft_s: Callable[[int], float],
    *,
    in_credit: bool,
) -> set[int]:
    """Choose the places of sequences that speculate next, for most tokens per second.

    All sequences wait for the largest verification of the batch, so a draft may pay only because
    another pays too. In credit, due tries begin, and drafts may lose up to `ALLOWED_LOSS`. Out of
    credit, no try begins, and drafts must win more than `DOUBT`.

    Args:
        verify_s: Seconds of a verification, by rows of each sequence.
        draft_s: Seconds of drafting, by drafting sequences.
        in_credit: See `Experience.in_credit`.
    """
    forced = [state.on_trial or (in_credit and state.pause_is_over) for state in states]
    gains = [
        state.gain - state.idle_gain - (0 if state.active or is_forced else _HANDICAP)
        for state, is_forced in zip(states, forced, strict=True)
    ]
    order = sorted(range(len(states)), key=lambda b: (not forced[b], -gains[b]))
    idle_tokens, idle_s = idle_pace(states, verify_s)
    tokens = list(accumulate((gains[b] for b in order), initial=idle_tokens))
    seconds = list(accumulate((verify_s(states[b].evidence.rows) for b in order), initial=0.0))

    def rate(count: int) -> float:
        if not count:
            return tokens[0] / idle_s * (1 - ALLOWED_LOSS if in_credit else 1 + DOUBT)
        return tokens[count] / (max(seconds[count] / count, idle_s) + draft_s(count))

    best = max(range(sum(forced), len(states) + 1), key=rate)
    return set(order[:best])


def idle_pace(
    states: Sequence[Speculation], verify_s: Callable[[float], float]
) -> tuple[float, float]:
    """Return tokens and seconds of a step in which all sequences pause."""
    tokens = sum(1 + state.idle_gain for state in states)
    return tokens, fmean(verify_s(state.idle.rows) for state in states)


def best_size(
    probabilities: Sequence[Sequence[float]], sizes: Sequence[int], seconds: Callable[[int], float]
) -> int:
    """Choose the size of trees, for most tokens per second.

    Args:
        probabilities: Calibrated path probabilities of each sequence, descending.
        sizes: Rows of a verification, root included, ascending.
        seconds: Time of the whole step, by size.
    """
    largest = 1 + max((len(each) for each in probabilities), default=0)
    enough = next((size for size in sizes if size >= largest), sizes[-1])

    def rate(size: int) -> float:
        return sum(1 + sum(each[: size - 1]) for each in probabilities) / seconds(size)

    return max((size for size in sizes if size <= enough), key=rate)


class Payoff:
    """Measures in trials whether drafts pay: some turns of a trial are plain for the whole batch.

    Sequences share their steps, so whole steps are compared by their tokens. `StepCosts` makes
    other batches comparable.
    """

    def __init__(self) -> None:
        self.drafts = True
        self.is_plain = False
        """Whether the next step belongs to a plain turn."""
        self.speedup: float | None = None
        """Speed of the last trial's documents over plain decoding."""
        self._num_steps = 0
        self._last = False, 0.0, 0.0
        self._begin(in_trial=True)

    def _begin(self, *, in_trial: bool) -> None:
        self._in_trial = in_trial
        self._num_plain_turns = self._num_documents = 0
        self._seconds = {True: 0.0, False: 0.0}
        self._worth_s = {True: 0.0, False: 0.0}
        self._documents = DecodingStats()
        self._documents_worth_s = 0.0

    def next_step(self, worth_s: float, likely_s: float) -> None:
        """Choose the kind of the next step.

        Args:
            worth_s: Seconds of plain steps for the last step's tokens; 0 without evidence.
            likely_s: Seconds of the last step by `StepCosts`.
        """
        self._last = self.is_plain, worth_s, likely_s
        self._num_steps += 1
        if self._num_steps % TURN == 0:
            self._num_plain_turns += self.is_plain
            is_last = self._num_steps // TURN % TURNS == TURNS - 1
            is_clear = (self._measured() or 0.0) >= _CLEAR_SPEEDUP
            self.is_plain = self._in_trial and is_last and not is_clear

    def took(self, seconds: float) -> None:
        """Record the seconds of the last step, unless drafts stopped or caught up."""
        was_plain, worth_s, likely_s = self._last
        if worth_s and was_plain == self.is_plain:
            self._seconds[was_plain] += min(seconds, _HELD_UP * likely_s)
            self._worth_s[was_plain] += worth_s
        self._last = False, 0.0, 0.0

    def ended(self, stats: DecodingStats, worth_s: float, *, drafted: bool) -> None:
        """Record a finished document, and decide after enough of them."""
        self._num_documents += drafted or not self._in_trial
        if not self._in_trial:
            if self._num_documents >= DECIDED_DOCUMENTS:
                self.drafts = True
                self._begin(in_trial=True)
        elif drafted:
            self._documents.add(stats)
            self._documents_worth_s += worth_s
            found = self._measured()
            if self._num_documents >= TRIAL_DOCUMENTS and found is not None:
                self.speedup = found
                self.drafts = found >= LEAST_SPEEDUP
                _log.info("with a draft %.2f times as fast as without", found)
                self._begin(in_trial=False)

    def _measured(self) -> float | None:
        if self._num_plain_turns < _PLAIN_TURNS or not min(self._worth_s.values()):
            return None
        plain_s, drafted_s = (
            self._documents.prefill_s
            + self._documents_worth_s * self._seconds[kind] / self._worth_s[kind]
            for kind in (True, False)
        )
        return ratio(plain_s, drafted_s + self._documents.draft_prefill_s)


class Adaptive:
    """Decides which sequences of the running batch speculate, and cuts their trees.

    Costs and experience last as long as the engine. They change its speed, never its output.
    """

    def __init__(self, costs: StepCosts, num_drafts: int, captured: Sequence[int] = ()):
        """Take the measured costs.

        Args:
            num_drafts: Draft tokens of the largest tree.
            captured: Draft tokens of captured trees, descending. The step before decides their
                size, so the host need not wait for the draft.
        """
        self.costs = costs
        self.payoff = Payoff()
        self._captured = captured
        self._promises: tuple[list[RunningSequence], Tensor] = [], torch.empty(0, 0)
        self._experience = Experience()
        self._num_settled = 0
        """Steps without a decision, while all pause and no try is due."""
        self._sizes = [size for size in costs.sizes if size <= num_drafts + 1]
        self._size = self._sizes[-1]
        """Rows of the last trees of drafts."""
        self._num_cut = 0

    @property
    def most_drafts(self) -> int:
        """Draft tokens of the next trees: one size above the last, to see if it pays."""
        return self._next_size(self._size) - 1

    @property
    def width(self) -> int:
        """Draft tokens of captured trees, or 0."""
        return self._width(self._size)

    def _next_size(self, size: int) -> int:
        return self._sizes[min(self._sizes.index(size) + 1, len(self._sizes) - 1)]

    def _width(self, size: int) -> int:
        return min(
            (each for each in self._captured if each >= self._next_size(size) - 1), default=0
        )

    def refresh_every(self, lengths: list[int]) -> int:
        """Return the steps between two retrievals that keep readings within `ALLOWED_LOSS`."""
        reading_s = len(lengths) * self.costs.reading_s()
        if not reading_s:
            return REFRESH_EVERY
        return ceil(reading_s / (ALLOWED_LOSS * self.costs.verify_s(self._size, lengths)))

    def least_probability(self, lengths: list[int]) -> float:
        """Return the least path probability of a node in a pause."""
        seconds = [self.costs.verify_s(size, lengths) for size in (1, self._sizes[-1])]
        return _WORTH_A_THOUGHT * (seconds[1] / seconds[0] - 1) / max(1, self._sizes[-1] - 1)

    def begin(self, num_tokens: int, running: Sequence[RunningSequence]) -> Speculation:
        """Return a new sequence's record; it begins with a pause if drafts do not pay."""
        new = self._experience.begin(num_tokens)
        if self._experience.is_known:
            states = [new, *(sequence.speculation for sequence in running)]
            if 0 not in self._choose(
                states, [num_tokens, *(sequence.length for sequence in running)]
            ):
                new.pause()
        return new

    def prune(
        self, trees: DraftTrees, drafting: list[RunningSequence], lengths: list[int]
    ) -> DraftTrees:
        """Cut trees to the size with most tokens per second, for `lengths` of all sequences.

        During a try the size is never 1, since a plain step gives no evidence.
        """
        promises = trees.log_probs[:, 1:].exp()
        self._promises = drafting, download(promises) if self._captured else promises
        if not self._captured:
            self._read_promises()
        states = [sequence.speculation for sequence in drafting]
        num_drafting = sum(state.active for state in states)

        def seconds(rows: int) -> float:
            draft_s = self.costs.draft_s(num_drafting, self._width(rows)) if num_drafting else 0.0
            return draft_s + self.costs.verify_s(rows, lengths)

        if not all(state.promised for state in states if state.active):
            return trees
        size = best_size(
            [
                sorted((min(1.0, each.calibration * p) for p in each.promised), reverse=True)
                for each in states
            ],
            self._sizes[1:] if any(state.on_trial for state in states) else self._sizes,
            seconds,
        )
        self._size = size if num_drafting else self._size
        return prune(trees, self._or_the_next(size))

    def _or_the_next(self, size: int) -> int:
        """Return the size, or a neighbour every `LOOK_AROUND` steps, to refresh its cost.

        1 is no neighbour: a plain step would count as a failed draft.
        """
        self._num_cut += 1
        if self._num_cut % LOOK_AROUND:
            return size
        at = self._sizes.index(size)
        which = max if self._num_cut % (2 * LOOK_AROUND) else min
        return which(self._sizes[max(min(at, 1), at - 1) : at + 2])

    def _read_promises(self) -> None:
        drafting, promises = self._promises
        self._promises = [], torch.empty(0, 0)
        for sequence, promised in zip(drafting, promises.tolist(), strict=True):
            sequence.speculation.promised = promised

    def observe(
        self,
        sequences: list[RunningSequence],
        lengths: list[int],
        trees: DraftTrees,
        accepted: list[int],
        verify_s: float | None,
    ) -> None:
        """Record a step. `lengths` are from before it; `verify_s` is None if untimed."""
        num_rows = trees.num_nodes
        if verify_s is not None:
            self.costs.observe_verify(num_rows, lengths, verify_s)
        each_s = self.costs.measured_s(1, lengths) / len(lengths)
        for sequence, number in zip(sequences, accepted, strict=True):
            sequence.speculation.worth_s += each_s * (1 + number)
        states = [sequence.speculation for sequence in sequences]
        num_drafting = sum(state.active for state in states)
        self.costs.count_drafted(num_drafting)
        seconds = self.costs.verify_s(num_rows, lengths) + self._draft_s(num_drafting)
        was_plain = self.payoff.is_plain
        if not any(each.is_doubted or each.request.drafts is not None for each in sequences):
            is_whole = all(each.drafts for each in sequences)
            worth_s = each_s * (len(accepted) + sum(accepted))
            self.payoff.next_step(worth_s * is_whole, seconds)
        if was_plain:
            return
        self._read_promises()
        idle_tokens, idle_s = idle_pace(states, self._verify_s(lengths))
        owed = seconds / idle_s * idle_tokens - sum(
            1 + state.idle_gain for state in states if not state.active
        )
        for sequence, length, size, number in zip(
            sequences, lengths, trees.sizes, accepted, strict=True
        ):
            state = sequence.speculation
            rows = num_rows if state.active else size
            expected = sum(sorted(state.promised, reverse=True)[: rows - 1])
            if state.active:
                state.observe(rows, expected, number)
                self._experience.observe(length, rows, expected, number, owed / num_drafting - 1)
            elif sequence.drafts:
                state.observe_idle(rows, expected, number)
                self._experience.observe_idle(rows, expected, number)

    def decide(self, sequences: list[RunningSequence]) -> None:
        """Decide which sequences speculate next."""
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
                self._size = self._sizes[-1]  # a whole tree shows its worth

    def _choose(self, states: list[Speculation], lengths: list[int]) -> set[int]:
        in_credit = self._experience.in_credit
        return who_speculates(states, self._verify_s(lengths), self._draft_s, in_credit=in_credit)

    def _draft_s(self, num_sequences: int) -> float:
        return self.costs.draft_s(num_sequences, self.width)

    def _verify_s(self, lengths: list[int]) -> Callable[[float], float]:
        """Interpolate the seconds of a verification by its rows."""
        seconds = [self.costs.verify_s(size, lengths) for size in self._sizes]
        return lambda num_rows: float(np.interp(num_rows, self._sizes, seconds))

"""Adaptive speculation: which sequences speculate in the next step, and with how large trees.

The evidence of a sequence is what its draft promised, how much of that was accepted, and in how
large trees. New sequences begin with the `Experience` of those before them of like length, so that
a run finds out once, not once a document. A sequence that pauses does without its draft network;
n-grams, which cost next to nothing, are proposed even then. So a draft has to bring more than they
do. `who_speculates` and `best_size` decide in plain numbers; `Adaptive` asks them for the running
batch. What documents win in all, prompts included, `Payoff` measures beside plain steps.

Steps cost what `measurements.py` measured at the start, corrected by every step that is taken. A
forward of n rows behind a prefix of L tokens takes `a_n + b_n * L`: its linear layers, and
attention over the prefix.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

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
from specextend.decoding.tree import DraftTrees, prune
from specextend.stats import DecodingStats, ratio

if TYPE_CHECKING:
    from specextend.decoding.sequence import Sequence as Running

_log = logging.getLogger(__name__)

Line = tuple[float, float]
"""(a, b) of `a + b * length`, seconds and seconds per token."""
DraftPhase = Literal["propose", "absorb"]

FIRST_PAUSE = 16
"""Steps before a draft is tried again; doubled after each try that did not last."""
LONGEST_PAUSE = 256
TRIAL_STEPS = 2
"""Speculative steps that a try takes at least, whatever they bring."""
PROBATION_STEPS = 16
"""Speculative steps after which a try counts as a success, so that the next pause is a short
one.
"""
ALLOWED_LOSS = 0.02
"""Share of all decoding time that speculation may lose: by tries, or by going on where plain steps
are as fast.
"""
DOUBT = 0.1
"""Gain that must be expected beyond plain steps after more than that was lost: estimates that were
too good before.
"""
LARGEST_CREDIT = 1.0
"""Tokens of gain that count towards later tries: what one document won, the next one must not
lose.
"""
LARGEST_DEBT = 8.0
"""Tokens of loss that have to be earned back before the next try: one held-up step must not end all
tries.
"""
KNOWN_STEPS = 8
"""Speculative steps of all sequences from which on new ones need no try of their own."""
_MEMORY = 0.92
"""Weight of a step's evidence one step later."""
_LONG_MEMORY = 0.99
"""The same for the experience of all sequences."""
_TRUST = 4.0
"""Initial weight of what was known before the first step, in accepted tokens; it fades as evidence
does.
"""
_LEAST_TRUST = 1.0
_AGED = 0.25
"""Weight after a pause of the evidence from before it."""
_HANDICAP = 0.2
"""Tokens by which the gain of a paused sequence is reduced: resuming it costs a forward of the
draft.
"""
_WORTH_A_THOUGHT = 0.5
"""Share of its cost that a node must promise to be proposed in a pause: sizes are chosen among
those that are.
"""
LOOK_AROUND = 16
"""Steps after which a tree of the next size, larger or smaller in turn, is verified: costs of sizes
that are never taken were measured once, at the start, perhaps beside other work.
"""
FIRST_READING_STEPS = 32
"""Steps by which a draft's first reading of a document is expected to pay."""
_READING_MEMORY = 0.998
"""Weight of the reading and the steps of drafts one step later."""
_WARM_UP = 4
"""Number of first measurements of a cost, of which the smallest is taken."""
_QUICKLY = 0.1
_SLOWLY = 0.05
"""Weights of a new measurement in a running average."""
_OUTLIER = 2.0
"""Factor by which a measurement may exceed what was expected; more is cut off, so that one slow
step does not stop speculation.
"""

TURN = 8
"""Steps of a turn, in which all sequences of the batch draft or none does."""
TURNS = 4
"""Turns of a trial of which the last is plain."""
_PLAIN_TURNS = 2
"""Plain turns without which nothing is decided."""
_CLEAR_SPEEDUP = 1.1
"""Speed-up with which a trial needs no further plain turns."""
_HELD_UP = 4.0
"""Factor by which a step may exceed what is likely; more is cut off."""


class StepCosts:
    """Holds what was measured of one pair on one device, corrected by this engine's own steps.

    What slows the machine down slows every step down, so one pace serves all of them: it is learned
    from each step that is taken, and holds for those that are not. What is left is learned slowly
    for each size of batch and tree.
    """

    def __init__(self, lines: Mapping[int, Line]):
        """Take the lines of forwards by their rows, ascending. One row is a plain step."""
        self.lines = lines
        self.sizes = list(lines)
        """The numbers of rows that were measured, ascending."""
        self._pace = _Average(_QUICKLY, 1.0, 1)  # the lines count as the first measurement
        # (sequences, size), beside the pace
        self._corrections: dict[tuple[int, int], _Average] = {}
        # (sequences, width), at pace 1
        self._drafting: dict[DraftPhase, dict[tuple[int, int], _Average]] = {
            "propose": {},
            "absorb": {},
        }
        # seconds at pace 1 in which drafts read what they are to see, and the steps that had it
        self._reading = _Average(_SLOWLY)
        self._reading_s = 0.0
        self._num_drafted = float(FIRST_READING_STEPS)

    def size_for(self, num_rows: int) -> int:
        """Return the smallest measured size that holds `num_rows`; the largest if none does."""
        return next((size for size in self.sizes if size >= num_rows), self.sizes[-1])

    def verify_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the time of a verification of `num_rows` rows (1: a plain step) of each
        sequence.
        """
        correction = self._corrections.get((len(lengths), self.size_for(num_rows)))
        return (
            self._pace.value
            * (correction.value if correction else 1.0)
            * self.measured_s(num_rows, lengths)
        )

    def measured_s(self, num_rows: int, lengths: Sequence[int]) -> float:
        """Return the same by the lines alone.

        Linear layers see all sequences' rows at once; attention is done for one after the other.
        """
        total = len(lengths) * num_rows
        beyond = max(1.0, total / self.sizes[-1])
        of_all, _ = self.lines[self.size_for(total)]
        _, of_prefix = self.lines[self.size_for(num_rows)]
        return of_all * beyond + of_prefix * sum(lengths)

    def draft_s(self, num_sequences: int, width: int = 0) -> float:
        """Return the time of drafting captured trees of `width` nodes (0: others) for
        `num_sequences`, by the nearest that was seen so far; 0 if there is none.

        It includes a step's share of the time in which the draft read the document.
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
        """Record the time of a verification."""
        key = len(lengths), self.size_for(num_rows)
        correction = self._corrections.setdefault(key, _Average(_SLOWLY, 1.0, 1))
        ratio = seconds / self.measured_s(num_rows, lengths)
        self._pace.add(ratio / correction.value)
        correction.add(ratio / self._pace.value)

    def observe_draft(
        self, phase: DraftPhase, num_sequences: int, seconds: float, width: int = 0
    ) -> None:
        """Record the time of drafting for `num_sequences` at once; `width` as in `draft_s`."""
        seen = self._drafting[phase].setdefault((num_sequences, width), _Average(_SLOWLY))
        seen.add(seconds / self._pace.value)

    def reading_s(self) -> float:
        """Return the time in which the draft reads the chunks that are new to it; 0 if it reads
        none.
        """
        return self._pace.value * self._reading.value

    def observe_reading(self, num_sequences: int, seconds: float) -> None:
        """Record the time in which the drafts of sequences read what they are to see."""
        self._reading.add(seconds / num_sequences / self._pace.value)
        self._reading_s += seconds / self._pace.value

    def count_drafted(self, num_sequences: int) -> None:
        """Count a step of sequences that draft: the steps by which their reading has to pay."""
        self._reading_s *= _READING_MEMORY**num_sequences
        self._num_drafted = self._num_drafted * _READING_MEMORY**num_sequences + num_sequences


@dataclass(slots=True)
class _Average:
    """A running average that begins with the smallest of the first values, because first calls
    build kernels.
    """

    weight: float
    """Weight of a new value."""
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= _WARM_UP:
            self.value = min(self.value, value) if self.count > 1 else value
        else:
            likely = min(max(value, self.value / _OUTLIER), self.value * _OUTLIER)
            self.value += self.weight * (likely - self.value)


class Evidence(NamedTuple):
    """Sums over steps with a draft, or in pauses, of which each counts a little less than the one
    after it.
    """

    num_steps: float = 0.0
    num_rows: float = 0.0
    """Rows of verifications."""
    expected: float = 0.0
    """Path probabilities of the verified nodes, by the draft."""
    accepted: float = 0.0
    """Nodes that were accepted."""

    def calibration(self, trust: float, prior: float) -> float:
        """Return accepted tokens over expected ones; `prior` counts like so many expected ones."""
        return (self.accepted + trust * prior) / (self.expected + trust)

    def gain(self, trust: float, prior: float) -> float:
        """Return the accepted tokens to expect from a step; 0 if there was none yet."""
        return (
            self.calibration(trust, prior) * self.expected / self.num_steps
            if self.num_steps
            else 0.0
        )

    @property
    def rows(self) -> float:
        """Return the mean rows of a step; 1 if there was none yet."""
        return self.num_rows / self.num_steps if self.num_steps else 1.0

    def times(self, weight: float) -> Evidence:
        """Return all sums times a weight."""
        return Evidence(*(weight * each for each in self))

    def after(self, memory: float, *step: float) -> Evidence:
        """Add a step, its rows, expected and accepted nodes; what came before counts `memory` times
        as much.
        """
        return Evidence(*(memory * old + new for old, new in zip(self, (1.0, *step), strict=True)))


@dataclass(slots=True)
class Speculation:
    """The evidence of one sequence's steps. Lives as long as its request."""

    active: bool = True
    """True while its draft proposes; otherwise it pauses."""
    prior: float = 1.0
    """The calibration before the first step."""
    evidence: Evidence = field(default_factory=Evidence)
    idle: Evidence = field(default_factory=Evidence)
    """That of steps in which it pauses."""
    promised: list[float] = field(default_factory=list)
    """Path probabilities of the draft tokens of its last whole tree."""
    worth_s: float = 0.0
    """Seconds that plain steps for its tokens take by the lines of `StepCosts`."""
    _trust: float = _TRUST
    _run: int = 0  # speculative steps since the last pause
    _pause: int = FIRST_PAUSE // 2
    _wait: int = 0  # steps until the next try

    @property
    def calibration(self) -> float:
        """Return accepted tokens over those that probabilities promised: of its draft, or of
        n-grams in a pause.
        """
        if self.active:
            return self.evidence.calibration(self._trust, self.prior)
        return self.idle.calibration(_LEAST_TRUST, 1.0)

    @property
    def gain(self) -> float:
        """Return the accepted tokens to expect from a step with its draft."""
        return self.evidence.gain(self._trust, self.prior)

    @property
    def idle_gain(self) -> float:
        """Return the accepted tokens to expect from a step in a pause, those that a grammar forces
        among them.
        """
        return self.idle.accepted / self.idle.num_steps if self.idle.num_steps else 0.0

    @property
    def on_trial(self) -> bool:
        """Return True if the next step must speculate because a try has begun."""
        return self.active and self._run < TRIAL_STEPS

    @property
    def pause_is_over(self) -> bool:
        """Return True if it is paused, and it is time to try again."""
        return not self.active and self._wait <= 0

    def observe(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a speculative step; `expected` is the sum of the path probabilities of the
        verified nodes.
        """
        self._trust = max(_LEAST_TRUST, _MEMORY * self._trust)
        self.evidence = self.evidence.after(_MEMORY, num_rows, expected, accepted)
        self._run += 1

    def observe_idle(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a step in a pause."""
        self.idle = self.idle.after(_MEMORY, num_rows, expected, accepted)
        self.promised = []
        self._wait -= 1

    def pause(self) -> None:
        """Do without its draft from now on."""
        in_vain = self._run < PROBATION_STEPS
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if in_vain else FIRST_PAUSE
        self.active = False
        self._wait = self._pause
        self.promised = []

    def resume(self) -> None:
        """Draft again."""
        self.active = True
        self._run = 0
        self.promised = []
        self.evidence = self.evidence.times(_AGED)


@dataclass(slots=True)
class Experience:
    """The evidence of all sequences, and the account that their tries are paid from."""

    balance: float = 0.0
    """Tokens won by drafts minus those that their time would have brought, and `ALLOWED_LOSS` of
    all tokens.
    """
    evidence: Evidence = field(default_factory=Evidence)
    by_length: dict[int, Evidence] = field(default_factory=lambda: defaultdict(Evidence))
    """The same by the number of binary digits of a sequence's length."""
    idle: Evidence = field(default_factory=Evidence)
    """That of steps in pauses."""
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

    def begin(self, length: int) -> Speculation:
        """Make the state of a new sequence of so many tokens, which expects what was seen so far at
        such lengths.
        """
        idle = self.idle.times(1 / max(1.0, self.idle.num_steps))
        if not self.is_known:
            return Speculation(idle=idle)
        alike = self.by_length[length.bit_length()]
        seen = alike if alike.num_steps >= KNOWN_STEPS else self.evidence
        return Speculation(
            prior=seen.calibration(_LEAST_TRUST, 1.0),
            evidence=seen.times(1 / seen.num_steps),
            idle=idle,
            _run=TRIAL_STEPS,
        )

    def observe(
        self, length: int, num_rows: int, expected: float, accepted: int, cost: float
    ) -> None:
        """Record a speculative step of a sequence of `length` tokens.

        `cost` is what a draft's tokens must be worth: those that would have been decided in the
        step's time without.
        """
        self.num_steps += 1
        step = (num_rows, expected, accepted)
        digits = length.bit_length()
        self.evidence = self.evidence.after(_LONG_MEMORY, *step)
        self.by_length[digits] = self.by_length[digits].after(_LONG_MEMORY, *step)
        self.book(1 + accepted, accepted - cost)

    def observe_idle(self, num_rows: int, expected: float, accepted: int) -> None:
        """Record a step of a sequence in a pause."""
        self.idle = self.idle.after(_LONG_MEMORY, num_rows, expected, accepted)
        self.book(1 + accepted, 0.0)

    def book(self, num_tokens: int, gain: float) -> None:
        """Book tokens that were decided, and how many of them a draft won."""
        balance = self.balance + ALLOWED_LOSS * num_tokens + gain
        self.balance = max(-LARGEST_DEBT, min(balance, LARGEST_CREDIT))


def who_speculates(
    states: Sequence[Speculation],
    verify_s: Callable[[float], float],
    draft_s: Callable[[int], float],
    *,
    in_credit: bool,
) -> set[int]:
    """Choose the sequences of a batch that speculate next: the set that brings most tokens per
    second.

    `verify_s(rows)` is the time of a verification of so many rows of each sequence, 1 being a plain
    step, and `draft_s(k)` that of drafting for k of them. All sequences wait for the largest
    verification of the batch, so speculation may pay for one of them only because it pays for
    another.

    In credit, paused sequences try again when their pause is over, and drafts pause if they would
    lose more than `ALLOWED_LOSS`. Out of credit, no try begins, and drafts must be expected to win
    more than `DOUBT`.
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
    """Return the tokens that a step decides in which all pause, and its seconds."""
    tokens = sum(1 + state.idle_gain for state in states)
    return tokens, fmean(verify_s(state.idle.rows) for state in states)


def best_size(
    probabilities: Sequence[Sequence[float]], sizes: Sequence[int], seconds: Callable[[int], float]
) -> int:
    """Choose the number of rows of a verification, including the root, that brings most tokens per
    second.

    `probabilities` are each sequence's calibrated path probabilities in falling order;
    `seconds(rows)` is the time of the whole step for one of the ascending `sizes`.
    """
    largest = 1 + max((len(each) for each in probabilities), default=0)
    enough = next((size for size in sizes if size >= largest), sizes[-1])

    def rate(size: int) -> float:
        return sum(1 + sum(each[: size - 1]) for each in probabilities) / seconds(size)

    return max((size for size in sizes if size <= enough), key=rate)


class Payoff:
    """Finds out in trials whether drafts pay: some turns of a trial are plain for the whole batch.

    Sequences share their steps, so steps are compared, not documents: whole steps, by the tokens
    that they decide. `StepCosts` says how much longer steps of more or longer sequences take. The
    seconds of prompts, and of drafts that read them, are those of the trial's documents.
    """

    def __init__(self) -> None:
        self.drafts = True
        """True while new sequences have a draft."""
        self.is_plain = False
        """True if the next step is one of a plain turn."""
        self.speedup: float | None = None
        """How many times as fast as plain decoding the last trial's documents were."""
        self._num_steps = 0
        self._last = False, 0.0, 0.0
        self._begin(in_trial=True)

    def _begin(self, *, in_trial: bool) -> None:
        self._in_trial = in_trial
        self._num_plain_turns = self._num_documents = 0
        # of steps, by whether they are plain
        self._seconds = {True: 0.0, False: 0.0}
        self._worth_s = {True: 0.0, False: 0.0}
        self._documents = DecodingStats()
        self._documents_worth_s = 0.0

    def next_step(self, worth_s: float, likely_s: float) -> None:
        """Choose the kind of the next step. worth_s: of the last one, in seconds of plain steps; 0
        if it tells nothing. likely_s: what it took by `StepCosts`.
        """
        self._last = self.is_plain, worth_s, likely_s
        self._num_steps += 1
        if self._num_steps % TURN == 0:
            self._num_plain_turns += self.is_plain
            is_last = self._num_steps // TURN % TURNS == TURNS - 1
            is_clear = (self._measured() or 0.0) >= _CLEAR_SPEEDUP
            self.is_plain = self._in_trial and is_last and not is_clear

    def took(self, seconds: float) -> None:
        """Record the seconds of the last step, unless drafts stop or catch up in it."""
        was_plain, worth_s, likely_s = self._last
        if worth_s and was_plain == self.is_plain:
            self._seconds[was_plain] += min(seconds, _HELD_UP * likely_s)
            self._worth_s[was_plain] += worth_s
        self._last = False, 0.0, 0.0

    def ended(self, stats: DecodingStats, worth_s: float, *, drafted: bool) -> None:
        """Record a document that is done, and decide if there were enough."""
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
        """Return the seconds of the trial's documents without drafts over those with them; None if
        too little is known.
        """
        if self._num_plain_turns < _PLAIN_TURNS or not min(self._worth_s.values()):
            return None
        plain_s, drafted_s = (
            self._documents.prefill_s
            + self._documents_worth_s * self._seconds[kind] / self._worth_s[kind]
            for kind in (True, False)
        )
        return ratio(plain_s, drafted_s + self._documents.draft_prefill_s)


class Adaptive:
    """Decides for the running batch; the evidence of each sequence is kept in
    `Sequence.speculation`.

    Costs and experience last as long as the engine. They decide how fast its output comes, never
    what it is.
    """

    def __init__(self, costs: StepCosts, num_nodes: int, captured: Sequence[int] = ()):
        """Take the measured costs, and the largest number of nodes of a tree, not counting the
        root.

        `captured`: nodes of the trees that captured drafts choose from, the largest first. They are
        cut by what the sequences' trees promised one step before, so that the host need not wait
        for a draft.
        """
        self.costs = costs
        self.payoff = Payoff()
        self._captured = captured
        self._promises: tuple[list[Running], Tensor] = [], torch.empty(0, 0)
        self._experience = Experience()
        # steps since the last decision, if all pause and none is to try again
        self._num_settled = 0
        self._sizes = [size for size in costs.sizes if size <= num_nodes + 1]
        self._size = self._sizes[-1]
        """Rows to which the last trees with drafts were cut."""
        self._num_cut = 0

    @property
    def most_nodes(self) -> int:
        """Return how many nodes a draft is worth growing to: one size more than was verified last,
        to see if it pays.

        A level of a draft takes longer the more nodes it has.
        """
        return self._next_size(self._size) - 1

    @property
    def width(self) -> int:
        """Return the nodes of the captured trees that are drafted; 0 if drafts are not captured."""
        return self._width(self._size)

    def _next_size(self, size: int) -> int:
        return self._sizes[min(self._sizes.index(size) + 1, len(self._sizes) - 1)]

    def _width(self, size: int) -> int:
        """Return the width of captured drafts while trees are cut to `size` rows."""
        return min(
            (each for each in self._captured if each >= self._next_size(size) - 1), default=0
        )

    def refresh_every(self, lengths: list[int]) -> int:
        """Return the steps between two retrievals of sequences, of which reading takes
        `ALLOWED_LOSS` of the time.
        """
        reading_s = len(lengths) * self.costs.reading_s()
        if not reading_s:
            return REFRESH_EVERY
        return ceil(reading_s / (ALLOWED_LOSS * self.costs.verify_s(self._size, lengths)))

    def least_probability(self, lengths: list[int]) -> float:
        """Return how likely a node must be to be worth a thought: half the tokens that its row
        takes the time of.
        """
        seconds = [self.costs.verify_s(size, lengths) for size in (1, self._sizes[-1])]
        return _WORTH_A_THOUGHT * (seconds[1] / seconds[0] - 1) / max(1, self._sizes[-1] - 1)

    def begin(self, num_tokens: int, running: Sequence[Running]) -> Speculation:
        """Make the state of a new sequence of `num_tokens` tokens that joins the `running` ones.

        Where its draft is known not to pay, it begins with a pause.
        """
        new = self._experience.begin(num_tokens)
        if self._experience.is_known:
            states = [new, *(sequence.speculation for sequence in running)]
            if 0 not in self._choose(
                states, [num_tokens, *(sequence.length for sequence in running)]
            ):
                new.pause()
        return new

    def prune(self, trees: DraftTrees, drafting: list[Running], lengths: list[int]) -> DraftTrees:
        """Cut the trees of sequences to the size that brings the batch most tokens per second.

        `lengths` has one entry for every sequence of the step. While a sequence tries speculation
        again, the size is never 1, because a plain step would give no evidence.
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
        """Return the size, or now and then one beside it, so that the cost of that is known, too.

        A plain step is none: it would be booked as a draft of which nothing was accepted.
        """
        self._num_cut += 1
        if self._num_cut % LOOK_AROUND:
            return size
        at = self._sizes.index(size)
        which = max if self._num_cut % (2 * LOOK_AROUND) else min
        return which(self._sizes[max(min(at, 1), at - 1) : at + 2])

    def _read_promises(self) -> None:
        """Give each sequence the path probabilities of its last whole tree, unless it has them."""
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
        verify_s: float | None,
    ) -> None:
        """Record a step: `lengths` before it, its trees, `accepted` draft tokens, seconds of its
        verification.
        """
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
                self._size = self._sizes[-1]  # what it is worth shows in a whole tree

    def _choose(self, states: list[Speculation], lengths: list[int]) -> set[int]:
        """Choose among sequences of these lengths."""
        in_credit = self._experience.in_credit
        return who_speculates(states, self._verify_s(lengths), self._draft_s, in_credit=in_credit)

    def _draft_s(self, num_sequences: int) -> float:
        """Return the time of drafting for so many sequences."""
        return self.costs.draft_s(num_sequences, self.width)

    def _verify_s(self, lengths: list[int]) -> Callable[[float], float]:
        """Return the time of a verification by its rows; a size between two measured ones is
        interpolated.
        """
        seconds = [self.costs.verify_s(size, lengths) for size in self._sizes]
        return lambda num_rows: float(np.interp(num_rows, self._sizes, seconds))

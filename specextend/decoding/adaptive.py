"""Adaptive speculation in the engine: sizes each step's trees, and decides which sequences speculate at all.

The decisions themselves are in `speculation.py`, the costs of steps in `step_costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from specextend.decoding.device import download
from specextend.decoding.sequence import Sequence
from specextend.decoding.speculation import FIRST_PAUSE, Experience, Speculation, best_size, who_speculates
from specextend.decoding.step_costs import StepCosts
from specextend.decoding.tree import DraftTrees, prune


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
        self._promises: tuple[list[Sequence], Tensor] = [], torch.empty(0, 0)
        self._experience = Experience()
        self._paused: tuple[int, int] | None = None  # sequences that all paused, and steps until the next decision
        self._sizes = [size for size in costs.table.sizes if size <= num_nodes + 1]

    def begin(self, num_tokens: int, running: Items[Sequence]) -> Speculation:
        """Make the state of a new sequence of `num_tokens` tokens that joins the `running` ones.

        Where speculation is known not to pay, it begins with plain steps.
        """
        new = self._experience.begin()
        if self._experience.is_known:
            states = [new, *(sequence.speculation for sequence in running)]
            if 0 not in self._choose(states, [num_tokens, *(sequence.length for sequence in running)]):
                new.pause()
        return new

    def prune(self, trees: DraftTrees, drafting: list[Sequence], lengths: list[int]) -> DraftTrees:
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
        sequences: list[Sequence],
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

    def decide(self, sequences: list[Sequence]) -> None:
        """Decide which of the sequences that go on speculate in the next step."""
        states = [sequence.speculation for sequence in sequences]
        if self._is_settled(states):
            return
        lengths = [sequence.length for sequence in sequences]
        chosen = self._choose(states, lengths)
        for b, sequence in enumerate(sequences):
            if sequence.speculation.active and b not in chosen:
                sequence.speculation.pause()
                sequence.stats.num_fallbacks += 1
            elif not sequence.speculation.active and b in chosen:
                sequence.speculation.resume()  # the draft has to catch up, which takes as long as a proposal
                self._experience.charge(len(lengths) * self.costs.draft_s(1) / self.costs.verify_s(1, lengths))
        self._paused = None if chosen else (len(sequences), FIRST_PAUSE)

    def _is_settled(self, states: list[Speculation]) -> bool:
        """Return True if a batch of this size was paused not long ago, and no sequence is new or to try again."""
        if self._paused is None or any(state.active for state in states):
            return False
        size, remaining = self._paused
        self._paused = size, remaining - 1
        tries = self._experience.in_credit and any(state.pause_is_over for state in states)
        return len(states) == size and remaining > 0 and not tries

    def _choose(self, states: list[Speculation], lengths: list[int]) -> set[int]:
        """Choose among sequences of these lengths; a size between two measured ones is interpolated."""
        seconds = [self.costs.verify_s(size, lengths) for size in self._sizes]
        return who_speculates(
            states,
            lambda num_rows: float(np.interp(num_rows, self._sizes, seconds)),
            self.costs.draft_s,
            in_credit=self._experience.in_credit,
        )


def _calibrated(promised: Items[float], calibration: float) -> Items[float]:
    """Return the calibrated path probabilities of the draft tokens, in falling order."""
    return sorted((min(1.0, calibration * p) for p in promised), reverse=True)

"""Adaptive speculation in the engine: sizes each step's trees, and decides which sequences speculate at all.

The decisions themselves are in `speculation.py`, the costs of steps in `step_costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from specextend.decoding.sequence import Sequence
from specextend.decoding.speculation import best_size, who_speculates
from specextend.decoding.step_costs import StepCosts
from specextend.decoding.tree import DraftTree, prune


class Adaptive:
    """Decides for the running batch; the evidence of each sequence is kept in `Sequence.speculation`."""

    def __init__(self, costs: StepCosts, num_nodes: int) -> None:
        """Take the measured costs, and the largest number of nodes of a tree, not counting the root."""
        self.costs = costs
        self._sizes = [size for size in costs.table.sizes if size <= num_nodes + 1]

    def prune(self, trees: list[DraftTree], drafting: list[Sequence], lengths: list[int]) -> list[DraftTree]:
        """Cut the trees of the `drafting` sequences to the size that brings the batch most tokens per second.

        `lengths` has one entry for every sequence of the step. While a sequence tries speculation again, the size is
        never 1, because a plain step would give no evidence.
        """
        draft_s = self.costs.draft_s(len(drafting))
        trying = any(sequence.speculation.is_forced for sequence in drafting)
        size = best_size(
            [_calibrated(tree, each.speculation.calibration) for tree, each in zip(trees, drafting, strict=True)],
            self._sizes[1:] if trying else self._sizes,
            lambda rows: draft_s + self.costs.verify_s(rows, lengths),
        )
        return [prune(tree, size) for tree in trees]

    def observe(
        self,
        sequences: list[Sequence],
        lengths: list[int],
        trees: list[DraftTree],
        accepted: list[int],
        verify_s: float,
    ) -> None:
        """Record a step: `lengths` before it, its trees, `accepted` draft tokens, seconds of its verification."""
        num_rows = max(len(tree.token_ids) for tree in trees)
        self.costs.observe_verify(num_rows, lengths, verify_s)
        num_drafting = sum(sequence.speculation.active for sequence in sequences)
        plain_s = self.costs.verify_s(1, lengths)
        load = self.costs.verify_s(num_rows, lengths) / plain_s
        cost = load + self.costs.draft_s(num_drafting) / plain_s - 1
        for sequence, tree, number in zip(sequences, trees, accepted, strict=True):
            if sequence.speculation.active:
                expected = float(tree.log_probs[1:].exp().sum())
                sequence.speculation.observe(expected, number, load, cost * len(sequences) / num_drafting)
            else:
                sequence.speculation.observe_plain()

    def decide(self, sequences: list[Sequence]) -> None:
        """Decide which of the sequences that go on speculate in the next step."""
        plain_s = self.costs.verify_s(1, [sequence.length for sequence in sequences])
        states = [sequence.speculation for sequence in sequences]
        chosen = who_speculates(states, lambda number: self.costs.draft_s(number) / plain_s)
        for b, sequence in enumerate(sequences):
            if sequence.speculation.active and b not in chosen:
                sequence.speculation.pause()
                sequence.stats.num_fallbacks += 1
            elif not sequence.speculation.active and b in chosen:
                sequence.speculation.resume(self.costs.draft_s(1) / plain_s)


def _calibrated(tree: DraftTree, calibration: float) -> Items[float]:
    """Return the calibrated path probabilities of the draft tokens, in falling order."""
    return sorted((min(1.0, calibration * p) for p in tree.log_probs[1:].exp().tolist()), reverse=True)

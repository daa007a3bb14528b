"""Adaptive speculation in the engine: each step's tree size, and who speculates at all, from what steps cost and bring.

The decisions themselves are in `speculation.py`, the costs in `step_costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from specextend.decoding.prune import prune
from specextend.decoding.sequence import Sequence
from specextend.decoding.speculation import best_size, who_speculates
from specextend.decoding.step_costs import StepCosts
from specextend.decoding.tree import DraftTree


class Adaptive:
    """Decides for the batch that runs; what it knows of a sequence is in `Sequence.speculation`."""

    def __init__(self, costs: StepCosts, num_nodes: int) -> None:
        """`num_nodes` of a tree at most, the root not counted."""
        self.costs = costs
        self._sizes = [size for size in costs.table.sizes if size <= num_nodes + 1]

    def prune(self, trees: list[DraftTree], drafting: list[Sequence], lengths: list[int]) -> list[DraftTree]:
        """The drafting sequences' trees, cut to the size that brings the batch most tokens per second.

        `lengths` of all sequences of the step. A sequence that tries speculation out shows some of its tree.
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
        """Take note of a step: `lengths` before it, its trees, `accepted` draft tokens, seconds of verification."""
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
        """Who speculates in the next step, of those that go on."""
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
    """Path probabilities without the root's, falling."""
    return sorted((min(1.0, calibration * p) for p in tree.log_probs[1:].exp().tolist()), reverse=True)

"""Merges n-gram drafts into another draft's trees, under one node budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.drafter import Decided, Drafter
from specextend.decoding.tree import DraftTree, DraftTrees
from specextend.drafters.ngram import NgramState, Node, as_draft_trees, children_of

Clock = Callable[[], float]
_PRIOR_GAIN = 1.0
_MEMORY = 0.9
"""Weight of a running mean after one more step."""


@dataclass(slots=True)
class _SlotState:
    ngrams: NgramState
    promised: float = _PRIOR_GAIN
    """Running mean of the accepted tokens that the draft's own tree promises."""

    @property
    def draft_gain(self) -> float:
        """Return the accepted tokens to expect from the draft's own tree."""
        return self.promised * self.ngrams.draft_factor


class DraftTimer:
    """Measures the share of a step's time that the draft's proposal takes, which a step without it saves."""

    def __init__(self, clock: Clock) -> None:
        """Take a clock in seconds."""
        self._clock = clock
        self._proposal_s = self._rest_s = 0.0
        self._ended_at: float | None = None

    @property
    def share(self) -> float:
        """Return the share, from 0 to 1; 0 until a whole step was measured, so that the draft proposes."""
        return self._proposal_s / (self._proposal_s + self._rest_s) if self._rest_s else 0.0

    def forget_step(self) -> None:
        """Do not count the time up to the next proposal: a prompt is read in it."""
        self._ended_at = None

    def begin(self) -> None:
        """Count the time since the last proposal: the rest of a step."""
        if self._ended_at is not None:
            self._rest_s = _moved(self._rest_s, self._clock() - self._ended_at)

    def propose(self, draft: Drafter, slots: Sequence[int]) -> DraftTrees:
        """Let the draft propose, and count the time."""
        begin = self._clock()
        trees = draft.propose(slots)
        self._proposal_s = _moved(self._proposal_s, self._clock() - begin)
        return trees

    def end(self) -> None:
        """Begin the rest of a step."""
        self._ended_at = self._clock()


def _moved(mean: float, value: float) -> float:
    return _MEMORY * mean + (1 - _MEMORY) * value if mean else value


class MergedDrafter:
    """Merges n-gram drafts into another drafter's trees; can skip it where they alone bring more tokens per second.

    Trees are cut to the remaining length of the output, so n-gram drafts need no room behind its last token.
    """

    def __init__(self, draft: Drafter, tree: TreeOptions, device: torch.device, clock: Clock | None = None) -> None:
        """Take the drafter to merge into, the tree's options, and the device on which trees are wanted.

        With a clock the drafter is skipped by its measured share of a step's time; without one it always proposes, so
        that equal requests give equal counts.
        """
        self._draft, self._options, self._device = draft, tree, device
        self._timer = None if clock is None else DraftTimer(clock)
        self._slots: dict[int, _SlotState] = {}

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return the draft's layers."""
        return self._draft.hidden_layers

    @property
    def num_levels(self) -> int:
        """Return the largest number of tree levels."""
        return max(self._draft.num_levels, self._options.ngram_depth)

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now.

        The draft absorbs a batch's new tokens padded to the longest run, which may be deeper than its own trees.
        """
        if not self._draft.admit(slot, num_prompt_tokens, max_new_tokens + self._options.ngram_depth):
            return False
        self._slots[slot] = _SlotState(NgramState(num_prompt_tokens, max_new_tokens))
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T] and the target's features [T, F] at them."""
        if self._timer is not None:
            self._timer.forget_step()
        self._slots[slot].ngrams.read(token_ids.tolist())
        self._draft.prefill(slot, token_ids, hidden)

    def select(self, slot: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S]; n-gram drafts see all."""
        self._draft.select(slot, positions)

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Read what was decided for these slots."""
        for slot, new in zip(slots, decided.token_ids, strict=True):
            self._slots[slot].ngrams.absorb(new)
        self._draft.absorb(slots, decided)

    def propose(self, slots: Sequence[int]) -> DraftTrees:
        """Propose a tree behind each slot's root: the likeliest nodes of both."""
        if self._timer is not None:
            self._timer.begin()
        trees = {slot: self._slots[slot].ngrams.propose(*self._limits, {}) for slot in slots}
        lacking = [slot for slot in slots if self._draft_pays(self._slots[slot], trees[slot])]
        if lacking:
            drafted = self._draft.propose(lacking) if self._timer is None else self._timer.propose(self._draft, lacking)
            trees |= {slot: self._merge(self._slots[slot], tree) for slot, tree in zip(lacking, drafted, strict=True)}
        if self._timer is not None:
            self._timer.end()
        return as_draft_trees([trees[slot] for slot in slots], self._device)

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._slots.pop(slot, None)
        self._draft.release(slot)

    @property
    def _limits(self) -> tuple[int, int]:
        return self._options.most_nodes, self.num_levels

    def _draft_pays(self, state: _SlotState, nodes: Sequence[Node]) -> bool:
        """Return True if drafting brings more tokens per second than these n-gram drafts alone."""
        if state.ngrams.most_levels <= 0:
            return False
        return self._timer is None or draft_pays(nodes, state.draft_gain, self._timer.share)

    def _merge(self, state: _SlotState, tree: DraftTree) -> list[Node]:
        promised = float(tree.log_probs[1:].exp().sum())
        state.promised = _MEMORY * state.promised + (1 - _MEMORY) * promised
        return state.ngrams.propose(*self._limits, children_of(tree))


def draft_pays(nodes: Sequence[Node], draft_gain: float, share: float) -> bool:
    """Return True if a step with a draft's tree brings more tokens per second than n-gram `nodes` alone.

    The draft, worth `draft_gain` tokens by itself, helps if no n-gram draft contains the next token. A step without it
    saves its `share` of the time.
    """
    expected = 1 + sum(node.probability for node in nodes[1:])
    missed = max(0.0, 1 - sum(node.probability for node in nodes if node.depth == 1))
    return expected + missed * draft_gain > expected / (1 - share)

"""The drafter that runs any network with a KV cache: a small causal LM or an EAGLE head.

Shapes: `B` sequences, `F` frontier nodes, `M` expanded nodes, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.tree import DraftTrees, grow_trees
from specextend.drafters.draft_cache import DraftCache

HISTORY = 3
"""Number of tokens before a token that a network may read."""


def last_tokens(before: Tensor | None, token_ids: Tensor) -> Tensor:
    """Return token_ids [T] behind the three tokens `before` them; at a text's start the first one stands for them."""
    return torch.cat([token_ids[:1].expand(HISTORY) if before is None else before, token_ids])


def histories(text: Tensor) -> Tensor:
    """Return the three tokens [T, 3] before each token of text [3 + T] but the first three, nearest first."""
    return text[:-1].unfold(0, HISTORY, 1).flip(1)


class DraftNetwork(Protocol):
    """A draft network that `CausalDrafter` can run."""

    cache: DraftCache
    vocabulary: Tensor | None
    """[V] int64 token ids of the logits; None: all of the target's, in order."""
    hidden_layers: tuple[int, ...]
    """Target layers, ascending, whose concatenated outputs are the features [.., F]; empty: the last hidden state."""
    reads_history: bool
    """True if `forward` needs the tokens before each token."""

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Put the next chunk of a prompt into the full cache: token_ids [T], features [T, F] of the target."""

    def num_staging_rows(self) -> int:
        """Return the number of working rows that prefill needs."""

    def release(self, slot: int) -> None:
        """Free what prefill keeps for the slot."""

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan, history: Tensor | None
    ) -> Tensor:
        """Run token_ids [B, T] at `positions` [B, T] and return hidden [B, T, C].

        `hidden` belongs to each token: the target's features [B, T, F] one position before it, or the network's own
        output [B, T, C] for its parent. Working rows are written as the plan says. `history` [B, T, 3] holds the three
        tokens before each token, nearest first; None if the network does not read them.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""


@dataclass(slots=True)
class _Root:
    """The last decided token of a slot, from which the next tree starts."""

    token_id: Tensor  # [] int64
    hidden: Tensor  # [C], the network's output at the root


@dataclass(frozen=True, slots=True)
class _SlotPlaces:
    """Says where slots stand in the working cache, uploaded once for all forwards of a call."""

    slots: Sequence[int]
    ends: Tensor
    """[B, 1] int64: the row behind the visible ones"""
    positions: Tensor
    """[B, 1] int64: the position behind the visible ones"""


@dataclass(slots=True)
class _Frontier:
    """The nodes whose children are drafted next."""

    hidden: Tensor
    """[B, F, C], the network's output at each node."""
    lineage: Tensor | None
    """[B, F, 3], each node's token, its parent's and its grandparent's; None if the network does not read them."""

    def parents(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden [B, n, C] and lineage [B, n, 3] of the nodes at indices [B, n]."""
        indices = indices.unsqueeze(2)
        hidden = self.hidden.gather(1, indices.expand(-1, -1, self.hidden.shape[2]))
        if self.lineage is None:
            return hidden, None
        return hidden, self.lineage.gather(1, indices.expand(-1, -1, HISTORY))


class CausalDrafter:
    """Grows OPT-Trees with a draft network, whose view of the document is chosen by `select`."""

    def __init__(
        self, network: DraftNetwork, tree: TreeOptions, tree_attention: TreeAttention, num_visible_rows: int | None
    ) -> None:
        """Take the network; `num_visible_rows` is the largest number that `select` is called with, None for all."""
        self.network, self._cache = network, network.cache
        self.fixed_shapes = self._cache.working.stored.device.type != "cpu"
        """True if every level runs at full width, so that a GPU need not ask the host; a CPU expands what is needed."""
        self._options, self._tree_attention = tree, tree_attention
        self._num_visible_rows = num_visible_rows
        self._roots: dict[int, _Root] = {}
        self._texts: dict[int, Tensor] = {}  # the last three decided tokens, if the network reads them

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return the target layers whose outputs the network takes; none: the last hidden state."""
        return self.network.hidden_layers

    @property
    def num_levels(self) -> int:
        """Return the largest number of tree levels."""
        return self._options.depth

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now."""
        num_tokens = num_prompt_tokens + max_new_tokens + self._options.depth + 1
        chosen = num_prompt_tokens if self._num_visible_rows is None else self._num_visible_rows
        visible = min(num_tokens, chosen + max_new_tokens + self._options.depth + 1)
        scratch = self._options.depth * self._options.most_nodes
        return self._cache.admit(slot, num_tokens, max(visible + scratch, self.network.num_staging_rows()))

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T] and the target's features [T, F] at them."""
        self.network.prefill(slot, token_ids, hidden)
        if self.network.reads_history:
            self._texts[slot] = last_tokens(self._texts.get(slot), token_ids)[-HISTORY:]

    def select(self, slot: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending, and what `absorb` adds later."""
        self._cache.select(slot, positions)

    def absorb(self, slots: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Run the newly decided tokens, the new root last, behind the rows that each slot sees now."""
        counts = [len(new) for new in token_ids]
        places, padded = self._locate(slots, token_ids, hidden[0].device)
        added = [new[:count] for new, count in zip(padded, counts, strict=True)]
        history = self._read_history(slots, added) if self.network.reads_history else None
        output = self._forward(places, padded, pad_sequence(list(hidden), batch_first=True), None, 0, history)
        self._cache.append(slots, counts)
        for slot, new, count, out in zip(slots, padded, counts, output, strict=True):
            self._roots[slot] = _Root(new[count - 1], out[count - 1])

    def propose(self, slots: Sequence[int]) -> DraftTrees:
        """Grow a tree behind each slot's root."""
        roots = [self._roots[slot] for slot in slots]
        hidden = torch.stack([root.hidden for root in roots])
        lineage = None
        if self.network.reads_history:
            lineage = torch.stack([self._texts[slot] for slot in slots]).flip(1).unsqueeze(1)
        frontier = _Frontier(hidden.unsqueeze(1), lineage)
        places, _ = self._locate(slots, [()] * len(slots), hidden.device)

        def expand(token_ids: Tensor, indices: Tensor, mask: Tensor, depth: int) -> Tensor:
            nonlocal frontier
            parents, history = frontier.parents(indices)
            output = self._forward(places, token_ids, parents, mask, depth, history)
            if history is not None:
                history = torch.cat([token_ids.unsqueeze(2), history[:, :, :-1]], 2)
            frontier = _Frontier(output, history)
            return self.network.logits(output)

        return grow_trees(
            torch.stack([root.token_id for root in roots]),
            self.network.logits(hidden),
            expand,
            self._options,
            adaptive=not self.fixed_shapes,
            vocabulary=self.network.vocabulary,
        )

    def first_level(self, slot: int) -> tuple[Tensor | None, Tensor]:
        """Return the root's children: token ids [V] (None: all of the target's, in order) and their logits [V]."""
        return self.network.vocabulary, self.network.logits(self._roots[slot].hidden)

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._cache.release(slot)
        self.network.release(slot)
        self._roots.pop(slot, None)
        self._texts.pop(slot, None)

    def _read_history(self, slots: Sequence[int], added: Sequence[Tensor]) -> Tensor:
        """Return the tokens [B, T, 3] before each newly decided one ([n] for each slot), and remember the last ones."""
        texts = [last_tokens(self._texts[slot], new) for slot, new in zip(slots, added, strict=True)]
        self._texts |= {slot: text[-HISTORY:] for slot, text in zip(slots, texts, strict=True)}
        return pad_sequence([histories(text) for text in texts], batch_first=True)

    def _locate(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], device: torch.device
    ) -> tuple[_SlotPlaces, Tensor]:
        """Upload the slots' places and token ids together; return the latter padded, [B, n]."""
        width = max(len(new) for new in token_ids)
        rows = []
        for slot, new in zip(slots, token_ids, strict=True):
            visible = self._cache.visible(slot)
            rows.append([self._cache.start(slot) + visible, visible, *new, *[0] * (width - len(new))])
        uploaded = torch.tensor(rows, device=device)
        return _SlotPlaces(slots, uploaded[:, :1], uploaded[:, 1:2]), uploaded[:, 2:]

    def _forward(
        self,
        places: _SlotPlaces,
        token_ids: Tensor,
        hidden: Tensor,
        mask: Tensor | None,
        depth: int,
        history: Tensor | None,
    ) -> Tensor:
        """Run [B, T] tokens: a tree level (`mask` [B, T, M], at `depth`), or a causal run behind the visible rows."""
        num_new = token_ids.shape[1]
        behind = num_new if mask is None else mask.shape[2]
        offsets = torch.arange(behind - num_new, behind, device=token_ids.device)
        plan = AttentionPlan(
            starts=[self._cache.start(slot) for slot in places.slots],
            lengths=[self._cache.reach(slot, behind) for slot in places.slots],
            num_new=num_new,
            mask=mask,
            tree=self._tree_attention,
            rows=places.ends + offsets,
        )
        positions = places.positions + (offsets if mask is None else depth - 1)
        return self.network.forward(token_ids, hidden, positions.expand_as(token_ids), plan, history)

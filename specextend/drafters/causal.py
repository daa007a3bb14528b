"""The drafter around any network with a KV cache: a small causal LM or an EAGLE head.

Shapes: `B` sequences, `F` frontier nodes, `M` expanded nodes, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.options import TreeOptions
from specextend.decoding.tree import DraftTree, grow_trees
from specextend.drafters.network import HISTORY, DraftNetwork, histories, last_tokens


@dataclass(slots=True)
class _Root:
    """What the next tree of a row starts from."""

    token_id: int
    hidden: Tensor  # [C], the network's output at the root


@dataclass(slots=True)
class _Frontier:
    """Nodes whose children come next."""

    hidden: Tensor
    """[B, F, C], the network's output at each node."""
    lineage: Tensor | None
    """[B, F, 3], each node's token, its parent's and its grandparent's; None where the network does not read them."""

    def parents(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden [B, n, C] and lineage [B, n, 3] of the nodes at slots [B, n]."""
        slots = slots.unsqueeze(2)
        hidden = self.hidden.gather(1, slots.expand(-1, -1, self.hidden.shape[2]))
        if self.lineage is None:
            return hidden, None
        return hidden, self.lineage.gather(1, slots.expand(-1, -1, HISTORY))


class CausalDrafter:
    """Grows OPT-Trees with a draft network, whose view of the document is chosen by `select`."""

    def __init__(
        self, network: DraftNetwork, tree: TreeOptions, tree_attention: TreeAttention, num_visible_rows: int | None
    ) -> None:
        """`num_visible_rows`: rows that `select` asks for at most; None: all."""
        self._network, self._cache = network, network.cache
        self._options, self._tree_attention = tree, tree_attention
        self._num_visible_rows = num_visible_rows
        self._roots: dict[int, _Root] = {}
        self._texts: dict[int, Tensor] = {}  # the last three decided tokens, where the network reads them

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the network takes; empty: the last hidden state."""
        return self._network.hidden_layers

    @property
    def num_levels(self) -> int:
        """Tree levels at most."""
        return self._options.depth

    def admit(self, row: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Make room for a sequence; False where there is none now."""
        num_tokens = num_prompt_tokens + max_new_tokens + self._options.depth + 1
        chosen = num_prompt_tokens if self._num_visible_rows is None else self._num_visible_rows
        visible = min(num_tokens, chosen + max_new_tokens + self._options.depth + 1)
        scratch = self._options.depth * self._options.most_nodes
        return self._cache.admit(row, num_tokens, max(visible + scratch, self._network.num_staging_rows()))

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """The next chunk of the prompt: token_ids [T] and the target's hidden states [T, C] at them."""
        self._network.prefill(row, token_ids, hidden)
        if self._network.reads_history:
            self._texts[row] = last_tokens(self._texts.get(row), token_ids)[-HISTORY:]

    def select(self, row: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending, and what `absorb` adds later."""
        self._cache.select(row, positions)

    def absorb(self, rows: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Run the newly decided tokens, the new root last, behind what each row sees now."""
        counts = [len(new) for new in token_ids]
        device = hidden[0].device
        added = [torch.tensor(new, device=device) for new in token_ids]
        padded = pad_sequence(added, batch_first=True)
        history = self._read_history(rows, added) if self._network.reads_history else None
        output = self._forward(rows, padded, pad_sequence(list(hidden), batch_first=True), None, 0, history)
        self._cache.append(rows, counts)
        for row, new, count, out in zip(rows, token_ids, counts, output, strict=True):
            self._roots[row] = _Root(new[-1], out[count - 1])

    def propose(self, rows: Sequence[int]) -> list[DraftTree]:
        """A tree behind each row's root."""
        roots = [self._roots[row] for row in rows]
        hidden = torch.stack([root.hidden for root in roots])
        lineage = None
        if self._network.reads_history:
            lineage = torch.stack([self._texts[row] for row in rows]).flip(1).unsqueeze(1)
        frontier = _Frontier(hidden.unsqueeze(1), lineage)

        def expand(token_ids: Tensor, slots: Tensor, mask: Tensor, depth: int) -> Tensor:
            nonlocal frontier
            parents, history = frontier.parents(slots)
            output = self._forward(rows, token_ids, parents, mask, depth, history)
            if history is not None:
                history = torch.cat([token_ids.unsqueeze(2), history[:, :, :-1]], 2)
            frontier = _Frontier(output, history)
            return self._network.logits(output)

        root_token_ids = torch.tensor([root.token_id for root in roots]).to(hidden.device)
        root_logits = self._network.logits(hidden)
        return grow_trees(
            root_token_ids,
            root_logits,
            expand,
            self._options,
            adaptive=hidden.device.type == "cpu",
            vocabulary=self._network.vocabulary,
        )

    def first_level(self, row: int) -> tuple[Tensor | None, Tensor]:
        """The root's children: token ids [V] (None: all of the target's, in order) and their logits [V]."""
        return self._network.vocabulary, self._network.logits(self._roots[row].hidden)

    def release(self, row: int) -> None:
        """Forget the row."""
        self._cache.release(row)
        self._network.release(row)
        self._roots.pop(row, None)
        self._texts.pop(row, None)

    def _read_history(self, rows: Sequence[int], added: Sequence[Tensor]) -> Tensor:
        """[B, T, 3]: the tokens before each of the newly decided ones ([n] of each row), which are noted."""
        texts = [last_tokens(self._texts[row], new) for row, new in zip(rows, added, strict=True)]
        self._texts |= {row: text[-HISTORY:] for row, text in zip(rows, texts, strict=True)}
        return pad_sequence([histories(text) for text in texts], batch_first=True)

    def _forward(
        self,
        rows: Sequence[int],
        token_ids: Tensor,
        hidden: Tensor,
        mask: Tensor | None,
        depth: int,
        history: Tensor | None,
    ) -> Tensor:
        """Run [B, T] tokens: a tree level (`mask` [B, T, M], at `depth`), or a causal run behind the visible rows."""
        num_new = token_ids.shape[1]
        visible = torch.tensor([self._cache.visible(row) for row in rows])
        behind = num_new if mask is None else mask.shape[2]
        offsets = torch.arange(num_new) if mask is None else torch.full((num_new,), depth - 1)
        plan = AttentionPlan(
            starts=[self._cache.start(row) for row in rows],
            lengths=(visible + behind).tolist(),
            num_new=num_new,
            mask=mask,
            tree=self._tree_attention,
        )
        positions = (visible[:, None] + offsets).to(token_ids.device)
        return self._network.forward(token_ids, hidden, positions, plan, history)

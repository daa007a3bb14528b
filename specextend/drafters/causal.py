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
from specextend.drafters.network import DraftNetwork


@dataclass(slots=True)
class _Root:
    """What the next tree of a row starts from."""

    token_id: int
    hidden: Tensor  # [C], the network's output at the root


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

    @property
    def num_levels(self) -> int:
        """Tree levels at most."""
        return self._options.depth

    def admit(self, row: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Make room for a sequence; False where there is none now."""
        num_tokens = num_prompt_tokens + max_new_tokens + self._options.depth + 1
        chosen = num_prompt_tokens if self._num_visible_rows is None else self._num_visible_rows
        visible = min(num_tokens, chosen + max_new_tokens + self._options.depth + 1)
        scratch = self._options.depth * self._options.nodes
        return self._cache.admit(row, num_tokens, max(visible + scratch, self._network.num_staging_rows()))

    def prefill(self, row: int, token_ids: Tensor, hidden: Tensor) -> None:
        """The next chunk of the prompt: token_ids [T] and the target's hidden states [T, C] at them."""
        self._network.prefill(row, token_ids, hidden)

    def select(self, row: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S], ascending, and what `absorb` adds later."""
        self._cache.select(row, positions)

    def absorb(self, rows: Sequence[int], token_ids: Sequence[list[int]], hidden: Sequence[Tensor]) -> None:
        """Run the newly decided tokens, the new root last, behind what each row sees now."""
        counts = [len(new) for new in token_ids]
        device = hidden[0].device
        padded = pad_sequence([torch.tensor(new) for new in token_ids], batch_first=True).to(device)
        output = self._forward(rows, padded, pad_sequence(list(hidden), batch_first=True), None, 0)
        self._cache.append(rows, counts)
        for row, new, count, out in zip(rows, token_ids, counts, output, strict=True):
            self._roots[row] = _Root(new[-1], out[count - 1])

    def propose(self, rows: Sequence[int]) -> list[DraftTree]:
        """A tree behind each row's root."""
        roots = [self._roots[row] for row in rows]
        parents = torch.stack([root.hidden for root in roots]).unsqueeze(1)  # [B, 1, C]

        def expand(token_ids: Tensor, slots: Tensor, mask: Tensor, depth: int) -> Tensor:
            nonlocal parents
            hidden = parents.gather(1, slots.unsqueeze(2).expand(-1, -1, parents.shape[2]))
            parents = self._forward(rows, token_ids, hidden, mask, depth)
            return self._network.logits(parents)

        root_token_ids = torch.tensor([root.token_id for root in roots]).to(parents.device)
        root_logits = self._network.logits(parents[:, 0])
        return grow_trees(
            root_token_ids,
            root_logits,
            expand,
            self._options,
            adaptive=parents.device.type == "cpu",
            vocabulary=self._network.vocabulary,
        )

    def release(self, row: int) -> None:
        """Forget the row."""
        self._cache.release(row)
        self._network.release(row)
        self._roots.pop(row, None)

    def _forward(
        self, rows: Sequence[int], token_ids: Tensor, hidden: Tensor, mask: Tensor | None, depth: int
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
        return self._network.forward(token_ids, hidden, positions, plan)

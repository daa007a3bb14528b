"""Verification: a forward of the target over the trees of a batch, and the accepted paths."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.device import Graphs, upload
from specextend.decoding.model import CachedModel
from specextend.decoding.sampling import NOT_FINITE, log_probs_of, where_finite
from specextend.decoding.sequence import Nodes, RunningSequence, choose
from specextend.decoding.tree import Decided, DraftTrees, tree_mask, verify


@dataclass(frozen=True)
class Verified:
    """The result of a verification."""

    paths: Tensor
    """[B, W] int64, accepted nodes, see `tree.verify`."""
    token_ids: Tensor
    """[B, W] int64, decided tokens; negative after them."""
    new_token_ids: list[list[int]]
    is_finite: list[bool]
    """[B] False if the choice ended early at logits that are not finite."""
    features: Tensor
    """[B, W, F] along the accepted paths."""
    queries: tuple[Tensor, ...]
    """[B, N, H, D] of each scoring layer."""

    def decided(self, places: list[int], *, whole: bool) -> Decided:
        """Return the decided tokens at `places`, for the draft.

        `whole` pads to the longest possible path, the same in every step.
        """
        token_ids = [self.new_token_ids[b] for b in places]
        padded = self.token_ids
        features = self.features
        if len(places) < len(self.new_token_ids):
            rows = upload(torch.tensor(places), padded.device)
            padded = padded[rows]
            features = features[rows]
        if not whole:
            width = max(len(new) for new in token_ids)
            padded = padded[:, :width]
            features = features[:, :width]
        return Decided(token_ids, padded, features)

    def last_queries(self, b: int) -> list[Tensor]:
        """Return the queries [H, D] of a sequence's last committed token."""
        num_new = len(self.new_token_ids[b])
        last = self.paths[b, num_new - 1 : num_new]
        return [query[b].index_select(0, last)[0] for query in self.queries]


@dataclass(frozen=True)
class Verifier:
    """Runs the target over trees and commits accepted paths to its cache."""

    _target: CachedModel
    _hidden_layers: tuple[int, ...] | None
    _scored_layers: tuple[int, ...]
    _num_levels: int
    _tree_attention: TreeAttention
    _graphs: Graphs

    def verify(self, sequences: Sequence[RunningSequence], trees: DraftTrees) -> Verified:
        """Run the target over all trees at once, choose tokens, and commit accepted paths."""
        known = [(each.region.start, each.length) for each in sequences]
        starts, lengths = zip(*known, strict=True)
        forward = partial(self.forward, starts, lengths)
        places = upload(torch.tensor(known), self._target.device)
        inputs = places, trees.token_ids, trees.parents, trees.depths
        if all(sequence.is_greedy for sequence in sequences):
            paths, decided, along, *queries = self._graphs.run(
                "verify", partial(self._decide, forward), *inputs
            )
        else:
            logits, features, *queries = self._graphs.run("score", forward, *inputs)
            chosen = self._choose(sequences, trees, logits, places[:, 1:] + trees.depths + 1)
            chosen = where_finite(chosen, logits, NOT_FINITE)
            paths, decided, along = self._accept(chosen, features, *inputs[:3])
        rows = decided.tolist()  # waits for the device
        new = [[token_id for token_id in row if token_id >= 0] for row in rows]
        finite = [NOT_FINITE not in row for row in rows]
        kept = [b for b, each in enumerate(sequences) if each.request.keeps_log_probs and new[b]]
        if kept:
            self._note_log_probs({b: sequences[b] for b in kept}, logits, paths, new)
        return Verified(paths, decided, new, finite, along, tuple(queries))

    @staticmethod
    def _note_log_probs(
        kept: Mapping[int, RunningSequence], logits: Tensor, paths: Tensor, new: Sequence[list[int]]
    ) -> None:
        nodes = paths.tolist()
        places = [(b, node) for b in kept for node in nodes[b][: len(new[b])]]
        of_batch, of_nodes = upload(torch.tensor(places).T.contiguous(), logits.device)
        token_ids = [token_id for b in kept for token_id in new[b]]
        found = iter(log_probs_of(logits[of_batch, of_nodes], token_ids))
        for b, sequence in kept.items():
            sequence.log_probs += islice(found, len(new[b]))

    def _decide(
        self, forward: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        logits, features, *queries = forward(*inputs)
        chosen = where_finite(logits.max(-1).indices, logits, NOT_FINITE)
        return *self._accept(chosen, features, *inputs[:3]), *queries

    def forward(
        self,
        first_rows: Sequence[int],
        committed: Sequence[int],
        places: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        depths: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the target over trees with tokens, parents and depths [B, N].

        Args:
            first_rows: First cache row of each sequence, on the host.
            committed: Committed tokens of each sequence, on the host.
            places: Both [B, 2] on the device.

        Returns:
            Logits [B, N, V], features [B, N, F], and queries [B, N, H, D] of each scoring layer.
        """
        num_nodes = token_ids.shape[1]
        starts, lengths = places.split(1, 1)
        plan = AttentionPlan(
            starts=[*first_rows],
            lengths=[length + num_nodes for length in committed],
            num_new=num_nodes,
            mask=tree_mask(parents, self._num_levels) if num_nodes > 1 else None,
            tree=self._tree_attention,
            keep_layers=frozenset(self._scored_layers),
            on_device=(starts, starts + lengths + torch.arange(num_nodes, device=places.device)),
            captured=self._graphs.capturing,
        )
        hidden, features = self._target.forward_with_features(
            token_ids, lengths + depths, plan, self._hidden_layers
        )
        return (
            self._target.logits(hidden),
            features,
            *(plan.queries[layer] for layer in self._scored_layers),
        )

    def _accept(
        self, chosen: Tensor, features: Tensor, places: Tensor, token_ids: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Commit the paths of the target's `chosen` tokens [B, N].

        Return paths and decided tokens [B, W], see `tree.verify`, and features [B, W, F] along
        paths.
        """
        num_nodes = token_ids.shape[1]
        if num_nodes == 1:
            return torch.zeros_like(chosen), chosen, features
        paths, decided = verify(token_ids, parents, chosen, self._num_levels)
        rows = places.sum(1, keepdim=True) + torch.arange(num_nodes, device=places.device)
        self._target.cache.commit(rows, paths)
        along = paths.unsqueeze(2).expand(-1, -1, features.shape[2])
        return paths, decided, features.gather(1, along)

    def _choose(
        self,
        sequences: Sequence[RunningSequence],
        trees: DraftTrees,
        logits: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Choose tokens [B, N] from logits [B, N, V] for positions [B, N]."""
        nodes: Sequence[Nodes] = [([], [])] * len(sequences)
        if any(sequence.is_adjusted for sequence in sequences):
            rows = torch.stack([trees.token_ids, trees.parents], 1).tolist()
            nodes = [
                (token_ids[:size], parents[:size])
                for (token_ids, parents), size in zip(rows, trees.sizes, strict=True)
            ]
        return choose(sequences, logits, positions, nodes)

"""A drafter of an EAGLE head and the head's slow twin, which must propose the same trees over one random text."""

from __future__ import annotations

import pytest
from torch import Tensor

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.drafter import Decided
from specextend.drafters.causal import CausalDrafter

OPTIONS = TreeOptions(nodes=6, depth=3, threshold=0)


class TwinCase:
    """What both kinds of heads are put through; each has a twin of its own, `slow_log_probs`."""

    drafter: CausalDrafter
    token_ids: Tensor
    """[n], the text."""
    features: Tensor
    """[n, F] of the target at each token."""

    def slow_log_probs(self, visible: list[int], path: tuple[int, ...] = ()) -> Tensor:
        """[V] after the visible slots (slot i: token i + 1 and features i) and a path behind them."""
        raise NotImplementedError

    def prefill(self, row: int, length: int, chunk: int) -> None:
        """Prompt tokens up to `length`; the root that follows them is absorbed."""
        assert self.drafter.admit(row, length, 64)
        pieces = zip(self.token_ids[:length].split(chunk), self.features[:length].split(chunk), strict=True)
        for token_ids, features in pieces:
            self.drafter.prefill(row, token_ids, features)

    def absorb(self, rows: list[int], first: list[int], last: list[int]) -> None:
        """Tokens [first, last) of the text, each with the features before it."""
        spans = list(zip(first, last, strict=True))
        token_ids = [self.token_ids[a:b].tolist() for a, b in spans]
        self.drafter.absorb(rows, Decided.pad(token_ids, [self.features[a - 1 : b - 1] for a, b in spans]))

    def assert_tree_is_the_twins(self, row: int, visible: list[int]) -> None:
        """Every node's weight is the twin's, and the first level has the twin's best."""
        [tree] = self.drafter.propose([row])
        weights, paths = [0.0], [()]
        for node in range(1, len(tree.parents)):
            parent, token_id = int(tree.parents[node]), int(tree.token_ids[node])
            weights.append(weights[parent] + float(self.slow_log_probs(visible, paths[parent])[token_id]))
            paths.append((*paths[parent], token_id))
        assert tree.log_probs.tolist() == pytest.approx(weights, abs=5e-4)
        assert (int(self.slow_log_probs(visible).argmax()),) in paths
        assert max(map(len, paths)) >= 2, "outputs of the head's own were used"

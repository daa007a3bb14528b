"""What one running sequence offers to copy, and what became of the offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specextend.drafters.copy_rates import CopyRates
from specextend.drafters.copy_tree import Calibration, DraftChild, Node, TreeGrower
from specextend.drafters.suffix_index import SuffixIndex


class Copying:
    """The text of one sequence, its matches, and the rates learned from it. Lives as long as its request."""

    def __init__(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._num_prompt_tokens, self._num_left = num_prompt_tokens, max_new_tokens
        self._index, self._rates, self._calibration = SuffixIndex(), CopyRates(), Calibration()
        self._proposed: list[Node] = []

    @property
    def most_levels(self) -> int:
        """Levels of a tree that can all be wanted: after them and the bonus token the output has its full length."""
        return max(0, self._num_left - 1)

    @property
    def draft_factor(self) -> float:
        """What came of what the draft claimed in the trees so far; 1 at first."""
        return self._calibration.factor("draft")

    def read(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the prompt."""
        self._index.extend(token_ids)

    def absorb(self, token_ids: Sequence[int]) -> None:
        """Newly decided tokens: what the copies and the proposed tree said of them is learned."""
        self._judge_proposed(token_ids)
        for token_id in token_ids:
            matches = self._index.matches()
            self._rates.learn(self._rates.copies(self._index.token_ids, matches, self._num_prompt_tokens), token_id)
            self._index.push(token_id)
        self._num_left -= len(token_ids)

    def propose(self, num_nodes: int, depth: int, draft: Mapping[int, Sequence[DraftChild]]) -> list[Node]:
        """The likeliest nodes behind the root: of copied text, and of a draft's tree (`children_of`; empty: none).

        `depth` levels at most, and no more than the output can take.
        """
        grower = TreeGrower(self._index, self._rates, self._calibration, self._num_prompt_tokens)
        self._proposed = grower.grow(num_nodes, min(depth, self.most_levels), draft)
        return self._proposed

    def _judge_proposed(self, token_ids: Sequence[int]) -> None:
        """Compare the last tree with what was decided, along the path that it holds of it."""
        at = 0
        for token_id in token_ids:
            children = [number for number, node in enumerate(self._proposed) if node.parent == at]
            hits = [number for number in children if self._proposed[number].token_id == token_id]
            for number in children:
                self._calibration.observe(self._proposed[number], hit=number in hits)
            if not hits:
                break
            at = hits[0]
        self._proposed = []

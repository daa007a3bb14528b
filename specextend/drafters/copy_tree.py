"""Trees of copied text, and of copied text and a draft's tree under one node budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import exp, log
from typing import Literal, NamedTuple

import torch

from specextend.decoding.tree import DraftTree
from specextend.drafters.copy_rates import CopyRates
from specextend.drafters.suffix_index import Match, SuffixIndex

Source = Literal["copy", "copy_only", "both", "draft", "draft_only"]
"""Who proposes a token. `copy`: the text, where the draft says nothing; `copy_only`: where the draft says other tokens;
`both`; `draft`; `draft_only`: where the text is as good as sure to go on otherwise."""

LEAST_PROBABILITY = 0.01
"""Of a path that is worth verifying: a node more takes about a hundredth of a step."""
_SURE = 0.65
"""Of all copies together: from here on the draft alone is rarely right."""
_CERTAIN = 0.99
"""Nothing is likelier."""
_PRIOR_WEIGHT = 20.0
"""Expected tokens that a prior factor counts for."""
_PRIOR_FACTORS: dict[Source, float] = {"copy": 1.0, "copy_only": 0.75, "both": 1.0, "draft": 1.0, "draft_only": 0.5}
"""Measured as `copy_rates` was, with the shipped EAGLE head."""


class Node(NamedTuple):
    """A node of a tree, with what was claimed for it."""

    parent: int
    token_id: int
    depth: int
    probability: float
    """Of the path from the root."""
    source: Source
    claim: float
    """Probability after its parent, as the source says, not corrected."""


class Calibration:
    """Corrects each source's probabilities by what came of them in this sequence."""

    def __init__(self) -> None:
        self._hits: dict[Source, float] = dict.fromkeys(_PRIOR_FACTORS, 0.0)
        self._claimed: dict[Source, float] = dict.fromkeys(_PRIOR_FACTORS, 0.0)

    def factor(self, source: Source) -> float:
        """What comes of what the source claims; above 1 if it claims too little."""
        hits = self._hits[source] + _PRIOR_WEIGHT * _PRIOR_FACTORS[source]
        return hits / (self._claimed[source] + _PRIOR_WEIGHT)

    def corrected(self, source: Source, claim: float) -> float:
        """A claim as a probability."""
        return min(_CERTAIN, claim * self.factor(source))

    def observe(self, node: Node, *, hit: bool) -> None:
        """The parent of the node was accepted, and the node too if `hit`."""
        self._claimed[node.source] += node.claim
        self._hits[node.source] += hit


class DraftChild(NamedTuple):
    """A node of a draft's tree, as its parent sees it."""

    token_id: int
    probability: float
    """After the parent."""
    node: int


def children_of(tree: DraftTree) -> dict[int, list[DraftChild]]:
    """A draft's tree by parents, on the host."""
    token_ids, parents = torch.stack([tree.token_ids, tree.parents]).tolist()
    log_probs = tree.log_probs.tolist()
    children: dict[int, list[DraftChild]] = {}
    for node in range(1, len(token_ids)):
        probability = exp(min(0.0, log_probs[node] - log_probs[parents[node]]))
        children.setdefault(parents[node], []).append(DraftChild(token_ids[node], probability, node))
    return children


class _Offer(NamedTuple):
    """A possible child."""

    token_id: int
    source: Source
    claim: float
    matches: Sequence[Match]
    """Where the text said it before."""
    draft_node: int
    """Its number in the draft's tree; -1: it is not there."""


class _Open(NamedTuple):
    """A candidate of the tree that grows, ordered by its chance, of equals the first found."""

    negative_probability: float
    number: int
    node: Node
    offer: _Offer


class TreeGrower:
    """Grows one tree best first. Path probabilities only shrink, so the best so far are the best of all."""

    def __init__(self, index: SuffixIndex, rates: CopyRates, calibration: Calibration, num_prompt_tokens: int) -> None:
        self._index, self._rates, self._calibration = index, rates, calibration
        self._num_prompt_tokens = num_prompt_tokens
        self._open: list[_Open] = []
        self._num_found = 0

    def grow(self, num_nodes: int, depth: int, draft: Mapping[int, Sequence[DraftChild]]) -> list[Node]:
        """The `num_nodes` likeliest nodes at most, behind the root, in `depth` levels at most; parents first."""
        nodes = [Node(-1, self._index.token_ids[-1], 0, 1.0, "copy", 1.0)]
        if depth > 0:
            self._expand(0, nodes[0], self._index.matches(), draft.get(0, []))
        while self._open and len(nodes) <= num_nodes:
            _, _, node, offer = heappop(self._open)
            nodes.append(node)
            if node.depth < depth:
                matches = self._index.continued(offer.matches)
                self._expand(len(nodes) - 1, node, matches, draft.get(offer.draft_node, []))
        return nodes

    def _expand(self, number: int, node: Node, matches: Sequence[Match], drafted: Sequence[DraftChild]) -> None:
        """Find the children of `node`, which is the tree's node `number`."""
        for offer in self._offers(matches, drafted):
            probability = node.probability * self._calibration.corrected(offer.source, offer.claim)
            if probability >= LEAST_PROBABILITY:
                child = Node(number, offer.token_id, node.depth + 1, probability, offer.source, offer.claim)
                heappush(self._open, _Open(-probability, self._num_found, child, offer))
                self._num_found += 1

    def _offers(self, matches: Sequence[Match], drafted: Sequence[DraftChild]) -> Iterator[_Offer]:
        """What the text and the draft propose behind one node."""
        copies = self._rates.copies(self._index.token_ids, matches, self._num_prompt_tokens)
        left = {child.token_id: child for child in drafted}
        for copy in copies:
            same = left.pop(copy.token_id, None)
            if same is None:
                source: Source = "copy_only" if drafted else "copy"
                yield _Offer(copy.token_id, source, copy.probability, copy.matches, -1)
            else:
                claim = 1 - (1 - copy.probability) * (1 - same.probability)
                yield _Offer(copy.token_id, "both", claim, copy.matches, same.node)
        source = "draft_only" if sum(copy.probability for copy in copies) > _SURE else "draft"
        for child in left.values():
            yield _Offer(child.token_id, source, child.probability, (), child.node)


def as_draft_tree(nodes: Sequence[Node], device: torch.device) -> DraftTree:
    """Nodes as the engine takes them, on the target's device."""
    columns = [[node.token_id, node.parent, node.depth] for node in nodes]
    token_ids, parents, depths = torch.tensor(columns).T.contiguous().to(device)
    log_probs = torch.tensor([log(node.probability) for node in nodes], device=device)
    return DraftTree(token_ids, parents, depths, log_probs)

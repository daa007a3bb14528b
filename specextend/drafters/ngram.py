"""N-gram drafts, which need no model: they propose what followed the same tokens before, in the prompt or the output.

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro and others, arXiv 2411.04975) propose what followed the longest
match of the text's end. Here every match proposes its next token, a candidate. Each sequence counts how often such
candidates were right, starting from a prior. The tree holds the likeliest paths: of candidates alone, or of candidates
and a draft's tree under one node budget (`merged.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import exp, inf, log
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.drafter import Decided
from specextend.decoding.tree import DraftTree, DraftTrees

Agreement = Literal["lone", "some", "most", "all"]

LONGEST = 12
"""Largest length of a match in tokens; a longer match counts as this long."""
MOST = 32
"""Largest number of matches that are returned."""
_MOST_CANDIDATES = 6
"""Most candidates that are considered behind one node."""
_PRIOR_GUESSES = 8.0
"""Weight of the prior, in guesses."""
# Measured on greedy summaries of 20 GovReport documents of 8K tokens and more, cut to 0.9K to 3.5K, by SmolLM2-135M.
_LONE = (0.17, 0.33, 0.50, 0.62, 0.70, 0.75, 0.78, 0.82, 0.85, 0.88, 0.90, 0.93)
"""Rates at which the text continues as after its only match, by the length of the match: 1, 2, ... tokens."""
_CONTESTED = 0.7
_LEAST = {"lone": 0.0, "some": 0.0, "most": 0.5, "all": 0.8}
_OWN = 0.15
"""Share of the misses that become hits if a match lies in the output, which may repeat itself."""
_LATER_RANKS = (1.0, 0.5, 0.4)

assert len(_LONE) == LONGEST


class Match(NamedTuple):
    """An earlier place whose last tokens are also the text's last. The best are the longest, then the latest."""

    length: int
    """Number of equal tokens, 1 to `LONGEST`."""
    position: int
    """Position of the token that followed there."""


class SuffixIndex:
    """A text and the matches of its end.

    A new token visits each of its earlier occurrences: a match ends there, one token longer than the match that ended
    one token before. So no search is needed.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """The text so far."""
        self._followers: defaultdict[int, list[int]] = defaultdict(list)  # token -> position behind each occurrence
        self._lengths: dict[int, int] = {}  # position behind a match -> length of the match

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append many tokens; only the last ones are matched, because the matches depend on nothing else."""
        unmatched = token_ids[:-LONGEST]
        if unmatched:
            self._lengths = {}
        for position, token_id in enumerate(unmatched, start=len(self.token_ids) + 1):
            self._followers[token_id].append(position)
        self.token_ids += unmatched
        for token_id in token_ids[-LONGEST:]:
            self.push(token_id)

    def push(self, token_id: int) -> None:
        """Append a token."""
        followers, length = self._followers[token_id], self._lengths.get
        self._lengths = {position: min(length(position - 1, 0) + 1, LONGEST) for position in followers}
        self.token_ids.append(token_id)
        followers.append(len(self.token_ids))

    def matches(self) -> list[Match]:
        """Return the `MOST` longest matches of the text's end, the best first."""
        best = sorted(zip(self._lengths.values(), self._lengths, strict=True), reverse=True)[:MOST]
        return [Match(length, position) for length, position in best]

    def continued(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches one token later if the text continues as they do, without those that reach its end."""
        end = len(self.token_ids)
        return [Match(min(length + 1, LONGEST), position + 1) for length, position in matches if position + 1 < end]


class Evidence(NamedTuple):
    """The evidence for a candidate; candidates of equal evidence share a rate."""

    length: int
    """Tokens of its longest match."""
    agreement: Agreement
    """Share of the matches of that length that propose it: `lone` is the only match, `some` are at most half."""
    is_own: bool
    """True if one of them lies in the output."""
    rank: int
    """0 for the likeliest candidate, 1 for the second, 2 for all others."""


class Candidate(NamedTuple):
    """A token that came next after a match, and may come next again."""

    token_id: int
    probability: float
    evidence: Evidence
    matches: list[Match]
    """The matches that it followed, best first."""


class CandidateRates:
    """The rates at which candidates were right in one sequence, given that no better candidate was."""

    def __init__(self) -> None:
        self._hits: Counter[Evidence] = Counter()
        self._guesses: Counter[Evidence] = Counter()

    def rate(self, evidence: Evidence) -> float:
        """Return the rate of candidates of this evidence, between 0 and 1."""
        hits = self._hits[evidence] + _PRIOR_GUESSES * prior(evidence)
        return hits / (self._guesses[evidence] + _PRIOR_GUESSES)

    def candidates(self, token_ids: Sequence[int], matches: Sequence[Match], num_prompt_tokens: int) -> list[Candidate]:
        """Return what followed the `matches` (best first) in the text `token_ids`, likeliest first."""
        followers: dict[int, list[Match]] = {}
        for match in matches:
            followers.setdefault(token_ids[match.position], []).append(match)
        sizes = Counter(match.length for match in matches)
        ranked = []
        for token_id, same in followers.items():
            longest, latest = same[0]
            best = [position for length, position in same if length == longest]
            ranked.append((longest, len(best), latest, token_id, max(best) >= num_prompt_tokens))
        ranked.sort(reverse=True)
        candidates, missed = [], 1.0
        for rank, (length, count, _, token_id, is_own) in enumerate(ranked[:_MOST_CANDIDATES]):
            evidence = Evidence(length, _agreement(count, sizes[length]), is_own, min(rank, 2))
            rate = self.rate(evidence)
            candidates.append(Candidate(token_id, missed * rate, evidence, followers[token_id]))
            missed *= 1 - rate
        return candidates

    def learn(self, candidates: Sequence[Candidate], token_id: int) -> None:
        """Count which candidates were right, now that the text has continued with `token_id`."""
        for candidate in candidates:
            self._guesses[candidate.evidence] += 1
            if candidate.token_id == token_id:
                self._hits[candidate.evidence] += 1
                return


def prior(evidence: Evidence) -> float:
    """Return the rate before anything was counted in a sequence."""
    rate = _LONE[evidence.length - 1] * (_CONTESTED if evidence.agreement == "some" else 1.0)
    rate = max(rate, _LEAST[evidence.agreement])
    rate += (1 - rate) * _OWN if evidence.is_own else 0.0
    return rate * _LATER_RANKS[evidence.rank]


def _agreement(count: int, of: int) -> Agreement:
    if of == 1:
        return "lone"
    if count == of:
        return "all"
    return "most" if 2 * count > of else "some"


Source = Literal["ngram", "ngram_only", "both", "draft", "draft_only"]
"""The source of a proposed token: `ngram`: a match, while the draft proposes nothing; `ngram_only`: a match, while the
draft proposes other tokens; `both`: a match and the draft; `draft`: the draft; `draft_only`: the draft, while matches
are nearly sure of other tokens."""

LEAST_PROBABILITY = 0.01
"""Smallest probability of a path that is worth verifying: one more node takes about a hundredth of a step."""
_SURE = 0.65
"""Total probability of all candidates above which a token that only the draft proposes is rarely right."""
_CERTAIN = 0.99
"""The highest probability of a node."""
_PRIOR_CLAIMS = 20.0
"""Weight of a prior factor, in expected tokens."""
_PRIOR_FACTORS: dict[Source, float] = {"ngram": 1.0, "ngram_only": 0.75, "both": 1.0, "draft": 1.0, "draft_only": 0.5}
"""Measured in the same way as the prior rates, with the shipped EAGLE head."""


class Node(NamedTuple):
    """A node of a tree, with the probability that its source claimed."""

    parent: int
    token_id: int
    depth: int
    probability: float
    """Probability of the path from the root."""
    source: Source
    claim: float
    """Probability after its parent that its source claims, before correction."""


class Calibration:
    """Corrects each source's probabilities by the rate at which it was right in this sequence."""

    def __init__(self) -> None:
        self._hits: dict[Source, float] = dict.fromkeys(_PRIOR_FACTORS, 0.0)
        self._claimed: dict[Source, float] = dict.fromkeys(_PRIOR_FACTORS, 0.0)

    def factor(self, source: Source) -> float:
        """Return the accepted tokens of a source over those that it claimed; above 1 if it claims too little."""
        hits = self._hits[source] + _PRIOR_CLAIMS * _PRIOR_FACTORS[source]
        return hits / (self._claimed[source] + _PRIOR_CLAIMS)

    def corrected(self, source: Source, claim: float) -> float:
        """Return a claim as a corrected probability."""
        return min(_CERTAIN, claim * self.factor(source))

    def observe(self, node: Node, *, hit: bool) -> None:
        """Record a node whose parent was accepted; `hit` says that the node itself was."""
        self._claimed[node.source] += node.claim
        self._hits[node.source] += hit


class DraftChild(NamedTuple):
    """A node of a draft's tree, as a child of its parent."""

    token_id: int
    probability: float
    """Probability after the parent."""
    node: int


def children_of(tree: DraftTree) -> dict[int, list[DraftChild]]:
    """Group the nodes of a draft's tree by their parents, on the host."""
    token_ids, parents = torch.stack([tree.token_ids, tree.parents]).tolist()
    log_probs = tree.log_probs.tolist()
    children: dict[int, list[DraftChild]] = {}
    for node in range(1, len(token_ids)):
        probability = exp(min(0.0, log_probs[node] - log_probs[parents[node]]))
        children.setdefault(parents[node], []).append(DraftChild(token_ids[node], probability, node))
    return children


class _Offer(NamedTuple):
    """A proposed child of a node."""

    token_id: int
    source: Source
    claim: float
    matches: Sequence[Match]
    """The matches that it followed."""
    draft_node: int
    """Its number in the draft's tree; -1 if the draft does not propose it."""


class _Open(NamedTuple):
    """An entry of the heap of possible nodes: likeliest first, and of two equal ones the first found."""

    negative_probability: float
    number: int
    node: Node
    offer: _Offer


class TreeGrower:
    """Grows one tree best first. Path probabilities only shrink, so the best nodes so far are the best of all."""

    def __init__(
        self, index: SuffixIndex, rates: CandidateRates, calibration: Calibration, num_prompt_tokens: int
    ) -> None:
        self._index, self._rates, self._calibration = index, rates, calibration
        self._num_prompt_tokens = num_prompt_tokens
        self._open: list[_Open] = []
        self._num_found = 0

    def grow(self, num_nodes: int, depth: int, draft: Mapping[int, Sequence[DraftChild]]) -> list[Node]:
        """Return the root and the `num_nodes` likeliest nodes behind it, in `depth` levels at most; parents first."""
        nodes = [Node(-1, self._index.token_ids[-1], 0, 1.0, "ngram", 1.0)]
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
        """Yield what matches and draft propose behind one node."""
        candidates = self._rates.candidates(self._index.token_ids, matches, self._num_prompt_tokens)
        left = {child.token_id: child for child in drafted}
        for token_id, probability, _, found in candidates:
            same = left.pop(token_id, None)
            if same is None:
                source: Source = "ngram_only" if drafted else "ngram"
                yield _Offer(token_id, source, probability, found, -1)
            else:
                claim = 1 - (1 - probability) * (1 - same.probability)
                yield _Offer(token_id, "both", claim, found, same.node)
        source = "draft_only" if sum(each.probability for each in candidates) > _SURE else "draft"
        for child in left.values():
            yield _Offer(child.token_id, source, child.probability, (), child.node)


def as_draft_trees(batch: Sequence[Sequence[Node]], device: torch.device) -> DraftTrees:
    """Turn the nodes of each tree into the engine's trees, on the target's device."""
    sizes = [len(nodes) for nodes in batch]
    columns, log_probs = [], []
    for nodes in batch:
        missing = max(sizes) - len(nodes)
        columns.append([*([node.token_id, node.parent, node.depth] for node in nodes), *[[0, -1, 0]] * missing])
        log_probs.append([*(log(node.probability) for node in nodes), *[-inf] * missing])
    token_ids, parents, depths = torch.tensor(columns).permute(2, 0, 1).contiguous().to(device)
    return DraftTrees(token_ids, parents, depths, torch.tensor(log_probs, device=device), sizes)


class NgramState:
    """The text of one sequence, its matches, and the rates learned from it. Lives as long as its request."""

    def __init__(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._num_prompt_tokens, self._num_left = num_prompt_tokens, max_new_tokens
        self._index, self._rates, self._calibration = SuffixIndex(), CandidateRates(), Calibration()
        self._proposed: list[Node] = []

    @property
    def most_levels(self) -> int:
        """Return the number of tree levels that the output still has room for, with the bonus token behind them."""
        return max(0, self._num_left - 1)

    @property
    def draft_factor(self) -> float:
        """Return the draft's accepted tokens over those that it claimed in the trees so far; 1 at first."""
        return self._calibration.factor("draft")

    def read(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens of the prompt."""
        self._index.extend(token_ids)

    def absorb(self, token_ids: Sequence[int]) -> None:
        """Append newly decided tokens; learn from how well the candidates and the proposed tree predicted them."""
        self._judge_proposed(token_ids)
        for token_id in token_ids:
            matches = self._index.matches()
            self._rates.learn(self._rates.candidates(self._index.token_ids, matches, self._num_prompt_tokens), token_id)
            self._index.push(token_id)
        self._num_left -= len(token_ids)

    def propose(self, num_nodes: int, depth: int, draft: Mapping[int, Sequence[DraftChild]]) -> list[Node]:
        """Propose the likeliest nodes of candidates and of a draft's tree (`children_of`; may be empty), root first.

        The tree has `depth` levels at most, and no more than the output has room for.
        """
        grower = TreeGrower(self._index, self._rates, self._calibration, self._num_prompt_tokens)
        self._proposed = grower.grow(num_nodes, min(depth, self.most_levels), draft)
        return self._proposed

    def _judge_proposed(self, token_ids: Sequence[int]) -> None:
        """Compare the last proposed tree with the decided tokens, along the path that both share."""
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


class NgramDrafter:
    """Proposes n-gram drafts. It reads tokens only, and always sees all of them, whatever `select` shows."""

    def __init__(self, tree: TreeOptions, device: torch.device) -> None:
        """Take the tree's options and the device on which trees are wanted."""
        self._options, self._device = tree, device
        self._slots: dict[int, NgramState] = {}

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Return none: the features are not read."""
        return ()

    @property
    def num_levels(self) -> int:
        """Return the largest number of tree levels."""
        return self._options.ngram_depth

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Return True: there is always room."""
        self._slots[slot] = NgramState(num_prompt_tokens, max_new_tokens)
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T]."""
        self._slots[slot].read(token_ids.tolist())

    def select(self, slot: int, positions: Tensor) -> None:
        """Do nothing: no token is hidden."""

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Read each slot's newly decided tokens, the new root last."""
        for slot, new in zip(slots, decided.token_ids, strict=True):
            self._slots[slot].absorb(new)

    def propose(self, slots: Sequence[int]) -> DraftTrees:
        """Propose a tree behind each slot's root, of the root alone if nothing matches."""
        num_nodes, depth = self._options.most_nodes, self._options.ngram_depth
        return as_draft_trees([self._slots[slot].propose(num_nodes, depth, {}) for slot in slots], self._device)

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._slots.pop(slot, None)

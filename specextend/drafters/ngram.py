"""N-gram drafts: tokens that followed the same tokens earlier.

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro and others, arXiv 2411.04975) continue the
longest match. Here every match proposes its next token at a measured rate, and a tree holds the
likeliest paths, merged with another draft's.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import exp, log
from typing import NamedTuple

import torch
from torch import Tensor

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.tree import Decided, Drafter, DraftTrees, TreeNode
from specextend.drafters.causal import Clock, moved, stands_still

LONGEST = 12
MOST = 32
"""Most matches of a text's end."""
LEAST_PROBABILITY = 0.01
"""Least probability of a path: another node takes a hundredth of a step."""
_MOST_CANDIDATES = 6
# Measured on greedy summaries of 20 GovReport documents of 8K tokens and more, cut to 0.9K to 3.5K,
# by SmolLM2-135M.
_LONE = (0.17, 0.33, 0.50, 0.62, 0.70, 0.75, 0.78, 0.82, 0.85, 0.88, 0.90, 0.93)
"""Rates at which a text continues as its only match, by its length."""
_CONTESTED = 0.7
"""Factor on a rate, if at most half of the longest matches agree."""
_MOST_AGREE = 0.5
_ALL_AGREE = 0.8
"""Least rate if most, or all, of the longest matches agree."""
_OWN = 0.15
"""Share of misses that become hits if a match lies in the output."""
_LATER_RANKS = (1.0, 0.5, 0.4)
"""Factors on the likeliest candidate, the second, and others."""
_BESIDE_A_DRAFT = 0.75
"""Factor on a candidate beside a draft's tokens, measured with the shipped EAGLE head."""
_BESIDE_MATCHES = 0.5
"""Factor on a draft's token beside nearly sure matches (`_SURE`), measured likewise."""
_SURE = 0.65
_CERTAIN = 0.99

assert len(_LONE) == LONGEST


class Match(NamedTuple):
    """An earlier place with the same last tokens; the longest and latest are best."""

    length: int
    """Equal tokens, 1 to `LONGEST`."""
    position: int
    """Position of the token after them."""


class SuffixIndex:
    """A text and the matches of its end.

    A new token extends the matches before its occurrences, so nothing is searched.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        # token -> positions after its occurrences
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._lengths: dict[int, int] = {}  # position after a match -> length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append many tokens; only the last ones matter to matches."""
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
        followers = self._followers[token_id]
        length = self._lengths.get
        self._lengths = {
            position: min(length(position - 1, 0) + 1, LONGEST) for position in followers
        }
        self.token_ids.append(token_id)
        followers.append(len(self.token_ids))

    def matches(self) -> list[Match]:
        """Return the best matches of the end, best first."""
        best = sorted(zip(self._lengths.values(), self._lengths, strict=True), reverse=True)[:MOST]
        return [Match(length, position) for length, position in best]

    def continued(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches after one more token."""
        end = len(self.token_ids)
        return [
            Match(min(length + 1, LONGEST), position + 1)
            for length, position in matches
            if position + 1 < end
        ]


class Candidate(NamedTuple):
    """A proposed child of a node."""

    token_id: int
    probability: float
    matches: Sequence[Match] = ()
    draft_node: int = -1
    """Number in the draft's tree, or -1."""


def candidates_of(
    token_ids: Sequence[int], matches: Sequence[Match], num_prompt_tokens: int
) -> list[Candidate]:
    """Return the tokens after `matches`, likeliest first."""
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
    candidates = []
    missed = 1.0
    for rank, (length, count, _, token_id, is_own) in enumerate(ranked[:_MOST_CANDIDATES]):
        rate = _rate(length, count, sizes[length], is_own) * _LATER_RANKS[min(rank, 2)]
        candidates.append(Candidate(token_id, missed * rate, followers[token_id]))
        missed *= 1 - rate
    return candidates


def _rate(length: int, count: int, of: int, is_own: bool) -> float:
    rate = _LONE[length - 1]
    if of > 1:
        rate = (
            max(rate, _ALL_AGREE if count == of else _MOST_AGREE)
            if 2 * count > of
            else rate * _CONTESTED
        )
    return rate + (1 - rate) * _OWN if is_own else rate


def children_of(tree: Sequence[TreeNode]) -> dict[int, list[Candidate]]:
    """Group the nodes of a draft's tree by their parents."""
    children: dict[int, list[Candidate]] = {}
    for number, node in enumerate(tree[1:], start=1):
        probability = exp(min(0.0, node.log_prob - tree[node.parent].log_prob))
        children.setdefault(node.parent, []).append(
            Candidate(node.token_id, probability, draft_node=number)
        )
    return children


def promised(tree: Sequence[TreeNode]) -> float:
    """Return the expected accepted tokens of a tree."""
    return sum(exp(node.log_prob) for node in tree[1:])


class NgramState:
    """The text of one request and its matches."""

    def __init__(self, num_prompt_tokens: int, max_new_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens
        self._most_tokens = num_prompt_tokens + max_new_tokens
        self._index = SuffixIndex()
        self.draft_gain = 1.0
        """Running mean of a draft tree's expected accepted tokens."""

    @property
    def most_levels(self) -> int:
        """Levels for which the output has room."""
        return max(0, self._most_tokens - len(self._index.token_ids) - 1)

    def read(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the prompt or the output."""
        self._index.extend(token_ids)

    def propose(
        self,
        num_drafts: int,
        depth: int,
        draft: Mapping[int, Sequence[Candidate]],
        least_probability: float = LEAST_PROBABILITY,
    ) -> list[TreeNode]:
        """Return the root and the likeliest nodes, parents first.

        `draft` has the nodes of a draft's tree by parent (`children_of`).
        """
        depth = min(depth, self.most_levels)
        nodes = [TreeNode(-1, self._index.token_ids[-1], 0, 0.0)]
        open_: list[tuple[float, int, int, Candidate]] = []
        num_found = 0

        def expand(number: int, matches: Sequence[Match], drafted: Sequence[Candidate]) -> None:
            nonlocal num_found
            if nodes[number].depth == depth:
                return
            for offer in self._offers(matches, drafted):
                probability = exp(nodes[number].log_prob) * min(_CERTAIN, offer.probability)
                if probability >= least_probability:
                    heappush(open_, (-probability, num_found, number, offer))
                    num_found += 1

        expand(0, self._index.matches(), draft.get(0, []))
        while open_ and len(nodes) <= num_drafts:
            probability, _, parent, offer = heappop(open_)
            nodes.append(
                TreeNode(parent, offer.token_id, nodes[parent].depth + 1, log(-probability))
            )
            expand(
                len(nodes) - 1,
                self._index.continued(offer.matches),
                draft.get(offer.draft_node, []),
            )
        return nodes

    def _offers(
        self, matches: Sequence[Match], drafted: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        candidates = candidates_of(self._index.token_ids, matches, self._num_prompt_tokens)
        left = {child.token_id: child for child in drafted}
        for each in candidates:
            same = left.pop(each.token_id, None)
            if same is None:
                yield each._replace(
                    probability=each.probability * (_BESIDE_A_DRAFT if drafted else 1.0)
                )
            else:
                both = 1 - (1 - each.probability) * (1 - same.probability)
                yield each._replace(probability=both, draft_node=same.draft_node)
        factor = _BESIDE_MATCHES if sum(each.probability for each in candidates) > _SURE else 1.0
        for child in left.values():
            yield child._replace(probability=child.probability * factor)


class NgramDrafter(Drafter):
    """Proposes n-gram drafts, merged into another draft's trees if there is one.

    Trees end with the output, so they need no room after its last token.
    """

    def __init__(
        self,
        tree: TreeOptions,
        device: torch.device,
        draft: Drafter | None = None,
        clock: Clock = stands_still,
    ):
        """Take the other draft, if any.

        It is skipped where, by the clock, n-grams bring more tokens per second without it.
        """
        self._options = tree
        self._device = device
        self._draft = draft or Drafter()
        self._clock = clock
        self.hidden_layers = self._draft.hidden_layers
        self.num_levels = max(self._draft.num_levels, tree.ngram_depth)
        self._slots: dict[int, NgramState] = {}
        self.drafted: dict[int, set[int]] = {}
        self._proposal_s = self._rest_s = 0.0
        self._has_proposed = False
        """True if drafts that do not pause proposed in this step."""
        self._ended_at: float | None = None
        """End of the last proposal; None after a prompt or a plain step."""

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence and a batch's padding; return False without room."""
        num_new = max_new_tokens + self._options.ngram_depth
        if not self._draft.admit(slot, num_prompt_tokens, num_new):
            return False
        self._slots[slot] = NgramState(num_prompt_tokens, max_new_tokens)
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read a prompt's next chunk."""
        self._ended_at = None
        self._slots[slot].read(token_ids.tolist())
        self._draft.prefill(slot, token_ids, hidden)

    def select(self, slot: int, positions: Tensor) -> None:
        """Show the draft committed positions [S]."""
        self._draft.select(slot, positions)

    def read_selected(self, slots: Sequence[int]) -> int:
        """Let the draft read selected tokens."""
        return self._draft.read_selected(slots)

    def read(self, slot: int, token_ids: list[int]) -> None:
        """Append decided tokens to the text."""
        self._slots[slot].read(token_ids)

    def glance(
        self, slots: Sequence[int], num_drafts: int, least_probability: float
    ) -> DraftTrees | None:
        """Propose n-gram drafts."""
        if not self._has_proposed:
            self._ended_at = None
        self._has_proposed = False
        least = max(LEAST_PROBABILITY, least_probability)
        trees = [
            self._slots[slot].propose(num_drafts, self.num_levels, {}, least) for slot in slots
        ]
        return (
            DraftTrees.pad(trees, self._device) if any(len(nodes) > 1 for nodes in trees) else None
        )

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Let the draft read decided tokens."""
        self._draft.absorb(slots, decided)

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Propose the likeliest nodes of both drafts."""
        limits = self._options.most_drafts if num_drafts is None else num_drafts, self.num_levels
        if self._ended_at is not None:
            self._rest_s = moved(self._rest_s, self._clock() - self._ended_at)
        trees = {slot: self._slots[slot].propose(*limits, {}) for slot in slots}
        self.drafted = {}
        if self._draft.num_levels:
            self._merge(trees, limits)
        self._has_proposed = True
        self._ended_at = self._clock()
        return DraftTrees.pad([*trees.values()], self._device)

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._slots.pop(slot, None)
        self._draft.release(slot)

    def _merge(self, trees: dict[int, list[TreeNode]], limits: tuple[int, int]) -> None:
        lacking = [
            slot for slot, nodes in trees.items() if self._draft_pays(self._slots[slot], nodes)
        ]
        if not lacking:
            return
        begin = self._clock()
        drafted = self._draft.propose(lacking, limits[0]).nodes()  # waits for the device
        self._proposal_s = moved(self._proposal_s, self._clock() - begin)
        for slot, tree in zip(lacking, drafted, strict=True):
            state = self._slots[slot]
            state.draft_gain = moved(state.draft_gain, promised(tree))
            self.drafted[slot] = {node.token_id for node in tree if node.depth == 1}
            trees[slot] = state.propose(*limits, children_of(tree))

    def _draft_pays(self, state: NgramState, nodes: Sequence[TreeNode]) -> bool:
        """Return True if the draft brings more tokens per second than `nodes` alone.

        Its tree helps where no n-gram draft is right.
        """
        if state.most_levels <= 0 or not self._rest_s:
            return state.most_levels > 0
        share = self._proposal_s / (self._proposal_s + self._rest_s)
        expected = 1 + promised(nodes)
        missed = 1 - promised([node for node in nodes if node.depth < 2])
        return expected + missed * state.draft_gain > expected / (1 - share)

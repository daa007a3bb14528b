"""N-gram drafts, which need no model: they propose what followed the same tokens before, in the
prompt or the output.

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro and others, arXiv 2411.04975) propose what
followed the longest match of the text's end. Here every match proposes its next token, a candidate,
at the rate at which such candidates were right. The tree holds the likeliest paths: of candidates
alone, or of candidates and a draft's tree under one node budget.
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
"""Largest length of a match in tokens; a longer match counts as this long."""
MOST = 32
"""Largest number of matches that are returned."""
LEAST_PROBABILITY = 0.01
"""Smallest probability of a path that is worth verifying: one more node takes about a hundredth of
a step.
"""
_MOST_CANDIDATES = 6
"""Most candidates that are considered behind one node."""
# Measured on greedy summaries of 20 GovReport documents of 8K tokens and more, cut to 0.9K to 3.5K,
# by SmolLM2-135M.
_LONE = (0.17, 0.33, 0.50, 0.62, 0.70, 0.75, 0.78, 0.82, 0.85, 0.88, 0.90, 0.93)
"""Rates at which the text continues as after its only match, by the length of the match: 1, 2, ...
tokens.
"""
_CONTESTED = 0.7
"""Factor on the rate of a candidate that at most half of the longest matches propose."""
_MOST_AGREE = 0.5
_ALL_AGREE = 0.8
"""Least rate of a candidate that most, or all, of several longest matches propose."""
_OWN = 0.15
"""Share of the misses that become hits if a match lies in the output, which may repeat itself."""
_LATER_RANKS = (1.0, 0.5, 0.4)
"""Factor on the rate of the likeliest candidate, the second, and all others."""
_BESIDE_A_DRAFT = 0.75
"""Factor on a candidate's probability where the draft proposes other tokens. Measured with the
shipped EAGLE head.
"""
_BESIDE_MATCHES = 0.5
"""Factor on a draft's probability where matches are nearly sure (`_SURE`) of other tokens. Measured
in the same way.
"""
_SURE = 0.65
_CERTAIN = 0.99
"""The highest probability of a node after its parent."""

assert len(_LONE) == LONGEST


class Match(NamedTuple):
    """An earlier place whose last tokens are also the text's last. The best are the longest, then
    the latest.
    """

    length: int
    """Number of equal tokens, 1 to `LONGEST`."""
    position: int
    """Position of the token that followed there."""


class SuffixIndex:
    """A text and the matches of its end.

    A new token visits each of its earlier occurrences: a match ends there, one token longer than
    the match that ended one token before. So no search is needed.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """The text so far."""
        # token -> position behind each occurrence
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._lengths: dict[int, int] = {}  # position behind a match -> length of the match

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append many tokens; only the last ones are matched, because the matches depend on nothing
        else.
        """
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
        """Return the `MOST` longest matches of the text's end, the best first."""
        best = sorted(zip(self._lengths.values(), self._lengths, strict=True), reverse=True)[:MOST]
        return [Match(length, position) for length, position in best]

    def continued(self, matches: Sequence[Match]) -> list[Match]:
        """Return the matches one token later if the text continues as they do, without those that
        reach its end.
        """
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
    """Probability after the parent."""
    matches: Sequence[Match] = ()
    """The matches that it followed, best first."""
    draft_node: int = -1
    """Its number in the draft's tree; -1 if the draft does not propose it."""


def candidates_of(
    token_ids: Sequence[int], matches: Sequence[Match], num_prompt_tokens: int
) -> list[Candidate]:
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
    candidates = []
    missed = 1.0
    for rank, (length, count, _, token_id, is_own) in enumerate(ranked[:_MOST_CANDIDATES]):
        rate = _rate(length, count, sizes[length], is_own) * _LATER_RANKS[min(rank, 2)]
        candidates.append(Candidate(token_id, missed * rate, followers[token_id]))
        missed *= 1 - rate
    return candidates


def _rate(length: int, count: int, of: int, is_own: bool) -> float:
    """Return how often a candidate is right that `count` of the longest matches propose, which are
    `length` long.
    """
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
    """Return the accepted tokens that a tree promises."""
    return sum(exp(node.log_prob) for node in tree[1:])


class NgramState:
    """The text of one sequence and its matches. Lives as long as its request."""

    def __init__(self, num_prompt_tokens: int, max_new_tokens: int):
        self._num_prompt_tokens = num_prompt_tokens
        self._most_tokens = num_prompt_tokens + max_new_tokens
        self._index = SuffixIndex()
        self.draft_gain = 1.0
        """Running mean of the accepted tokens that a draft's own tree promises."""

    @property
    def most_levels(self) -> int:
        """Return the number of tree levels that the output still has room for, with the bonus token
        behind them.
        """
        return max(0, self._most_tokens - len(self._index.token_ids) - 1)

    def read(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens, of the prompt or the output."""
        self._index.extend(token_ids)

    def propose(
        self,
        num_drafts: int,
        depth: int,
        draft: Mapping[int, Sequence[Candidate]],
        least_probability: float = LEAST_PROBABILITY,
    ) -> list[TreeNode]:
        """Return the root and the `num_drafts` likeliest nodes behind it, parents first; none less
        likely than asked.

        They are candidates and nodes of a draft's tree (`children_of`; may be empty). The tree has
        `depth` levels at most, and no more than the output has room for. It grows best first: path
        probabilities only shrink, so the best nodes so far are the best of all.
        """
        depth = min(depth, self.most_levels)
        nodes = [TreeNode(-1, self._index.token_ids[-1], 0, 0.0)]
        # of two equal ones the first found comes first
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
        """Yield what matches and draft propose behind one node."""
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
    """Proposes n-gram drafts, alone or merged into another draft's trees.

    N-gram drafts read tokens only, and always see all of them. Trees are cut to the remaining
    length of the output, so they need no room behind its last token.
    """

    def __init__(
        self,
        tree: TreeOptions,
        device: torch.device,
        draft: Drafter | None = None,
        clock: Clock = stands_still,
    ):
        """Take the tree's options, the device on which trees are wanted, and the draft to merge
        into.

        The draft is skipped where n-grams alone bring more tokens per second, by its share of a
        step's time. By a clock that stands still it always proposes, so that equal requests give
        equal counts.
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
        """Whether slots that do not pause had a proposal in this step."""
        self._ended_at: float | None = None
        """When the last proposal ended; None if a prompt was read since, or a step taken without a
        draft.
        """

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False if there is none now.

        The draft absorbs a batch's new tokens padded to the longest run, which may be deeper than
        its own trees.
        """
        num_new = max_new_tokens + self._options.ngram_depth
        if not self._draft.admit(slot, num_prompt_tokens, num_new):
            return False
        self._slots[slot] = NgramState(num_prompt_tokens, max_new_tokens)
        return True

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read the next chunk of the prompt: token_ids [T] and the target's features [T, F] at
        them.
        """
        self._ended_at = None
        self._slots[slot].read(token_ids.tolist())
        self._draft.prefill(slot, token_ids, hidden)

    def select(self, slot: int, positions: Tensor) -> None:
        """Let the draft see these committed positions [S]; n-gram drafts see all."""
        self._draft.select(slot, positions)

    def read_selected(self, slots: Sequence[int]) -> int:
        """Let the draft read what was selected."""
        return self._draft.read_selected(slots)

    def read(self, slot: int, token_ids: list[int]) -> None:
        """Append newly decided tokens to the text."""
        self._slots[slot].read(token_ids)

    def glance(
        self, slots: Sequence[int], num_drafts: int, least_probability: float
    ) -> DraftTrees | None:
        """Propose the likeliest n-gram drafts alone."""
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
        """Let the draft read what was decided for these slots."""
        self._draft.absorb(slots, decided)

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Propose a tree behind each slot's root: the likeliest nodes of both, or the root
        alone.
        """
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
        """Replace the trees of slots for which drafting pays by merged ones."""
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
        """Return True if drafting brings more tokens per second than these n-gram drafts alone.

        The draft's own tree helps if no n-gram draft contains the next token. A step without it
        saves its share of the time, once a whole step was measured.
        """
        if state.most_levels <= 0 or not self._rest_s:
            return state.most_levels > 0
        share = self._proposal_s / (self._proposal_s + self._rest_s)
        expected = 1 + promised(nodes)
        missed = 1 - promised([node for node in nodes if node.depth < 2])
        return expected + missed * state.draft_gain > expected / (1 - share)

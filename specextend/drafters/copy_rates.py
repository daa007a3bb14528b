"""What the text may be copying next, and how likely: from earlier places that look like its end.

How often such a guess was right is counted for each sequence; a prior stands for what has not been seen yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from specextend.drafters.suffix_index import LONGEST, Match

Agreement = Literal["lone", "some", "most", "all"]

_MOST_COPIES = 6
"""Different tokens that are considered to come next."""
_PRIOR_WEIGHT = 8.0
"""Guesses that the prior counts for."""
# Measured on greedy summaries of 20 GovReport documents of 8K tokens and more, cut to 0.9K to 3.5K, by SmolLM2-135M.
_LONE = (0.17, 0.33, 0.50, 0.62, 0.70, 0.75, 0.78, 0.82, 0.85, 0.88, 0.90, 0.93)
"""How often the text goes on as it did after a match of 1, 2, .. tokens, which is the only one."""
_CONTESTED = 0.7
_LEAST = {"lone": 0.0, "some": 0.0, "most": 0.5, "all": 0.8}
_OWN = 0.15
"""Share of the misses that are none where the output repeats itself."""
_LATER_RANKS = (1.0, 0.5, 0.4)

assert len(_LONE) == LONGEST


class Evidence(NamedTuple):
    """What speaks for a copy: guesses of equal evidence share a rate."""

    length: int
    """Of its longest match."""
    agreement: Agreement
    """How many of the matches of that length say the same: `lone` is the only one, `some` are half of them at most."""
    is_own: bool
    """Whether one of them lies in the output."""
    rank: int
    """0 for the likeliest copy, 1 for the second, 2 for all others."""


class Copy(NamedTuple):
    """A token that may come next."""

    token_id: int
    probability: float
    evidence: Evidence
    matches: list[Match]
    """Where it came next before, best first."""


class CopyRates:
    """Rates of one sequence: the chance of a copy to come true if no better one does."""

    def __init__(self) -> None:
        self._hits: Counter[Evidence] = Counter()
        self._guesses: Counter[Evidence] = Counter()

    def rate(self, evidence: Evidence) -> float:
        """Between 0 and 1."""
        hits = self._hits[evidence] + _PRIOR_WEIGHT * prior(evidence)
        return hits / (self._guesses[evidence] + _PRIOR_WEIGHT)

    def copies(self, token_ids: Sequence[int], matches: Sequence[Match], num_prompt_tokens: int) -> list[Copy]:
        """What came next after the `matches` (best first) in the text `token_ids`, likeliest first."""
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
        copies, missed = [], 1.0
        for rank, (length, count, _, token_id, is_own) in enumerate(ranked[:_MOST_COPIES]):
            evidence = Evidence(length, _agreement(count, sizes[length]), is_own, min(rank, 2))
            rate = self.rate(evidence)
            copies.append(Copy(token_id, missed * rate, evidence, followers[token_id]))
            missed *= 1 - rate
        return copies

    def learn(self, copies: Sequence[Copy], token_id: int) -> None:
        """The text went on with `token_id`."""
        for copy in copies:
            self._guesses[copy.evidence] += 1
            if copy.token_id == token_id:
                self._hits[copy.evidence] += 1
                return


def prior(evidence: Evidence) -> float:
    """The rate before anything is known of a sequence."""
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

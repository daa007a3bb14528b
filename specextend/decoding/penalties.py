"""Repetition penalties: logits changed by the tokens that a sequence already has, as transformers changes them.

At a node of a tree the sequence is prompt, output and the path from the root to the node, so every mode changes the
logits behind the same tokens in the same way, and chooses the same tokens as plain decoding.

Letters: N tree nodes (root included), V vocabulary, U distinct tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specextend.core import Request
from specextend.decoding.device import upload

Places = tuple[list[int], list[int]]
"""Entries of logits [N, V]: their nodes, and their token ids."""


class NgramIndex:
    """Knows what followed each run of `size - 1` tokens in a growing text. A token more takes the same time in any."""

    def __init__(self, size: int) -> None:
        """Take the length of an n-gram, in tokens."""
        assert size > 0, "an n-gram has at least one token"
        self.size = size
        self.end: tuple[int, ...] = ()
        """The last `size - 1` tokens, or the whole text if it is shorter."""
        self._followers: dict[tuple[int, ...], set[int]] = {}  # run -> tokens that followed it

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            if len(self.end) == self.size - 1:
                self._followers.setdefault(self.end, set()).add(token_id)
            self.end = self.behind(self.end, token_id)

    def behind(self, end: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """Return the last tokens of a text that ended in `end` and has one token more."""
        longer = (*end, token_id)
        return longer[1:] if len(longer) == self.size else longer

    def repeating(self, token_ids: Sequence[int], parents: Sequence[int]) -> Places:
        """Return the tokens behind each node of a tree that would repeat an n-gram of the text or of the node's path.

        The root is the text's last token.
        """
        ends, nodes, repeating = [self.end], list[int](), list[int]()
        paths: list[list[tuple[tuple[int, ...], int]]] = [[]]  # of each node: the tokens below the root, behind what
        for node in range(len(token_ids)):
            if node > 0:
                parent, token_id = parents[node], token_ids[node]
                paths.append([*paths[parent], (ends[parent], token_id)])
                ends.append(self.behind(ends[parent], token_id))
            if len(ends[node]) == self.size - 1:
                found = [*self._followers.get(ends[node], ())]
                found += [token_id for end, token_id in paths[node] if end == ends[node]]
                nodes += [node] * len(found)
                repeating += found
        return nodes, repeating


class Penalties:
    """The penalties of one request, and the tokens that they count. Lives as long as its request."""

    def __init__(self, request: Request, device: torch.device) -> None:
        """Take a request that has penalties, and the device of the logits."""
        sampling = request.sampling
        self._penalty = sampling.repetition_penalty
        self._ngrams = NgramIndex(sampling.no_repeat_ngram_size) if sampling.no_repeat_ngram_size else None
        self._seen: set[int] = set()
        self._seen_ids = torch.empty(0, dtype=torch.int64, device=device)
        self.extend(request.prompt_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count tokens behind those counted so far."""
        if self._ngrams is not None:
            self._ngrams.extend(token_ids)
        if self._penalty != 1 and (new := list(dict.fromkeys(each for each in token_ids if each not in self._seen))):
            self._seen.update(new)
            self._seen_ids = torch.cat([self._seen_ids, self._seen_ids.new_tensor(new)])

    def apply(self, logits: Tensor, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Return the penalised logits [N, V] fp32 behind each node of a tree, whose root is the last token counted.

        First each token that occurred is penalised once, then what would repeat an n-gram becomes -inf.
        """
        scores = logits.to(torch.float32, copy=True)
        if self._penalty != 1:
            scores.index_copy_(1, self._seen_ids, self._penalised(scores.index_select(1, self._seen_ids)))
            places = _as_index(self._new_in_paths(token_ids, parents), scores.device)
            scores[places] = self._penalised(scores[places])
        if self._ngrams is not None:
            scores[_as_index(self._ngrams.repeating(token_ids, parents), scores.device)] = float("-inf")
        return scores

    def _penalised(self, scores: Tensor) -> Tensor:
        return torch.where(scores < 0, scores * self._penalty, scores / self._penalty)

    def _new_in_paths(self, token_ids: Sequence[int], parents: Sequence[int]) -> Places:
        """Return for each node the tokens of its path that have not been counted, each once."""
        paths: list[dict[int, None]] = [{}]
        for node in range(1, len(token_ids)):
            token_id, path = token_ids[node], paths[parents[node]]
            paths.append(path if token_id in self._seen else path | {token_id: None})
        nodes = [node for node, path in enumerate(paths) for _ in path]
        return nodes, [token_id for path in paths for token_id in path]


def penalties_of(request: Request, device: torch.device) -> Penalties | None:
    """Return the penalties of a request; None if it has none, so that it costs nothing."""
    sampling = request.sampling
    is_on = sampling.repetition_penalty != 1 or sampling.no_repeat_ngram_size > 0
    return Penalties(request, device) if is_on else None


def _as_index(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places as an index of [N, V]."""
    nodes, token_ids = upload(torch.tensor(places, dtype=torch.int64), device)
    return nodes, token_ids

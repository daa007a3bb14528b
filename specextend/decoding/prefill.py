"""Prefill: the target reads a prompt in chunks, and the draft reads along.

Prompts with the same first n tokens have the same first n cache rows, because attention sees no
later token. So rows are copied from prompt to prompt (prefix caching). The draft reads every prompt
from the target's features, which takes little time.

More shapes: `T` tokens of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache
from specextend.decoding.device import synchronise
from specextend.decoding.model import CachedModel
from specextend.decoding.sequence import RunningSequence, Stopwatch
from specextend.decoding.tree import Drafter

LEAST_REUSED = 256
"""Least common tokens of two prompts for a copy of rows."""


@dataclass(slots=True)
class LastPrompt:
    """The last prompt of the target, for the next one about the same document.

    Its rows stay in the cache until the next prompt: nothing is written to a free region.
    """

    token_ids: list[int]
    first_row: int
    features: list[Tensor] = field(default_factory=list)
    """Features for the draft, by chunk [1, n, F]."""

    def length_in(self, prompt_token_ids: list[int]) -> int:
        """Return the tokens in common with another prompt, except its last; 0 if too few."""
        both = [self.token_ids, prompt_token_ids[:-1]]
        n = len(commonprefix(both))  # noqa: RUF071  of lists it compares item by item
        return n if n >= LEAST_REUSED else 0

    def write(self, cache: KVCache, first_row: int, count: int) -> list[Tensor]:
        """Copy the first `count` rows to `first_row`; return their features [1, n, F] in chunks."""
        cache.copy(self.first_row, first_row, count)
        chunks = []
        left = count
        for chunk in self.features:
            # a view would keep all of it
            chunks.append(chunk if chunk.shape[1] <= left else chunk[:, :left].clone())
            left -= chunks[-1].shape[1]
            if not left:
                break
        return chunks


class PromptEnd(NamedTuple):
    """Results of the last token of a prompt."""

    hidden: Tensor
    """[1, C] of the target."""
    features: Tensor
    """[1, F] for the draft."""
    queries: list[Tensor]
    """[H, D] of each scoring layer."""


@dataclass
class PromptReader:
    """Reads prompts, except their common start with the last prompt."""

    _target: CachedModel
    _drafter: Drafter
    _scored_layers: Sequence[int]
    _watch: Stopwatch
    _on_chunk: Callable[[], None]
    _last_prompt: LastPrompt | None = None
    _features: list[Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Forget the last prompt. No prompt may be in work."""
        self._last_prompt = None
        self._features = []

    def overwrite(self, sequence: RunningSequence, num_kept: int) -> None:
        """Limit what a next prompt takes over of this prompt, because later rows change."""
        last = self._last_prompt
        if last is not None and last.first_row == sequence.region.start:
            last.token_ids = last.token_ids[:num_kept]

    def read(self, sequence: RunningSequence, chunk_size: int) -> PromptEnd | None:
        """Read the next chunk of a prompt, one prompt after the other; return None before its
        end.
        """
        token_ids = sequence.request.prompt_token_ids
        device = self._target.device
        if sequence.length == 0:
            sequence.stats.num_prompt_tokens = len(token_ids)
            self._features = self._take_over(sequence)
            taken = torch.tensor(token_ids[: sequence.length], device=device)
            self._let_draft_read(sequence, taken, self._features)
        end = sequence.length + chunk_size
        if self._target.is_recurrent and sequence.length < len(token_ids) - 1:
            end = min(end, len(token_ids) - 1)  # choices read the last token again
        chunk = torch.tensor(token_ids[sequence.length : end], device=device)
        plan, hidden, features = self._read_chunk(sequence, chunk)
        self._let_draft_read(sequence, chunk, [features])
        self._features.append(features)
        if sequence.length < len(token_ids):
            return None
        self._target.end_prompt(sequence.region.start, sequence.length)
        self._last_prompt = LastPrompt(token_ids, sequence.region.start, self._features)
        queries = [plan.queries[layer][0, -1] for layer in self._scored_layers]
        return PromptEnd(hidden[0, -1:], features[0, -1:], queries)

    def _take_over(self, sequence: RunningSequence) -> list[Tensor]:
        last, self._last_prompt = self._last_prompt, None  # its rows may be overwritten from here
        n = last.length_in(sequence.request.prompt_token_ids) if last else 0
        n = self._target.take_over(sequence.region.start, n)
        if last is None or n == 0:
            return []
        sequence.length = sequence.stats.num_cached_tokens = n
        return last.write(self._target.cache, sequence.region.start, n)

    def _let_draft_read(
        self, sequence: RunningSequence, token_ids: Tensor, chunks: Sequence[Tensor]
    ) -> None:
        if sequence.drafts and chunks:  # so that each model is charged for its GPU seconds
            synchronise(self._target.device)
        self._watch.charge("prefill_s", [sequence])
        if not sequence.drafts or not chunks:
            return
        read = token_ids.split([features.shape[1] for features in chunks])
        for tokens, features in zip(read, chunks, strict=True):
            self._drafter.prefill(sequence.slot, tokens, features[0])
        synchronise(self._target.device)
        self._watch.charge("draft_prefill_s", [sequence])

    def _read_chunk(
        self, sequence: RunningSequence, chunk: Tensor
    ) -> tuple[AttentionPlan, Tensor, Tensor]:
        """Run the next chunk [T] of a prompt; return plan, hidden [1, T or 1, C], features [1, T,
        F].

        The last layer computes only the last token unless the draft reads its output.
        """
        first = sequence.length
        sequence.length += len(chunk)
        read = self._drafter.hidden_layers
        last = self._target.config.num_hidden_layers - 1
        plan = AttentionPlan(
            [sequence.region.start],
            [sequence.length],
            len(chunk),
            keep_layers=frozenset(self._scored_layers),
            ends_only=read is None or last not in (read or [last]),
            decided=sequence.length < sequence.stats.num_prompt_tokens,
        )
        positions = torch.arange(first, sequence.length, device=chunk.device)
        self._on_chunk()
        token_ids = chunk.unsqueeze(0)
        positions = positions.unsqueeze(0)
        return plan, *self._target.forward_with_features(token_ids, positions, plan, read)

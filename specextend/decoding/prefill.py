"""Prefill: the target reads a prompt in chunks, and a draft reads along.

The attention of a token depends on no later one, so prompts with the same first n tokens have the
same n cache rows: what the target read for one is copied for the next (prefix caching). A draft
reads every prompt itself, from the target's features; that takes little time.

Shapes: `P` tokens of a prompt, `T` of a chunk, `L` layers, `C` hidden size, `F` features of a
position, `H` query heads, `K` key heads, `D` head size.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import NamedTuple

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import KVCache
from specextend.decoding.device import synchronise
from specextend.decoding.model import CachedModel
from specextend.decoding.sequence import Sequence, Stopwatch
from specextend.decoding.tree import Drafter

LEAST_REUSED = 256
"""Tokens that a prompt must have in common with the one before it to take its rows."""


@dataclass(slots=True)
class LastPrompt:
    """The prompt that the target read last, for one with the same long instruction, or about the
    same document.

    Its rows stay in the cache until the next prompt is read, even if its request has ended: nothing
    else is ever written to a region that no running request has.
    """

    token_ids: list[int]
    first_row: int
    features: list[Tensor] = field(default_factory=list)
    """What a draft is given for its chunks, each [1, n, F]."""

    def length_in(self, prompt_token_ids: list[int]) -> int:
        """Return the tokens to take over for another prompt, whose last token is never among them;
        0 if too few.
        """
        both = [self.token_ids, prompt_token_ids[:-1]]
        n = len(commonprefix(both))  # noqa: RUF071  of lists it compares item by item
        return n if n >= LEAST_REUSED else 0

    def write(self, cache: KVCache, first_row: int, count: int) -> list[Tensor]:
        """Copy the first `count` rows to `first_row` on; return their features in chunks [1, n,
        F].
        """
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
    """Holds what the last token of a prompt gives."""

    hidden: Tensor
    """[1, C], the target's output."""
    features: Tensor
    """[1, F], what a draft is given for it."""
    queries: list[Tensor]
    """[H, D] in each layer that scores chunks."""


@dataclass
class PromptReader:
    """Reads prompts for one engine. What a prompt has in common with the one before it is read
    once.
    """

    _target: CachedModel
    _drafter: Drafter
    _scored_layers: Items[int]
    """Those that score chunks."""
    _watch: Stopwatch
    """Time is charged to it."""
    _on_chunk: Callable[[], None]
    """Called for each chunk."""
    _last_prompt: LastPrompt | None = None
    _features: list[Tensor] = field(default_factory=list)
    """What a draft is given for the chunks so far of the prompt that is being read."""

    def forget(self) -> None:
        """Take nothing over from the last prompt. None may be half read that is still wanted."""
        self._last_prompt = None
        self._features = []

    def read(self, sequence: Sequence, chunk_size: int) -> PromptEnd | None:
        """Read the next `chunk_size` tokens of a sequence's prompt; return None if more of it is
        left.

        A prompt is read to its end, or given up, before another one is begun.
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
            end = min(end, len(token_ids) - 1)  # choices are scored from the last token on
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

    def _take_over(self, sequence: Sequence) -> list[Tensor]:
        """Copy the start of a prompt that was read for the one before; return its features in
        chunks [1, n, F].
        """
        last, self._last_prompt = self._last_prompt, None  # from here on its rows may be written
        n = last.length_in(sequence.request.prompt_token_ids) if last else 0
        n = self._target.take_over(sequence.region.start, n)
        if last is None or n == 0:
            return []
        sequence.length = sequence.stats.num_cached_tokens = n
        return last.write(self._target.cache, sequence.region.start, n)

    def _let_draft_read(self, sequence: Sequence, token_ids: Tensor, chunks: Items[Tensor]) -> None:
        """Let the draft read tokens [T] of the prompt after the target, with features [1, n, F] of
        chunks of them.
        """
        if sequence.drafts and chunks:  # a GPU's seconds are those of the model that took them
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
        self, sequence: Sequence, chunk: Tensor
    ) -> tuple[AttentionPlan, Tensor, Tensor]:
        """Run the next `chunk` [T] of the prompt; return its plan, hidden [1, T or 1, C] and
        features [1, T, F].

        The last layer's output is computed for the last token alone, unless the draft reads it.
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

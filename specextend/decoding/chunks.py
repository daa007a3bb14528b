"""How a text is cut into the chunks that retrieval shows or hides: every so many tokens, or at the ends of sentences.

Shapes: `S` tokens, `P` chunks of the prompt, `C` chunks of the text so far, `V` vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.decoding.options import CacheOptions

_CLOSING = r"""["'\u201d\u2019\u300d\u300f\uff09)\]]*$"""  # quotation marks and brackets
_STOP = re.compile(r"[.!?]" + _CLOSING)
_BREAK = re.compile(r"\n|[\u3002\uff01\uff1f]" + _CLOSING)  # a line break; full stops of scripts without spaces


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where one text is cut. What is decoded behind the prompt is cut every `size` tokens."""

    size: int
    """Tokens of a chunk, at most."""
    prompt_edges: Tensor | None = None
    """[P + 1] int64 on the CPU: each chunk's first token, then the prompt's length; None: every `size` tokens."""

    def edges(self, num_tokens: int) -> Tensor:
        """[C + 1] int64: the first token of each chunk, and `num_tokens` (not fewer than the prompt's)."""
        end = torch.tensor([num_tokens])
        if self.prompt_edges is None:
            return torch.cat([torch.arange(0, num_tokens, self.size), end])
        num_prompt_tokens = int(self.prompt_edges[-1])
        assert num_tokens >= num_prompt_tokens, "edges are asked for before the prompt has run"
        if num_tokens == num_prompt_tokens:
            return self.prompt_edges
        return torch.cat([self.prompt_edges, torch.arange(num_prompt_tokens, num_tokens, self.size)[1:], end])

    def sums(self, values: Tensor) -> Tensor:
        """[..., C] of values [..., S] of every token so far: a sum a chunk, each on its own."""
        num_tokens = values.shape[-1]
        if self.prompt_edges is None:
            return pad(values, (0, -num_tokens % self.size)).unflatten(-1, (-1, self.size)).sum(-1)
        sizes = self.edges(num_tokens).diff().to(values.device)
        numbers = torch.repeat_interleave(sizes)
        return values.new_zeros(*values.shape[:-1], len(sizes)).index_add_(-1, numbers, values)


@dataclass(frozen=True, slots=True)
class SentenceTable:
    """Which tokens of a vocabulary end a sentence. [V] bool each, on the CPU."""

    breaks: Tensor
    """It ends whatever follows: a line break, a full stop of a script without spaces."""
    stops: Tensor
    """It ends where the next token starts with white space: `.`, but not that of 3.5."""
    opens: Tensor
    """Starts with white space."""

    def cut(self, token_ids: list[int], size: int) -> Chunks:
        """A prompt's chunks: whole sentences, as many as fit `size` tokens; one that does not is cut every `size`."""
        ids = torch.tensor(token_ids)
        followed = torch.cat([self.opens[ids[1:]], torch.ones(1, dtype=torch.bool)])
        ends = (self.breaks[ids] | (self.stops[ids] & followed)).nonzero().flatten() + 1
        return Chunks(size, torch.tensor(pack(ends.tolist(), len(token_ids), size)))


class Cutter:
    """Cuts the prompts of one engine, as `cache.chunk_boundaries` says."""

    def __init__(self, options: CacheOptions, tokenizer: Any, vocab_size: int) -> None:
        sentences = options.policy == "retrieval" and options.chunk_boundaries == "sentence"
        self._size = options.chunk_size
        self._table = sentence_table(tokenizer, vocab_size) if sentences else None

    def cut(self, prompt_token_ids: list[int]) -> Chunks:
        """Where a prompt and what follows it is cut."""
        return Chunks(self._size) if self._table is None else self._table.cut(prompt_token_ids, self._size)


def sentence_table(tokenizer: Any, vocab_size: int) -> SentenceTable:
    """The table of a transformers fast tokenizer; `vocab_size` may exceed its own by rows that mean nothing.

    A token's text is what it adds behind another one: decoded alone, some tokenizers drop its space.
    """
    [anchor, *_] = tokenizer("a", add_special_tokens=False)["input_ids"]
    known = min(vocab_size, len(tokenizer))
    decode = tokenizer.backend_tokenizer.decode_batch
    first = decode([[anchor]], skip_special_tokens=False)[0]
    pairs = decode([[anchor, token_id] for token_id in range(known)], skip_special_tokens=False)
    texts = [text[len(first) :] for text in pairs] + [""] * (vocab_size - known)
    return SentenceTable(
        breaks=torch.tensor([bool(_BREAK.search(text)) for text in texts]),
        stops=torch.tensor([bool(_STOP.search(text)) for text in texts]),
        opens=torch.tensor([text[:1].isspace() for text in texts]),
    )


def pack(ends: list[int], num_tokens: int, size: int) -> list[int]:
    """Edges of chunks of at most `size` tokens from the `ends` of sentences, ascending: 0 first, `num_tokens` last."""
    edges, previous = [0], 0
    for end in [*ends, num_tokens]:
        if end - edges[-1] > size and previous > edges[-1]:
            edges.append(previous)
        while end - edges[-1] > size:
            edges.append(edges[-1] + size)
        previous = end
    return edges if edges[-1] == num_tokens else [*edges, num_tokens]

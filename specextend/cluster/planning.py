"""The plan of a start: its documents with their tokens, estimated from a sample."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from specextend.cluster.progress import TokenEstimate
from specextend.core import DocumentKey
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import Source

SAMPLE_SIZE = 200
"""Documents that are tokenized to estimate tokens per byte."""
SAMPLE_BYTES = 64 << 10
"""Most bytes of each that are tokenized: that takes a hundred times the memory of the text."""
DEFAULT_TOKENS_PER_BYTE = 0.25
BUCKETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper bounds of the length buckets, in prompt tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The documents of a start with their estimated tokens."""

    estimates: dict[DocumentKey, TokenEstimate]
    tokens_per_byte: float | None
    """None if `num_tokens_column` gives the tokens of every document."""
    rejected: Counter[str]
    """Number of rows that are sure to become error rows, by error class."""
    num_over_length: int
    """Number of documents whose estimate exceeds the prompt limit, so that the length policy applies to them."""

    def work(self) -> list[tuple[DocumentKey, int]]:
        """List the keys with their tokens, prompt and output."""
        return [(key, estimate.total) for key, estimate in self.estimates.items()]

    def num_prompt_tokens(self) -> int:
        """Sum the estimated prompt tokens of all documents."""
        return sum(estimate.num_prompt_tokens for estimate in self.estimates.values())

    def buckets(self) -> dict[str, int]:
        """Count the documents by estimated prompt length."""
        counts = Counter(_bucket(estimate.num_prompt_tokens) for estimate in self.estimates.values())
        return {name: counts[name] for name in map(_bucket_name, range(len(BUCKETS) + 1)) if counts[name]}


@dataclass(frozen=True, slots=True)
class _Length:
    """The facts about a row that the scan of the input gives."""

    num_bytes: int
    num_tokens: int | None
    max_new_tokens: int
    is_rejected: bool


def make_plan(
    source: Source,
    prompts: Prompts,
    keys: Collection[DocumentKey],
    max_new_tokens: int,
    seed: int,
    checkpoint: Callable[[], None],
) -> Plan:
    """Estimate the documents of `keys` in one streaming pass over the input.

    max_new_tokens: for rows without a value of their own. seed: of the sample. checkpoint: called for every row; may
    raise.
    """
    lengths: dict[DocumentKey, _Length] = {}
    rejected: Counter[str] = Counter()
    sample = _TokenSample(random.Random(seed))
    for row in source.scan():
        checkpoint()
        if row.key not in keys:
            continue
        own = max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
        error_class = row.error_class or _without_room(prompts, own)
        lengths[row.key] = _Length(row.num_bytes or 0, row.num_tokens, own, error_class is not None)
        if error_class is not None:
            rejected[error_class] += 1
        elif row.text is not None:
            sample.offer(row.text)
    per_byte = sample.tokens_per_byte(prompts, checkpoint) if sample.texts else None
    estimates = {key: _estimate(length, prompts, per_byte) for key, length in lengths.items()}
    kept = [length for length in lengths.values() if not length.is_rejected]
    num_over_length = sum(_uncut(length, prompts, per_byte) > _limit(length, prompts) for length in kept)
    return Plan(estimates, per_byte, rejected, num_over_length)


@dataclass(slots=True)
class _TokenSample:
    """A sample of the beginnings of documents, drawn as they stream by, each with the same probability."""

    random: random.Random
    texts: list[str] = field(default_factory=list)
    num_offered: int = 0

    def offer(self, text: bytes) -> None:
        """Take a document into the sample if the draw falls on it."""
        self.num_offered += 1
        if len(self.texts) < SAMPLE_SIZE:
            self.texts.append(_beginning(text))
        elif (place := self.random.randrange(self.num_offered)) < SAMPLE_SIZE:
            self.texts[place] = _beginning(text)

    def tokens_per_byte(self, prompts: Prompts, checkpoint: Callable[[], None]) -> float:
        """Tokenize the sample. Returns tokens per byte of text."""
        num_tokens = num_bytes = 0
        for text in self.texts:
            checkpoint()
            num_tokens += len(prompts.encode_document(text))
            num_bytes += len(text.encode())
        return num_tokens / num_bytes if num_bytes else DEFAULT_TOKENS_PER_BYTE


def _beginning(text: bytes) -> str:
    """Cut a text to at most `SAMPLE_BYTES`, between characters."""
    return text[:SAMPLE_BYTES].decode(errors="ignore")


def _without_room(prompts: Prompts, max_new_tokens: int) -> str | None:
    """Return the error class of a `max_new_tokens` that leaves no room for a document; None if there is room."""
    try:
        prompts.room(max_new_tokens)
    except DocumentError as error:
        return error.error_class
    return None


def _estimate(length: _Length, prompts: Prompts, per_byte: float | None) -> TokenEstimate:
    """Estimate template and document, cut as the length policy would; nothing for a row that will be refused."""
    if length.is_rejected:
        return TokenEstimate(0, 0)
    num_tokens = min(_limit(length, prompts), _uncut(length, prompts, per_byte))
    return TokenEstimate(max(0, num_tokens), length.max_new_tokens)


def _uncut(length: _Length, prompts: Prompts, per_byte: float | None) -> int:
    """Estimate the tokens of template and whole document."""
    document = round(length.num_bytes * (per_byte or 0.0)) if length.num_tokens is None else length.num_tokens
    return prompts.num_template_tokens + document


def _limit(length: _Length, prompts: Prompts) -> int:
    """Return the most tokens that the prompt may have."""
    limit = prompts.limit - length.max_new_tokens
    longest = prompts.options.max_prompt_tokens
    return limit if longest is None else min(limit, longest)


def _bucket(num_tokens: int) -> str:
    return _bucket_name(sum(num_tokens > bound for bound in BUCKETS))


def _bucket_name(index: int) -> str:
    if index == 0:
        return f"up to {BUCKETS[0]}"
    if index == len(BUCKETS):
        return f"over {BUCKETS[-1]}"
    return f"{BUCKETS[index - 1] + 1} to {BUCKETS[index]}"

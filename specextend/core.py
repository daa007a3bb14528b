"""The nouns of the product that carry no tensors: what goes in, what comes out."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specextend.stats import DecodingStats

FinishReason = Literal["stop", "length"]


class DocumentKey(NamedTuple):
    """Where a row stands in the input. Inside a job a row is its key, never its `doc_id`."""

    file: int
    """Number of the input file, in path order."""
    row: int
    """Row in that file."""


@dataclass(frozen=True, slots=True)
class Document:
    """One input row."""

    key: DocumentKey
    doc_id: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the target's distribution."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    seed: int = 0
    """Seed of the request's noise; equal seeds give equal output in every decoding mode."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; none of them is part of `Completion.text`."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if any(not stop for stop in self.stop):
            raise ValueError("a stop string must not be empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt for the engine."""

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine made of a request.

    `token_ids` ends with the EOS or with the token that completes a stop string, `text` has neither.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: DecodingStats


def printable(text: str, keep: str = "") -> str:
    """Text of documents as a terminal or a log may show it: each control character but those to `keep` as U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in keep else each for each in text)

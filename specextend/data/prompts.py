"""Prompts: the template around a document, and what is dropped when both do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

LengthPolicy = Literal["error", "head", "tail", "middle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """`prompt.*`"""

    instruction: str = "Summarize the following document."
    """What to do; `{document}` in it is the document's place, without it the document follows after a blank line."""
    system: str = ""
    """System message; empty sends none."""
    length_policy: LengthPolicy = "middle"
    """What an over-long document keeps: its `head`, its `tail`, both with the `middle` dropped, or it is an `error`."""
    max_prompt_tokens: int | None = None
    """Limit on the rendered prompt, in tokens; None: only the context limits it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt."""

    token_ids: list[int]
    num_dropped_tokens: int
    """Tokens of the document that were left out."""
    length_policy: LengthPolicy


class Prompts:
    """Renders documents for one tokenizer.

    tokenizer: a transformers fast tokenizer. limit: tokens that prompt and new tokens may take together
    (`Engine.max_prompt_tokens`). Raises ValueError for a template that cannot take the options.
    """

    def __init__(self, tokenizer: Any, options: PromptOptions, limit: int) -> None:
        raise NotImplementedError

    def render(self, text: str, max_new_tokens: int) -> Prompt:
        """Template and document as token ids, the length policy applied.

        Raises DocumentError (`PromptTooLong`, stage `prompt`) under policy `error` and where the template alone
        does not fit. Control tokens written in the document stay text.
        """
        raise NotImplementedError

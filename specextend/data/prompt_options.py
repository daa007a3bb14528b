"""Options of prompts: the instruction around a document, and what becomes of a document that does not fit."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from specextend.data.inputs import PLACEHOLDER

LengthPolicy = Literal["error", "head", "tail", "middle", "chunk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """`prompt.*`: The prompt, and how a document that is too long is shortened."""

    instruction: str = "Summarize the following document."
    """The user message. `{document}` is replaced by the document; without it the document is appended after a blank
    line."""
    system: str = ""
    """The system message; empty sends none."""
    length_policy: LengthPolicy = "middle"
    """What to do with a document that is too long: `head` keeps its beginning, `tail` keeps its end, `middle` keeps
    both ends and drops the middle, `chunk` summarises it in parts and merges their summaries (`chunks.*`), `error`
    makes it an error row."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens in the rendered prompt; if unset, what the model's context leaves room for."""

    def __post_init__(self) -> None:
        if self.length_policy not in get_args(LengthPolicy):
            allowed = ", ".join(get_args(LengthPolicy))
            raise ValueError(f"prompt.length_policy must be one of {allowed}, got {self.length_policy!r}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"prompt.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        _check_instruction("prompt.instruction", self.instruction)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOptions:
    """`chunks.*`: Documents under `prompt.length_policy: chunk` that do not fit into one prompt.

    Such a document is split into parts where sections, paragraphs or sentences end, each part is summarised, and the
    summaries are merged: all at once or, if they do not fit into one prompt, group by group until one is left.
    """

    tokens: int | None = None
    """Tokens of a part at most; if unset, what fits into a prompt. Parts of a document are all about as long."""
    overlap_tokens: int = 0
    """Tokens at the end of a part that the next one repeats, less than half of a part."""
    instruction: str = "{document}\n\nSummarize this part of a longer document."
    """The user message for a part, with `{document}` as in `prompt.instruction`. In a document with an instruction of
    its own that is used for parts and merges."""
    merge_instruction: str = (
        "{document}\n\nThese are summaries of the consecutive parts of one document. Write one summary of the whole."
    )
    """The user message for the summaries of parts, which take the place of `{document}`."""
    max_new_tokens: int | None = None
    """Tokens of a part's summary at most; if unset, those of the document's summary."""
    on_error: Literal["fail", "leave_out"] = "fail"
    """What becomes of a document with a part that fails: an error row that names the part (`fail`), or a summary of the
    other parts with the quality flag `incomplete` (`leave_out`)."""

    def __post_init__(self) -> None:
        for name, least in (("tokens", 64), ("overlap_tokens", 0), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"chunks.{name} must be at least {least}, got {value}")
        if self.tokens is not None and 2 * self.overlap_tokens >= self.tokens:
            raise ValueError(
                f"chunks.overlap_tokens must be less than half of chunks.tokens = {self.tokens}, got "
                f"{self.overlap_tokens}"
            )
        for name in ("instruction", "merge_instruction"):
            _check_instruction(f"chunks.{name}", getattr(self, name))
        if self.on_error not in ("fail", "leave_out"):
            raise ValueError(f"chunks.on_error must be fail or leave_out, got {self.on_error!r}")


def _check_instruction(name: str, text: str) -> None:
    """Raise ValueError for an instruction with two places for the document, or with a misspelt one."""
    if text.count(PLACEHOLDER) > 1:
        raise ValueError(f"{name} must contain {PLACEHOLDER} at most once")
    words = re.findall(r"\{\s*(\w+)\s*\}", text.replace(PLACEHOLDER, ""))
    if close := difflib.get_close_matches(PLACEHOLDER[1:-1], words):
        raise ValueError(f"{name} contains {{{close[0]}}}, which would be read as text; write {PLACEHOLDER}")

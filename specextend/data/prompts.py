"""Prompts: the template around a document, and what is dropped when both do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from specextend.data.inputs import DocumentError

LengthPolicy = Literal["error", "head", "tail", "middle"]

PLACEHOLDER = "{document}"
"""The document's place in an instruction."""

_SENTINEL = "\u2063DOCUMENT\u2063"


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

    def __post_init__(self) -> None:
        if self.length_policy not in get_args(LengthPolicy):
            allowed = ", ".join(get_args(LengthPolicy))
            raise ValueError(f"prompt.length_policy must be one of {allowed}, got {self.length_policy!r}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"prompt.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.instruction.count(PLACEHOLDER) > 1:
            raise ValueError(f"prompt.instruction must name {PLACEHOLDER} once at most")


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
        self.options = options
        self.limit = limit
        self._tokenizer = tokenizer
        self._documents = _document_tokenizer(tokenizer)
        self._control_ids = control_token_ids(tokenizer)
        prefix, suffix = _template(tokenizer, options)
        self._prefix_ids = _bos(tokenizer) + self._encode(prefix)
        self._suffix_ids = self._encode_continuation(suffix)

    @property
    def num_template_tokens(self) -> int:
        """Tokens of a prompt that are not the document's."""
        return len(self._prefix_ids) + len(self._suffix_ids)

    def render(self, text: str, max_new_tokens: int) -> Prompt:
        """Template and document as token ids, the length policy applied.

        Raises DocumentError (`PromptTooLong`, stage `prompt`) under policy `error` and where the template alone
        does not fit. Control tokens written in the document stay text.
        """
        policy, room = self.options.length_policy, self.room(max_new_tokens)
        document_ids = self.encode_document(text)
        kept = keep(document_ids, room, policy)
        if policy == "error" and len(kept) < len(document_ids):
            size = self.num_template_tokens + len(document_ids)
            limit = self._limit(max_new_tokens)
            raise DocumentError("PromptTooLong", f"the prompt has {size} tokens, the limit is {limit}", stage="prompt")
        token_ids = self._prefix_ids + kept + self._suffix_ids
        return Prompt(token_ids, len(document_ids) - len(kept), policy)

    def room(self, max_new_tokens: int) -> int:
        """Tokens of a document that a prompt has room for. Raises DocumentError (`PromptTooLong`) for none."""
        limit = self._limit(max_new_tokens)
        if limit <= self.num_template_tokens:
            raise DocumentError(
                "PromptTooLong",
                f"the template takes {self.num_template_tokens} tokens of the {max(0, limit)} that max_new_tokens "
                f"{max_new_tokens} leaves for the prompt, so there is no room for a document",
                stage="prompt",
            )
        return limit - self.num_template_tokens

    def encode_document(self, text: str) -> list[int]:
        """The document's tokens, none of which is a control token, whatever it says."""
        token_ids = self._tokenize(text)
        if self._control_ids.isdisjoint(token_ids):
            return token_ids
        encoding = self._documents.encode(text, add_special_tokens=False)
        spelled: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelled += self._spell(text[start:end]) if token_id in self._control_ids else [token_id]
        return spelled

    def _limit(self, max_new_tokens: int) -> int:
        room = self.limit - max_new_tokens
        return room if self.options.max_prompt_tokens is None else min(self.options.max_prompt_tokens, room)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._documents.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def _spell(self, text: str) -> list[int]:
        """A forged control token, character by character: tokenizers split special tokens, not all added ones."""
        ids = [token_id for character in text for token_id in self._tokenize(character)]
        return [token_id for token_id in ids if token_id not in self._control_ids]

    def _encode(self, text: str) -> list[int]:
        """The template's tokens: here a control token is one."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode_continuation(self, text: str) -> list[int]:
        """Tokens of text that goes on after other text: without the space that some tokenizers put at the start."""
        anchor = self._encode("\n")
        joined = self._encode("\n" + text)
        return joined[len(anchor) :] if joined[: len(anchor)] == anchor else self._encode(text)


def keep(token_ids: list[int], room: int, policy: LengthPolicy) -> list[int]:
    """At most `room` of a document's tokens, chosen by the policy; `error` keeps the head, for its caller to notice."""
    if len(token_ids) <= room:
        return token_ids
    if policy == "tail":
        return token_ids[len(token_ids) - room :]
    if policy == "middle":
        tail = room // 2
        return token_ids[: room - tail] + token_ids[len(token_ids) - tail :]
    return token_ids[:room]


def control_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that steer a model: added tokens other than white space, without an unknown token that is only that."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = set(tokenizer.all_special_ids)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = {tokenizer.unk_token_id} - roles
    return frozenset((added | special) - unknown)


def _template(tokenizer: Any, options: PromptOptions) -> tuple[str, str]:
    """The text before and after the document."""
    instruction = options.instruction
    if PLACEHOLDER not in instruction:
        instruction = f"{instruction}\n\n{PLACEHOLDER}" if instruction else PLACEHOLDER
    content = instruction.replace(PLACEHOLDER, _SENTINEL)
    rendered = _chat(tokenizer, options.system, content) if tokenizer.chat_template else _plain(options.system, content)
    if rendered.count(_SENTINEL) != 1:
        raise ValueError(
            f"the chat template holds the document {rendered.count(_SENTINEL)} times, it must hold it once"
        )
    prefix, suffix = rendered.split(_SENTINEL)
    return prefix, suffix


def _chat(tokenizer: Any, system: str, content: str) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise ValueError(
            f"the chat template refuses the prompt ({error}); if it knows no system message, empty prompt.system"
        ) from error
    return rendered


def _plain(system: str, content: str) -> str:
    return f"{system}\n\n{content}\n\nSummary:" if system else f"{content}\n\nSummary:"


def _document_tokenizer(tokenizer: Any) -> Tokenizer:
    """The tokenizer itself, to which a special token is text: what transformers does around it for a batch of one is a
    quarter of the cost with a small vocabulary. It cuts nothing off and pads nothing, whatever its file says.
    """
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()
    return own


def _bos(tokenizer: Any) -> list[int]:
    """The BOS token where the tokenizer begins texts with one; a chat template brings its own."""
    bos = tokenizer.bos_token_id
    return [bos] if not tokenizer.chat_template and bos in tokenizer("")["input_ids"] else []

"""Prompts: their options, the template around a document, and the length policy for documents that do not fit."""

from __future__ import annotations

import copy
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specextend.data.inputs import DocumentError
from specextend.data.instructions import PLACE, Around, Instruction, around_document

LengthPolicy = Literal["error", "head", "tail", "middle", "parts"]
PIECE_CHARACTERS = 1 << 18
"""Length of the pieces in which a long document is tokenized; a call takes about a hundred bytes per character."""
_LEAST_PIECES = 4
"""A document that is no longer than so many pieces is tokenized in one call."""
_WINDOW = 2048
"""Characters on either side of a cut that are tokenized with and without it, to see that it changes nothing."""
_MOST_TRIES = 64
"""Most places that are tried for a cut."""

TEMPLATE_S = 10.0
"""Seconds that a chat template may take, which needs milliseconds; one made to never end is given up."""

_SENTINEL = "\u2063DOCUMENT\u2063"
THINKING_BEGINS, THINKING_ENDS = "<think>", "</think>"
"""What models that think write around it; a template may write the first for them, or both, to have none."""
_ANCHOR = "\n"
"""Text that a piece is tokenized behind, because tokenizers may treat the start of a text specially."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A turn that shows what is wanted: the user message with its document, and the answer."""

    user: str
    """The message, with its document in it."""
    assistant: str
    """What the model should have answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """`prompt.*`: The prompt, and how a document that is too long is shortened."""

    instruction: str = "Summarize the following document."
    """The user message, a jinja2 template: `{{ document }}` is the document, which is appended after a blank line if it
    is not there; any other name is a column of the row."""
    examples: tuple[Example, ...] = ()
    """Turns before the user message that show what is wanted: a list of `user` and `assistant`."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking: false`."""
    system: str = ""
    """The system message; empty sends none."""
    length_policy: LengthPolicy = "middle"
    """What to do with a document that is too long: `head` keeps its beginning, `tail` keeps its end, `middle` keeps
    both ends and drops the middle, `parts` summarises it in parts and merges their summaries (`parts.*`), `error`
    makes it an error row."""
    max_prompt_tokens: int | None = None
    """Maximum number of tokens in the rendered prompt; if unset, what the model's context leaves room for."""

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"prompt.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        _ = self.template

    @property
    def template(self) -> Instruction:
        """Return the instruction as a template. Raises ValueError if it is none."""
        return Instruction("prompt.instruction", self.instruction)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOptions:
    """`parts.*`: Documents under `prompt.length_policy: parts` that do not fit into one prompt.

    Such a document is split into parts where sections, paragraphs or sentences end, each part is summarised, and the
    summaries are merged: all at once or, if they do not fit into one prompt, group by group until one is left.
    """

    tokens: int | None = None
    """Tokens of a part at most; if unset, what fits into a prompt. Parts of a document are all about as long."""
    instruction: str = ""
    """The user message for a part, with `{{ document }}` but no columns; if empty, `prompt.instruction`. In a document
    with an instruction of its own that is used for parts and merges."""
    merge_instruction: str = ""
    """The user message for what was written about the parts, in order, which takes the place of `{{ document }}`; if
    empty, `prompt.instruction`."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 64:
            raise ValueError(f"parts.tokens must be at least 64, got {self.tokens}")
        for name in ("instruction", "merge_instruction"):
            if columns := Instruction(f"parts.{name}", getattr(self, name)).columns:
                raise ValueError(f"parts.{name} names {columns[0]}; it takes {PLACE} alone, and no columns")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt."""

    token_ids: list[int]
    num_dropped_tokens: int
    """Tokens of the document that were left out."""
    length_policy: LengthPolicy
    coverage: float = field(default=1.0, compare=False)
    """Share of the document's tokens that it holds."""


class PromptTooLongError(DocumentError):
    """A document that does not fit and must not be cut: an error row, or the reason to split it into parts."""


class Prompts:
    """Renders documents for one tokenizer.

    tokenizer: a transformers fast tokenizer. limit: tokens that prompt and new tokens may take together
    (`Engine.max_tokens`). parts: for the length policy `parts`. Raises ValueError for a template that cannot take the
    options.
    """

    def __init__(self, tokenizer: Any, options: PromptOptions, limit: int, parts: PartOptions | None = None) -> None:
        self.options = options
        self.limit = limit
        self.parts = parts or PartOptions()
        self._tokenizer = tokenizer
        self._documents = _document_tokenizer(tokenizer)
        self._control_ids = control_token_ids(tokenizer)
        self._around = self._encode_template(options)
        self._thinks = THINKING_ENDS in (tokenizer.chat_template or "")
        self.begins_thinking = _template(tokenizer, options)[1].rstrip().endswith(THINKING_BEGINS)
        """True if a prompt ends where the model is to think, so that it cannot begin with its answer."""
        self._frame = self._encode_template(replace(options, instruction=PLACE))

    @property
    def num_template_tokens(self) -> int:
        """Return the number of tokens of a prompt that are not the document's."""
        return sum(map(len, self._around))

    def render(self, text: str, max_new_tokens: int, instruction: Around | None = None) -> Prompt:
        """Render template and document as token ids, with the length policy applied.

        instruction: of the document, in the place of the run's. Raises DocumentError
        (`PromptTooLong`, stage `prompt`) if the template alone does not fit, and PromptTooLongError, which is one,
        under the policies `error` and `parts`. Control tokens written in the document or in its own instruction remain
        text.
        """
        before, after = self._around if instruction is None else self._encode_instruction(instruction)
        num_template = len(before) + len(after)
        policy, room = self.options.length_policy, self._room(max_new_tokens, num_template)
        kept, num_tokens = keep(self.encode_pieces(text), room, policy)
        if policy in ("error", "parts") and len(kept) < num_tokens:
            size, limit = num_template + num_tokens, self._limit(max_new_tokens)
            message = f"the prompt has {size} tokens, the limit is {limit}"
            raise PromptTooLongError("PromptTooLong", message, stage="prompt")
        coverage = len(kept) / num_tokens if num_tokens else 1.0
        return Prompt(before + kept + after, num_tokens - len(kept), policy, coverage)

    def told_apart(self, text: str) -> tuple[str, str | None]:
        """Return the answer in a model's output, and what it wrote before while it thought; None if it does not think.

        Output that ends within the thinking has an empty answer.
        """
        thought, ends, answer = text.partition(THINKING_ENDS)
        begins = self.begins_thinking or text.lstrip().startswith(THINKING_BEGINS)
        if not self._thinks or not (ends or begins):
            return text, None
        return answer.lstrip(), thought.strip().removeprefix(THINKING_BEGINS).strip()

    def with_instruction(self, instruction: str) -> Prompts:
        """Return prompts with another instruction, for the same tokenizer and limit."""
        other = copy.copy(self)
        other.options = replace(self.options, instruction=instruction)
        other._around = other._encode_template(other.options)
        return other

    def room(self, max_new_tokens: int, instruction: Around | None = None) -> int:
        """Return the number of a document's tokens that fit. Raises DocumentError (`PromptTooLong`) if none do.

        instruction: of the document, as for `render`.
        """
        around = self._around if instruction is None else self._encode_instruction(instruction)
        return self._room(max_new_tokens, sum(map(len, around)))

    def _room(self, max_new_tokens: int, num_template: int) -> int:
        limit = self._limit(max_new_tokens)
        if limit <= num_template:
            raise DocumentError(
                "PromptTooLong",
                f"the template takes {num_template} tokens of the {max(0, limit)} that max_new_tokens "
                f"{max_new_tokens} leaves for the prompt, so there is no room for a document",
                stage="prompt",
            )
        return limit - num_template

    def encode_document(self, text: str) -> list[int]:
        """Tokenize a document; none of its tokens is a control token, whatever the text says."""
        token_ids = self._tokenize(text)
        if self._control_ids.isdisjoint(token_ids):
            return token_ids
        encoding = self._documents.encode(text, add_special_tokens=False)
        spelled: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelled += self._spell(text[start:end]) if token_id in self._control_ids else [token_id]
        return spelled

    def token_starts(self, text: str) -> NDArray[np.int64]:
        """Return the character at which each token of a document starts [N]; forged control tokens count as one."""
        starts: list[int] = []
        for begin, end in self._pieces(text):
            starts += [
                begin + first for first, _ in self._documents.encode(text[begin:end], add_special_tokens=False).offsets
            ]
        return np.array(starts, np.int64)

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """Tokenize a document, in one piece if it is not longer than four; yield the tokens of each piece.

        Together they are the tokens of the whole text if no token depends on text more than 2,048 characters away. In a
        text without any such place to cut (one endless word), tokens beside a cut may differ.
        """
        for begin, end in self._pieces(text):
            yield self._encode_piece(text[begin:end], is_first=begin == 0)

    def _pieces(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the first character and the one behind the last of each piece of a document."""
        size = PIECE_CHARACTERS if len(text) > _LEAST_PIECES * PIECE_CHARACTERS else len(text)
        begin = 0
        while len(text) - begin > size:
            end = self._cut(text, begin + size)
            yield begin, end
            begin = end
        yield begin, len(text)

    def _cut(self, text: str, end: int) -> int:
        """Find the last place up to `end` where a cut changes no token around it; `end` if there is none."""
        for place in islice(_places(text, end), _MOST_TRIES):
            before, after = text[max(0, place - _WINDOW) : place], text[place : place + _WINDOW]
            apart = self._encode_piece(before, is_first=True) + self._encode_piece(after, is_first=False)
            if apart == self._encode_piece(before + after, is_first=True):
                return place
        return end

    def _encode_piece(self, text: str, is_first: bool) -> list[int]:
        """Tokenize a part of a document. is_first: it is the start; otherwise it continues other text."""
        return self.encode_document(text) if is_first else _continued(self.encode_document, text)

    def _limit(self, max_new_tokens: int) -> int:
        room = self.limit - max_new_tokens
        return room if self.options.max_prompt_tokens is None else min(self.options.max_prompt_tokens, room)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._documents.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def _spell(self, text: str) -> list[int]:
        """Tokenize a forged control token by characters: tokenizers split special tokens, but not all added ones."""
        ids = [token_id for character in text for token_id in self._tokenize(character)]
        return [token_id for token_id in ids if token_id not in self._control_ids]

    def _encode_template(self, options: PromptOptions) -> tuple[list[int], list[int]]:
        """Tokenize what stands before and behind the document."""
        prefix, suffix = _template(self._tokenizer, options)
        return _bos(self._tokenizer) + self._encode(prefix), _continued(self._encode, suffix)

    def _encode_instruction(self, instruction: Around) -> tuple[list[int], list[int]]:
        """Tokenize what stands before and behind a document that has its own instruction, which is data as it is."""
        pieces = [self._encode_piece(part, is_first=False) if part else [] for part in instruction]
        return self._frame[0] + pieces[0], pieces[1] + self._frame[1]

    def _encode(self, text: str) -> list[int]:
        """Tokenize the template, in which a control token is one."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _continued(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Tokenize text that continues other text, without the space that some tokenizers put at the start."""
    anchor, joined = encode(_ANCHOR), encode(_ANCHOR + text)
    return joined[len(anchor) :] if joined[: len(anchor)] == anchor else encode(text)


def keep(pieces: Iterable[list[int]], room: int, policy: LengthPolicy) -> tuple[list[int], int]:
    """Keep at most `room` of a document's tokens, as the policy says; return them and how many the document has.

    Besides the result it holds one piece at most. Under `error` it keeps the head, and its caller raises.
    """
    num_tail = {"tail": room, "middle": room // 2}.get(policy, 0)
    head: list[int] = []
    tail: list[int] = []
    num_tokens = 0
    for piece in pieces:
        taken = room - num_tail - len(head)
        head += piece[:taken]
        rest = piece[taken:]
        tail = (tail + rest)[max(0, len(tail) + len(rest) - num_tail) :]
        num_tokens += len(piece)
    return head + tail, num_tokens


def _places(text: str, end: int) -> Iterator[int]:
    """Yield places where a long text may be cut, the last first: before single spaces, then anywhere."""
    begin = end - _WINDOW
    spaces = [begin + found.start() for found in re.finditer(r"(?<=\S) (?=\S)", text[begin:end])]
    yield from islice(reversed(spaces), _MOST_TRIES // 2)
    yield from range(end, begin, -1)


def control_token_ids(tokenizer: Any) -> frozenset[int]:
    """Collect the ids that steer a model: added tokens other than white space and a mere unknown token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = set(tokenizer.all_special_ids)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unknown = {tokenizer.unk_token_id} - roles
    return frozenset((added | special) - unknown)


def _template(tokenizer: Any, options: PromptOptions) -> tuple[str, str]:
    """Render the template; return the text before and after the document."""
    before, after = around_document(options.instruction) if options.template.columns else options.template.around({})
    content = before + _SENTINEL + after
    rendered = _chat(tokenizer, options, content) if tokenizer.chat_template else _plain(options, content)
    if rendered.count(_SENTINEL) != 1:
        raise ValueError(
            f"the chat template renders the document {rendered.count(_SENTINEL)} times, but must render it once"
        )
    prefix, suffix = rendered.split(_SENTINEL)
    return prefix, suffix


def _chat(tokenizer: Any, options: PromptOptions, content: str) -> str:
    messages = [{"role": "system", "content": options.system}] if options.system else []
    for example in options.examples:
        messages += [{"role": "user", "content": example.user}, {"role": "assistant", "content": example.assistant}]
    messages.append({"role": "user", "content": content})
    try:
        with _at_most(TEMPLATE_S):
            rendered: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options.template_options
            )
    except TimeoutError:
        raise ValueError(f"the chat template does not end within {TEMPLATE_S:g} s") from None
    except Exception as error:
        raise ValueError(
            f"the chat template refuses the prompt ({error}); if it takes no system message, leave out prompt.system"
        ) from error
    return rendered


@contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer.

    Only the main thread can be interrupted. A run renders its template there before any other thread or process does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plain(options: PromptOptions, content: str) -> str:
    """Write the prompt of a model that has no chat template."""
    shown = [f"{example.user}\n\nSummary: {example.assistant}" for example in options.examples]
    said = [options.system] if options.system else []
    return "\n\n".join([*said, *shown, f"{content}\n\nSummary:"])


def _document_tokenizer(tokenizer: Any) -> Tokenizer:
    """Copy the tokenizer proper, without transformers around it, for which special tokens are text.

    With a small vocabulary, transformers' own work on a batch of one is a quarter of the cost. The copy neither
    truncates nor pads, whatever its file says.
    """
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()
    return own


def _bos(tokenizer: Any) -> list[int]:
    """Return the BOS token if the tokenizer begins texts with one; a chat template brings its own."""
    bos = tokenizer.bos_token_id
    return [bos] if not tokenizer.chat_template and bos in tokenizer("")["input_ids"] else []


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the token that the chat template writes after an answer; None if that is none."""
    said = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    try:
        with _at_most(TEMPLATE_S):
            rendered: str = tokenizer.apply_chat_template(said, tokenize=False)
    except Exception:  # noqa: BLE001  templates raise anything for what they do not take
        return None
    after = tokenizer(rendered.rpartition("Answer")[2].lstrip(), add_special_tokens=False)["input_ids"]
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None

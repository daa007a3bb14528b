"""Prompts: options, chat template and length policy. Begin at `Prompts`."""

from __future__ import annotations

import copy
import json
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Any, Literal

import numpy as np
from jinja2 import Undefined, meta, nodes
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specextend.core import Questions, Values, counted, did_you_mean, first_line, mended
from specextend.data.inputs import DocumentError
from specextend.data.instructions import PLACE, Around, Instruction, around_document

LengthPolicy = Literal["error", "head", "tail", "middle", "parts"]
PIECE_CHARACTERS = 1 << 18
"""Length of tokenized pieces of a long document. A call takes about 100 bytes per character."""
_LEAST_PIECES = 4
_WINDOW = 2048
"""Characters on both sides of a cut that are tokenized to check it."""
_MOST_TRIES = 64

TEMPLATE_S = 10.0
"""Time limit of a chat template in seconds; usual templates need milliseconds."""

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Markers around reasoning. A template may write the first, or both to suppress reasoning."""
CLOCK = "strftime_now"
"""Function for the time in chat templates, and key for a fixed time in `template_options`."""
_PLAIN = (
    "{% for each in messages %}{{ ' ' if each.role == 'assistant' else '' }}{{ each.content }}"
    "{{ '\n\nSummary:' if each.role == 'user' else '\n\n' }}{% endfor %}"
)
_CHANCE = re.compile(r"\| *random\b|\blipsum\(|<[\w ,.'<>-]+ at 0x[0-9a-f]{6,}>")
"""Random filters and memory addresses, which chat templates must not contain."""
_PROBE = "\u20630" * 50_000
_MARKS = range(0xE000, 0xF8FF)
"""Private-use characters for messages in the check of a template."""
_STAND_INS = range(0xF0000, 0xFFFFE)
"""Private-use characters for the first characters of control tokens in documents."""
_JOINT = 256
"""Last characters of a document, by which the tokens after it are found."""
ANSWERS = ("Yes", "No")
_ANCHOR = "\n"
"""Text before a piece, because tokenizers may treat the start of a text specially."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A user message with a document, and the right answer."""

    user: str
    """Message with its document."""
    assistant: str
    """Right answer."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """`prompt.*`: The prompt, and how a document that is too long is shortened."""

    instruction: str = "Summarize the following document."
    """The user message, a jinja2 template: `{{ document }}` is the document, appended if missing;
    any other name is a column of the row.
    """
    examples: tuple[Example, ...] = ()
    """Example turns before the user message: a list of `user` and `assistant`."""
    template_options: Values = field(default_factory=dict)
    """Variables for the model's chat template, such as `enable_thinking: false`."""
    verification: str = "Does the document support this sentence? Answer Yes or No."
    """The question of `output.verify`, answered Yes or No: `{{ sentence }}` is the sentence,
    appended if missing. The question replaces the text after the document.
    """
    system: str = ""
    """The system message; empty sends none."""
    length_policy: LengthPolicy = "middle"
    """What a document that is too long keeps: the `head`, the `tail`, both ends (`middle`), or all,
    read in `parts` that are merged; `error` makes it an error row.
    """
    max_prompt_tokens: int | None = None
    """Most tokens of the rendered prompt. Unset, the context of the model decides."""

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(
                f"prompt.max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}"
            )
        _ = self.template
        _ = self.question

    @property
    def question(self) -> Around:
        """Return the text before and after the sentence in `verification`. Raises ValueError."""
        template = Instruction("prompt.verification", self.verification, "sentence")
        if template.columns:
            raise ValueError(
                f"prompt.verification names {template.columns[0]}; it takes {{{{ sentence }}}} "
                "alone, and no columns"
            )
        return template.around({})

    @property
    def template(self) -> Instruction:
        """Return the instruction as a template. Raises ValueError."""
        return Instruction("prompt.instruction", self.instruction)


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """`parts.*`: Documents under `prompt.length_policy: parts` that do not fit into one prompt.

    Each part is summarised, and the summaries are merged, at once or group by group.
    """

    tokens: int | None = None
    """Most tokens of a part; unset, all that fit into a prompt. Parts of a document have similar
    lengths. A document that fits into one prompt is read whole; a lower `prompt.max_prompt_tokens`
    splits it too.
    """
    instruction: str = ""
    """The user message for a part, with `{{ document }}` but no columns; empty means
    `prompt.instruction`. An instruction of the row replaces it, for merges too.
    """
    merge_instruction: str = ""
    """The user message for a merge, with the summaries in place of `{{ document }}`; empty means
    `prompt.instruction`.
    """

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 64:
            raise ValueError(f"parts.tokens must be at least 64, got {self.tokens}")
        for name in ("instruction", "merge_instruction"):
            if columns := Instruction(f"parts.{name}", getattr(self, name)).columns:
                raise ValueError(
                    f"parts.{name} names {columns[0]}; it takes {PLACE} alone, and no columns"
                )


def describe_cut(num_cut: int, num_documents: int, unread: float) -> list[str]:
    """Describe the documents that a length policy cuts; [] if it cuts none."""
    if not num_cut:
        return []
    return [
        f"{num_cut:,} of {counted(num_documents, 'document')} cut, {unread:.0%} of all tokens "
        "unread; prompt.length_policy: parts reads all"
    ]


@dataclass(frozen=True)
class Prompt:
    """Rendered prompt."""

    token_ids: list[int]
    num_dropped_tokens: int
    length_policy: LengthPolicy
    coverage: float = field(default=1.0, compare=False)
    """Fraction of the document's tokens in the prompt."""
    left_out: range = field(default=range(0), compare=False)
    """Dropped characters of the document."""


class PromptTooLongError(DocumentError):
    """A document does not fit under the policies `error` and `parts`."""


class Prompts:
    """Renderer of documents for one tokenizer.

    Args:
        tokenizer: Fast tokenizer of transformers.
        limit: Most tokens of prompt and output (`Engine.max_tokens`).
        parts: Options of the length policy `parts`.

    Raises:
        ValueError: The chat template cannot render the options.
    """

    def __init__(
        self, tokenizer: Any, options: PromptOptions, limit: int, parts: PartOptions | None = None
    ):
        self.options = options
        self.limit = limit
        self.parts = parts or PartOptions()
        self._tokenizer = tokenizer
        self._own, self._names = _renamed(tokenizer)
        longest_first = sorted(self._names, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control = re.compile(names)
        self._control_begins = re.compile(f"(?={names})(.)", re.DOTALL)
        self._bos = _bos(tokenizer)
        source = template_source(tokenizer, options)
        self._chat = _Chat(tokenizer, options, source)
        said = (source, tokenizer.get_added_vocab())
        self._thinking = next(
            (pair for place in said for pair in THINKING if pair[1] in place), None
        )
        self._look()

    def _look(self) -> None:
        options = self.options
        template = self.options.template
        self._around = (
            around_document(options.instruction) if template.columns else template.around({})
        )
        with _at_most(TEMPLATE_S):
            rendered = self._rendered(_PROBE)
            self._chat.check()
        if (count := rendered.count(_PROBE)) != 1:
            raise ValueError(
                f"the chat template renders a document {count} times, but must render all of it "
                "once"
            )
        if _CHANCE.search(rendered):
            raise ValueError(
                "the chat template writes a place in memory, which is another one in each process"
            )
        self.begins_thinking = rendered.rstrip().endswith(
            tuple(self._names.get(begin, begin) for begin, _ in THINKING)
        )
        """Whether prompts end with the start of reasoning."""
        self.num_template_tokens = self._measure(None)
        """Tokens of a prompt without its document."""

    def render(self, text: str, max_new_tokens: int, instruction: Around | None = None) -> Prompt:
        """Render a document with the length policy, to the tokens of transformers.

        Control tokens in the document or its instruction stay text. The template sees a document
        after cuts.

        Args:
            max_new_tokens: Output limit of the document.
            instruction: Instruction of the document; None for the instruction of the task.

        Raises:
            PromptTooLongError: The document does not fit under `error` or `parts`.
            DocumentError: `PromptTooLong`, if there is no room for a document.
        """
        policy = self.options.length_policy
        limit = self._limit(max_new_tokens)
        token_ids, size = self._encode(text, instruction, limit)
        if size <= limit:
            return Prompt(token_ids, 0, policy)
        room = self.room(max_new_tokens, instruction)
        if policy in ("error", "parts"):
            message = f"the prompt has {size} tokens, the limit is {limit}"
            raise PromptTooLongError("PromptTooLong", message, stage="prompt")
        starts = self.token_starts(text)
        while room > 0:
            left_out, num_kept = cut(text, starts, room, policy)
            kept = text[: left_out.start] + text[left_out.stop :]
            token_ids, size = self._encode(kept, instruction, limit)
            if size <= limit and num_kept:
                return Prompt(
                    token_ids, len(starts) - num_kept, policy, num_kept / len(starts), left_out
                )
            room = min(room - 1, room * limit // size)
        raise _no_room(limit, max_new_tokens, limit)

    def questions(
        self, prompt: Prompt, text: str, instruction: Around | None, asked: Sequence[str]
    ) -> Questions:
        """Render questions in place of the text after a document.

        Args:
            prompt: Prompt from `render`.
            text: Document.
            instruction: As for `render`.
            asked: Questions.

        Returns:
            Questions for the engine; empty if the end of the prompt depends on the whole document.
        """
        end = (text[: prompt.left_out.start] + text[prompt.left_out.stop :])[-_JOINT:]
        whole = self._encode(end, instruction, sys.maxsize)[0]
        others = [self._encode(end, instruction, sys.maxsize, each)[0] for each in asked]
        shared = len(commonprefix([whole, *others]))  # noqa: RUF071  of lists it compares item by item
        num_read = len(prompt.token_ids) - len(whole) + shared
        is_end = num_read > 0 and prompt.token_ids[num_read:] == whole[shared:]
        yes, no = self._tokenizer([*ANSWERS], add_special_tokens=False)["input_ids"]
        begin = len(commonprefix([yes, no]))  # noqa: RUF071
        token_ids = [[*each[shared:], *yes[:begin]] for each in others if is_end]
        return Questions(num_read, token_ids, yes[begin], no[begin])

    @property
    def opening(self) -> tuple[str, tuple[Example, ...], str]:
        """Return everything before the document."""
        return self.options.system, self.options.examples, self._around[0]

    def told_apart(self, text: str, token_ids: Sequence[int] = ()) -> tuple[str, str | None]:
        """Divide an output into answer and reasoning.

        Args:
            token_ids: Tokens of the output, to find markers that are special tokens.

        Returns:
            Answer (empty if the output ends within the reasoning), and reasoning (None without it).
        """
        if self._thinking is None:
            return text, None
        begin, end = self._thinking
        marked = text
        for marker in (end, begin):
            token_id = (
                self._tokenizer.convert_tokens_to_ids(marker) if marker in self._names else None
            )
            if token_id in token_ids:
                before = self.decode(token_ids[: token_ids.index(token_id)])
                marked = marked[: len(before)] + marker + marked[len(before) :]
        thought, ends, answer = marked.partition(end)
        if not (ends or self.begins_thinking or marked.lstrip().startswith(begin)):
            return text, None
        return answer.lstrip(), thought.strip().removeprefix(begin).strip()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode the first tokens of an output like the engine."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def with_instruction(self, instruction: str) -> Prompts:
        """Return prompts with another instruction."""
        other = copy.copy(self)
        other.options = replace(self.options, instruction=instruction)
        other._look()
        return other

    def room(self, max_new_tokens: int, instruction: Around | None = None) -> int:
        """Return the number of document tokens that fit.

        Raises:
            DocumentError: `PromptTooLong`, if there is no room.
        """
        num_template = (
            self.num_template_tokens if instruction is None else self._measure(instruction)
        )
        limit = self._limit(max_new_tokens)
        if limit <= num_template:
            raise _no_room(num_template, max_new_tokens, limit)
        return limit - num_template

    def encode_document(self, text: str) -> list[int]:
        """Tokenize a document without control tokens."""
        text = mended(text)
        token_ids: list[int] = self._own.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def token_starts(self, text: str) -> NDArray[np.int64]:
        """Return the first character of each token of a document [N]."""
        text = mended(text)
        starts = [np.zeros(0, np.int64)]
        for begin, end in self._pieces(text):
            anchor = _ANCHOR if begin else ""
            offsets = self._own.encode(anchor + text[begin:end], add_special_tokens=False).offsets
            size = len(anchor)
            found = [
                begin + max(0, first - size) for first, last in offsets if last > size or not begin
            ]
            starts.append(np.array(found, np.int64))
        return np.concatenate(starts)

    def encode_pieces(self, text: str) -> Iterator[list[int]]:
        """Tokenize a document piece by piece; up to the length of four pieces in one call.

        The tokens are those of the whole text if no token depends on text more than 2,048
        characters away. In an endless word, tokens beside a cut may differ.
        """
        for begin, end in self._pieces(text):
            yield self._encode_piece(text[begin:end], is_first=begin == 0)

    def _pieces(self, text: str) -> Iterator[tuple[int, int]]:
        size = PIECE_CHARACTERS if len(text) > _LEAST_PIECES * PIECE_CHARACTERS else len(text)
        begin = 0
        while len(text) - begin > size:
            end = self._cut(text, begin + size)
            yield begin, end
            begin = end
        yield begin, len(text)

    def _cut(self, text: str, end: int) -> int:
        """Find the last cut up to `end` that changes no token nearby; `end` if there is none."""
        for place in islice(_places(text, end), _MOST_TRIES):
            before = text[max(0, place - _WINDOW) : place]
            after = text[place : place + _WINDOW]
            apart = self._encode_piece(before, is_first=True) + self._encode_piece(
                after, is_first=False
            )
            if apart == self._encode_piece(before + after, is_first=True):
                return place
        return end

    def _encode_piece(self, text: str, is_first: bool) -> list[int]:
        """Tokenize a piece; a later piece without the space that some tokenizers add."""
        if is_first:
            return self.encode_document(text)
        anchor = self.encode_document(_ANCHOR)
        joined = self.encode_document(_ANCHOR + text)
        return (
            joined[len(anchor) :] if joined[: len(anchor)] == anchor else self.encode_document(text)
        )

    def _limit(self, max_new_tokens: int) -> int:
        return min(self.limit - max_new_tokens, self.options.max_prompt_tokens or self.limit)

    def _encode(
        self, text: str, instruction: Around | None, most: int, question: str | None = None
    ) -> tuple[list[int], int]:
        """Tokenize a prompt; return `most` tokens and the number of all."""
        try:
            rendered = self._rendered(text, instruction, question)
        except ValueError as error:
            raise DocumentError("BadInstruction", first_line(error), stage="prompt") from error
        token_ids = list(self._bos)
        size = len(self._bos)
        for piece in self.encode_pieces(rendered):
            token_ids += piece[: max(0, most - len(token_ids))]
            size += len(piece)
        return token_ids, size

    def _rendered(
        self, text: str, instruction: Around | None = None, question: str | None = None
    ) -> str:
        """Render a document, or a question in place of the text after it.

        Only control tokens of the template get their names. The template sees data with stand-ins
        for the first characters of control tokens.
        """
        before, after = self._around if instruction is None else instruction
        if question is not None:
            text, after = f"{text}\n\n{question}", ""
        data = text if instruction is None else before + text + after
        stand_ins: dict[str, str] = {}
        if self._control.search(data):
            free = (chr(code) for code in _STAND_INS if chr(code) not in data)
            stand_ins = dict(zip({token[0] for token in self._names}, free, strict=False))
            data = self._control_begins.sub(lambda found: stand_ins[found[1]], data)
        written = self._chat.write(before + data + after if instruction is None else data)
        named = self._control.sub(lambda found: self._names[found[0]], written)
        return named.translate({ord(other): first for first, other in stand_ins.items()})

    def _measure(self, instruction: Around | None) -> int:
        return self._encode("x", instruction, 0)[1] - len(self.encode_document("x"))


def _no_room(num_template: int, max_new_tokens: int, limit: int) -> DocumentError:
    return DocumentError(
        "PromptTooLong",
        f"the template takes {num_template} tokens of the {max(0, limit)} that max_new_tokens "
        f"{max_new_tokens} leaves for the prompt, so there is no room for a document",
        stage="prompt",
    )


def cut(text: str, starts: NDArray[np.int64], room: int, policy: LengthPolicy) -> tuple[range, int]:
    """Cut a text to at most `room` tokens at whole characters.

    Args:
        starts: First character of each token [N], ascending.

    Returns:
        Range of dropped characters, and number of kept tokens.
    """
    num_tokens = len(starts)
    if num_tokens <= room:
        return range(0), num_tokens
    num_tail = {"tail": room, "middle": room // 2}.get(policy, 0)
    ends = np.append(starts, len(text))
    head_end = ends[room - num_tail] if room > num_tail else 0
    first = num_tokens - num_tail
    if first and ends[first - 1] == ends[first]:  # one character has several tokens
        first = int(ends.searchsorted(ends[first], "right"))
    num_head = int(starts.searchsorted(head_end))
    return range(head_end, ends[first]), num_head + num_tokens - first


def _places(text: str, end: int) -> Iterator[int]:
    """Yield places to cut a long text, last first: before single spaces, then anywhere."""
    begin = end - _WINDOW
    spaces = [begin + found.start() for found in re.finditer(r"(?<=\S) (?=\S)", text[begin:end])]
    yield from islice(reversed(spaces), _MOST_TRIES // 2)
    yield from range(end, begin, -1)


def template_source(tokenizer: Any, options: PromptOptions) -> str:
    """Return the chat template of a model, or else a plain template. Raises ValueError if the model
    has several without a default.
    """
    if not tokenizer.chat_template:
        return _PLAIN
    try:
        source: str = tokenizer.get_chat_template(options.template_options.get("chat_template"))
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ValueError(
            f"the model has the chat templates {names}, and none is its default: name one in "
            "prompt.template_options, as in {chat_template: NAME}"
        ) from None
    return source


def with_time(options: PromptOptions, tokenizer: Any, recorded: str | None) -> PromptOptions:
    """Fix the time for a chat template that asks for it: the recorded time, or else now."""
    if CLOCK in options.template_options or CLOCK not in template_source(tokenizer, options):
        return options
    time = recorded or datetime.now().isoformat(timespec="seconds")
    return replace(options, template_options=options.template_options | {CLOCK: time})


_Turn = tuple[str, str, str]
"""Configuration key, role and content."""


class _Chat:
    """Chat template with the messages of a task. Raises ValueError."""

    def __init__(self, tokenizer: Any, options: PromptOptions, source: str):
        if found := _CHANCE.search(source):
            raise ValueError(
                f"the chat template draws at random ({found[0]}), so that each process has another "
                "prompt"
            )
        told = str(options.template_options.get(CLOCK, datetime.now()))
        try:
            now = datetime.fromisoformat(told)
        except ValueError:
            raise ValueError(
                f"prompt.template_options.{CLOCK} must be a time like 2026-01-31T08:00, got {told}"
            ) from None
        self._source = source
        self._options = dict(options.template_options)
        self._fixed = {CLOCK: now.strftime, "add_generation_prompt": True}
        self._variables = {"tools": None, "documents": None, **tokenizer.special_tokens_map}
        self._own = {CLOCK} if CLOCK in source else set()
        if tokenizer.chat_template:
            self._own.add("chat_template")
        turns: list[_Turn] = []
        if options.system:
            turns.append(("prompt.system", "system", options.system))
        for number, example in enumerate(options.examples):
            turns += [
                (f"prompt.examples[{number}].user", "user", example.user),
                (f"prompt.examples[{number}].assistant", "assistant", example.assistant),
            ]
        self._turns = turns

    def write(self, content: str) -> str:
        """Render a user message. Raises ValueError if part of a message is missing."""
        turns = [*self._turns, ("the document's message", "user", content)]
        return self._whole(turns, self._options)

    def check(self) -> None:
        marks = map(chr, _MARKS)
        turns = [*self._turns, ("the document's message", "user", "x")]
        told_apart = [(what, role, next(marks) * len(text)) for what, role, text in turns]
        self._whole(told_apart, self._options)
        if options := self._options.keys() - self._own:
            self._check_options(options, turns)

    def _check_options(self, names: set[str], turns: list[_Turn]) -> None:
        tree = self._template.environment.parse(self._source)
        known = meta.find_undeclared_variables(tree) - self._fixed.keys() - {"messages"}
        for name in sorted(names - known):
            raise ValueError(
                f"prompt.template_options.{name}: the chat template takes no such variable"
                f"{did_you_mean(name, known)}; it takes {', '.join(sorted(known)) or 'none'}"
            )
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        for name in sorted(names):
            for value, put in _leaves(self._options[name]):
                others: dict[Any, list[Any]] = {True: [False, Undefined()], False: [True]}
                tried = others.get(value) or [f"{value}x", *(texts - {""})]
                if not any(self._tells(turns, {name: put(other)}) for other in tried):
                    raise ValueError(
                        f"prompt.template_options.{name}: the chat template does not look at "
                        f"{json.dumps(value)}: give what it tests, such as true or false without "
                        "quotes, or leave it out"
                    )

    def _tells(self, turns: list[_Turn], other: Values) -> bool:
        try:
            return self._render(turns, self._options | other) != self._render(turns, self._options)
        except ValueError:
            return True

    def _whole(self, turns: list[_Turn], options: Values) -> str:
        written = self._render(turns, options)
        for what, _, text in turns:
            if text.strip() not in written and _dense(text) not in _dense(written):
                raise ValueError(
                    f"the chat template does not render all of {what}; change that, or take a "
                    "model whose template does"
                )
        return written

    @property
    def _template(self) -> Any:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self._source)

    def _render(self, turns: list[_Turn], options: Values) -> str:
        messages = [{"role": role, "content": content} for _, role, content in turns]
        given = {**self._variables, **options, **self._fixed, "messages": messages}
        try:
            return str(self._template.render(given))
        except TimeoutError:
            raise ValueError(f"the chat template does not end within {TEMPLATE_S:g} s") from None
        except Exception as error:
            raise ValueError(
                f"the chat template refuses the prompt ({first_line(error)}); if it takes no "
                "system message, leave out prompt.system"
            ) from error


def _dense(text: str) -> str:
    return "".join(text.split())


def _leaves(value: Any) -> Iterator[tuple[str | bool, Callable[[Any], Any]]]:
    """Yield each string and Boolean of an option, with a function that replaces it."""
    if isinstance(value, str | bool):
        yield value, lambda other: other
    elif isinstance(value, Mapping | Sequence):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            for leaf, put in _leaves(value[key]):
                yield leaf, partial(_with, value, key, put)


def _with(value: Any, key: Any, put: Callable[[Any], Any], other: Any) -> Any:
    changed = copy.copy(value)
    changed[key] = put(other)
    return changed


@contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer, on the main thread, where a run renders
    first.
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


def _renamed(tokenizer: Any) -> tuple[Tokenizer, dict[str, str]]:
    """Copy the tokenizer with secret names for special tokens; return the names, too.

    No text contains a secret name, so only the template makes control tokens.
    """
    key = secrets.token_hex(8)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [
        each["content"]
        for each in parts["added_tokens"]
        if each["special"] and each["content"].strip()
    ]
    names = {token: f"<{key}-{number}>" for number, token in enumerate(special)}

    def rename(part: Any) -> Any:
        match part:
            case str():
                return names.get(part, part)
            case list():
                return [rename(each) for each in part]
            case dict():
                return {rename(name): rename(each) for name, each in part.items()}
        return part

    merges = parts["model"].pop("merges", None)
    renamed = rename(parts) | {"truncation": None, "padding": None}
    if merges is not None:
        kept = [pair for pair in merges if names.keys().isdisjoint([*pair, "".join(pair)])]
        renamed["model"]["merges"] = kept
    return Tokenizer.from_str(json.dumps(renamed)), names


def _bos(tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos] if not tokenizer.chat_template and bos in tokenizer("")["input_ids"] else []


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token after an answer in the chat template, or None."""
    said = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    try:
        with _at_most(TEMPLATE_S):
            rendered: str = tokenizer.apply_chat_template(said, tokenize=False)
    except Exception:  # noqa: BLE001  templates raise anything for what they do not take
        return None
    after = tokenizer(rendered.rpartition("Answer")[2].lstrip(), add_special_tokens=False)[
        "input_ids"
    ]
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None

"""Keys of documents, requests and completions, which hold no tensors; loops of tokens; functions
that show text safely.
"""

import difflib
import gc
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

from specextend.stats import DecodingStats

FinishReason = Literal["stop", "length", "repetition"]

_UNSAFE = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))
"""Unicode categories of the characters that are escaped."""
_NEEDED = frozenset(
    "\u180e\u200b\u200c\u200d\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
) | frozenset(map(chr, (*range(0x600, 0x606), *range(0x13430, 0x13440))))
"""Exceptions, because scripts are written with them: word and vowel separators, joiners, signs
around numbers.
"""

MIN_REPEATS = 4
"""Times that a stretch of tokens must stand in a row to be a loop."""
MAX_PERIOD = 64
"""Tokens of the longest stretch that is looked for."""
MIN_STOP_TOKENS = 64
"""Tokens that a loop must cover to end an output. A line of a table with one entry over and over
has covered 40.
"""

MIN_FLAGGED_TOKENS = 24
"""Tokens that a loop must cover to count as one where that costs no text."""


Values = dict[str, Any]
"""Values by name: a row, an object of JSON, a section of a configuration or of a report."""
ReadOnly = Mapping[str, Any]
"""The same, which whoever gets it does not change."""
Checkpoint = Callable[[], object]
"""Called between the steps of long work; may raise."""


class DocumentKey(NamedTuple):
    """The place of a row in the input. Inside a job a row is identified by its key, never by its
    `doc_id`.
    """

    file: int
    """Number of the input file, in path order."""
    row: int
    """Row number in that file."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options for choosing the next token from the target's distribution."""

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
    ignore_eos: bool = False
    """Go on after an end-of-sequence token, as benchmarks of a fixed output length need it."""
    stop_repetition: bool = False
    """End the output once its tokens repeat themselves in a loop."""
    repetition_penalty: float | None = None
    """Divide the positive logits of tokens that occurred by this and multiply the negative ones; 1
    changes nothing. None: what the model asks.
    """
    no_repeat_ngram_size: int | None = None
    """Choose no token that completes a run of so many tokens that occurred before; 0 allows all.
    None: what the model asks.
    """

    @property
    def leaves_out(self) -> bool:
        """Return True if only some of the likeliest tokens can be chosen, which depend on all
        others.
        """
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if any(not stop for stop in self.stop):
            raise ValueError("stop must not hold an empty string")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if self.no_repeat_ngram_size is not None and self.no_repeat_ngram_size < 0:
            raise ValueError(
                f"no_repeat_ngram_size must be at least 0, got {self.no_repeat_ngram_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Asks:
    """Holds what a model's `generation_config.json` asks of its outputs, besides where they end."""

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never chosen."""
    passed_over: tuple[str, ...] = ()
    """Keys that are not served."""

    def of(self, sampling: SamplingParams) -> Self:
        """Return what holds for a request: its own penalties or else the model's."""
        names = ("repetition_penalty", "no_repeat_ngram_size")
        own = {name: getattr(sampling, name) for name in names}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def penalises(self) -> bool:
        """Return True if logits are changed."""
        return replace(self, passed_over=()) != Asks()


class Choice(NamedTuple):
    """A field of which all values are known."""

    field: str
    values: tuple[str, ...]
    texts: tuple[str, ...]
    """How an output goes on for each value. None begins another."""


class Scored(NamedTuple):
    """Hold what the target thinks of a value of a choice."""

    field: str
    value: str
    log_prob: float
    """Given that it is one of the field's values."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt for the engine."""

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafts: bool | None = None
    """True to draft in any case, False for plain steps, None to draft while that pays."""
    keeps_leads: bool = False
    """True for `Completion.leads`, if it does not draft."""
    keeps_log_probs: bool = False
    """True for `Completion.log_probs`, if the output is not made of choices."""
    schema: str = ""
    """JSON Schema of the object that the output must be; empty for any text."""
    choices: tuple[Choice, ...] = ()
    """If given, the output is one text of each, the likeliest behind those before it; nothing else
    is asked of it.
    """
    closed: tuple[Choice, ...] = ()
    """Fields of the schema whose values are scored once the output is done; their texts are the
    values alone.
    """

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Completion:
    """The output of the engine for one request.

    `token_ids` ends with the EOS or with the token that completes a stop string; `text` contains
    neither. A loop that ends the output is part of both, up to the token that completes it. Behind
    choices there is no EOS.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: DecodingStats
    leads: tuple[float, ...] = ()
    """Of each token, by how much of its logit it stood above every other; behind choices, of its
    choice.
    """
    scored: tuple[Scored, ...] = ()
    """All values of a request's choices and closed fields, one after the other."""
    log_probs: tuple[float, ...] = ()
    """Of each token, by the target's own logits: before temperature, penalties and grammar."""


def mended(value: Any, *, decodes: bool = False) -> Any:
    """Return a value in which halves of surrogate pairs are U+FFFD, those inside of its lists and
    fields as well.

    decodes: bytes become text, in which what is not UTF-8 is U+FFFD, too.
    """
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case bytes() if decodes:
            return value.decode(errors="replace")
        case list() | tuple():
            return [mended(each, decodes=decodes) for each in value]
        case Mapping():
            return {mended(name): mended(each, decodes=decodes) for name, each in value.items()}
    return value


def printable(text: str, keep: str = "") -> str:
    r"""Escape text so that it is safe on a terminal, in a log line and in a report.

    Control characters, line ends of every kind, characters that are invisible or reorder their
    neighbours, halves of surrogate pairs and private-use characters become codes such as `\x1b` and
    `\u202e`, except those in `keep`. Text in any language is left unchanged, including the joiners,
    separators and signs that its script needs.
    """
    safe = _NEEDED.union(keep)
    return "".join(
        each
        if each in safe or unicodedata.category(each) not in _UNSAFE
        else each.encode("unicode_escape").decode()
        for each in text
    )


def read_json(text: str, **options: Any) -> Any:
    """Parse JSON, with U+FFFD for halves of surrogate pairs, which only escapes can make. Raises
    ValueError.
    """
    value = json.loads(text, **options)
    return mended(value) if "\\u" in text else value


def json_values(text: str, begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each value in the object or list that begins at `begin`, empty in a list,
    and where its JSON begins and ends. Raises ValueError if the text breaks off.
    """

    def behind_gap(place: int) -> int:
        return len(text) - len(text[place:].lstrip(" \t\r\n,:"))

    decode = json.JSONDecoder().raw_decode
    place = behind_gap(begin + 1)
    while not text.startswith(("]", "}"), place):
        name = ""
        if text[begin] == "{":
            name, place = decode(text, place)
        start = behind_gap(place)
        _, end = decode(text, start)
        yield name, start, end
        place = behind_gap(end)


def unique_fields(fields: list[tuple[str, Any]]) -> Values:
    """Return an object of JSON. Raises ValueError if it would lose a field."""
    values = dict(fields)
    if len(values) < len(fields):
        raise ValueError(f"two of the fields {', '.join(values)} have one name")
    return values


def counted(count: int, noun: str) -> str:
    """Put a count before a noun whose plural ends in s: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Ask, at the end of a message, for the known name that is most like a misspelt one; empty if
    none is like it.

    least: similarity from 0 to 1 from which one is.
    """
    near = difflib.get_close_matches(name, list(known), 1, least)
    return f"; did you mean {near[0]}?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if it has no message."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip()


def one_line(error: BaseException) -> str:
    """Return an exception's whole message, its lines joined."""
    return " ".join(str(error).split())


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python look for no garbage during a `with` block: a large import makes none, but objects
    by the million.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # both together make all objects old
        if was_enabled:
            gc.enable()


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra of this package, which no package index has."""
    return f"pip install '.[{extra}]' in the clone, or 'WHEEL[{extra}]' with the path of the wheel"


def ends_in_loop(token_ids: list[int], min_tokens: int) -> bool:
    """Return True if a stretch of up to MAX_PERIOD tokens, MIN_REPEATS times or more in a row, is
    the end.

    min_tokens: how many tokens the repeats must cover at least.
    """
    if len(token_ids) < min_tokens:
        return False
    last = token_ids[-1]
    longest = min(MAX_PERIOD, len(token_ids) // MIN_REPEATS)
    periods = [period for period in range(1, longest + 1) if token_ids[-1 - period] == last]
    tails = ((period, token_ids[-max(MIN_REPEATS * period, min_tokens) :]) for period in periods)
    return any(tail[period:] == tail[:-period] for period, tail in tails)


def is_loop(token_ids: list[int]) -> bool:
    """Return True if the end of a whole output is a loop; a final EOS does not hide it."""
    return any(ends_in_loop(tokens, MIN_FLAGGED_TOKENS) for tokens in (token_ids, token_ids[:-1]))

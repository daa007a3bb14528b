"""Basic types without tensors, loop detection and safe text."""

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
"""Unicode categories of escaped characters."""
_NEEDED = frozenset(
    "\u180e\u200b\u200c\u200d\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
) | frozenset(map(chr, (*range(0x600, 0x606), *range(0x13430, 0x13440))))
"""Needed by scripts: word and vowel separators, joiners, number signs."""

MIN_REPEATS = 4
MAX_PERIOD = 64
MIN_STOP_TOKENS = 64
"""Tokens of a loop that ends an output. Tables with repeated entries have covered 40."""

MIN_FLAGGED_TOKENS = 24
"""Tokens of a loop that sets a flag, where a mistake costs no text."""


Values = dict[str, Any]
"""A row, a JSON object, a section of a configuration or report."""
ReadOnly = Mapping[str, Any]
"""Values that the receiver does not modify."""
Checkpoint = Callable[[], object]
"""Call between the steps of long work; may raise."""


class DocumentKey(NamedTuple):
    """Position of a row in the input. Identifies a row within a job, unlike its `doc_id`."""

    file: int
    """Number of the input file, in path order."""
    row: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options for choosing the next token from the target's distribution."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with a total probability of top_p."""
    seed: int = 0
    """Random seed of the request; equal seeds give equal output in every decoding mode."""
    stop: tuple[str, ...] = ()
    """Strings that end the output, not included in `Completion.text`."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token, for benchmarks with fixed output lengths."""
    stop_repetition: bool = False
    """End the output when its tokens repeat in a loop."""
    repetition_penalty: float | None = None
    """Divide positive logits of earlier tokens by this value, and multiply negative ones; 1 is off.
    None: default of the model.
    """
    no_repeat_ngram_size: int | None = None
    """Forbid tokens that would repeat an n-gram of this size; 0 is off. None: default of the
    model.
    """

    @property
    def leaves_out(self) -> bool:
        """Return True if only some of the likeliest tokens can be chosen."""
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
    """Requests of a model's `generation_config.json` for outputs, except stop tokens."""

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    passed_over: tuple[str, ...] = ()

    def of(self, sampling: SamplingParams) -> Self:
        """Return the values for a request, whose penalties override the model's."""
        names = ("repetition_penalty", "no_repeat_ngram_size")
        own = {name: getattr(sampling, name) for name in names}
        return replace(self, **{name: value for name, value in own.items() if value is not None})

    @property
    def penalises(self) -> bool:
        """Return True if logits are changed."""
        return replace(self, passed_over=()) != Asks()


class Choice(NamedTuple):
    """A field with a closed set of values."""

    field: str
    values: tuple[str, ...]
    texts: tuple[str, ...]
    """No continuation of the output is a prefix of another."""


class Scored(NamedTuple):
    """The target's score of a value."""

    field: str
    value: str
    log_prob: float
    """Logarithm relative to the other values of the field."""


class Questions(NamedTuple):
    """Questions about the start of a prompt, each answered by one of two tokens."""

    num_read: int
    """Tokens of the prompt before each question."""
    token_ids: list[list[int]]
    """Tokens of each question, up to its answer."""
    yes: int
    no: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt for the engine."""

    request_id: str
    prompt_token_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafts: bool | None = None
    """True drafts always, False never, None while it pays."""
    keeps_leads: bool = False
    """Return `Completion.leads`, unless drafts are used."""
    keeps_log_probs: bool = False
    """Return `Completion.log_probs`, unless the output consists of choices."""
    schema: str = ""
    """JSON Schema for the output object; empty for free text."""
    choices: tuple[Choice, ...] = ()
    """If given, the output consists of the likeliest text of each choice, in sequence."""
    closed: tuple[Choice, ...] = ()
    """Schema fields to score after decoding. Their texts are the plain values."""
    questions: Callable[[str, list[int]], Questions] | None = None
    """Function from text and tokens of the output to the questions of `Completion.verdicts`."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Completion:
    """The engine's output for a request.

    `token_ids` ends with the EOS or the token that completes a stop string; `text` excludes both. A
    final loop is included up to the token that completes it. Choices have no EOS.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: DecodingStats
    leads: tuple[float, ...] = ()
    """Lead of each token's logit, or a choice's, over the runner-up."""
    scored: tuple[Scored, ...] = ()
    """Values of all choices and closed fields, in order."""
    log_probs: tuple[float, ...] = ()
    """Log probability of each token before temperature, penalties and grammar."""
    verdicts: tuple[float | None, ...] = ()
    """Probability of yes against no for each question; None for a question without room in the
    cache rows of the output.
    """


def mended(value: Any, *, decodes: bool = False) -> Any:
    """Replace unpaired surrogates by U+FFFD, in nested values as well; decode bytes, if asked."""
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
    r"""Escape text for terminals, logs and reports.

    Control characters, line breaks, invisible and reordering characters, unpaired surrogates and
    private-use characters become codes such as `\x1b` and `\u202e`, except characters in `keep`.
    Joiners and signs of a script stay.
    """
    safe = _NEEDED.union(keep)
    return "".join(
        each
        if each in safe or unicodedata.category(each) not in _UNSAFE
        else each.encode("unicode_escape").decode()
        for each in text
    )


def read_json(text: str, **options: Any) -> Any:
    """Parse JSON, with U+FFFD for escaped unpaired surrogates. Raises ValueError."""
    value = json.loads(text, **options)
    return mended(value) if "\\u" in text else value


def json_values(text: str, begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield name (empty in a list), start and end of each value in the JSON at `begin`.

    Raises ValueError for truncated text.
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
    """Return a JSON object. Raises ValueError for duplicate fields."""
    values = dict(fields)
    if len(values) < len(fields):
        raise ValueError(f"two of the fields {', '.join(values)} have the same name")
    return values


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Suggest the most similar known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), 1, least)
    return f"; did you mean {near[0]}?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the class name."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip()


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line."""
    return " ".join(str(error).split())


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection, which would scan millions of objects during a large import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra: this package is on no index."""
    return f"pip install '.[{extra}]' in the clone, or 'WHEEL[{extra}]' with the path of the wheel"


def ends_in_loop(token_ids: list[int], min_tokens: int) -> bool:
    """Return True if the tokens end in MIN_REPEATS or more equal stretches of up to MAX_PERIOD."""
    if len(token_ids) < min_tokens:
        return False
    last = token_ids[-1]
    longest = min(MAX_PERIOD, len(token_ids) // MIN_REPEATS)
    periods = [period for period in range(1, longest + 1) if token_ids[-1 - period] == last]
    tails = ((period, token_ids[-max(MIN_REPEATS * period, min_tokens) :]) for period in periods)
    return any(tail[period:] == tail[:-period] for period, tail in tails)


def is_loop(token_ids: list[int]) -> bool:
    """Return True if a finished output ends in a loop, possibly before a final EOS."""
    return any(ends_in_loop(tokens, MIN_FLAGGED_TOKENS) for tokens in (token_ids, token_ids[:-1]))

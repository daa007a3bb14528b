"""From a row of the input to requests for the engine and to its summary: one request, or rounds of
parts and merges.

`summarize` is a generator, so that who runs the engine decides how: a worker waits for each
request, a `Summarizer` decodes those of many documents at once.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specextend.config import RunConfig
from specextend.core import Completion, DocumentKey, Request, Values, first_line
from specextend.data.answers import (
    choices_of,
    closed_fields,
    has_rules,
    merge_answers,
    whole_answer,
)
from specextend.data.commits import Earlier
from specextend.data.confidence import confidence_of
from specextend.data.inputs import DocumentError
from specextend.data.instructions import Around
from specextend.data.pages import with_pages
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError
from specextend.data.quality import answer_words, assess
from specextend.data.rows import Row
from specextend.data.rules import broken_rules
from specextend.data.schema import (
    COMMITTED_TASKS,
    FAILURE,
    decoded_columns,
    failure_of,
    stats_columns,
)
from specextend.decoding.device import is_out_of_memory
from specextend.stats import DecodingStats, ratio

OUT_OF_MEMORY = "OutOfMemoryError"
"""Error class of a document that does not fit into memory, whichever allocator says so."""
INCOMPLETE = "IncompleteAnswer"
"""Error class of an answer that broke off before its object ended."""


@dataclass(frozen=True)
class Summary:
    """The summary of a document, with the counts of all that was decoded for it."""

    completion: Completion
    prompt: Prompt
    """Says how much of the document was read: all of it, in parts."""
    part_rows: list[Values] | None = None
    """The parts as values of the column `part_summaries`; None for a document that fits into one
    prompt.
    """
    num_requests: int = 1
    """Parts and merges."""
    reasoning: str | None = None
    """What the model wrote while it thought, if it is of a kind that does; it is no part of the
    text.
    """
    confidence: list[Values] | None = None
    """Entries of the column `confidence`, if it is wanted; none for parts that are merged by
    rules.
    """
    tasks: tuple[Answered, ...] = ()
    """Those of all tasks if there are several; all else is of the first one that was decoded, with
    the counts of all that were.
    """

    def timed(self, total_s: float) -> Summary:
        """Return the summary of a document that took `total_s` seconds: in parts, several at a
        time.

        Those are divided as the engine's time for it was: into `ttft_s` for reading and `decode_s`
        for writing.
        """
        if self.part_rows is None and not self.tasks:
            return self
        stats = self.completion.stats
        reading = stats.prefill_s + stats.draft_prefill_s
        ttft_s = total_s * (ratio(reading, reading + stats.step_s) or 0.0)
        timed = replace(stats, ttft_s=ttft_s, decode_s=total_s - ttft_s)
        return replace(self, completion=replace(self.completion, stats=timed))


Round = tuple[Request, ...]
"""Requests that can be decoded at the same time. Their outcomes are sent back in the same order."""
Outcomes = Sequence[Completion | DocumentError]
Rounds = Generator[Round, Outcomes, Summary]


def summarize(config: RunConfig, prompts: Prompts, row: Row, name: str) -> Rounds:
    """Yield the requests for a document, round by round, take their outcomes, and return the
    summary.

    name: of the document; the ids of its requests begin with it, and with a colon behind it if
    there are several. Raises DocumentError for a document that cannot be summarised, also one that
    the engine has failed over.
    """
    limit = max_new_tokens_of(config, row)
    try:
        prompt = prompts.render(row.text, limit, row.instruction)
    except PromptTooLongError:
        if prompts.options.length_policy != "parts":
            raise
        return (yield from _InParts(config, prompts, row, name).rounds())
    request = document_request(config, row, prompt, name, is_last=True)
    [outcome] = yield (request,)
    if isinstance(outcome, DocumentError):
        raise outcome
    answer, reasoning = prompts.told_apart(outcome.text, outcome.token_ids)
    whole = _whole(config, replace(outcome, text=answer))
    confidence = _confidence(config, prompts, outcome, answer)
    return Summary(whole, prompt, reasoning=reasoning, confidence=confidence)


@dataclass(frozen=True)
class Task:
    """Says what is asked of each document."""

    name: str
    """Empty if it is the only one."""
    config: RunConfig
    prompts: Prompts


class Answered(NamedTuple):
    """Holds what came of one of several tasks of a document. row: as the task reads it."""

    task: Task
    row: Row
    state: Summary | DocumentError | Values
    """Values: the entry of an earlier start."""


def tasks_of(config: RunConfig, tokenizer: Any, limit: int) -> list[Task]:
    """Return the tasks of a run. limit: tokens of prompt and output. Raises ValueError for a bad
    template.
    """
    return [
        Task(name, each, Prompts(tokenizer, each.prompt, limit, each.parts))
        for name, each in config.each_task.items()
    ]


def answer(tasks: Sequence[Task], row: Row, name: str, earlier: Earlier | None = None) -> Rounds:
    """Yield the requests for all tasks of a document, as `summarize` does for one.

    An engine that decodes them one after another reads what their prompts begin with once, so the
    requests of tasks whose prompts begin alike follow each other. A task that fails does not end
    the others.

    Args:
        tasks: Tasks of the run.
        row: Document.
        name: Its name, as for `summarize`.
        earlier: Answers of an earlier start, of which some tasks are done again.

    Raises:
        DocumentError: No task that was decoded has an answer.
    """
    if len(tasks) == 1:
        return (yield from summarize(tasks[0].config, tasks[0].prompts, row, name))
    rows = [row, *(replace(row, instruction=other) for other in row.others)]
    under_way = [
        summarize(task.config, task.prompts, own, f"{name}:{number}")
        for number, (task, own) in enumerate(zip(tasks, rows, strict=True))
    ]
    kept = {} if earlier is None else {each["name"]: each for each in earlier.tasks}
    states: list[Round | Summary | DocumentError | Values] = [
        kept[task.name] if earlier and task.name not in earlier.again else advance(rounds, None)
        for task, rounds in zip(tasks, under_way, strict=True)
    ]
    openings = [
        (*task.prompts.opening[:2], (own.instruction or task.prompts.opening[2:])[0])
        for task, own in zip(tasks, rows, strict=True)
    ]
    order = sorted(range(len(tasks)), key=lambda number: openings.index(openings[number]))
    while step := tuple(
        chain.from_iterable(state for number in order if isinstance(state := states[number], tuple))
    ):
        found = iter((yield step))
        for number in order:
            if isinstance(state := states[number], tuple):
                states[number] = advance(under_way[number], [*islice(found, len(state))])
    ended = [state for state in states if not isinstance(state, tuple)]
    return _together(tuple(map(Answered, tasks, rows, ended)))


def _together(answered: tuple[Answered, ...]) -> Summary:
    """Return the summary of a document of several tasks. Raises DocumentError if none of them was
    decoded to its end.
    """
    summaries = [state for _, _, state in answered if isinstance(state, Summary)]
    if not summaries:
        entries = _task_rows(answered)
        raise DocumentError(**failure_of(entries), summary=entries[0]["text"], tasks=entries)
    stats = DecodingStats()
    for summary in summaries:
        stats.add(summary.completion.stats)
    whole = replace(summaries[0].completion, stats=stats)
    return replace(summaries[0], completion=whole, tasks=answered)


def _task_rows(answered: Iterable[Answered]) -> list[Values]:
    """Return what the column `tasks` has: of each task what the row of a run of its own would
    have, of one that failed why, and what it wrote.
    """
    found: list[Values] = []
    for task, row, state in answered:
        made: Values
        if isinstance(state, Summary):
            made = _of_one(task.config, row, state)
        elif isinstance(state, DocumentError):
            made = asdict(state)
        else:
            found.append(state)
            continue
        entry = dict.fromkeys(each.name for each in COMMITTED_TASKS.value_type)
        entry |= {name: value for name, value in made.items() if name in entry}
        found.append(entry | {"name": task.name, "text": made["summary"]})
    return found


def advance(rounds: Rounds, outcomes: Outcomes | None) -> Round | Summary | DocumentError:
    """Send outcomes to a document's rounds, None at first; return the next round or, after the
    last, the summary or the error.
    """
    try:
        return next(rounds) if outcomes is None else rounds.send(outcomes)
    except StopIteration as end:
        summary: Summary = end.value
        return summary
    except DocumentError as error:
        return error


TimedOutcome = tuple[Completion | DocumentError, float]
"""Outcome of a request, and its time by `time.monotonic`."""


class DecodedRow:
    """A document in progress: its current round, and its start and end times."""

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self._began = math.inf
        self.ended = 0.0
        self.completions: list[Completion] = []
        """Completions of all requests, in order."""
        self.state = advance(rounds, None)

    @property
    def requests(self) -> Round:
        """Return the requests of the current round; empty when done or failed."""
        return self.state if isinstance(self.state, tuple) else ()

    def advance(self, outcomes: Sequence[TimedOutcome]) -> None:
        """Process the outcomes of the current round, in order."""
        for outcome, at in outcomes:
            self.ended = max(self.ended, at)
            if isinstance(outcome, Completion):
                self._began = min(self._began, at - outcome.stats.total_s)
                self.completions.append(outcome)
        if outcomes:
            step = advance(self._rounds, [outcome for outcome, _ in outcomes])
            total_s = self.ended - self._began
            self.state = step.timed(total_s) if isinstance(step, Summary) else step


def finished_row(
    config: RunConfig,
    row: Row,
    summary: Summary,
    *,
    received: float = 0.0,
    ended: float = 0.0,
    worker: str = "",
    attempts: int = 0,
) -> Values:
    """Assess a summary, which may take 0.1 s, and make the row of its document.

    received, ended: when the document was asked for, and when its last request was done, by
    `time.monotonic`. One of several tasks has none of these.
    """
    total_s = summary.completion.stats.total_s
    started_at = time.time() - (time.monotonic() - ended) - total_s
    kept = (each.state for each in summary.tasks if isinstance(each.state, dict))
    made = (
        _of_all(_task_rows(summary.tasks), summary.completion.stats, kept)
        if summary.tasks
        else _of_one(config, row, summary)
    )
    return made | {
        **row.key._asdict(),
        "doc_id": row.doc_id,
        "content_sha256": row.content_sha256,
        "queue_s": max(0.0, ended - received - total_s),
        "started_at": datetime.fromtimestamp(started_at, UTC),
        "worker": worker,
        "attempts": attempts,
    }


def failed_row(
    key: DocumentKey, error: DocumentError, attempts: int, earlier: Earlier | None
) -> Values:
    """Return the row of a document that has failed: with the answers of an earlier start, of which
    other tasks had failed, and this failure of those that were tried again.
    """
    made = asdict(error)
    if earlier and len({each["error_class"] is None for each in earlier.tasks}) == 2:
        again = {each["name"]: each for each in error.tasks or ()}
        failure = {name: made[name] for name in FAILURE.names}
        entries = [
            again.get(each["name"], dict.fromkeys(each) | failure | {"name": each["name"]})
            if each["name"] in earlier.again
            else each
            for each in earlier.tasks
        ]
        made = _of_all(entries, DecodingStats(), entries) | earlier.document
    return made | {**key._asdict(), "attempts": attempts}


def _of_one(config: RunConfig, row: Row, summary: Summary) -> Values:
    """Return the columns about a text."""
    prompt = summary.prompt
    quality = assess(
        summary.completion,
        row.text,
        prompt.num_dropped_tokens,
        row.reference,
        config.quality,
        " ".join(row.instruction or [config.prompt.instruction]),
        config.output.evidence_for,
        prompt.left_out if config.output.sources and not config.output.schema else None,
        [text for each in config.prompt.examples for text in (each.user, each.assistant)],
        config.output.figures_for,
    )
    made = {
        **decoded_columns(summary.completion, prompt, quality),
        "part_summaries": summary.part_rows,
        "num_requests": summary.num_requests,
        "reasoning": summary.reasoning,
        "max_new_tokens": max_new_tokens_of(config, row),
        "confidence": summary.confidence,
        "words": None if config.output.schema else answer_words(summary.completion.text, row.text),
    }
    made = with_pages(made, row.page_starts)
    broken = broken_rules(config.output, made, row.passed)
    return made | {"quality_flags": [*quality.quality_flags, *broken]}


def _of_all(entries: list[Values], stats: DecodingStats, kept: Iterable[Values]) -> Values:
    """Return the columns that the row of a document has of all its tasks: sums of counts, and of
    the rest those of the first one that has an answer. A row of which a task failed says why.

    stats: of what was decoded now. kept: entries of an earlier start.
    """
    tasks = [each for each in entries if each["error_class"] is None]
    joined = {
        name: [each for task in tasks for each in task[name] or ()]
        for name in ("quality_flags", "evidence", "choices", "figures")
    }
    total = DecodingStats()
    for one in (stats, *map(DecodingStats.of_row, kept)):
        total.add(one)
    reasons = [task["finish_reason"] for task in tasks]
    return {
        **tasks[0],
        **stats_columns(total),
        "summary": entries[0]["text"] if entries[0]["error_class"] is None else None,
        "finish_reason": next((reason for reason in reasons if reason != "stop"), "stop"),
        "max_new_tokens": None,
        "num_dropped_tokens": sum(task["num_dropped_tokens"] for task in tasks),
        "num_requests": sum(task["num_requests"] for task in tasks),
        "coverage": min(task["coverage"] for task in tasks),
        "quality_flags": [*dict.fromkeys(joined["quality_flags"])],
        "evidence": joined["evidence"] or None,
        "choices": joined["choices"] or None,
        "figures": joined["figures"] or None,
        **failure_of(entries),
        "tasks": entries,
    }


def check_requests(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError if no document could be summarised: as data, or in parts if rows have no
    limits of their own.
    """
    if config.output.schema is not None and prompts.begins_thinking:
        raise ValueError(
            "output.schema leaves no room to think, with which the model begins: set "
            "prompt.template_options to what "
            "keeps it from that, such as {enable_thinking: false}"
        )
    if config.prompt.length_policy == "parts" and not config.input.has_limits:
        merges = not has_rules(config.output.json_schema)
        PartPrompts(prompts).check(config.decoding.max_new_tokens, merges=merges)


@dataclass(slots=True)
class _InParts:
    """A document that is summarised in parts."""

    config: RunConfig
    prompts: Prompts
    row: Row
    name: str
    stats: DecodingStats = field(default_factory=DecodingStats)
    num_requests: int = 0
    reasoning: str | None = None
    confidence: list[Values] | None = None

    def rounds(self) -> Rounds:
        """Yield the parts, then merges until one is left."""
        part_prompts = PartPrompts(self.prompts)
        limit = max_new_tokens_of(self.config, self.row)
        parts = part_prompts.parts(self.row.text, limit, self.row.instruction)
        schema = self.config.output.json_schema
        by_rules = is_last = has_rules(schema)
        steps = [
            f"part {number} of {len(parts)} (characters {part.span.begin} to {part.span.end})"
            for number, part in enumerate(parts, 1)
        ]
        prompts = [part.prompt for part in parts]
        answers = yield from self._answers(prompts, steps, is_last=is_last)
        part_rows = [
            {
                **part.span._asdict(),
                "text": answer.text,
                "finish_reason": answer.finish_reason,
            }
            for part, answer in zip(parts, answers, strict=True)
        ]
        while not is_last:
            texts = [answer.text for answer in answers]
            prompts = part_prompts.merges(texts, limit, self.row.instruction)
            is_last = len(prompts) == 1
            steps = [f"a merge of {len(texts)} summaries"] * len(prompts)
            answers = yield from self._answers(prompts, steps, is_last=is_last)
        whole = replace(answers[-1], stats=self.stats)
        if schema and by_rules:
            merged = merge_answers(schema, [answer.text for answer in answers])
            whole = replace(whole, text=merged, scored=())
            self.confidence = None
        prompt = Prompt(prompts[-1].token_ids, 0, "parts")
        return Summary(whole, prompt, part_rows, self.num_requests, self.reasoning, self.confidence)

    def _answers(
        self, prompts: Sequence[Prompt], steps: Sequence[str], *, is_last: bool
    ) -> Generator[Round, Outcomes, list[Completion]]:
        """Yield a round; return its answers, without what the model thought.

        Raises DocumentError that names the step if one has failed.
        """
        requests = tuple(
            document_request(
                self.config, self.row, prompt, f"{self.name}:{number}", is_last=is_last
            )
            for number, prompt in enumerate(prompts, self.num_requests)
        )
        self.num_requests += len(requests)
        answers: list[Completion] = []
        for step, outcome in zip(steps, (yield requests), strict=True):
            if isinstance(outcome, DocumentError):
                raise replace(outcome, message=f"{step}: {outcome.message}")
            self.stats.add(outcome.stats)
            text, self.reasoning = self.prompts.told_apart(outcome.text, outcome.token_ids)
            answer = replace(outcome, text=text)
            if is_last:
                answer = _whole(self.config, answer, f"{step}: ")
                self.confidence = _confidence(self.config, self.prompts, outcome, text)
            answers.append(answer)
        return answers


def document_seed(run_seed: int, doc_id: str) -> int:
    """Derive a document's own seed: the same on every worker, in every order, after every
    restart.
    """
    return int.from_bytes(blake2b(f"{run_seed}:{doc_id}".encode(), digest_size=8).digest()) >> 1


def max_new_tokens_of(config: RunConfig, row: Row) -> int:
    """Return the limit of a document's output: its own, or the run's."""
    return config.decoding.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens


def document_request(
    config: RunConfig, row: Row, prompt: Prompt, request_id: str, *, is_last: bool
) -> Request:
    """Make a request with the options of the run and the document's seed; the last one of a
    document has its schema.
    """
    schema = (config.output.json_schema or "") if is_last else ""
    is_confidence_wanted = config.output.confidence and is_last
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens_of(config, row),
        sampling=replace(
            config.decoding.sampling(document_seed(config.decoding.seed, row.doc_id)),
            **row.sampling,
        ),
        schema=schema,
        choices=choices_of(schema) if schema else (),
        keeps_log_probs=is_confidence_wanted,
        closed=closed_fields(schema) if schema and is_confidence_wanted else (),
    )


def _whole(config: RunConfig, answer: Completion, which: str = "") -> Completion:
    """Return an answer. Raises DocumentError if it breaks off before the object of `output.schema`
    ends.
    """
    if config.output.schema is None:
        return answer
    if (text := whole_answer(answer.text)) is not None:
        return replace(answer, text=text)
    is_loop = answer.finish_reason == "repetition"
    most = 2 * config.decoding.max_new_tokens
    rows = f"--redo \"error_class = '{INCOMPLETE}'\""
    advice = f"do it again with {rows} --set decoding.max_new_tokens={most}"
    if is_loop:
        advice = "set decoding.repetition_penalty"
    elif config.input.has_limits:
        advice = "raise its limit"
    raise DocumentError(
        INCOMPLETE,
        f"{which}the answer ended ({answer.finish_reason}) after {answer.stats.num_output_tokens} "
        "tokens, before its "
        f"object did: {advice}, or limit the fields in output.schema (maxLength, maxItems)",
        "decode",
        summary=answer.text,
    )


def _confidence(
    config: RunConfig, prompts: Prompts, outcome: Completion, answer: str
) -> list[Values] | None:
    if not config.output.confidence:
        return None
    return confidence_of(outcome, answer, config.output.schema is not None, prompts.decode)


def as_document_error(error: Exception) -> DocumentError:
    """Return what becomes of a document that failed alone in the engine."""
    if isinstance(error, DocumentError):
        return error
    if is_out_of_memory(error):
        message = f"even alone and without a draft: {first_line(error)}"
        return DocumentError(OUT_OF_MEMORY, message, "decode", retryable=True)
    return DocumentError(type(error).__name__, first_line(error), "decode")


# The order in which an engine gets requests


class Inbox:
    """Requests that wait for the engine, longest first, but those about one document one after
    another.

    An engine reads a document once for requests that follow each other. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        """Longest first, of equally long ones by their ids."""
        self._last: list[int] = []
        """The first half of the prompt that was taken last: what begins so, too, is about the same
        document.
        """
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request."""
        with self._changed:
            bisect.insort(self._waiting, request, key=_longest_first)
            self._changed.notify()

    def take(self, block: bool) -> Request | None:
        """Remove and return the next request; None if there is none and `block` is False."""
        with self._changed:
            while block and not self._waiting:
                self._changed.wait()
            if not self._waiting:
                return None
            prompts = (request.prompt_token_ids for request in self._waiting)
            place = next((n for n, prompt in enumerate(prompts) if _begins(prompt, self._last)), 0)
            request = self._waiting.pop(place)
            self._last = request.prompt_token_ids[: len(request.prompt_token_ids) // 2]
            return request

    def remove(self, request_id: str) -> bool:
        """Remove a request. Returns False if it does not wait here any more."""
        with self._changed:
            kept = [request for request in self._waiting if request.request_id != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found


def _longest_first(request: Request) -> tuple[int, str]:
    return -len(request.prompt_token_ids) - request.max_new_tokens, request.request_id


def _begins(token_ids: list[int], start: list[int]) -> bool:
    """Return True if the tokens begin with `start`; its last one tells most others apart without a
    copy.
    """
    n = len(start)
    return not n or (
        len(token_ids) >= n and token_ids[n - 1] == start[-1] and token_ids[:n] == start
    )


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order of an `Inbox` that holds all of them."""
    inbox = Inbox()
    for request in requests:
        inbox.put(request)
    return [*iter(lambda: inbox.take(block=False), None)]


# A document that is too long for one prompt: split where sections, paragraphs or sentences end, and
# merged again


Ints = NDArray[np.int64]
LEAST_TOKENS = 64
"""Tokens of a part for which there must be room."""
_LEAST_SHARE = 0.75
"""A part may end before its even share of what is left to end with a section, a paragraph, or so,
but not before this part of the share.
"""
_BREAKS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\n(?=#{1,6}\s)|\n(?=[ "
        r"\t]*(?:chapter|section|part|article|appendix|book)\s+(?:\d+|[ivxlc]+)\b)|\f"
        r"|(?:\n[ \t]*){4}",
        r"\n[ \t]*\n\s*",
        r"[.!?\u2026][\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]\s*",
        r"\n",
        r"\s+",
    )
)
"""Where a text may be cut, the best places first: sections, paragraphs, sentences, lines, words. A
cut is at the end of a match.
"""


class TextSpan(NamedTuple):
    """A part of a text, in characters."""

    begin: int
    end: int


def split(text: str, starts: Sequence[int] | Ints, most: int) -> list[TextSpan]:
    """Split a text into parts of at most `most` tokens, all about as long; together they are the
    whole text.

    Only a part of one character may have more of them. starts: the character at which each of its
    tokens starts, rising.
    """
    starts = np.asarray(starts, np.int64)
    places = np.append(starts, len(text))
    spans: list[TextSpan] = []
    begin = first = 0
    while (left := len(starts) - first) > most:
        share = math.ceil(left / math.ceil(left / most))
        least, wanted, last = (
            places[min(first + count, len(starts))]
            for count in (max(1, int(_LEAST_SHARE * share)), share, most)
        )
        # a character may have many tokens
        end = max(_best_cut(text, int(least), int(wanted), int(last)), begin + 1)
        spans.append(TextSpan(begin, end))
        begin = end
        first = int(starts.searchsorted(end))
    is_over = bool(spans) and begin == len(text)
    return spans if is_over else [*spans, TextSpan(begin, len(text))]


def _best_cut(text: str, least: int, wanted: int, last: int) -> int:
    """Find the best place to cut behind character `least`, up to `last`, and as near to `wanted` as
    it may be.
    """
    for pattern in _BREAKS:
        places = [
            found.end()
            for found in pattern.finditer(text, least, last)
            if least < found.end() <= last
        ]
        if places:
            return min(places, key=lambda place: abs(place - wanted))
    return wanted


class Part(NamedTuple):
    """A part of a document and its prompt."""

    span: TextSpan
    prompt: Prompt


class PartPrompts:
    """The prompts of documents that do not fit into one: for each part, and for merges of the
    parts' summaries.
    """

    def __init__(self, prompts: Prompts):
        """Take the prompts of the run, whose `parts` are the options."""
        options = prompts.parts
        task = prompts.options.instruction
        self._most_tokens = options.tokens
        self._part = prompts.with_instruction(options.instruction or task)
        self._merge = prompts.with_instruction(options.merge_instruction or task)

    def check(self, max_new_tokens: int, *, merges: bool = True) -> None:
        """Raise ValueError if no document could be summarised in parts with summaries of
        `max_new_tokens`.

        merges: the model merges them.
        """
        try:
            self._size(max_new_tokens, None)
            room = self._merge.room(max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"prompt.length_policy parts: {error.message}") from error
        needed = 2 * (max_new_tokens + self._entry_size(_entry("", 999, 999)))
        if merges and needed > room:
            raise ValueError(
                f"prompt.length_policy parts: two summaries of parts may have {needed} tokens, "
                "but a prompt that "
                f"merges them has room for {room}: lower decoding.max_new_tokens"
            )

    def parts(self, text: str, max_new_tokens: int, instruction: Around | None) -> list[Part]:
        """Split a document and render its parts. max_new_tokens, instruction: of the document.

        What holds only white space has no prompt: it belongs to the part before it, at the
        beginning to the first one. Raises DocumentError (`PromptTooLong`) if there is no room for
        parts.
        """
        size = self._size(max_new_tokens, instruction)
        starts = self._part.token_starts(text)
        while size > 0:
            try:
                return self._rendered(text, split(text, starts, size), max_new_tokens, instruction)
            except PromptTooLongError:
                size -= 1 + size // 64  # cuts change tokens
        raise DocumentError(
            "PromptTooLong", "a character of it has more tokens than fit", stage="prompt"
        )

    def _rendered(
        self, text: str, spans: Sequence[TextSpan], max_new_tokens: int, instruction: Around | None
    ) -> list[Part]:
        written = [span for span in spans if text[span.begin : span.end].strip()]
        borders = [0, *(span.begin for span in written[1:]), len(text)]
        return [
            Part(
                TextSpan(begin, end),
                self._part.render(text[span.begin : span.end], max_new_tokens, instruction),
            )
            for (begin, end), span in zip(pairwise(borders), written, strict=True)
        ]

    def merges(
        self, texts: Sequence[str], max_new_tokens: int, instruction: Around | None
    ) -> list[Prompt]:
        """Render the prompts that merge texts in order, as few as hold them all; if one does, it is
        the last merge.

        Where a number of texts cannot be halved, one of them is alone in its prompt.
        max_new_tokens, instruction: of the document. Raises DocumentError (`PromptTooLong`) if two
        do not fit.
        """
        entries = [_entry(text, number, len(texts)) for number, text in enumerate(texts, 1)]
        sizes = [self._entry_size(entry) for entry in entries]
        room = self._merge.room(max_new_tokens, instruction)
        for groups in _groupings(sizes, room):
            joined = ["".join(entries[group.start : group.stop]).strip() for group in groups]
            try:
                return [self._merge.render(text, max_new_tokens, instruction) for text in joined]
            except PromptTooLongError:
                continue  # joined texts may have more tokens than they have alone
        message = (
            f"two summaries of parts have up to {2 * max(sizes)} tokens, a merge has room "
            f"for {room}"
        )
        raise DocumentError("PromptTooLong", message, stage="prompt")

    def work(self, num_tokens: Ints, max_new_tokens: Ints) -> tuple[Ints, Ints]:
        """Estimate the prompt and output tokens of all requests for documents that do not fit.

        num_tokens: of the documents [N]. max_new_tokens: of their summaries [N]. Returns two arrays
        [N].
        """
        limits, which = np.unique(max_new_tokens, return_inverse=True)
        sizes = np.array([self._usual_size(limit) for limit in limits.tolist()], np.int64)[which]
        num_parts = -(-np.maximum(1, num_tokens) // sizes)
        templates = num_parts * self._part.num_template_tokens + self._merge.num_template_tokens
        outputs = num_parts * max_new_tokens
        return num_tokens + outputs + templates, outputs + max_new_tokens

    def _entry_size(self, entry: str) -> int:
        """Count the tokens of an entry, and one more at the joint with the next one."""
        return len(self._merge.encode_document(entry)) + 1

    def _usual_size(self, max_new_tokens: int) -> int:
        try:
            return self._size(max_new_tokens, None)
        except DocumentError:
            return LEAST_TOKENS

    def _size(self, max_new_tokens: int, instruction: Around | None) -> int:
        """Return the tokens of a part at most."""
        room = self._part.room(max_new_tokens, instruction)
        if room < LEAST_TOKENS:
            message = f"a part has room for {room} tokens, but should have at least {LEAST_TOKENS}"
            raise DocumentError("PromptTooLong", message, stage="prompt")
        return min(self._most_tokens or room, room)


def _entry(text: str, number: int, count: int) -> str:
    """Return the summary of a part as it stands in a merge."""
    return f"Part {number} of {count}:\n{text.strip()}\n\n"


def _groupings(sizes: Sequence[int], room: int) -> Iterator[list[range]]:
    """Yield ways to cut texts of some sizes into groups that fit, with about as many each; the
    fewest groups first.

    There are at most half as many groups as texts, rounded up, so that each round of merges leaves
    fewer texts.
    """
    count = len(sizes)
    for num_groups in range(1, (count + 1) // 2 + 1):
        ends = [count * number // num_groups for number in range(num_groups + 1)]
        groups = [range(begin, end) for begin, end in pairwise(ends)]
        if all(sum(sizes[group.start : group.stop]) <= room for group in groups):
            yield groups

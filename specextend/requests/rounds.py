"""Rounds: the requests for one document, their order in the engine, and the summary.

`summarize` is a generator, so the caller runs the engine: a worker awaits each request, and a
`Summarizer` decodes the requests of many documents together.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from specextend.config import RunConfig
from specextend.core import Completion, Request, Values, first_line
from specextend.data.answers import (
    choices_of,
    closed_fields,
    has_rules,
    merge_answers,
    whole_answer,
)
from specextend.data.confidence import check_questions, confidence_of, questions_about, verdict_rows
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError
from specextend.data.rows import Row
from specextend.decoding.device import is_out_of_memory
from specextend.requests.splitting import PartPrompts
from specextend.stats import DecodingStats, ratio

if TYPE_CHECKING:
    from specextend.requests.tasks import Answered

OUT_OF_MEMORY = "OutOfMemoryError"
"""Error class of a document too large for memory, for every allocator."""
INCOMPLETE = "IncompleteAnswer"


@dataclass(frozen=True)
class Summary:
    """Summary of a document, with the counts of all its requests."""

    completion: Completion
    prompt: Prompt
    """Prompt statistics. For documents split into parts, they cover the whole document."""
    part_rows: list[Values] | None = None
    """Entries of the column `part_summaries`; None for a document in one prompt."""
    num_requests: int = 1
    reasoning: str | None = None
    confidence: list[Values] | None = None
    """Entries of the column; None without `output.confidence`, and for parts merged by rules."""
    verdicts: list[Values] | None = None
    """Entries of the column; None without `output.verify`."""
    tasks: tuple[Answered, ...] = ()
    """Outcomes of several tasks. The other fields describe the first decoded task, with the counts
    of all tasks.
    """

    def timed(self, total_s: float) -> Summary:
        """Return the summary with the wall-clock seconds of concurrent requests, divided into
        `ttft_s` and `decode_s` like the engine's time for reading and for writing.
        """
        if self.part_rows is None and not self.tasks:
            return self
        stats = self.completion.stats
        reading = stats.prefill_s + stats.draft_prefill_s
        ttft_s = total_s * (ratio(reading, reading + stats.step_s) or 0.0)
        timed = replace(stats, ttft_s=ttft_s, decode_s=total_s - ttft_s)
        return replace(self, completion=replace(self.completion, stats=timed))


Round = tuple[Request, ...]
"""Requests that can run at the same time. Outcomes are sent back in their order."""
Outcomes = Sequence[Completion | DocumentError]
Rounds = Generator[Round, Outcomes, Summary]


def summarize(config: RunConfig, prompts: Prompts, row: Row, name: str) -> Rounds:
    """Yield the requests for a document, round by round, and return the summary.

    Args:
        name: Document name. Request ids are `name`, or `name:N` if the document needs several.

    Raises:
        DocumentError: The document cannot be rendered, or the engine failed on it.
    """
    limit = max_new_tokens_of(config, row)
    try:
        prompt = prompts.render(row.text, limit, row.instruction)
    except PromptTooLongError:
        if prompts.options.length_policy != "parts":
            raise
        return (yield from _InParts(config, prompts, row, name).rounds())
    request = document_request(config, row, prompt, name, is_last=True)
    fields = config.output.free_fields
    if config.output.verify:
        request = replace(request, questions=questions_about(prompts, row, prompt, fields))
    [outcome] = yield (request,)
    if isinstance(outcome, DocumentError):
        raise outcome
    answer, reasoning = prompts.told_apart(outcome.text, outcome.token_ids)
    whole = _whole(config, replace(outcome, text=answer))
    return Summary(
        whole,
        prompt,
        reasoning=reasoning,
        confidence=_confidence(config, prompts, outcome, answer),
        verdicts=verdict_rows(answer, fields, outcome.verdicts) if config.output.verify else None,
    )


def advance(rounds: Rounds, outcomes: Outcomes | None) -> Round | Summary | DocumentError:
    """Send the outcomes of a round (None to begin); return the next round, or summary or error."""
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


def check_requests(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError if the options of a task exclude every document."""
    if config.output.schema is not None and prompts.begins_thinking:
        raise ValueError(
            "output.schema leaves no room to think, with which the model begins: set "
            "prompt.template_options to what "
            "keeps it from that, such as {enable_thinking: false}"
        )
    if config.output.verify:
        limit = None if config.input.has_limits else config.decoding.max_new_tokens
        check_questions(prompts, limit)
    if config.prompt.length_policy == "parts" and not config.input.has_limits:
        merges = not has_rules(config.output.json_schema)
        PartPrompts(prompts).check(config.decoding.max_new_tokens, merges=merges)


@dataclass(slots=True)
class _InParts:
    config: RunConfig
    prompts: Prompts
    row: Row
    name: str
    stats: DecodingStats = field(default_factory=DecodingStats)
    num_requests: int = 0
    reasoning: str | None = None
    confidence: list[Values] | None = None

    def rounds(self) -> Rounds:
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
        """Yield a round and return its answers without reasoning; errors name a step."""
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
    """Derive the seed of a document from its id, independent of workers and restarts."""
    return int.from_bytes(blake2b(f"{run_seed}:{doc_id}".encode(), digest_size=8).digest()) >> 1


def max_new_tokens_of(config: RunConfig, row: Row) -> int:
    """Return the output limit of a document: the row's limit, or else the run's."""
    return config.decoding.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens


def document_request(
    config: RunConfig, row: Row, prompt: Prompt, request_id: str, *, is_last: bool
) -> Request:
    """Make a request for a prompt; only the last request of a document has the schema."""
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
    """Convert the error of a single request."""
    if isinstance(error, DocumentError):
        return error
    if is_out_of_memory(error):
        message = f"even alone and without a draft: {first_line(error)}"
        return DocumentError(OUT_OF_MEMORY, message, "decode", retryable=True)
    return DocumentError(type(error).__name__, first_line(error), "decode")


class Inbox:
    """Queue of requests for the engine: longest first, requests about one document in a row.

    The engine reads a document once for consecutive requests. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._last: list[int] = []
        """First half of the last prompt; prompts with the same start share its document."""
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request to the queue."""
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
        """Remove a request; return False if it is not there."""
        with self._changed:
            kept = [request for request in self._waiting if request.request_id != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found


def _longest_first(request: Request) -> tuple[int, str]:
    return -len(request.prompt_token_ids) - request.max_new_tokens, request.request_id


def _begins(token_ids: list[int], start: list[int]) -> bool:
    n = len(start)
    # comparing one token first avoids a copy for most prompts
    return not n or (
        len(token_ids) >= n and token_ids[n - 1] == start[-1] and token_ids[:n] == start
    )


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order in which an `Inbox` hands them out."""
    inbox = Inbox()
    for request in requests:
        inbox.put(request)
    return [*iter(lambda: inbox.take(block=False), None)]

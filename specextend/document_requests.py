"""From a row of the input to requests for the engine and to its summary: one request, or rounds of parts and merges.

`summarize` is a generator, so that who runs the engine decides how: a worker waits for each request, a `Summarizer`
decodes those of many documents at once.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter

from specextend.config import RunConfig
from specextend.core import Completion, Request, Values, first_line
from specextend.data.answers import choices_of, has_rules, merge_answers, whole_answer
from specextend.data.inputs import DocumentError
from specextend.data.parts import PartPrompts
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError
from specextend.data.quality import assess
from specextend.data.rows import Row
from specextend.data.schema import result_row
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
    """The parts as values of the column `part_summaries`; None for a document that fits into one prompt."""
    num_requests: int = 1
    """Parts and merges."""
    reasoning: str | None = None
    """What the model wrote while it thought, if it is of a kind that does; it is no part of the text."""

    def timed(self, total_s: float) -> Summary:
        """Return the summary of a document that took `total_s` seconds: in parts, several at a time.

        Those are divided as the engine's time for it was: into `ttft_s` for reading and `decode_s` for writing.
        """
        if self.part_rows is None:
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
    """Yield the requests for a document, round by round, take their outcomes, and return the summary.

    name: of the document; the ids of its requests begin with it, and with a colon behind it if there are several.
    Raises DocumentError for a document that cannot be summarised, also one that the engine has failed over.
    """
    limit = max_new_tokens_of(config, row)
    try:
        prompt = prompts.render(row.document.text, limit, row.instruction)
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
    return Summary(whole, prompt, reasoning=reasoning)


def advance(rounds: Rounds, outcomes: Outcomes | None) -> Round | Summary:
    """Send outcomes to a document's rounds, None at first; return the next round or, after the last, the summary."""
    try:
        return next(rounds) if outcomes is None else rounds.send(outcomes)
    except StopIteration as end:
        summary: Summary = end.value
        return summary


def finished_row(
    config: RunConfig, row: Row, summary: Summary, *, received: float, ended: float, worker: str, attempts: int
) -> Values:
    """Assess a summary, which may take 0.1 s, and make the row of its document.

    received, ended: when the document was asked for, and when its last request was done, by `time.monotonic`.
    """
    completion, prompt, text = summary.completion, summary.prompt, row.document.text
    dropped, fields = prompt.num_dropped_tokens, config.output.evidence_for
    total_s = completion.stats.total_s
    return result_row(
        row.document.key,
        row.document.doc_id,
        completion,
        prompt,
        assess(completion, text, dropped, row.reference, config.quality, fields),
        part_summaries=summary.part_rows,
        num_requests=summary.num_requests,
        reasoning=summary.reasoning,
        content_sha256=row.content_sha256,
        queue_s=max(0.0, ended - received - total_s),
        started_at=time.time() - (time.monotonic() - ended) - total_s,
        worker=worker,
        attempts=attempts,
    )


def check_requests(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError if no document could be summarised: as data, or in parts if rows have no limits of their own."""
    if config.output.schema is not None and prompts.begins_thinking:
        raise ValueError(
            "output.schema leaves no room to think, with which the model begins: set prompt.template_options to what "
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

    def rounds(self) -> Rounds:
        """Yield the parts, then merges until one is left."""
        part_prompts = PartPrompts(self.prompts)
        limit = max_new_tokens_of(self.config, self.row)
        parts = part_prompts.parts(self.row.document.text, limit, self.row.instruction)
        schema = self.config.output.json_schema
        by_rules = has_rules(schema)
        step = self._round([part.prompt for part in parts], is_last=by_rules)
        outcomes = yield step
        part_rows: list[Values] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            which = f"part {len(part_rows) + 1} of {len(parts)} (characters {part.span.begin} to {part.span.end})"
            summary = self._counted(outcome, which)
            if by_rules:
                summary = _whole(self.config, summary, f"{which}: ")
            part_rows.append({**part.span._asdict(), "text": summary.text, "finish_reason": summary.finish_reason})
        texts = [part["text"] for part in part_rows]
        if schema and by_rules:
            last = replace(summary, text=merge_answers(schema, texts), scored=(), stats=self.stats)
            return self._summary(step[-1], last, part_rows)
        while True:
            prompts = part_prompts.merges(texts, limit, self.row.instruction)
            is_last = len(prompts) == 1
            step = self._round(prompts, is_last=is_last)
            merged = [self._counted(outcome, f"a merge of {len(texts)} summaries") for outcome in (yield step)]
            if is_last:
                [request], [last] = step, merged
                whole = _whole(self.config, replace(last, stats=self.stats))
                return self._summary(request, whole, part_rows)
            texts = [completion.text for completion in merged]

    def _summary(self, request: Request, whole: Completion, part_rows: list[Values]) -> Summary:
        prompt = Prompt(request.prompt_token_ids, 0, "parts")
        return Summary(whole, prompt, part_rows, self.num_requests, self.reasoning)

    def _round(self, prompts: Sequence[Prompt], *, is_last: bool) -> Round:
        first, self.num_requests = self.num_requests, self.num_requests + len(prompts)
        return tuple(
            document_request(self.config, self.row, prompt, f"{self.name}:{number}", is_last=is_last)
            for number, prompt in enumerate(prompts, first)
        )

    def _counted(self, outcome: Completion | DocumentError, step: str) -> Completion:
        """Add the counts of a request to the document's; leave what the model thought out of its text.

        Raises DocumentError that names the step if it failed.
        """
        if isinstance(outcome, DocumentError):
            raise DocumentError(outcome.error_class, f"{step}: {outcome.message}", outcome.stage, outcome.retryable)
        self.stats.add(outcome.stats)
        answer, self.reasoning = self.prompts.told_apart(outcome.text, outcome.token_ids)
        return replace(outcome, text=answer)


def document_seed(run_seed: int, doc_id: str) -> int:
    """Derive a document's own seed: the same on every worker, in every order, after every restart."""
    return int.from_bytes(blake2b(f"{run_seed}:{doc_id}".encode(), digest_size=8).digest()) >> 1


def max_new_tokens_of(config: RunConfig, row: Row) -> int:
    """Return the limit of a document's output: its own, or the run's."""
    return config.decoding.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens


def document_request(config: RunConfig, row: Row, prompt: Prompt, request_id: str, *, is_last: bool) -> Request:
    """Make a request with the options of the run and the document's seed; the last one of a document has its schema."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens_of(config, row),
        sampling=replace(
            config.decoding.sampling(document_seed(config.decoding.seed, row.document.doc_id)), **row.sampling
        ),
        schema=(config.output.json_schema or "") if is_last else "",
        choices=choices_of(config.output.json_schema) if is_last else (),
    )


def _whole(config: RunConfig, answer: Completion, which: str = "") -> Completion:
    """Return an answer. Raises DocumentError if it breaks off before the object of `output.schema` ends."""
    if config.output.schema is None:
        return answer
    if (text := whole_answer(answer.text)) is not None:
        return replace(answer, text=text)
    is_loop = answer.finish_reason == "repetition"
    advice = "set decoding.repetition_penalty" if is_loop else "raise decoding.max_new_tokens in a run of its own"
    raise DocumentError(
        INCOMPLETE,
        f"{which}the answer ended ({answer.finish_reason}) after {answer.stats.num_output_tokens} tokens, before its "
        f"object did: {advice}, or limit the fields in output.schema (maxLength, maxItems)",
        "decode",
        summary=answer.text,
    )


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
    """Requests that wait for the engine, longest first, but those about one document one after another.

    An engine reads a document once for requests that follow each other. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, str, Request]] = []
        """Negative sizes, ids and requests, sorted by the first two."""
        self._last: list[int] = []
        """The first half of the prompt that was taken last: what begins so, too, is about the same document."""
        self._changed = threading.Condition()

    def put(self, request: Request) -> None:
        """Add a request."""
        with self._changed:
            size = len(request.prompt_token_ids) + request.max_new_tokens
            bisect.insort(self._waiting, (-size, request.request_id, request), key=itemgetter(0, 1))
            self._changed.notify()

    def take(self, block: bool) -> Request | None:
        """Remove and return the next request; None if there is none and `block` is False."""
        with self._changed:
            while block and not self._waiting:
                self._changed.wait()
            if not self._waiting:
                return None
            prompts = (request.prompt_token_ids for _, _, request in self._waiting)
            place = next((n for n, prompt in enumerate(prompts) if _begins(prompt, self._last)), 0)
            request = self._waiting.pop(place)[2]
            self._last = request.prompt_token_ids[: len(request.prompt_token_ids) // 2]
            return request

    def remove(self, request_id: str) -> bool:
        """Remove a request. Returns False if it does not wait here any more."""
        with self._changed:
            kept = [entry for entry in self._waiting if entry[1] != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found


def _begins(token_ids: list[int], start: list[int]) -> bool:
    """Return True if the tokens begin with `start`; its last one tells most others apart without a copy."""
    n = len(start)
    return not n or (len(token_ids) >= n and token_ids[n - 1] == start[-1] and token_ids[:n] == start)


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return requests in the order of an `Inbox` that holds all of them."""
    inbox = Inbox()
    for request in requests:
        inbox.put(request)
    return [*iter(lambda: inbox.take(block=False), None)]

"""From a document to its summary: one request if it fits into a prompt, else rounds of parts and of merges.

`summarize` is a generator, so that who runs the engine decides how: a worker waits for each request, a `Summarizer`
decodes those of many documents at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specextend.config import RunConfig
from specextend.core import Completion, Request
from specextend.data.chunk_prompts import ChunkPrompts, Part
from specextend.data.inputs import DocumentError, Row
from specextend.data.prompts import Prompt, Prompts, PromptTooLongError
from specextend.data.splitting import TextSpan, covered
from specextend.document_requests import document_request, max_new_tokens_of
from specextend.stats import DecodingStats, ratio


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that can be decoded at the same time. Their outcomes are sent back in the same order."""

    requests: tuple[Request, ...]
    is_last: bool
    """True if the summary comes of it."""


@dataclass(frozen=True, slots=True)
class ChunkSummary:
    """The summary of a part of a document."""

    span: TextSpan
    text: str | None
    """None if the part failed and was left out."""
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a document, with the counts of all that was decoded for it."""

    request: Request
    """The one that made the text."""
    completion: Completion
    prompt: Prompt
    """Says how much of the document was read. In parts, coverage is a share of its characters, not of its tokens."""
    last: Completion
    """With the counts of that request alone."""
    chunks: tuple[ChunkSummary, ...] = ()
    """Of a document that was read in parts, in order."""
    num_requests: int = 1
    """Parts and merges, the failed ones included."""

    @property
    def is_incomplete(self) -> bool:
        """Return True if a part was left out."""
        return any(chunk.text is None for chunk in self.chunks)

    @property
    def chunk_rows(self) -> list[dict[str, Any]] | None:
        """Return the parts as values of the column `chunk_summaries`; None for a document that fits into one prompt."""
        return [
            {**chunk.span._asdict(), "text": chunk.text, "finish_reason": chunk.finish_reason} for chunk in self.chunks
        ] or None

    def timed(self, total_s: float) -> Summary:
        """Return the summary of a document that took `total_s` seconds: in parts, several at a time.

        Those are divided as the engine's time for it was: into `ttft_s` for reading and `decode_s` for writing.
        """
        if not self.chunks:
            return self
        stats = self.completion.stats
        reading = stats.prefill_s + stats.draft_prefill_s
        ttft_s = total_s * (ratio(reading, reading + stats.step_s) or 0.0)
        timed = replace(stats, ttft_s=ttft_s, decode_s=total_s - ttft_s)
        return replace(self, completion=replace(self.completion, stats=timed))


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
        if prompts.options.length_policy != "chunk":
            raise
        return (yield from _Chunked(config, prompts, row, name).rounds())
    request = document_request(config, row, prompt, name)
    [outcome] = yield Round((request,), is_last=True)
    completion = _checked(outcome)
    return Summary(request, completion, prompt, completion)


def advance(rounds: Rounds, outcomes: Outcomes | None) -> Round | Summary:
    """Send outcomes to a document's rounds, None at first; return the next round or, after the last, the summary."""
    try:
        return next(rounds) if outcomes is None else rounds.send(outcomes)
    except StopIteration as end:
        summary: Summary = end.value
        return summary


def check_chunks(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError if no document could be summarised in parts. Rows with limits of their own are not judged."""
    if config.prompt.length_policy == "chunk" and config.input.max_new_tokens_column is None:
        ChunkPrompts(prompts).check(config.decoding.max_new_tokens)


def shared_start(config: RunConfig, prompts: Prompts) -> list[int]:
    """Return the tokens that all prompts of a run begin with: rows and parts may have instructions of their own."""
    has_others = config.input.instruction_column is not None or config.prompt.length_policy == "chunk"
    return prompts.frame_token_ids if has_others else prompts.start_token_ids


class _Chunked:
    """A document that is summarised in parts."""

    def __init__(self, config: RunConfig, prompts: Prompts, row: Row, name: str) -> None:
        self._config, self._prompts, self._row, self._name = config, prompts, row, name
        self._chunks = ChunkPrompts(prompts)
        self._limit = max_new_tokens_of(config, row)
        self._stats = DecodingStats()
        self._num_requests = 0

    def rounds(self) -> Rounds:
        """Yield the parts, then merges until one is left."""
        row = self._row
        parts = self._chunks.parts(row.document.text, self._limit, row.instruction)
        outcomes = yield self._round([part.prompt for part in parts], is_last=False)
        self._check_parts(parts, outcomes)
        texts = [self._counted(outcome).text for outcome in outcomes if isinstance(outcome, Completion)]
        while True:
            prompts = self._chunks.merges(texts, self._limit, row.instruction)
            step = self._round(prompts, is_last=len(prompts) == 1)
            merged = [self._merged(outcome, len(texts)) for outcome in (yield step)]
            if step.is_last:
                return self._summary(step.requests[0], merged[0], parts, outcomes)
            texts = [completion.text for completion in merged]

    def _round(self, prompts: Sequence[Prompt], *, is_last: bool) -> Round:
        limit = self._limit if is_last else self._chunks.part_tokens(self._limit)
        first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
        requests = [
            document_request(self._config, self._row, prompt, f"{self._name}:{first + number}", limit)
            for number, prompt in enumerate(prompts)
        ]
        return Round(tuple(requests), is_last)

    def _check_parts(self, parts: Sequence[Part], outcomes: Outcomes) -> None:
        """Raise DocumentError if a part failed that must not, or if all did."""
        failed = [(number, outcome) for number, outcome in enumerate(outcomes) if isinstance(outcome, DocumentError)]
        if failed and (self._config.chunks.on_error == "fail" or len(failed) == len(parts)):
            number, error = failed[0]
            begin, end = parts[number].span
            raise _of_step(error, f"part {number + 1} of {len(parts)} (characters {begin} to {end})")

    def _merged(self, outcome: Completion | DocumentError, num_texts: int) -> Completion:
        if isinstance(outcome, DocumentError):
            raise _of_step(outcome, f"a merge of {num_texts} summaries")
        return self._counted(outcome)

    def _counted(self, completion: Completion) -> Completion:
        self._stats.add(completion.stats)
        return completion

    def _summary(self, request: Request, last: Completion, parts: Sequence[Part], outcomes: Outcomes) -> Summary:
        chunks, read, num_dropped = [], [], 0
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, DocumentError):
                num_dropped += part.num_tokens
                chunks.append(ChunkSummary(part.span, None, None))
            else:
                read.append(part.span)
                chunks.append(ChunkSummary(part.span, outcome.text, outcome.finish_reason))
        coverage = covered(read) / len(self._row.document.text)
        prompt = Prompt(request.prompt_token_ids, num_dropped, "chunk", coverage)
        return Summary(request, replace(last, stats=self._stats), prompt, last, tuple(chunks), self._num_requests)


def _checked(outcome: Completion | DocumentError) -> Completion:
    if isinstance(outcome, DocumentError):
        raise outcome
    return outcome


def _of_step(error: DocumentError, step: str) -> DocumentError:
    """Return the error of a document for that of one of its requests."""
    return DocumentError(error.error_class, f"{step}: {error.message}", error.stage, error.retryable)

"""Summaries in a pipeline or a notebook: of a text, some documents, or batches (`ray.data.Dataset.map_batches`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specextend.config import Configs, RunConfig
from specextend.core import Completion, Request, Values
from specextend.data.batches import as_table, check_batch_options, read_batch, result_table
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.rows import Row, RowReader
from specextend.decoding.device import is_device_error
from specextend.decoding.engine import BatchError
from specextend.document_requests import (
    Round,
    Rounds,
    Summary,
    advance,
    as_document_error,
    check_requests,
    finished_row,
    summarize,
)
from specextend.inbox import in_order
from specextend.loading import load_engine

_Timed = tuple[Completion | DocumentError, float]
"""The outcome of a request, and when it came."""


class Summarizer:
    """Summarises documents. Loads its models once, when it is made; one process needs one.

    A call takes a text, a dictionary, a list of either, a dictionary of columns, a data frame or an Arrow table, with
    the columns of `config.input`, and returns its results in the same form and order: the columns of a summary, then
    the passthrough columns. A document that fails has its error in `error_class`, `message`, `stage` and `retryable`.
    `input.path`, `output` and `job` are not used.
    """

    def __init__(
        self,
        config: Configs,
        factory: Callable[[RunConfig], Any] = load_engine,
    ):
        """Load the models of a configuration: what `RunConfig.load` takes.

        Raises ValueError if they cannot be found or served, or do not fit each other, and for options that choose rows,
        which no batch can follow.
        """
        config = RunConfig.load(config)
        check_batch_options(config.input, config.output)
        self._config = config
        self._decoder = RowDecoder(config, factory(config))
        self._worker = f"{os.uname().nodename}:{os.getpid()}"

    def __call__(self, documents: Any) -> Any:
        """Summarise documents; many at once keep the engine's batch full.

        Raises InputError for missing or mistyped columns, and if `input.id_column` is not set for documents other than
        texts; and what makes the engine unusable, such as a broken GPU.
        """
        received = time.monotonic()
        batch, given_back = as_table(documents, self._config.input)
        found = read_batch(batch, RowReader(self._config.input, self._config.prompt.template))
        decoded = iter(self._decoder.decode([row for row in found if isinstance(row, Row)]))
        results = [
            _failed(row.doc_id, row) if isinstance(row, DocumentError) else self._result(row, next(decoded), received)
            for row in found
        ]
        return given_back(result_table(results, batch, self._config.input.passthrough, self._config.output))

    def _result(self, row: Row, document: DecodedRow, received: float) -> Values:
        """Make the row of a document."""
        summary = document.state
        if isinstance(summary, DocumentError):
            return _failed(row.document.doc_id, summary)
        assert isinstance(summary, Summary), "all rounds are done"
        times = {"received": received, "ended": document.ended}
        return finished_row(self._config, row, summary, **times, worker=self._worker, attempts=1)


class RowDecoder:
    """Decodes rows with an engine of this process."""

    def __init__(self, config: RunConfig, engine: Any):
        """Take an engine. Raises ValueError if no document could be summarised with it."""
        self._config = config
        self._engine = engine
        self._prompts = Prompts(engine.tokenizer, config.prompt, engine.max_tokens, config.parts)
        check_requests(config, self._prompts)

    def decode(self, rows: Sequence[Row], **changes: Any) -> list[DecodedRow]:
        """Decode rows together, each to its summary or its error. changes: of the fields of all requests."""
        documents = [
            DecodedRow(summarize(self._config, self._prompts, row, str(number))) for number, row in enumerate(rows)
        ]
        for document in documents:
            document.advance(None)
        while requests := [request for document in documents for request in document.requests]:
            outcomes = self._outcomes([replace(request, **changes) for request in in_order(requests)])
            for document in documents:
                if document.requests:
                    document.advance([outcomes[request.request_id] for request in document.requests])
        return documents

    def _outcomes(self, requests: Sequence[Request]) -> dict[str, _Timed]:
        """Decode requests; return each one's outcome and when it came. After a batch failed, its members run alone."""
        outcomes: dict[str, _Timed] = {}

        def on_error(request_id: str, error: Exception) -> None:
            if is_device_error(error):
                raise error
            outcomes[request_id] = as_document_error(error), time.monotonic()

        groups = [list(requests)]
        while groups:
            group = groups.pop()
            try:
                for completion in self._engine.generate(group, on_error):
                    outcomes[completion.request_id] = completion, time.monotonic()
            except BatchError as error:
                if is_device_error(error.__cause__ or error):
                    raise
                open_ones = [request for request in group if request.request_id not in outcomes]
                groups.append([each for each in open_ones if each.request_id not in error.request_ids])
                groups += [[each] for each in open_ones if each.request_id in error.request_ids]
        return outcomes


@dataclass(slots=True)
class DecodedRow:
    """A document on its way: the round that is to be decoded, and when its first one began and its last one ended."""

    rounds: Rounds
    state: Round | Summary | DocumentError | None = None
    began: float = math.inf
    ended: float = 0.0
    completions: list[Completion] = field(default_factory=list)
    """Of its requests, in their order."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return what is to be decoded for it; nothing once it is done or has failed."""
        return self.state if isinstance(self.state, tuple) else ()

    def advance(self, outcomes: Sequence[_Timed] | None) -> None:
        """Take the outcomes of its requests in, with the times at which they came; None at first."""
        for outcome, at in outcomes or ():
            self.ended = max(self.ended, at)
            if isinstance(outcome, Completion):
                self.began = min(self.began, at - outcome.stats.total_s)
                self.completions.append(outcome)
        try:
            step = advance(self.rounds, None if outcomes is None else [outcome for outcome, _ in outcomes])
        except DocumentError as error:
            self.state = error
        else:
            self.state = step.timed(self.ended - self.began) if isinstance(step, Summary) else step


def _failed(doc_id: str, error: DocumentError) -> Values:
    details = {name: getattr(error, name) for name in ("error_class", "message", "stage", "retryable", "summary")}
    return {"doc_id": doc_id, **details, "attempts": 1}

"""Summaries in notebooks and pipelines, for texts, documents or `ray.data` batches."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch

from specextend.config import Configs, RunConfig
from specextend.core import DocumentKey, ReadOnly, Request, Values, mended
from specextend.data.answers import answer_columns, answer_fields
from specextend.data.check import check_columns, check_names
from specextend.data.confidence import confidence_column, confidence_field
from specextend.data.flags import check_rules
from specextend.data.inputs import DocumentError, InputError, InputOptions, OutputOptions
from specextend.data.parquet import plain_rows
from specextend.data.prompts import Prompts
from specextend.data.rows import Row, RowReader
from specextend.data.schema import (
    COMMIT_SCHEMA,
    ERROR_SCHEMA,
    SUMMARY_SCHEMA,
    rows_table,
    without_pages,
)
from specextend.decoding.device import is_device_error
from specextend.decoding.engine import BatchError
from specextend.models.loading import load_engine
from specextend.requests.rounds import (
    DecodedRow,
    Summary,
    TimedOutcome,
    as_document_error,
    check_requests,
    in_order,
    summarize,
)
from specextend.requests.tasks import finished_row


class Summarizer:
    """Summarises documents. Loads its models once; a process needs a single instance.

    Takes texts, dictionaries, lists of them, a dictionary of columns, a data frame or an Arrow
    table, with the columns of `config.input`. Returns results of the same form in the same order:
    the columns of a summary, then the passthrough columns. Failed documents have `error_class`,
    `message`, `stage` and `retryable`. `input.path`, `output` and `job` are ignored, except
    `job.gpus_per_worker`: above 0 the models run on a GPU.
    """

    def __init__(
        self,
        config: Configs,
        factory: Callable[[RunConfig], Any] = load_engine,
    ):
        """Load the models of a configuration, given as for `RunConfig.load`.

        Raises:
            ValueError: A model is missing or unsupported, the pair does not fit, or an option
                selects rows of files.
        """
        config = RunConfig.load(config, needs_paths=False)
        if config.tasks:
            raise ValueError(
                "a Summarizer takes a single task; make one per task, or use specextend.run"
            )
        check_batch_options(config.input, config.output)
        if torch.cuda.is_available() and not config.job.gpus_per_worker:
            warnings.warn("job.gpus_per_worker is 0: no GPU is used", stacklevel=2)
        self._config = config
        self._decoder = RowDecoder(config, factory(config))
        self._worker = f"{os.uname().nodename}:{os.getpid()}"
        self._lock = threading.Lock()

    def __call__(self, documents: Any) -> Any:
        """Summarise documents. Large batches are faster. Calls from other threads wait.

        Raises:
            InputError: A column is missing or has the wrong type, or `input.id_column` is not set
                for documents other than plain texts.
        """
        received = time.monotonic()
        batch, given_back = as_table(documents, self._config.input)
        passthrough = self._config.input.copied_columns
        if not len(batch):  # an empty batch may lack columns
            columns = {name: batch[name] for name in passthrough if name in batch.column_names}
            batch = pa.table(dict.fromkeys(passthrough, pa.nulls(0)) | columns)
            return given_back(self._table([], batch))
        reader = RowReader(self._config.input, (self._config.prompt.template,))
        check_columns("the batch", batch.schema, reader)
        check_rules(self._config.output, map(batch.schema.field, passthrough))
        named = [name for name in passthrough if name in self._config.output.rule_columns]
        rows = plain_rows(batch, reader.document_columns)
        found = [_row_or_error(number, row, reader) for number, row in enumerate(rows)]
        with self._lock:
            decoded = iter(self._decoder.decode([row for row in found if isinstance(row, Row)]))
        results = [
            _failed(row.doc_id, row)
            if isinstance(row, DocumentError)
            else self._result(
                replace(row, passed=batch.slice(number, 1).select(named)), next(decoded), received
            )
            for number, row in enumerate(found)
        ]
        return given_back(self._table(results, batch))

    def _table(self, results: Sequence[Values], batch: pa.Table) -> pa.Table:
        config = self._config
        has_pages = config.input.pages_column is not None
        return result_table(
            results, batch, config.input.copied_columns, config.output, has_pages=has_pages
        )

    def _result(self, row: Row, document: DecodedRow, received: float) -> Values:
        summary = document.state
        if isinstance(summary, DocumentError):
            return _failed(row.doc_id, summary)
        assert isinstance(summary, Summary), "all rounds are done"
        times = {"received": received, "ended": document.ended}
        return finished_row(self._config, row, summary, **times, worker=self._worker, attempts=1)


class RowDecoder:
    """Decodes rows with a local engine."""

    def __init__(self, config: RunConfig, engine: Any):
        self._config = config
        self._engine = engine
        self._prompts = Prompts(engine.tokenizer, config.prompt, engine.max_tokens, config.parts)
        check_requests(config, self._prompts)

    def decode(self, rows: Sequence[Row], **changes: Any) -> list[DecodedRow]:
        """Decode rows together to summaries or errors. `changes` override request fields."""
        documents = [
            DecodedRow(summarize(self._config, self._prompts, row, str(number)))
            for number, row in enumerate(rows)
        ]
        while requests := [request for document in documents for request in document.requests]:
            outcomes = self._outcomes(
                [replace(request, **changes) for request in in_order(requests)]
            )
            for document in documents:
                document.advance([outcomes[request.request_id] for request in document.requests])
        return documents

    def _outcomes(self, requests: Sequence[Request]) -> dict[str, TimedOutcome]:
        """Decode requests; the members of a failed batch run again alone."""
        outcomes: dict[str, TimedOutcome] = {}

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
                groups.append(
                    [each for each in open_ones if each.request_id not in error.request_ids]
                )
                groups += [[each] for each in open_ones if each.request_id in error.request_ids]
        return outcomes


def _failed(doc_id: str, error: DocumentError) -> Values:
    names = ("error_class", "message", "stage", "retryable", "summary")
    return {"doc_id": doc_id, "attempts": 1} | {name: getattr(error, name) for name in names}


BATCH_SCHEMA = pa.schema(
    [
        *SUMMARY_SCHEMA,
        *(ERROR_SCHEMA.field(name) for name in ("error_class", "message", "stage", "retryable")),
    ]
)
"""Columns of `summaries/`, then those of `errors/`, null without an error."""


def check_batch_options(options: InputOptions, output: OutputOptions) -> None:
    """Raise InputError for options that do not apply to batches, before loading models."""
    if options.selects:
        chosen = [
            name
            for name in ("filter", "sample", "except_done_in", "redo", "limit")
            if getattr(options, name)
        ]
        raise InputError(
            f"input.{chosen[0]} chooses rows of files, not of batches: leave it out, and choose "
            "them in the pipeline"
        )
    check_names(options, output)
    if taken := [
        name for name in options.copied_columns if name in {*BATCH_SCHEMA.names} - {"summary"}
    ]:
        raise InputError(
            f"input.passthrough names {taken[0]}, also a column of the result; rename it"
        )


def as_table(documents: Any, options: InputOptions) -> tuple[pa.Table, Callable[[pa.Table], Any]]:
    """Convert documents to a table; also return a function to convert results back.

    The ids of plain texts are their positions.

    Raises:
        InputError: The form is unknown, or `input.id_column` is not set.
    """
    documents = mended(documents)
    is_mapping = isinstance(documents, Mapping)
    if isinstance(documents, str) or (
        is_mapping and isinstance(documents.get(options.text_column), str | None)
    ):
        table, given_back = as_table([documents], options)
        return table, lambda results: given_back(results)[0]
    if isinstance(documents, list) and all(
        each is None or isinstance(each, str) for each in documents
    ):
        columns: Values = {options.text_column: pa.array(documents, "string")}
        if options.id_column is not None:
            columns[options.id_column] = pa.array(map(str, range(len(documents))), "string")
        return pa.table(columns), pa.Table.to_pylist
    if options.id_column is None:
        raise InputError(
            "input.id_column must be set: a document of a batch has no place in a file to be its id"
        )
    if isinstance(documents, list) and all(isinstance(each, Mapping) for each in documents):
        return pa.Table.from_pylist(documents), pa.Table.to_pylist
    if is_mapping:
        return pa.table(dict(documents)), pa.Table.to_pydict
    if hasattr(documents, "__arrow_c_stream__"):
        return pa.table(documents), pa.Table.to_pandas if hasattr(
            documents, "iloc"
        ) else lambda table: table
    raise InputError(
        "documents must be texts, dictionaries, a table or a data frame, got "
        f"{type(documents).__name__}"
    )


def _row_or_error(number: int, values: ReadOnly, reader: RowReader) -> Row | DocumentError:
    """Number documents without `input.id_column` by position."""
    column = reader.options.id_column
    doc_id = number if column is None else values[column]
    if doc_id is None:
        return DocumentError("NullId", f"the id in column {column!r} is null")
    name = doc_id.decode() if isinstance(doc_id, bytes) else str(doc_id)
    try:
        return reader.read(DocumentKey(0, number), name, values)
    except DocumentError as error:
        return error


def result_table(
    results: Sequence[Values],
    batch: pa.Table,
    passthrough: Sequence[str],
    output: OutputOptions,
    *,
    has_pages: bool,
) -> pa.Table:
    """Return the result table: BATCH_SCHEMA, the fields of answers, the passthrough columns.

    Args:
        results: A row of `finished_row` or facts of a failure per document.
        batch: Input table.
        has_pages: True if places name their pages.
    """
    optional = [COMMIT_SCHEMA.field(name) for name in ("confidence", "verdicts")]
    whole = rows_table(results, pa.schema([*BATCH_SCHEMA, *optional]))
    table = whole.select(BATCH_SCHEMA.names)
    if not has_pages:
        table = table.cast(pa.schema(without_pages(table.schema)))
    if output.confidence:
        found = confidence_column(output.json_schema, whole["confidence"])
        table = table.append_column(confidence_field(output.json_schema), found)
    if output.verify:
        table = table.append_column(whole.schema.field("verdicts"), whole["verdicts"])
    answers = answer_columns(output.json_schema, table["summary"])
    named = table.rename_columns({"summary": output.column})
    fields = [
        *named.schema,
        *answer_fields(output.json_schema),
        *map(batch.schema.field, passthrough),
    ]
    columns = [*named.columns, *answers, *map(batch.column, passthrough)]
    return pa.table(columns, schema=pa.schema(fields))

"""Documents and results as Arrow tables, for a pipeline that hands over batches instead of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from specextend.core import DocumentKey
from specextend.data.check import check_columns
from specextend.data.inputs import DocumentError, InputError, InputOptions
from specextend.data.parquet import plain_values
from specextend.data.rows import Row, RowReader
from specextend.data.schema import ERROR_SCHEMA, SUMMARY_SCHEMA

BATCH_SCHEMA = pa.schema(
    [*SUMMARY_SCHEMA, *(ERROR_SCHEMA.field(name) for name in ("error_class", "message", "stage", "retryable"))]
)
"""Our columns of a result: those of `summaries/`, then of `errors/`, which are null for a document that is done."""


def check_batch_options(options: InputOptions) -> None:
    """Raise InputError for options that batches cannot follow, before a model is loaded for them."""
    if options.id_column is None:
        raise InputError("input.id_column must be set: a document of a batch has no place in a file to be its id")
    if options.selects:
        chosen = [name for name in ("filter", "sample", "except_done_in", "limit") if getattr(options, name)]
        raise InputError(
            f"input.{chosen[0]} chooses rows of files, not of batches: leave it out, and choose them in the pipeline"
        )
    if taken := [name for name in options.passthrough if name in BATCH_SCHEMA.names]:
        raise InputError(f"input.passthrough names {taken[0]}, which is a column of the result; rename it in the input")


def read_batch(batch: pa.Table, reader: RowReader) -> list[Row | DocumentError]:
    """Read the documents of a table; one that cannot be processed is its error. A row's key is its place in the table.

    Raises InputError for something else than a table, and if a configured column is missing or has a wrong type.
    """
    if not isinstance(batch, pa.Table | pa.RecordBatch):
        raise InputError(f'a batch must be a pyarrow.Table, got {type(batch).__name__}: give batch_format="pyarrow"')
    assert reader.options.id_column is not None
    check_columns("the batch", batch.schema, reader)
    columns = plain_values(batch, reader.document_columns)
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [_row_or_error(number, row, reader) for number, row in enumerate(rows)]


def _row_or_error(number: int, values: Mapping[str, Any], reader: RowReader) -> Row | DocumentError:
    doc_id = values[str(reader.options.id_column)]
    if doc_id is None:
        return DocumentError("NullId", f"the id in column {reader.options.id_column!r} is null")
    name = doc_id.decode() if isinstance(doc_id, bytes) else str(doc_id)
    try:
        return reader.read(DocumentKey(0, number), name, values)
    except DocumentError as error:
        return error


def result_table(
    results: Sequence[dict[str, Any]], batch: pa.Table, passthrough: Sequence[str], text_column: str = "summary"
) -> pa.Table:
    """Make the table of a batch's results, in its order: BATCH_SCHEMA, then the passthrough columns.

    results: of `result_row` or `error_row`, one for each row of the batch. text_column: the name of `summary`.
    """
    table = pa.Table.from_pylist(list(results), schema=BATCH_SCHEMA)
    table = table.rename_columns({"summary": text_column})
    for name in passthrough:
        table = table.append_column(batch.schema.field(name), batch[name])
    return table

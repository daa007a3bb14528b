"""Documents and results as Arrow tables, for a pipeline that hands over batches instead of files."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from specextend.core import DocumentKey, ReadOnly, Values, mended
from specextend.data.answers import answer_columns, answer_fields
from specextend.data.check import check_columns, check_names
from specextend.data.inputs import DocumentError, InputError, InputOptions, OutputOptions
from specextend.data.parquet import plain_rows
from specextend.data.rows import Row, RowReader
from specextend.data.schema import ERROR_SCHEMA, SUMMARY_SCHEMA, rows_table

BATCH_SCHEMA = pa.schema(
    [*SUMMARY_SCHEMA, *(ERROR_SCHEMA.field(name) for name in ("error_class", "message", "stage", "retryable"))]
)
"""Our columns of a result: those of `summaries/`, then of `errors/`, which are null for a document that is done."""


def check_batch_options(options: InputOptions, output: OutputOptions) -> None:
    """Raise InputError for options that batches cannot follow, before a model is loaded for them."""
    if options.selects:
        chosen = [name for name in ("filter", "sample", "except_done_in", "limit") if getattr(options, name)]
        raise InputError(
            f"input.{chosen[0]} chooses rows of files, not of batches: leave it out, and choose them in the pipeline"
        )
    check_names(options, output)
    if taken := [name for name in options.passthrough if name in {*BATCH_SCHEMA.names} - {"summary"}]:
        raise InputError(f"input.passthrough names {taken[0]}, which is a column of the result; rename it in the input")


def as_table(documents: Any, options: InputOptions) -> tuple[pa.Table, Callable[[pa.Table], Any]]:
    """Return documents as a table, and what gives results back in the form that they came in.

    documents: a table or data frame; one text or document (a dictionary), or a list of them; a dictionary of columns.
    Texts alone have their number as id. Raises InputError for anything else, and if `input.id_column` is not set.
    """
    documents = mended(documents)
    if isinstance(documents, str):
        return _of_texts([documents], options), _first
    if isinstance(documents, list) and all(each is None or isinstance(each, str) for each in documents):
        return _of_texts(documents, options), pa.Table.to_pylist
    if options.id_column is None:
        raise InputError("input.id_column must be set: a document of a batch has no place in a file to be its id")
    if isinstance(documents, pa.Table | pa.RecordBatch):
        return documents, lambda table: table
    if isinstance(documents, list) and all(isinstance(each, Mapping) for each in documents):
        return pa.Table.from_pylist(documents), pa.Table.to_pylist
    if isinstance(documents, Mapping) and isinstance(documents.get(options.text_column), str | None):
        return pa.Table.from_pylist([documents]), _first
    if isinstance(documents, Mapping):
        return pa.table(dict(documents)), pa.Table.to_pydict
    if hasattr(documents, "__arrow_c_stream__"):
        return pa.table(documents), pa.Table.to_pandas if hasattr(documents, "iloc") else lambda table: table
    raise InputError(f"documents must be texts, dictionaries, a table or a data frame, got {type(documents).__name__}")


def _first(results: pa.Table) -> Values:
    return results.to_pylist()[0]


def _of_texts(texts: Sequence[str | None], options: InputOptions) -> pa.Table:
    columns: Values = {options.text_column: pa.array(texts, pa.string())}
    if options.id_column is not None:
        columns[options.id_column] = pa.array(map(str, range(len(texts))), pa.string())
    return pa.table(columns)


def read_batch(batch: pa.Table, reader: RowReader) -> list[Row | DocumentError]:
    """Read the documents of a table; one that cannot be processed is its error. A row's key is its place in the table.

    Without `input.id_column` that place is its id. Raises InputError if a configured column is missing or mistyped.
    """
    check_columns("the batch", batch.schema, reader)
    rows = plain_rows(batch, reader.document_columns)
    return [_row_or_error(number, row, reader) for number, row in enumerate(rows)]


def _row_or_error(number: int, values: ReadOnly, reader: RowReader) -> Row | DocumentError:
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
    results: Sequence[Values], batch: pa.Table, passthrough: Sequence[str], output: OutputOptions
) -> pa.Table:
    """Make the table of a batch's results, in its order: BATCH_SCHEMA, the fields of answers, the passthrough columns.

    results: of `result_row`, or the facts of a failure, one for each row of the batch. output: names `summary` and the
    fields.
    """
    table = rows_table(results, BATCH_SCHEMA)
    answers = zip(answer_fields(output.json_schema), answer_columns(output.json_schema, table["summary"]), strict=True)
    table = table.rename_columns({"summary": output.column})
    for field, values in answers:
        table = table.append_column(field, values)
    for name in passthrough:
        table = table.append_column(batch.schema.field(name), batch[name])
    return table

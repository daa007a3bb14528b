"""The end of a run: parts become summaries and errors in input order, and every row is accounted for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.data.documents import Source
from specextend.data.results import Results, Window, find_results
from specextend.data.schema import ERROR_SCHEMA, SUMMARY_SCHEMA, summary_schema
from specextend.data.storage import (
    Location,
    atomic_output,
    delete,
    exists,
    read_bytes,
    remove_temporary_files,
    write_bytes,
)

_DIGEST = b"specextend.results"
_CHUNK_ROWS = 4096
_GROUP_BYTES = 16 << 20


class ReconciliationError(RuntimeError):
    """Rows in are not rows done plus errors: nothing is written."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows in = done + errors."""

    rows: int
    done: int
    errors: int


def finalize(source: Source, output: Location) -> Counts:
    """Write `summaries/` and `errors/` from the parts, one row per document in input order.

    Bounded memory; each file is there whole or not at all; one that would not change is not rewritten; an errors
    file whose rows are done by now is deleted. Passthrough columns are read from the input itself. Raises
    ReconciliationError, and InputError for an input that changed or cannot be read.
    """
    for file in source.files:
        source.check_unchanged(file.number)
    results = find_results(output)
    counts = _reconcile(source, results)
    window = Window(results)
    for folder in ("summaries", "errors"):
        remove_temporary_files(output.child(folder))
    for file in source.files:
        name = _name(file.number)
        _write_summaries(source, file.number, results, window, output.child("summaries", name))
        _write_errors(file.number, results, output.child("errors", name))
    return counts


def is_finalized(source: Source, output: Location) -> bool:
    """Whether `summaries/` and `errors/` are what `finalize` would write: somebody may have taken a file away."""
    results = find_results(output)
    for file in source.files:
        name = _name(file.number)
        if not _is_written(output.child("summaries", name), _summaries_schema(source, file.number, results)):
            return False
        failed, errors = _failed(file.number, results), output.child("errors", name)
        if not (_is_written(errors, _errors_schema(results, failed)) if len(failed) else not exists(errors)):
            return False
    return True


def is_output_file(name: str) -> bool:
    """Whether a file of `summaries/` or `errors/` is one of ours, by its name."""
    return re.fullmatch(r"part-\d{5,}\.parquet", name) is not None


def _name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def write_success(output: Location, counts: Counts) -> None:
    """Write `_SUCCESS`, the last file of a run that exits 0."""
    write_bytes(output.child("_SUCCESS"), (json.dumps(asdict(counts)) + "\n").encode())


def remove_success(output: Location) -> None:
    """Remove `_SUCCESS` before anything in the folder changes."""
    delete(output.child("_SUCCESS"))


def read_success(output: Location) -> Counts | None:
    """The counts of a finished run, or None."""
    data = read_bytes(output.child("_SUCCESS"))
    return None if data is None else Counts(**json.loads(data))


def _reconcile(source: Source, results: Results) -> Counts:
    """Raise ReconciliationError unless there is one result for each input row, and no other."""
    for file in source.files:
        span = results.span(file.number)
        have = results.rows[span.start : span.stop]
        missing = np.setdiff1d(np.arange(file.num_rows), have)
        if len(missing):
            raise ReconciliationError(
                f"{len(missing)} of the {file.num_rows} rows of {file.relative_path} have no result, "
                f"the first is row {missing[0]}; run the job again to do them"
            )
    if len(results.rows) != source.num_rows:
        raise ReconciliationError(f"the parts hold {len(results.rows)} rows, the input has {source.num_rows}")
    done = int(results.done.sum())
    return Counts(source.num_rows, done, source.num_rows - done)


def _write_summaries(source: Source, number: int, results: Results, window: Window, location: Location) -> None:
    schema = _summaries_schema(source, number, results)
    if _is_written(location, schema):
        return
    with atomic_output(location) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        tables = _summaries(source, number, results, window, schema)
        has_dictionary = any("dictionary<" in str(field.type) for field in schema)  # of which each table has its own
        for table in (each for each, _ in tables) if has_dictionary else gathered(tables):
            writer.write_table(table)


def _summaries_schema(source: Source, number: int, results: Results) -> pa.Schema:
    span = results.span(number)
    done = np.arange(span.start, span.stop)[results.done[span.start : span.stop]]
    return _with_digest(summary_schema(source.passthrough_fields), results.digest(done))


def _summaries(
    source: Source, number: int, results: Results, window: Window, schema: pa.Schema
) -> Iterator[tuple[pa.Table, int]]:
    """The summaries of a file, some rows at a time, in row order, and the bytes that such rows keep in memory."""
    span = results.span(number)
    begin = span.start
    for columns, num_rows in _passthrough(source, number):
        rows = window.rows(begin, begin + num_rows)
        table = pa.Table.from_arrays([rows[name] for name in SUMMARY_SCHEMA.names] + columns, schema=schema)
        yield _rows_where(table, results.done[begin : begin + num_rows]), table.nbytes
        begin += num_rows
    assert begin == span.stop, "the input has as many rows as its footer says"


def gathered(tables: Iterable[tuple[pa.Table, int]]) -> Iterator[pa.Table]:
    """The same rows in tables worth a row group: a writer keeps what it knows of each group until the file is whole.

    tables: each with the bytes that holding it takes, which for slices is more than they show.
    """
    waiting: list[pa.Table] = []
    num_rows = num_bytes = 0
    for table, held_bytes in tables:
        if not len(table):
            continue
        waiting.append(table)
        num_rows, num_bytes = num_rows + len(table), num_bytes + held_bytes
        if num_rows >= _CHUNK_ROWS or num_bytes >= _GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, num_rows, num_bytes = [], 0, 0
    if waiting:
        yield pa.concat_tables(waiting)


def _rows_where(table: pa.Table, mask: NDArray[np.bool_]) -> pa.Table:
    """Some rows of a table, as slices of it: Arrow's own filter does not know every type, such as string views."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return pa.concat_tables([table.slice(0, 0), *(table.slice(begin, end - begin) for begin, end in edges.tolist())])


def _passthrough(source: Source, number: int) -> Iterator[tuple[list[pa.ChunkedArray], int]]:
    """Passthrough columns of a file and their number of rows, some rows at a time, in row order."""
    fields = source.passthrough_fields
    if not fields:
        num_rows = source.files[number].num_rows
        yield from (([], min(_CHUNK_ROWS, num_rows - begin)) for begin in range(0, num_rows, _CHUNK_ROWS))
        return
    for batch in source.batches(number, [field.name for field in fields], original=True):
        yield [_typed(batch[field.name], field.type) for field in fields], len(batch)


def _typed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column without values takes the type it has in the other files."""
    return pa.chunked_array([pa.nulls(len(values), kind)]) if pa.types.is_null(values.type) else values


def _write_errors(number: int, results: Results, location: Location) -> None:
    failed = _failed(number, results)
    if not len(failed):
        delete(location)
        return
    schema = _errors_schema(results, failed)
    if _is_written(location, schema):
        return
    with atomic_output(location) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for begin in range(0, len(failed), _CHUNK_ROWS):
            rows = results.load(failed[begin : begin + _CHUNK_ROWS]).combine_chunks()
            keys = pa.StructArray.from_arrays(
                [rows[name].combine_chunks() for name in ("file", "row")], fields=list(ERROR_SCHEMA.field("key").type)
            )
            writer.write_table(
                pa.Table.from_arrays([keys, *(rows[name] for name in ERROR_SCHEMA.names[1:])], schema=schema)
            )


def _failed(number: int, results: Results) -> NDArray[np.int64]:
    """Positions of a file's error rows."""
    span = results.span(number)
    return np.arange(span.start, span.stop)[~results.done[span.start : span.stop]]


def _errors_schema(results: Results, failed: NDArray[np.int64]) -> pa.Schema:
    return _with_digest(ERROR_SCHEMA, results.digest(failed))


def _with_digest(schema: pa.Schema, digest: str) -> pa.Schema:
    columns = hashlib.sha256(schema.to_string().encode()).hexdigest()
    return schema.with_metadata({_DIGEST: f"{columns}:{digest}".encode()})


def _is_written(location: Location, schema: pa.Schema) -> bool:
    """Whether the file is there and holds the very columns and results that `schema`'s digest names."""
    if not exists(location):
        return False
    try:
        found = pq.read_schema(location.path, filesystem=location.filesystem).metadata or {}
    except pa.ArrowInvalid:
        return False
    return found.get(_DIGEST) == schema.metadata[_DIGEST]

"""The end of a run: parts become summaries and errors in input order, and every row is accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.data.fingerprint import read_manifest
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.parts import WINDOW_ROWS, Results, Window, find_results
from specextend.data.provenance import PROVENANCE, provenance
from specextend.data.run_folder import Counts, errors_folder, read_starts, result_name, summaries_folder
from specextend.data.schema import ERROR_SCHEMA, SUMMARY_SCHEMA, summary_schema
from specextend.data.source import Source
from specextend.data.storage import Location, atomic_output, delete, exists, remove_temporary_files

_DIGEST = b"specextend.results"
_CHUNK_ROWS = 4096
_GROUP_BYTES = 16 << 20
Origin = Callable[[Iterable[str]], bytes]
"""Encodes the provenance of rows that starts with these run ids have committed."""


class ReconciliationError(RuntimeError):
    """The number of input rows differs from that of rows done and error rows; nothing is written."""


def finalize(
    source: Source,
    output: Location,
    checkpoint: Callable[[], object] = lambda: None,
    window_rows: int = WINDOW_ROWS,
) -> Counts:
    """Write `summaries/` and `errors/` from the parts, one row per document in input order.

    Memory is bounded: `window_rows` results are held at a time. Each file is there whole or not at all; one that would
    not change is not rewritten; an errors file whose rows are done by now is deleted. Passthrough columns are read from
    the input itself. checkpoint: called between tables; may raise. Raises ReconciliationError, DamagedPartError,
    StrangePartError, and InputError for an input that changed or cannot be read.
    """
    for file in source.files:
        checkpoint()
        source.check_unchanged(file.number)
    results = find_results(output)
    origin = partial(provenance, read_manifest(output), read_starts(output))
    counts = _reconcile(source, results)
    window = Window(results, window_rows)
    for folder in (summaries_folder(output), errors_folder(output)):
        remove_temporary_files(folder)
    for file in source.files:
        name = result_name(file.number)
        checkpoint()
        summaries = _summaries(source, file.number, results, window, checkpoint)
        _write_summaries(source, file.number, results, summaries, origin, summaries_folder(output).child(name))
        _write_errors(file.number, results, origin, errors_folder(output).child(name))
    return counts


def is_finalized(source: Source, output: Location) -> bool:
    """Return True if `summaries/` and `errors/` are what `finalize` would write: a file may have been taken away."""
    results = find_results(output)
    for file in source.files:
        name = result_name(file.number)
        if not _is_written(summaries_folder(output).child(name), _summaries_schema(source, file.number, results)):
            return False
        failed, errors = _failed(file.number, results), errors_folder(output).child(name)
        if not (_is_written(errors, _errors_schema(results, failed)) if len(failed) else not exists(errors)):
            return False
    return True


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
        raise ReconciliationError(
            f"the parts hold {len(results.rows)} rows, the input has {source.num_rows}; move foreign parts away"
        )
    done = int(results.done.sum())
    return Counts(source.num_rows, done, source.num_rows - done)


def _write_summaries(
    source: Source,
    number: int,
    results: Results,
    tables: Iterator[tuple[pa.Table, int]],
    origin: Origin,
    location: Location,
) -> None:
    schema = _summaries_schema(source, number, results)
    if _is_written(location, schema):
        return
    schema = _with_origin(schema, origin(results.run_ids(_done(number, results))))
    with atomic_output(location) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        has_dictionary = any("dictionary<" in str(field.type) for field in schema)  # each table has its own dictionary
        for table in (each for each, _ in tables) if has_dictionary else gathered(tables):
            writer.write_table(table)


def _summaries_schema(source: Source, number: int, results: Results) -> pa.Schema:
    return _with_digest(summary_schema(source.passthrough_fields), results.digest(_done(number, results)))


def _summaries(
    source: Source, number: int, results: Results, window: Window, checkpoint: Callable[[], object]
) -> Iterator[tuple[pa.Table, int]]:
    """Yield the summaries of a file in row order, some rows at a time, each with the bytes that they keep in memory."""
    span, schema = results.span(number), _summaries_schema(source, number, results)
    begin = span.start
    for columns, num_rows in _passthrough(source, number):
        checkpoint()
        rows = window.rows(begin, begin + num_rows)
        table = pa.Table.from_arrays([rows[name] for name in SUMMARY_SCHEMA.names] + columns, schema=schema)
        yield _rows_where(table, results.done[begin : begin + num_rows]), table.nbytes
        begin += num_rows
    assert begin == span.stop, "the input has as many rows as its footer says"


def gathered(tables: Iterable[tuple[pa.Table, int]]) -> Iterator[pa.Table]:
    """Join tables into row groups that are not too small: a writer keeps metadata of each until the file is whole.

    tables: each with the bytes that it keeps in memory, which for a slice are more than its own size.
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
    """Select rows of a table as slices of it: Arrow's own filter does not know every type, such as string views."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return pa.concat_tables([table.slice(0, 0), *(table.slice(begin, end - begin) for begin, end in edges.tolist())])


def _passthrough(source: Source, number: int) -> Iterator[tuple[list[pa.ChunkedArray], int]]:
    """Yield the passthrough columns of a file and their number of rows, some rows at a time, in row order."""
    fields = source.passthrough_fields
    if not fields:
        num_rows = source.files[number].num_rows
        yield from (([], min(_CHUNK_ROWS, num_rows - begin)) for begin in range(0, num_rows, _CHUNK_ROWS))
        return
    for batch in source.batches(number, [field.name for field in fields], original=True):
        yield [_typed(batch[field.name], field.type) for field in fields], len(batch)


def _typed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Give a column without values the type it has in the other files, and write out text that was read compact."""
    if pa.types.is_null(values.type):
        return pa.chunked_array([pa.nulls(len(values), kind)])
    if pa.types.is_dictionary(values.type) and not pa.types.is_dictionary(kind):
        return values.cast(values.type.value_type).cast(kind, safe=False)
    return values


def _write_errors(number: int, results: Results, origin: Origin, location: Location) -> None:
    failed = _failed(number, results)
    if not len(failed):
        delete(location)
        return
    schema = _errors_schema(results, failed)
    if _is_written(location, schema):
        return
    schema = _with_origin(schema, origin(results.run_ids(failed)))
    with atomic_output(location) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for begin in range(0, len(failed), _CHUNK_ROWS):
            rows = results.load(failed[begin : begin + _CHUNK_ROWS]).combine_chunks()
            keys = pa.StructArray.from_arrays(
                [rows[name].combine_chunks() for name in ("file", "row")], fields=list(ERROR_SCHEMA.field("key").type)
            )
            writer.write_table(
                pa.Table.from_arrays([keys, *(rows[name] for name in ERROR_SCHEMA.names[1:])], schema=schema)
            )


def _done(number: int, results: Results) -> NDArray[np.int64]:
    """Return the positions of a file's rows that are done."""
    span = results.span(number)
    return np.arange(span.start, span.stop)[results.done[span.start : span.stop]]


def _failed(number: int, results: Results) -> NDArray[np.int64]:
    """Return the positions of a file's error rows."""
    span = results.span(number)
    return np.arange(span.start, span.stop)[~results.done[span.start : span.stop]]


def _errors_schema(results: Results, failed: NDArray[np.int64]) -> pa.Schema:
    return _with_digest(ERROR_SCHEMA, results.digest(failed))


def _with_digest(schema: pa.Schema, digest: str) -> pa.Schema:
    columns = hashlib.sha256(schema.to_string().encode()).hexdigest()
    return schema.with_metadata({_DIGEST: f"{columns}:{digest}".encode()})


def _with_origin(schema: pa.Schema, origin: bytes) -> pa.Schema:
    """Add the provenance, which does not say whether a file must be written again."""
    return schema.with_metadata({**schema.metadata, PROVENANCE: origin})


def _is_written(location: Location, schema: pa.Schema) -> bool:
    """Return True if the file exists and holds the very columns and results that `schema`'s digest names."""
    if not exists(location):
        return False
    try:
        found = pq.read_schema(location.path, filesystem=location.filesystem).metadata or {}
    except DAMAGED as error:
        if not is_damaged(location, error):
            raise
        return False
    return found.get(_DIGEST) == schema.metadata[_DIGEST]

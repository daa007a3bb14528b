"""The end of a run: parts become summaries and errors in input order, and every row is accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import counted
from specextend.data.fingerprint import PROVENANCE, provenance, read_manifest
from specextend.data.in_order import in_order
from specextend.data.parquet import DAMAGED, gathered, is_damaged, rows_where
from specextend.data.parts import (
    KEY_COLUMNS,
    ORIGIN,
    commit_order,
    part_sizes,
    read_results,
    run_id_of,
)
from specextend.data.run_folder import Counts, errors_folder, read_starts, result_name, summaries_folder
from specextend.data.schema import ERROR_SCHEMA, PART_SCHEMA, SUMMARY_SCHEMA, summary_schema
from specextend.data.sorted_rows import BUFFER_BYTES, SortedRows, Tables, Window, cut
from specextend.data.source import Source
from specextend.data.storage import Location, atomic_output, delete, file_sizes, remove_temporary_files

WINDOW_ROWS = 16_384
"""Neighbouring results that are taken at once, at most."""
_WINDOW_BYTES = 16 << 20
"""Bytes of them as parts store them; in memory they take a few times as much."""
_MOST_WINDOWS = 1024
"""Every temporary file has a batch for each window."""
MOST_BYTES = 256 << 20
"""Memory of the results that are being written, by several threads, or wait to be."""
_PASSTHROUGH_BYTES = 32 << 20
"""Most memory that the passthrough columns of an input file take while its summaries are written."""
_DIGEST = b"specextend.results"
_CHUNK_ROWS = 4096


class ReconciliationError(RuntimeError):
    """The number of input rows differs from that of rows done and error rows; nothing is written."""


def finalize(
    source: Source,
    output: Location,
    checkpoint: Callable[[], object] = lambda: None,
    observe: Callable[[pa.Table], object] = lambda rows: None,
    *,
    window_rows: int = WINDOW_ROWS,
    buffer_bytes: int = BUFFER_BYTES,
) -> Counts:
    """Write `summaries/` and `errors/` from the parts, one row per document in input order.

    Each part is read once. Memory is bounded: `buffer_bytes` of rows are sorted at a time (the rest goes to a temporary
    file), and up to `window_rows` rows are taken at a time, with some others that wait for a thread. Each file is there
    whole or not at all; one that would not change is not rewritten; an errors file whose rows are done by now is
    deleted. Passthrough columns are read from the input itself. checkpoint: called between tables, by several threads;
    may raise. observe: called with the results that count, as `read_results` yields them with the columns of
    PART_SCHEMA and ORIGIN. Raises ReconciliationError, DamagedPartError, StrangePartError, and InputError for an input
    that changed or cannot be read.
    """
    for _ in in_order(source.check_unchanged, [file.number for file in source.files]):
        checkpoint()
    stored_bytes = sum(part_sizes(output).values())
    wanted = (source.rows(file.number) for file in source.files)
    windows = cut(wanted, _rows_at_once(source.num_rows, stored_bytes, window_rows))
    keys = ResultKeys()
    with SortedRows(PART_SCHEMA, windows, buffer_bytes) as rows:
        for table in read_results(output, (*PART_SCHEMA.names, *ORIGIN)):
            checkpoint()
            keys.add(table)
            rows.add(table)
            observe(table)
        results = keys.results()
        counts = _reconcile(source, results)
        for folder in (summaries_folder(output), errors_folder(output)):
            remove_temporary_files(folder, recursive=True)
        ending = _Ending(source, output, results, checkpoint)
        stretches = _stretches(source, windows, rows)
        for _ in in_order(ending.write, stretches, cost=lambda stretch: stretch.num_bytes, most=MOST_BYTES):
            checkpoint()
    return counts


def _rows_at_once(num_rows: int, stored_bytes: int, window_rows: int) -> int:
    """Return how many rows to take at once: up to `window_rows`, fewer of long rows, more if there are very many."""
    by_size = _WINDOW_BYTES * num_rows // max(1, stored_bytes)
    return max(1, num_rows // _MOST_WINDOWS, min(window_rows, by_size))


def is_finalized(source: Source, output: Location) -> bool:
    """Return True if `summaries/` and `errors/` are what `finalize` would write: a file may have been taken away."""
    ending = _Ending(source, output, find_results(output))
    return all(in_order(ending.is_written, [file.number for file in source.files]))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The results of an input file."""

    number: int
    tables: Callable[[], Iterator[pa.Table]]
    """Yields them in row order, as often as it is called."""
    num_bytes: int
    """Memory that writing them takes."""


def _stretches(source: Source, windows: Sequence[Window], rows: SortedRows) -> Iterator[_Stretch]:
    """Yield the results of each input file, and keep those of one window in memory."""
    number = 0
    while number < len(windows):
        files = windows[number].files
        if len(files) == 1:
            mine = [other for other in range(number, len(windows)) if windows[other].files == files]
            yield _Stretch(files.start, partial(map, rows.take, mine), MOST_BYTES // 4)
            number += len(mine)
            continue
        table, begin = rows.take(number), 0
        for file in files:
            piece = table.slice(begin, len(source.rows(file)))
            extra = min(source.files[file].size, _PASSTHROUGH_BYTES) if source.passthrough_fields else 0
            yield _Stretch(file, partial(iter, [piece]), piece.nbytes + extra)
            begin += len(piece)
        number += 1


def _reconcile(source: Source, results: Results) -> Counts:
    """Raise ReconciliationError unless there is one result for each input row, and no other."""
    for file in source.files:
        span = results.span(file.number)
        have = results.rows[span.start : span.stop]
        wanted = source.rows(file.number)
        missing = np.setdiff1d(np.asarray(wanted), have)
        if len(missing):
            raise ReconciliationError(
                f"{file.relative_path} lacks the results of {len(missing):,} of {counted(len(wanted), 'row')}, "
                f"the first is row {missing[0]}; run the job again"
            )
    if len(results.rows) != source.num_rows:
        raise ReconciliationError(
            f"the parts hold {counted(len(results.rows), 'row')}, the input has {source.num_rows:,}; "
            "move foreign parts away"
        )
    done = int(results.done.sum())
    return Counts(source.num_rows, done, source.num_rows - done)


class _Ending:
    """Writes the results of one input file after the other; its methods are thread-safe."""

    def __init__(
        self, source: Source, output: Location, results: Results, checkpoint: Callable[[], object] = lambda: None
    ) -> None:
        self._source, self._results, self._checkpoint = source, results, checkpoint
        self._summaries, self._errors = summaries_folder(output), errors_folder(output)
        self._there = {folder.path: file_sizes(folder, recursive=True) for folder in (self._summaries, self._errors)}
        self._origin = partial(provenance, read_manifest(output), read_starts(output))

    def is_written(self, number: int) -> bool:
        """Return True if the files of an input file are what `write` would write."""
        (done, failed), errors = self._positions(number), result_name(number)
        has_errors = errors in self._there[self._errors.path]
        return self._holds(self._summaries, result_name(number), self._summaries_schema(done)) and (
            self._holds(self._errors, errors, self._errors_schema(failed)) if len(failed) else not has_errors
        )

    def write(self, stretch: _Stretch) -> None:
        """Write both files of an input file, unless they are there."""
        self._checkpoint()
        done, failed = self._positions(stretch.number)
        name, schema = result_name(stretch.number), self._summaries_schema(done)
        if not self._holds(self._summaries, name, schema):
            tables = gathered(schema, self._summaries_of(stretch, schema))
            self._write(self._summaries.child(name), schema, done, tables)
        name, schema = result_name(stretch.number), self._errors_schema(failed)
        if not len(failed):
            if name in self._there[self._errors.path]:
                delete(self._errors.child(name))
        elif not self._holds(self._errors, name, schema):
            self._write(self._errors.child(name), schema, failed, _errors_of(stretch, schema))

    def _write(
        self, location: Location, schema: pa.Schema, positions: NDArray[np.int64], tables: Iterator[pa.Table]
    ) -> None:
        """Write the file of an input file in one of the two folders, with the provenance of its rows."""
        origin = self._origin(self._results.run_ids(positions))  # does not say whether a file must be written again
        schema = schema.with_metadata({**schema.metadata, PROVENANCE: origin})
        with (
            atomic_output(location) as path,
            pq.ParquetWriter(path, schema, compression="zstd") as writer,
        ):
            for table in tables:
                writer.write_table(table)

    def _summaries_of(self, stretch: _Stretch, schema: pa.Schema) -> Iterator[tuple[pa.Table, int]]:
        """Yield summaries in row order, some rows at a time, each with the bytes that they keep in memory."""
        results = Tables(stretch.tables())
        for columns, num_rows in _passthrough(self._source, stretch.number):
            self._checkpoint()
            rows = results.take(num_rows)
            table = pa.Table.from_arrays([rows[name] for name in SUMMARY_SCHEMA.names] + columns, schema=schema)
            yield rows_where(table, rows["error_class"].is_null().to_numpy()), table.nbytes

    def _positions(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of a file's rows that are done, and of its error rows."""
        span = self._results.span(number)
        done = self._results.done[span.start : span.stop]
        return span.start + np.flatnonzero(done), span.start + np.flatnonzero(~done)

    def _summaries_schema(self, done: NDArray[np.int64]) -> pa.Schema:
        return _with_digest(summary_schema(self._source.passthrough_fields), self._results.digest(done))

    def _errors_schema(self, failed: NDArray[np.int64]) -> pa.Schema:
        return _with_digest(ERROR_SCHEMA, self._results.digest(failed))

    def _holds(self, folder: Location, name: str, schema: pa.Schema) -> bool:
        """Return True if a file of the folder holds the columns and results that the digest names."""
        if name not in self._there[folder.path]:
            return False
        location = folder.child(name)
        try:
            found = pq.read_schema(location.path, filesystem=location.filesystem).metadata or {}
        except DAMAGED as error:
            if not is_damaged(location, error):
                raise
            return False
        return found.get(_DIGEST) == schema.metadata[_DIGEST]


def _errors_of(stretch: _Stretch, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield error rows in row order."""
    for table in stretch.tables():
        rows = table.filter(table["error_class"].is_valid()).combine_chunks()
        pair = [rows[name].combine_chunks() for name in ("file", "row")]
        keys = pa.StructArray.from_arrays(pair, fields=list(ERROR_SCHEMA.field("key").type))
        yield pa.Table.from_arrays([keys, *(rows[name] for name in ERROR_SCHEMA.names[1:])], schema=schema)


def _passthrough(source: Source, number: int) -> Iterator[tuple[list[pa.ChunkedArray], int]]:
    """Yield the passthrough columns of a file and their number of rows, some rows at a time, in row order."""
    fields = source.passthrough_fields
    if not fields:
        num_rows = len(source.rows(number))
        yield from (([], min(_CHUNK_ROWS, num_rows - begin)) for begin in range(0, num_rows, _CHUNK_ROWS))
        return
    for batch in source.chosen_batches(number, [field.name for field in fields]):
        yield [_typed(batch[field.name], field.type) for field in fields], len(batch)


def _typed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Give a column without values the type it has in the other files, and write out text that was read compact."""
    if pa.types.is_null(values.type):
        return pa.chunked_array([pa.nulls(len(values), kind)])
    if pa.types.is_dictionary(values.type) and not pa.types.is_dictionary(kind):
        return values.cast(values.type.value_type).cast(kind, safe=False)
    return values


def _with_digest(schema: pa.Schema, digest: str) -> pa.Schema:
    columns = hashlib.sha256(schema.to_string().encode()).hexdigest()
    return schema.with_metadata({_DIGEST: f"{columns}:{digest}".encode()})


@dataclass(frozen=True, slots=True)
class Results:
    """Says where the results that count were committed, sorted by the keys of their rows; no text is held.

    files, rows, parts, offsets [N] int64; done [N] bool.
    """

    names: tuple[str, ...]
    """The parts with which they were committed, in that order."""
    files: NDArray[np.int64]
    rows: NDArray[np.int64]
    parts: NDArray[np.int64]
    """Index into `names`."""
    offsets: NDArray[np.int64]
    """Row in the part."""
    done: NDArray[np.bool_]

    def span(self, number: int) -> range:
        """Return the positions of an input file's rows."""
        begin, end = np.searchsorted(self.files, [number, number + 1])
        return range(int(begin), int(end))

    def run_ids(self, positions: NDArray[np.int64]) -> list[str]:
        """Return the run ids of the starts that committed the results at some positions, in the order of commits."""
        return list(dict.fromkeys(run_id_of(self.names[part]) for part in np.unique(self.parts[positions])))

    def digest(self, positions: NDArray[np.int64]) -> str:
        """Hash the places of the results at some positions; a commit never changes, so equal hashes mean equal rows."""
        used, local = np.unique(self.parts[positions], return_inverse=True)
        digest = hashlib.sha256("\n".join(self.names[part] for part in used).encode())
        for values in (local, self.offsets[positions], self.rows[positions]):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()


class ResultKeys:
    """Collects the places of results, table by table."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._columns: list[tuple[NDArray[np.int64], ...]] = []

    def add(self, table: pa.Table) -> None:
        """Add a table with the KEY_COLUMNS and ORIGIN."""
        numbers = (table[name].to_numpy() for name in ("file", "row", "origin_row"))
        done = table["error_class"].is_null().to_numpy()
        self._columns.append((*numbers, done, self._parts(table["origin"])))

    def _parts(self, origins: pa.ChunkedArray) -> NDArray[np.int64]:
        """Number the parts that a column names."""
        pieces = [np.zeros(0, np.int32)]
        for chunk in origins.chunks:
            known = [self._names.setdefault(name, len(self._names)) for name in chunk.dictionary.to_pylist()]
            pieces.append(np.array(known, np.int32)[chunk.indices.to_numpy()])
        return np.concatenate(pieces)

    def results(self) -> Results:
        """Return what was added, sorted."""
        names = sorted(self._names, key=commit_order)
        ranks = np.zeros(len(names), np.int32)
        ranks[[self._names[name] for name in names]] = np.arange(len(names))
        empty = tuple(np.zeros(0, kind) for kind in (np.int32, np.int64, np.int32, bool, np.int32))
        files, rows, offsets, done, parts = map(np.concatenate, zip(empty, *self._columns, strict=True))
        order = np.lexsort((rows, files))
        return Results(tuple(names), files[order], rows[order], ranks[parts[order]], offsets[order], done[order])


def find_results(output: Location) -> Results:
    """Find the result of each input row, without its text. Raises DamagedPartError, StrangePartError."""
    keys = ResultKeys()
    for table in read_results(output, (*KEY_COLUMNS, *ORIGIN)):
        keys.add(table)
    return keys.results()

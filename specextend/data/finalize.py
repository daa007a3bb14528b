"""The end of a run: commits become summaries and errors in input order, and every row is accounted
for.
"""

import hashlib
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from specextend.core import Checkpoint, counted
from specextend.data.commits import (
    FAILED,
    KEY_COLUMNS,
    OPEN,
    Settled,
    commit_of,
    commit_order,
    read_results,
    run_id_of,
    state_of,
)
from specextend.data.database import temporary_room
from specextend.data.fingerprint import PROVENANCE, output_columns, provenance, read_manifest
from specextend.data.generic import WORD_COLUMNS, RunWords, with_flags
from specextend.data.parquet import (
    DAMAGED,
    Ints,
    as_stored,
    gathered,
    halved,
    open_parquet,
    rows_where,
    stream,
    write_groups,
)
from specextend.data.run_folder import (
    Counts,
    errors_folder,
    read_starts,
    result_name,
    summaries_folder,
)
from specextend.data.schema import (
    COMMIT_SCHEMA,
    ERROR_SCHEMA,
    error_schema,
    summary_columns,
    summary_fields,
)
from specextend.data.source import Source
from specextend.data.storage import Location, atomic_output, delete, file_sizes, in_order

MOST_BYTES = 256 << 20
"""Memory of the results that are being written, by several threads, or wait to be."""
_HELD_BYTES = 32 << 20
"""Most bytes of a file's results, or of its passthrough columns, that wait for a thread; larger
files are written one after the other.
"""
_DIGEST = b"specextend.results"


class ReconciliationError(RuntimeError):
    """The number of input rows differs from that of rows done and error rows; nothing is
    written.
    """


def finalize(
    source: Source,
    output: Location,
    checkpoint: Checkpoint = lambda: None,
    observe: Callable[[pa.Table], object] = lambda rows: None,
    words: RunWords | None = None,
) -> Counts:
    """Write `summaries/` and `errors/` from the commits, one row per document in input order.

    A row of which some tasks failed is in `summaries/`, and counts as an error.

    Each commit is read once. Memory is bounded: some rows are sorted at a time; the rest goes to
    temporary files. Each file is there whole or not at all; one that would not change is not
    rewritten; an errors file whose rows are done by now is deleted. Passthrough columns are read
    from the input itself. checkpoint: called between tables, by several threads; may raise.
    observe: called with the results that count, as `read_results` yields them with the columns of
    COMMIT_SCHEMA. words: filled in. Raises ReconciliationError, DamagedCommitError,
    StrangeCommitError, and InputError for an input that changed or cannot be read.
    """
    for _ in in_order(source.check_unchanged, [file.number for file in source.files]):
        checkpoint()
    settled = Settled()
    ending = _Ending(source, output, checkpoint, words)
    with closing(SortedRows(COMMIT_SCHEMA)) as rows:
        for table in read_results(output, COMMIT_SCHEMA.names, settled=settled):
            checkpoint()
            ending.add(table)
            rows.add(table)
            observe(table)
        counts = _reconcile(source, settled)
        ending.find_generic()
        stretches = ending.stretches(rows.tables())
        for _ in in_order(
            ending.write, stretches, cost=lambda stretch: stretch.num_bytes, most=MOST_BYTES
        ):
            checkpoint()
    return counts


def unfinished(source: Source, output: Location) -> list[str]:
    """Return the names of the files in `summaries/` and `errors/` that are not what `finalize`
    would write.

    One may have been taken away, or a byte of it has changed on the disk.
    """
    ending = _Ending(source, output)
    for table in read_results(output, [*dict.fromkeys((*KEY_COLUMNS, *WORD_COLUMNS))]):
        ending.add(table)
    ending.find_generic()
    numbers = [file.number for file in source.files]
    written = in_order(ending.is_written, numbers)
    return [
        result_name(number)
        for number, is_written in zip(numbers, written, strict=True)
        if not is_written
    ]


def _reconcile(source: Source, settled: Settled) -> Counts:
    """Raise ReconciliationError unless there is one result for each input row, and no other."""
    for file in source.files:
        wanted = np.asarray(source.rows(file.number), np.int64)
        missing = wanted[settled.states(file.number, file.num_rows)[wanted] == OPEN]
        if len(missing):
            raise ReconciliationError(
                f"{file.relative_path} lacks the results of {len(missing):,} of "
                f"{counted(len(wanted), 'row')}, the first is row {missing[0]}; run the job again"
            )
    done, failed = settled.count()
    if done + failed != source.num_rows:
        raise ReconciliationError(
            f"the commits hold {counted(done + failed, 'row')}, the input has {source.num_rows:,}; "
            "move foreign commits away"
        )
    return Counts(source.num_rows, done, failed)


class _Stretch(NamedTuple):
    """The results of an input file in row order."""

    number: int
    tables: Iterable[pa.Table]
    num_bytes: int
    """Memory that writing them takes."""


class _Folder:
    """One of the two folders of results: the commits whose rows each of its files holds.

    A commit never changes, so equal commits mean equal results, generic answers aside.
    """

    def __init__(self, place: Location, schema: pa.Schema):
        self.place = place
        self.schema = schema
        self.there = file_sizes(place)
        self.commits = defaultdict[int, set[str]](set)


class _Ending:
    """Writes the results of one input file after the other; `write` and `is_written` are
    thread-safe.
    """

    def __init__(
        self,
        source: Source,
        output: Location,
        checkpoint: Checkpoint = lambda: None,
        words: RunWords | None = None,
    ):
        self._source = source
        self._words = words or RunWords()
        self._generic = defaultdict[int, dict[int, list[str]]](dict)
        self._checkpoint = checkpoint
        self._columns = output_columns(output)
        passed = source.passthrough_fields
        summaries = pa.schema([*summary_fields(self._columns), *passed])
        self._summaries = _Folder(summaries_folder(output), summaries)
        self._errors = _Folder(errors_folder(output), error_schema(passed, self._columns))
        self._provenance = partial(provenance, read_manifest(output), read_starts(output))

    def add(self, table: pa.Table) -> None:
        """Remember the commit and the words of a table of `read_results`."""
        self._words.add(table)
        folder = self._errors if state_of(table) == FAILED else self._summaries
        for number in np.unique(table["file"].to_numpy()).tolist():
            folder.commits[number].add(commit_of(table))

    def find_generic(self) -> None:
        """Find the generic answers, after all results were added."""
        for found in self._words.flagged():
            self._generic[found["file"]][found["row"]] = found["tasks"]

    def stretches(self, tables: Iterator[pa.Table]) -> Iterator[_Stretch]:
        """Cut all results into those of each file; a file with too many of them is written at once,
        and not yielded.
        """
        results = Tables(tables)
        for file in self._source.files:
            rest = results.take(len(self._source.rows(file.number)))
            held: list[pa.Table] = []
            num_bytes = min(file.size, _HELD_BYTES) if self._source.passthrough_fields else 0
            for table in rest:
                held.append(table)
                num_bytes += table.nbytes
                if num_bytes > 2 * _HELD_BYTES:
                    self.write(_Stretch(file.number, chain(held, rest), num_bytes))
                    break
            else:
                yield _Stretch(file.number, held, num_bytes)

    def is_written(self, number: int) -> bool:
        """Return True if the files of an input file are what `write` would write."""
        return self._is_right(self._summaries, number) and self._is_right(self._errors, number)

    def write(self, stretch: _Stretch) -> None:
        """Write both files of an input file, unless they are there."""
        self._checkpoint()
        number = stretch.number
        failed = list[pa.Table]()

        def told_apart() -> Iterator[pa.Table]:
            for given in stretch.tables:
                table = with_flags(given, self._generic.get(number, {}))
                failed.append(self._error_rows(table))
                yield table

        tables = told_apart()
        self._write(self._summaries, number, self._summaries_of(number, tables))
        deque(tables, maxlen=0)  # those of a file that was there
        self._write(self._errors, number, self._errors_of(number, failed))

    def _write(self, folder: _Folder, number: int, tables: Iterator[pa.Table]) -> None:
        """Write the file of an input file in one of the two folders, with the provenance of its
        rows, or delete it if there is nothing for it; unless that is done.
        """
        if self._is_right(folder, number):
            return
        place = folder.place.child(result_name(number))
        names = self._commits(folder, number)
        if names is None:
            delete(place)
            return
        # no reason to write a file again
        origin = self._provenance(dict.fromkeys(map(run_id_of, names)))
        metadata = {_DIGEST: self._digest(folder, number, names), PROVENANCE: origin}
        with atomic_output(place) as path:
            write_groups(path, folder.schema.with_metadata(metadata), tables)

    def _commits(self, folder: _Folder, number: int) -> list[str] | None:
        """Return the commits on which a file's rows depend, the earliest first: error rows on those
        of rows done, too. None if there is no row, and so no file, of errors.
        """
        names = folder.commits[number]
        if folder is self._errors:
            if not names:
                return None
            names = names | self._summaries.commits[number]
        return sorted(names, key=commit_order)

    def _summaries_of(self, number: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Yield summaries in row order, some rows at a time."""
        for results, passed in self._joined(number, COMMIT_SCHEMA, tables):
            self._checkpoint()
            columns = summary_columns(results, self._columns) + passed
            table = pa.table(columns, schema=self._summaries.schema)
            yield rows_where(table, _has_answers(results).to_numpy())

    def _errors_of(self, number: int, failed: list[pa.Table]) -> Iterator[pa.Table]:
        """Yield error rows as `_summaries_of` does. failed: their own columns."""
        keys = [table["key"].combine_chunks().field("row").to_numpy() for table in failed]
        schema = error_schema([], self._columns)
        for results, passed in self._joined(number, schema, iter(failed), np.concatenate(keys)):
            self._checkpoint()
            yield pa.table(results.columns + passed, schema=self._errors.schema)

    def _joined(
        self,
        number: int,
        schema: pa.Schema,
        tables: Iterator[pa.Table],
        rows: Ints | None = None,
    ) -> Iterator[tuple[pa.Table, list[pa.ChunkedArray]]]:
        """Yield the results of a file with the columns that are passed through to them, some rows
        at a time. rows: of the file, if they are not all that the run is about.
        """
        source = self._source
        names = [field.name for field in source.passthrough_fields]
        if not names:
            yield from ((table, []) for table in gathered(tables))
            return
        results = Tables(tables)
        for batch in source.batches_of(number, names, rows):
            taken = pa.concat_tables([schema.empty_table(), *results.take(len(batch))])
            yield taken, source.passthrough(batch, number)

    def _error_rows(self, table: pa.Table) -> pa.Table:
        """Return the error rows of a table of results, with the columns of their schema but those
        passed through.
        """
        rows = table.filter(pc.invert(_has_answers(table)))
        keys = pc.make_struct(rows["file"], rows["row"], field_names=["file", "row"])
        names = [*ERROR_SCHEMA.names, *(["tasks"] if self._columns.others else [])]
        schema = error_schema([], self._columns)
        return (
            rows.append_column("key", keys).select(names).rename_columns(schema.names).cast(schema)
        )

    def _is_right(self, folder: _Folder, number: int) -> bool:
        """Return True if a file of the folder holds the columns and results that the digest names,
        or is not there and need not be.

        Its pages have checksums; its footer, and the headers of pages, have none.
        """
        names = self._commits(folder, number)
        is_there = result_name(number) in folder.there
        if names is None or not is_there:
            return names is None and not is_there
        schema = folder.schema
        try:
            with open_parquet(folder.place.child(result_name(number))) as parquet:
                found = parquet.schema_arrow
                num_rows = sum(map(len, stream(parquet, found.names)))
                is_whole = num_rows == parquet.metadata.num_rows and found.equals(as_stored(schema))
        except DAMAGED:  # if its store is away, writing it again says so
            return False
        return is_whole and (found.metadata or {}).get(_DIGEST) == self._digest(
            folder, number, names
        )

    def _digest(self, folder: _Folder, number: int, names: list[str]) -> bytes:
        """Return what tells whether a file must be written again: its columns, the commits that its
        rows come from, and its generic answers, which depend on all other rows.
        """
        generic = sorted(self._generic.get(number, {}).items())
        content = "\n".join([folder.schema.to_string(), *names, *map(str, generic)])
        return hashlib.sha256(content.encode()).hexdigest().encode()


def _has_answers(results: pa.Table) -> pa.ChunkedArray:
    """Return which rows belong in `summaries/`: rows done, and those of which some tasks failed."""
    return pc.or_(results["error_class"].is_null(), results["finish_reason"].is_valid())


# Rows in the order of the input, whatever order they come in


BUFFER_BYTES = 128 << 20
"""Bytes of rows that are sorted in memory; if there are more, they go to temporary files."""
_BATCH_BYTES = 768 << 10
"""Bytes of a temporary file that are in memory at a time, if a row has no more. A full buffer is
halved down to two thirds of it.
"""
_ORDER = "order"
"""A column by which rows are sorted: the number of the file and, in the lower bits, of the row."""
_ROW_BITS = 32


class Tables:
    """Rows of some tables, taken in order in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]):
        self._tables = filter(len, tables)
        self.rest: pa.Table = next(self._tables, None)
        """What is left of the next table; None at the end."""

    def take_some(self, most: int) -> pa.Table:
        """Return the next rows, at most so many, of one table."""
        taken = self.rest.slice(0, most)
        rest = self.rest.slice(most)
        self.rest = rest if len(rest) else next(self._tables, None)
        return taken

    def take(self, num_rows: int) -> Iterator[pa.Table]:
        """Yield the next rows in tables as they come; there must be as many."""
        while num_rows:
            taken = self.take_some(num_rows)
            num_rows -= len(taken)
            yield taken


class SortedRows:
    """Rows of one schema, which has columns `file` and `row`, added in any order and taken in the
    order of the input.

    Holds `buffer_bytes` of rows and a sorted copy of them. More go to temporary files without a
    name, each sorted; the system removes them when the process ends, however it ends.
    """

    def __init__(self, schema: pa.Schema, buffer_bytes: int = BUFFER_BYTES):
        self._names = schema.names
        self._schema = schema.append(pa.field(_ORDER, "int64"))
        self._buffer_bytes = buffer_bytes
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0
        self._files: list[IO[bytes]] = []

    def close(self) -> None:
        """Remove the temporary files."""
        for file in self._files:
            file.close()

    def add(self, rows: pa.Table) -> None:
        """Add rows. Raises OSError if the temporary folder has no room."""
        files, numbers = (rows[name].to_numpy().astype(np.int64) for name in ("file", "row"))
        keys = pa.array((files << _ROW_BITS) + numbers)
        self._waiting.append(rows.select(self._names).append_column(_ORDER, keys))
        self._num_bytes += rows.nbytes
        if self._num_bytes >= self._buffer_bytes:
            self._store()

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in order, as tables of a few hundred kilobytes. Nothing can be added any
        more.
        """
        sorted_runs = [*map(_stored_batches, self._files), halved(self._sorted(), _BATCH_BYTES)]
        runs = [Tables(run) for run in sorted_runs]
        while runs := [run for run in runs if run.rest is not None]:
            keys = [run.rest[_ORDER].to_numpy() for run in runs]
            bound = min(each[-1] for each in keys)
            counts = (int(each.searchsorted(bound, side="right")) for each in keys)
            taken = [run.take_some(count) for run, count in zip(runs, counts, strict=True)]
            yield _in_order(pa.concat_tables(taken)).select(self._names)

    def _sorted(self) -> pa.Table:
        """Sort the rows that wait, and forget them."""
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        self._waiting = []
        self._num_bytes = 0
        return _in_order(table)

    def _store(self) -> None:
        """Write the rows that wait to a temporary file."""
        with temporary_room():
            file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
            self._files.append(file)
            options = ipc.IpcWriteOptions(compression="lz4")
            with ipc.new_stream(
                pa.PythonFile(file, mode="w"), self._schema, options=options
            ) as writer:
                for batch in halved(self._sorted(), _BATCH_BYTES):
                    writer.write_table(batch)


def _in_order(table: pa.Table) -> pa.Table:
    return table.take(np.argsort(table[_ORDER].to_numpy(), kind="stable")).combine_chunks()


def _stored_batches(file: IO[bytes]) -> Iterator[pa.Table]:
    file.seek(0)
    with ipc.open_stream(pa.PythonFile(file, mode="r")) as reader:
        yield from (pa.table(batch) for batch in reader)

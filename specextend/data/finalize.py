"""The end of a run: commits become summaries and errors in input order.

Begin at `finalize`.
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
from specextend.data.flags import WORD_COLUMNS, RunWords, with_flags
from specextend.data.parquet import (
    DAMAGED,
    Ints,
    as_stored,
    gathered,
    halved,
    open_parquet,
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
"""Memory for results written by several threads."""
_HELD_BYTES = 32 << 20
"""Largest result of a file that waits for a thread."""
_DIGEST = b"specextend.results"


class ReconciliationError(RuntimeError):
    """Results and input rows do not match; nothing is written."""


def finalize(
    source: Source,
    output: Location,
    checkpoint: Checkpoint = lambda: None,
    observe: Callable[[pa.Table], object] = lambda rows: None,
    words: RunWords | None = None,
) -> Counts:
    """Write `summaries/` and `errors/` from the commits, one row per document in input order.

    Rows with some failed tasks go to `summaries/` and count as errors. Files are written
    atomically, unchanged files are kept, and obsolete error files deleted. Memory is bounded: each
    commit is read once, and rows are sorted in temporary files.

    Args:
        checkpoint: Called between tables by several threads; may raise.
        observe: Called with each table of `read_results`.
        words: Receives the content words of all answers.

    Raises:
        ReconciliationError: A row has no result, or a result no row.
        InputError: The input changed or cannot be read.
    """
    for _ in in_order(source.check_unchanged, [file.number for file in source.files]):
        checkpoint()
    settled = Settled()
    ending = _Ending(source, output, checkpoint, words)
    summaries, errors = ending.folders
    with closing(summaries.rows), closing(errors.rows):
        for table in read_results(output, COMMIT_SCHEMA.names, settled=settled):
            checkpoint()
            ending.add(table).rows.add(table)
            observe(table)
        counts = _reconcile(source, settled)
        ending.find_generic()
        stretches = chain(ending.stretches(summaries, settled), ending.stretches(errors, settled))
        for _ in in_order(
            ending.write, stretches, cost=lambda stretch: stretch.num_bytes, most=MOST_BYTES
        ):
            checkpoint()
    return counts


def unfinished(source: Source, output: Location) -> list[str]:
    """Return the names of result files that are missing, damaged or outdated."""
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


class _Folder:
    """Results of a folder, with the commits of each file.

    Commits never change, so equal commits mean equal results, except for generic answers.
    """

    def __init__(self, place: Location, schema: pa.Schema):
        self.place = place
        self.schema = schema
        self.there = file_sizes(place)
        self.commits = defaultdict[int, set[str]](set)
        self.rows = SortedRows(COMMIT_SCHEMA)


class _Stretch(NamedTuple):
    folder: _Folder
    number: int
    rows: Ints
    tables: Iterable[pa.Table]
    num_bytes: int


class _Ending:
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
        self.folders = (
            _Folder(summaries_folder(output), summaries),
            _Folder(errors_folder(output), error_schema(passed, self._columns)),
        )
        self._provenance = partial(provenance, read_manifest(output), read_starts(output))

    def add(self, table: pa.Table) -> _Folder:
        self._words.add(table)
        folder = self.folders[state_of(table) == FAILED]
        for number in np.unique(table["file"].to_numpy()).tolist():
            folder.commits[number].add(commit_of(table))
        return folder

    def find_generic(self) -> None:
        for found in self._words.flagged():
            self._generic[found["file"]][found["row"]] = found["tasks"]

    def stretches(self, folder: _Folder, settled: Settled) -> Iterator[_Stretch]:
        """Yield the results of each file; a large file is written at once instead."""
        results = Tables(folder.rows.tables())
        for file in self._source.files:
            states = settled.states(file.number, file.num_rows)
            is_here = states == FAILED if folder is self.folders[1] else states > FAILED
            rows = np.flatnonzero(is_here)
            rest = results.take(len(rows))
            held: list[pa.Table] = []
            num_bytes = min(file.size, _HELD_BYTES) if self._source.passthrough_fields else 0
            for table in rest:
                held.append(table)
                num_bytes += table.nbytes
                if num_bytes > 2 * _HELD_BYTES:
                    self.write(_Stretch(folder, file.number, rows, chain(held, rest), num_bytes))
                    deque(rest, maxlen=0)  # the file was up to date
                    break
            else:
                yield _Stretch(folder, file.number, rows, held, num_bytes)

    def is_written(self, number: int) -> bool:
        return all(self._is_right(folder, number) for folder in self.folders)

    def write(self, stretch: _Stretch) -> None:
        self._checkpoint()
        folder = stretch.folder
        number = stretch.number
        if self._is_right(folder, number):
            return
        place = folder.place.child(result_name(number))
        names = self._commits(folder, number)
        if names is None:
            delete(place)
            return
        # Different provenance alone does not justify another write.
        origin = self._provenance(dict.fromkeys(map(run_id_of, names)))
        metadata = {_DIGEST: self._digest(folder, number, names), PROVENANCE: origin}
        with atomic_output(place) as path:
            write_groups(path, folder.schema.with_metadata(metadata), self._tables(stretch))

    def _commits(self, folder: _Folder, number: int) -> list[str] | None:
        """Return the commits of a result file in order; None if there should be no file.

        Error rows depend on the commits of done rows too.
        """
        summaries, errors = self.folders
        names = folder.commits[number]
        if folder is errors:
            if not names:
                return None
            names = names | summaries.commits[number]
        return sorted(names, key=commit_order)

    def _tables(self, stretch: _Stretch) -> Iterator[pa.Table]:
        generic = self._generic.get(stretch.number, {})
        for results, passed in self._joined(stretch):
            self._checkpoint()
            if stretch.folder is self.folders[1]:
                columns = self._error_columns(results)
            else:
                columns = summary_columns(with_flags(results, generic), self._columns)
            yield pa.table(columns + passed, schema=stretch.folder.schema)

    def _joined(self, stretch: _Stretch) -> Iterator[tuple[pa.Table, list[pa.ChunkedArray]]]:
        source = self._source
        names = [field.name for field in source.passthrough_fields]
        if not names:
            yield from ((table, []) for table in gathered(stretch.tables))
            return
        results = Tables(iter(stretch.tables))
        for batch in source.batches_of(stretch.number, names, stretch.rows):
            taken = pa.concat_tables([COMMIT_SCHEMA.empty_table(), *results.take(len(batch))])
            yield taken, source.passthrough(batch, stretch.number)

    def _error_columns(self, rows: pa.Table) -> list[pa.ChunkedArray]:
        keys = pc.make_struct(rows["file"], rows["row"], field_names=["file", "row"])
        names = [*ERROR_SCHEMA.names, *(["tasks"] if self._columns.others else [])]
        schema = error_schema([], self._columns)
        own = rows.append_column("key", keys).select(names)
        return list(own.rename_columns(schema.names).cast(schema).columns)

    def _is_right(self, folder: _Folder, number: int) -> bool:
        """Return True if a result file is up to date, or rightly missing.

        Reads all pages, since their checksums do not cover the footer.
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
        except DAMAGED:  # a store that is away fails the write too
            return False
        return is_whole and (found.metadata or {}).get(_DIGEST) == self._digest(
            folder, number, names
        )

    def _digest(self, folder: _Folder, number: int, names: list[str]) -> bytes:
        generic = sorted(self._generic.get(number, {}).items())
        content = "\n".join([folder.schema.to_string(), *names, *map(str, generic)])
        return hashlib.sha256(content.encode()).hexdigest().encode()


# Sort rows into input order


BUFFER_BYTES = 64 << 20
_BATCH_BYTES = 768 << 10
_ORDER = "order"
"""File number in the upper bits, row number in the lower bits."""
_ROW_BITS = 32


class Tables:
    """A queue of rows, filled from tables."""

    def __init__(self, tables: Iterator[pa.Table]):
        self._tables = filter(len, tables)
        self.rest: pa.Table = next(self._tables, None)
        """Rest of the current table; None at the end."""

    def take_some(self, most: int) -> pa.Table:
        """Take up to `most` rows from the current table."""
        taken = self.rest.slice(0, most)
        rest = self.rest.slice(most)
        self.rest = rest if len(rest) else next(self._tables, None)
        return taken

    def take(self, num_rows: int) -> Iterator[pa.Table]:
        """Take exactly `num_rows` rows, as tables."""
        while num_rows:
            taken = self.take_some(num_rows)
            num_rows -= len(taken)
            yield taken


class SortedRows:
    """Sorts rows by `file` and `row`.

    Rows beyond `buffer_bytes` go to unnamed temporary files, which vanish with the process.
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
        """Add rows. Raises OSError if the temporary folder is full."""
        files, numbers = (rows[name].to_numpy().astype(np.int64) for name in ("file", "row"))
        keys = pa.array((files << _ROW_BITS) + numbers)
        self._waiting.append(rows.select(self._names).append_column(_ORDER, keys))
        self._num_bytes += rows.nbytes
        if self._num_bytes >= self._buffer_bytes:
            self._store()

    def tables(self) -> Iterator[pa.Table]:
        """Yield all rows in order, as tables of a few hundred kilobytes. Add no rows after."""
        sorted_runs = [*map(_stored_batches, self._files), halved(self._sorted(), _BATCH_BYTES)]
        runs = [Tables(run) for run in sorted_runs]
        while runs := [run for run in runs if run.rest is not None]:
            keys = [run.rest[_ORDER].to_numpy() for run in runs]
            bound = min(each[-1] for each in keys)
            counts = (int(each.searchsorted(bound, side="right")) for each in keys)
            taken = [run.take_some(count) for run, count in zip(runs, counts, strict=True)]
            yield _in_order(pa.concat_tables(taken)).select(self._names)

    def _sorted(self) -> pa.Table:
        table = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        self._waiting = []
        self._num_bytes = 0
        return _in_order(table)

    def _store(self) -> None:
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

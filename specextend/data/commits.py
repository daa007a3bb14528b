"""Append-only commits, which are the only record of finished rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import DocumentKey, Values
from specextend.data.fingerprint import PROVENANCE, read_manifest
from specextend.data.parquet import CHECKED, Ints, damaged_as, read_file, write_table
from specextend.data.run_folder import Retry, commits_folder
from specextend.data.schema import COMMIT_SCHEMA, ERROR_SCHEMA, OF_DOCUMENT, rows_table
from specextend.data.storage import Location, file_sizes, in_order
from specextend.stats import PHASES, DecodingStats

_NAME = re.compile(r"part-(?P<run_id>[0-9a-f]{8})-(?P<seq>\d{6,})\.parquet")
_RUN_ID = b"specextend.run_id"
_FINGERPRINT = b"specextend.fingerprint"
_WHOLE_BYTES = 1 << 20
"""A commit up to this size is read in one request, also if few of its columns are wanted."""
KEY_COLUMNS = ("file", "row", "error_class", "finish_reason")
"""The columns that name the row of a result, and its state: done, or with which failure."""
_WORK_COLUMNS = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_network_steps",
    "num_first_accepted",
    *PHASES,
)
"""The columns that tell how much work is done, what a token of each kind costs, and whether the
draft fits.
"""
_NAME_OF = b"specextend.commit"


class DamagedCommitError(ValueError):
    """A commit that is there and does not parse."""


class StrangeCommitError(ValueError):
    """A commit of another run."""


class CommitWriter:
    """Commits rows to `_run/parts/part-<run id>-<seq>.parquet`; one writer per output folder, which
    holds its lock.

    `seq` continues after the highest in the folder, so the order of commits over all starts is the
    order of (seq, run id): this is what "later" means. run_id: 8 hexadecimal digits. fingerprint:
    that of the run; origin: its `provenance`. Both are written into every commit.
    """

    def __init__(self, output: Location, run_id: str, fingerprint: str = "", origin: bytes = b""):
        assert re.fullmatch(r"[0-9a-f]{8}", run_id), run_id
        self.run_id = run_id
        self._schema = COMMIT_SCHEMA.with_metadata(
            {_RUN_ID: run_id, _FINGERPRINT: fingerprint, PROVENANCE: origin}
        )
        self._folder = commits_folder(output)
        names = [*commit_sizes(output)]
        self._next_seq = commit_order(names[-1])[0] + 1 if names else 0

    def commit(self, rows: Sequence[Values]) -> str | None:
        """Write rows of `finished_row`, and those of documents that failed, whole or not at all.

        Returns the commit's name; None if there are no rows.
        """
        if not rows:
            return None
        name = f"part-{self.run_id}-{self._next_seq:06d}.parquet"
        write_table(self._folder.child(name), rows_table(rows, self._schema))
        self._next_seq += 1
        return name


def commit_sizes(output: Location) -> dict[str, int]:
    """Return the bytes of the commits by name, the earliest first."""
    sizes = file_sizes(commits_folder(output))
    return {name: sizes[name] for name in sorted(filter(_NAME.fullmatch, sizes), key=commit_order)}


def read_commit(
    output: Location,
    name: str,
    columns: Sequence[str],
    fingerprint: str = "",
    num_bytes: int | None = None,
) -> pa.Table:
    """Read columns of one commit with the types of COMMIT_SCHEMA; `commit_of` returns its name.

    num_bytes: its size in the listing; a large one is read by columns. Raises DamagedCommitError if
    it does not parse: none of our writers leaves such a commit. Raises OSError if it is out of
    reach, and StrangeCommitError if it names another run than `fingerprint`.
    """
    location = commits_folder(output).child(name)
    wanted = pa.schema([COMMIT_SCHEMA.field(column) for column in columns], {_NAME_OF: name})

    def read(file: pa.NativeFile) -> tuple[str, pa.Table]:
        contents = pa.BufferReader(file.read_buffer()) if (num_bytes or 0) <= _WHOLE_BYTES else file
        with pq.ParquetFile(contents, pre_buffer=True, **CHECKED) as parquet:
            found = (parquet.schema_arrow.metadata or {}).get(_FINGERPRINT, b"").decode()
            table = parquet.read(list(columns)).select(wanted.names).cast(wanted)
        for column in {"file", "row"}.intersection(columns):
            numbers = table[column].to_numpy()
            if ((numbers < 0) | (numbers >= _MOST_ROWS)).any():
                raise pa.ArrowInvalid("it names a row that no input has")
        return found, table

    damaged = damaged_as(DamagedCommitError, location, "move it away to do its documents again")
    found, table = read_file(location, read, damaged, num_bytes)
    if found and fingerprint and found != fingerprint:
        which = f"fingerprint {found[:12]}, here {fingerprint[:12]}"
        raise StrangeCommitError(
            f"{location.path} is a commit of another run ({which}); move it away"
        )
    return table


def commit_of(table: pa.Table) -> str:
    """Return the name of the commit that a table of `read_commit` or `read_results` was read
    from.
    """
    name: bytes = table.schema.metadata[_NAME_OF]
    return name.decode()


def run_id_of(name: str) -> str:
    """Return the run id of the start that wrote a commit, from the commit's name."""
    return commit_order(name)[1]


def commit_order(name: str) -> tuple[int, str]:
    """Return (seq, run id) of a commit's name, by which commits are ordered."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match["seq"]), match["run_id"]


MOST_BYTES = 64 << 20
"""Bytes of commits, as they are stored, that are read ahead; in memory they take a few times as
much.
"""
_MOST_ROWS = 1 << 32
"""No input file has so many rows."""
_ERROR_COLUMNS = {*KEY_COLUMNS, *ERROR_SCHEMA.names, "tasks"}
OPEN = 0
FAILED = 1
PARTIAL = 2
DONE = 3
"""States of an input row: without a result, or with the best one: an error row, a row of which some
tasks failed, a row done.
"""


class Earlier(NamedTuple):
    """Holds the answers to a document of several tasks, some of which are done again."""

    tasks: list[Values]
    """Its entries of the column `tasks`."""
    again: frozenset[str]
    """Names of the tasks to do again."""
    document: Values
    """Its columns that are of no task."""


class KeptTasks:
    """The answers in rows of which something may be done again, as they were read."""

    def __init__(self, retry_errors: Retry = "none"):
        self._retry_errors = retry_errors
        self._places: dict[DocumentKey, tuple[pa.Table, int]] = {}

    def add(self, rows: pa.Table) -> None:
        """Add rows with their keys."""
        own = rows.select(["tasks", *OF_DOCUMENT])
        for place, key in enumerate(_keys(rows)):
            self._places[key] = own, place

    def find(self, key: DocumentKey) -> Earlier | None:
        """Return the answers to a document; None if all of its tasks are to be done."""
        if key not in self._places:
            return None
        rows, place = self._places[key]
        [document] = rows.slice(place, 1).to_pylist()
        entries: list[Values] = document.pop("tasks")
        again = frozenset(each["name"] for each in entries if self._is_due(each))
        return Earlier(entries, again, document)

    def _is_due(self, entry: Values) -> bool:
        is_wanted = self._retry_errors == "all" or entry["retryable"]
        return entry["error_class"] is not None and is_wanted


@dataclass(frozen=True)
class Progress:
    """The state of a run, as the commits of its output folder record it."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Rows that have failed, if only in some of their tasks: key -> error_class of the latest
    result.
    """
    final: frozenset[DocumentKey] = frozenset()
    """Those of `errors` that would fail again, because their latest result is not retryable."""
    attempts: dict[DocumentKey, int] = field(default_factory=dict)
    """Attempts of `errors`: key -> attempts of the latest result."""
    work: DecodingStats = field(default_factory=DecodingStats)
    """Sums of `_WORK_COLUMNS` over `done`."""
    num_partial: int = 0
    """Number of `errors` of which some tasks have an answer."""
    kept: KeptTasks = field(default_factory=KeptTasks, compare=False)
    """Answers of the rows of which only some tasks are done again."""


def read_commits(
    output: Location,
    fingerprint: str = "",
    retry_errors: Retry = "none",
) -> Progress:
    """Read the keys and the work of every commit; without commits the progress is empty.

    All columns are read, so that damage is found before a worker starts, not when the summaries are
    written. fingerprint: that of the run to which the commits must belong; if empty, that of the
    folder's manifest. retry_errors: which failed tasks are done again.
    """
    done: set[DocumentKey] = set()
    num_partial = 0
    kept = KeptTasks(retry_errors)
    errors: dict[DocumentKey, str] = {}
    final: set[DocumentKey] = set()
    attempts: dict[DocumentKey, int] = {}
    work = DecodingStats()
    for table in read_results(output, COMMIT_SCHEMA.names, fingerprint):
        state = state_of(table)
        if state == DONE:
            done.update(_keys(table))
            for name in _WORK_COLUMNS:
                setattr(work, name, getattr(work, name) + (pc.sum(table[name]).as_py() or 0))
            continue
        if state == PARTIAL:
            num_partial += len(table)
            if retry_errors != "none":
                kept.add(table)
        for row in table.select([*KEY_COLUMNS, "retryable", "attempts"]).to_pylist():
            key = DocumentKey(row["file"], row["row"])
            errors[key] = row["error_class"]
            attempts[key] = row["attempts"] or 0
            if not row["retryable"]:
                final.add(key)
    return Progress(frozenset(done), errors, frozenset(final), attempts, work, num_partial, kept)


def _keys(rows: pa.Table) -> Iterator[DocumentKey]:
    return map(DocumentKey, rows["file"].to_pylist(), rows["row"].to_pylist())


def pending(
    rows: Iterable[Sequence[int]], progress: Progress, *, retry_errors: Retry = "none"
) -> Iterator[DocumentKey]:
    """Yield the keys to do, in order. rows: wanted rows of each input file. retry_errors: the error
    rows to redo.
    """
    closed = {
        "none": progress.errors.keys(),
        "retryable": progress.final,
        "all": set[DocumentKey](),
    }[retry_errors]
    for file, wanted in enumerate(rows):
        for row in wanted:
            key = DocumentKey(file, row)
            if key not in progress.done and key not in closed:
                yield key


def read_results(
    output: Location, columns: Sequence[str], fingerprint: str = "", settled: Settled | None = None
) -> Iterator[pa.Table]:
    """Yield the results that count as tables of `columns`, in which the KEY_COLUMNS must be; each
    commit is read once.

    Done beats failed in some tasks, which beats error, later beats earlier, and each input row has
    one result. A table is of one commit and one state: first come the rows done, the latest commits
    first, then all others in the order of their commits. Memory: the commits read ahead
    (MOST_BYTES), the rows of which tasks failed, the error rows' own columns, and a byte for each
    input row. fingerprint: as for `read_commits`. settled: filled in. Raises DamagedCommitError and
    StrangeCommitError.
    """
    sizes = commit_sizes(output)
    if not fingerprint and (manifest := read_manifest(output)) is not None:
        fingerprint = manifest["fingerprint"]
    settled = settled or Settled()
    failed = list[pa.Table]()

    def read(name: str) -> pa.Table:
        return read_commit(output, name, columns, fingerprint, sizes[name])

    for table in in_order(read, reversed(sizes), cost=sizes.__getitem__, most=MOST_BYTES):
        done, partial, errors = settled.settle(table)
        if len(done):
            yield table.take(done)
        if len(partial):
            failed.append(table.take(partial))
        if len(errors):
            own = table.select([column for column in columns if column in _ERROR_COLUMNS])
            failed.append(own.take(errors))
    while failed:
        own = failed.pop()
        own = own.filter(settled.is_best(own))
        if len(own):
            every = table.schema.with_metadata(own.schema.metadata)
            yield pa.concat_tables([every.empty_table(), own], promote_options="default")


def state_of(results: pa.Table) -> int:
    """Return the state of the rows of a table of `read_results`."""
    return int(_states(results.slice(0, 1))[0])


def _states(table: pa.Table) -> NDArray[np.uint8]:
    """Return the state of each result of a table."""
    has_text = table["finish_reason"].is_valid().to_numpy()
    is_done = table["error_class"].is_null().to_numpy()
    return np.where(is_done, DONE, np.where(has_text, PARTIAL, FAILED)).astype(np.uint8)


class Settled:
    """Remembers the best state of each input row that was seen."""

    def __init__(self) -> None:
        self._states: dict[int, NDArray[np.uint8]] = {}
        """Of the rows of each file, which may have room for more."""

    def settle(self, table: pa.Table) -> tuple[Ints, Ints, Ints]:
        """Take in a commit; return which of its rows count by now, of equal ones the last: rows
        done, rows of which some tasks failed, and error rows.
        """
        own = _states(table)
        counts = np.zeros(len(table), bool)
        for state in (DONE, PARTIAL, FAILED):
            mask = own == state
            for states, places, rows in self._files(table):
                is_better = mask[places] & (states[rows] < state)
                _, last = np.unique(rows[is_better][::-1], return_index=True)
                counts[places[is_better][::-1][last]] = True
                states[rows[is_better]] = state
        done, partial, failed = (
            np.flatnonzero(counts & (own == state)) for state in (DONE, PARTIAL, FAILED)
        )
        return done, partial, failed

    def is_best(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return which rows have no better result, before or afterwards."""
        own = _states(table)
        best = np.zeros(len(table), bool)
        for states, places, rows in self._files(table):
            best[places] = states[rows] == own[places]
        return best

    def states(self, file: int, num_rows: int) -> NDArray[np.uint8]:
        """Return the states of the first rows of an input file [num_rows]."""
        known = self._states.get(file, np.zeros(0, np.uint8))[:num_rows]
        return np.pad(known, (0, num_rows - len(known)))

    def count(self) -> tuple[int, int]:
        """Count the rows done and those that failed, if only in some of their tasks."""
        done, partial, failed = (
            sum(int((each == state).sum()) for each in self._states.values())
            for state in (DONE, PARTIAL, FAILED)
        )
        return done, partial + failed

    def _files(self, table: pa.Table) -> Iterator[tuple[NDArray[np.uint8], Ints, Ints]]:
        """Yield the states of each file that a commit names, the places of its rows in the commit,
        and the numbers.
        """
        files, rows = (table[column].to_numpy() for column in ("file", "row"))
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            numbers = rows[places]
            states = self._states.get(file, np.zeros(0, np.uint8))
            needed = int(numbers.max()) + 1
            if needed > len(states):
                states = self._states[file] = np.pad(states, (0, 2 * needed - len(states)))
            yield states, places, numbers

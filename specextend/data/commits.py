"""Append-only commits, the only record of finished rows.

`CommitWriter` writes them; `read_commits` and `read_results` read them.
"""

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
"""Largest commit that is read whole even for a few columns."""
KEY_COLUMNS = ("file", "row", "error_class", "finish_reason")
"""Columns with the row and state of a result."""
_WORK_COLUMNS = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_network_steps",
    "num_first_accepted",
    *PHASES,
)
_NAME_OF = b"specextend.commit"


class DamagedCommitError(ValueError):
    """A commit does not parse."""


class StrangeCommitError(ValueError):
    """A commit belongs to another run."""


class CommitWriter:
    """Writes commits to `_run/parts/part-<run id>-<seq>.parquet`.

    An output folder has one writer, the holder of its lock. `seq` grows over all starts and orders
    the commits.

    Args:
        run_id: 8 hexadecimal digits.
        origin: Provenance of the rows.
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
        """Write rows atomically. Return the name of the commit; None without rows."""
        if not rows:
            return None
        name = f"part-{self.run_id}-{self._next_seq:06d}.parquet"
        write_table(self._folder.child(name), rows_table(rows, self._schema))
        self._next_seq += 1
        return name


def commit_sizes(output: Location) -> dict[str, int]:
    """Return the size of each commit by name, in order."""
    sizes = file_sizes(commits_folder(output))
    return {name: sizes[name] for name in sorted(filter(_NAME.fullmatch, sizes), key=commit_order)}


def read_commit(
    output: Location,
    name: str,
    columns: Sequence[str],
    fingerprint: str = "",
    num_bytes: int | None = None,
) -> pa.Table:
    """Read columns of a commit with the types of COMMIT_SCHEMA.

    Args:
        fingerprint: Expected fingerprint; empty for any.
        num_bytes: Size in the listing. Only large commits are read by column.

    Raises:
        DamagedCommitError: The commit does not parse. Our writers never leave such a file.
        StrangeCommitError: The commit has another fingerprint.
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
    """Return the name of the commit with the rows of `table`."""
    name: bytes = table.schema.metadata[_NAME_OF]
    return name.decode()


def run_id_of(name: str) -> str:
    """Return the run id in the name of a commit."""
    return commit_order(name)[1]


def commit_order(name: str) -> tuple[int, str]:
    """Return (seq, run id) of a commit, the sort key."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match["seq"]), match["run_id"]


MOST_BYTES = 64 << 20
"""Stored bytes of commits read ahead, which take a few times as much memory."""
_MOST_ROWS = 1 << 32
_ERROR_COLUMNS = {*KEY_COLUMNS, *ERROR_SCHEMA.names, "tasks"}
OPEN = 0
FAILED = 1
PARTIAL = 2
DONE = 3
"""States of an input row: no result, error, done in some tasks, done."""


class Earlier(NamedTuple):
    """Earlier answers to a document, `again` the names of tasks to repeat."""

    tasks: list[Values]
    again: frozenset[str]
    document: Values


class KeptTasks:
    """Answers of rows with tasks to repeat."""

    def __init__(self, retry_errors: Retry = "none"):
        self._retry_errors = retry_errors
        self._places: dict[DocumentKey, tuple[pa.Table, int]] = {}

    def add(self, rows: pa.Table) -> None:
        """Add rows."""
        own = rows.select(["tasks", *OF_DOCUMENT])
        for place, key in enumerate(_keys(rows)):
            self._places[key] = own, place

    def find(self, key: DocumentKey) -> Earlier | None:
        """Return the answers to a document; None if all tasks are to do."""
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
    """State of a run according to its commits."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Class of the latest error by key, including rows with some answers."""
    final: frozenset[DocumentKey] = frozenset()
    """Rows of `errors` that are not retryable."""
    attempts: dict[DocumentKey, int] = field(default_factory=dict)
    work: DecodingStats = field(default_factory=DecodingStats)
    """Sums of `_WORK_COLUMNS` over `done`."""
    num_partial: int = 0
    """Number of `errors` with some answers."""
    kept: KeptTasks = field(default_factory=KeptTasks, compare=False)


def read_commits(
    output: Location,
    fingerprint: str = "",
    retry_errors: Retry = "none",
) -> Progress:
    """Read the progress of a run: all columns, so that damage is found before a worker starts.

    Args:
        fingerprint: Fingerprint of the run; empty for that of the manifest.
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
    """Yield the keys to do in order, from the wanted `rows` of each file."""
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
    """Yield the valid results, each table from one commit and with one state.

    Done beats partly done, which beats error; later beats earlier. Done rows come first, latest
    commits first, then the others in commit order. Memory holds MOST_BYTES of commits, rows with
    failed tasks, error rows, and a byte per input row.

    Args:
        columns: Columns to read, including KEY_COLUMNS.
        fingerprint: As for `read_commits`.
        settled: Receives the states.
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
    """Return the state of a table of `read_results`."""
    return int(_states(results.slice(0, 1))[0])


def _states(table: pa.Table) -> NDArray[np.uint8]:
    has_text = table["finish_reason"].is_valid().to_numpy()
    is_done = table["error_class"].is_null().to_numpy()
    return np.where(is_done, DONE, np.where(has_text, PARTIAL, FAILED)).astype(np.uint8)


class Settled:
    """The best state seen of each input row."""

    def __init__(self) -> None:
        self._states: dict[int, NDArray[np.uint8]] = {}

    def settle(self, table: pa.Table) -> tuple[Ints, Ints, Ints]:
        """Add a commit and return its valid rows so far: done, partly done, failed."""
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
        """Return a mask of the rows without a better result."""
        own = _states(table)
        best = np.zeros(len(table), bool)
        for states, places, rows in self._files(table):
            best[places] = states[rows] == own[places]
        return best

    def states(self, file: int, num_rows: int) -> NDArray[np.uint8]:
        """Return the states of the first `num_rows` rows of a file."""
        known = self._states.get(file, np.zeros(0, np.uint8))[:num_rows]
        return np.pad(known, (0, num_rows - len(known)))

    def count(self) -> tuple[int, int]:
        """Return the number of done and of failed rows; partly done rows count as failed."""
        done, partial, failed = (
            sum(int((each == state).sum()) for each in self._states.values())
            for state in (DONE, PARTIAL, FAILED)
        )
        return done, partial + failed

    def _files(self, table: pa.Table) -> Iterator[tuple[NDArray[np.uint8], Ints, Ints]]:
        files, rows = (table[column].to_numpy() for column in ("file", "row"))
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            numbers = rows[places]
            states = self._states.get(file, np.zeros(0, np.uint8))
            needed = int(numbers.max()) + 1
            if needed > len(states):
                states = self._states[file] = np.pad(states, (0, 2 * needed - len(states)))
            yield states, places, numbers

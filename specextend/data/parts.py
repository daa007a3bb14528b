"""Append-only commits, which are the only record of finished rows, and the result that counts for each input row."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import DocumentKey, one_line
from specextend.data.fingerprint import read_manifest
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.provenance import PROVENANCE
from specextend.data.run_folder import parts_folder
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, list_files, remove_temporary_files, write_bytes

Retry = Literal["none", "retryable", "all"]
"""The error rows that are done again."""
_NAME = re.compile(r"part-(?P<run_id>[0-9a-f]{8})-(?P<seq>\d{6,})\.parquet")
WINDOW_ROWS = 16_384
"""Neighbouring results that `finalize` loads at once."""
_RUN_ID, _FINGERPRINT = b"specextend.run_id", b"specextend.fingerprint"
KEY_COLUMNS = ("file", "row", "error_class")
"""The columns that name the row of a result, and whether it is done: then the last is null."""


class DamagedPartError(ValueError):
    """A part that cannot be read."""


class StrangePartError(ValueError):
    """A part of another run."""


class PartWriter:
    """Commits rows to `_run/parts/part-<run id>-<seq>.parquet`; one writer per output folder, which holds its lock.

    `seq` continues after the highest in the folder, so the order of commits over all starts is the order of
    (seq, run id): this is what "later" means. run_id: 8 hexadecimal digits. fingerprint: that of the run; origin: its
    `provenance`. Both are written into every part.
    """

    def __init__(self, output: Location, run_id: str, fingerprint: str = "", origin: bytes = b"") -> None:
        if not re.fullmatch(r"[0-9a-f]{8}", run_id):
            raise ValueError(f"a run id is 8 hexadecimal digits, got {run_id!r}")
        self.run_id = run_id
        metadata = {_RUN_ID: run_id, _FINGERPRINT: fingerprint} if fingerprint else {}
        self._schema = PART_SCHEMA.with_metadata(metadata | ({PROVENANCE: origin} if origin else {}))
        self._folder = parts_folder(output)
        remove_temporary_files(self._folder)
        names = list_parts(output)
        self._next_seq = _order(names[-1])[0] + 1 if names else 0

    def commit(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """Write rows of `result_row` and `error_row`, whole or not at all.

        Returns the part's name; None if there are no rows.
        """
        if not rows:
            return None
        name = f"part-{self.run_id}-{self._next_seq:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(list(rows), schema=self._schema), sink, compression="zstd")
        write_bytes(self._folder.child(name), sink.getvalue())
        self._next_seq += 1
        return name


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run, as the parts of its output folder record it."""

    done: frozenset[DocumentKey]
    errors: dict[DocumentKey, str]
    """Error rows that are not done: key -> error_class of the latest result."""
    final: frozenset[DocumentKey] = frozenset()
    """Those of `errors` that would fail again, because their latest result is not retryable."""
    attempts: dict[DocumentKey, int] = field(default_factory=dict)
    """Attempts of `errors`: key -> attempts of the latest result."""


def read_parts(output: Location, fingerprint: str = "") -> Progress:
    """Read the keys of every part; without parts the progress is empty.

    fingerprint: that of the run to which the parts must belong; if empty, that of the folder's manifest.
    """
    keys = _read_keys(output, list_parts(output), (*KEY_COLUMNS, "retryable", "attempts"), fingerprint)[0]
    final = keys.take(pa.array(_chosen(keys)))
    is_done = pc.is_null(final["error_class"])
    done, failed = final.filter(is_done), final.filter(pc.invert(is_done)).to_pylist()
    errors = {DocumentKey(each["file"], each["row"]): each for each in failed}
    return Progress(
        frozenset(map(DocumentKey, done["file"].to_pylist(), done["row"].to_pylist())),
        {key: error["error_class"] for key, error in errors.items()},
        frozenset(key for key, error in errors.items() if not error["retryable"]),
        {key: error["attempts"] or 0 for key, error in errors.items()},
    )


def pending(file_rows: Sequence[int], progress: Progress, *, retry_errors: Retry = "none") -> Iterator[DocumentKey]:
    """Yield the keys to do, in order. file_rows: rows of each input file. retry_errors: the error rows to redo."""
    closed = {"none": progress.errors.keys(), "retryable": progress.final, "all": set[DocumentKey]()}[retry_errors]
    for file, num_rows in enumerate(file_rows):
        for row in range(num_rows):
            key = DocumentKey(file, row)
            if key not in progress.done and key not in closed:
                yield key


@dataclass(frozen=True, slots=True)
class Results:
    """The places of the results that count, sorted by the keys of their rows; no text is held.

    files, rows, parts, offsets [N] int64; done [N] bool.
    """

    output: Location
    names: tuple[str, ...]
    """The parts, in the order of their commits."""
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

    def load(self, positions: NDArray[np.int64]) -> pa.Table:
        """Load the results at some positions, in that order, as rows of PART_SCHEMA. Reads each part concerned once."""
        parts = self.parts[positions]
        pieces, places = [PART_SCHEMA.empty_table()], [np.empty(0, np.int64)]
        for part in np.unique(parts):
            mine = np.flatnonzero(parts == part)
            table = read_part(self.output, self.names[part], PART_SCHEMA.names)
            pieces.append(table.take(pa.array(self.offsets[positions[mine]])))
            places.append(mine)
        return pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places))))

    def run_ids(self, positions: NDArray[np.int64]) -> list[str]:
        """Return the run ids of the starts that committed the results at some positions, in the order of commits."""
        return list(dict.fromkeys(run_id_of(self.names[part]) for part in np.unique(self.parts[positions])))

    def digest(self, positions: NDArray[np.int64]) -> str:
        """Hash the places of the results at some positions; parts never change, so equal hashes mean equal rows."""
        used, local = np.unique(self.parts[positions], return_inverse=True)
        digest = hashlib.sha256("\n".join(self.names[part] for part in used).encode())
        for values in (local, self.offsets[positions], self.rows[positions]):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()


class Window:
    """Neighbouring results, loaded thousands at a time, so that reading them in order reads each part few times."""

    def __init__(self, results: Results, size: int = WINDOW_ROWS) -> None:
        """Take the results, and how many of them to load at once."""
        self._results, self._size = results, size
        self._loaded = range(0)
        self._table = PART_SCHEMA.empty_table()

    def rows(self, begin: int, end: int) -> pa.Table:
        """Return the results at positions `begin` to `end`."""
        if begin < self._loaded.start or end > self._loaded.stop:
            stop = max(end, min(begin + self._size, len(self._results.rows)))
            self._loaded = range(begin, stop)
            self._table = self._results.load(np.arange(begin, stop))
        return self._table.slice(begin - self._loaded.start, end - begin)


def find_results(output: Location) -> Results:
    """Read the keys of all parts and choose one result for each. Raises DamagedPartError, StrangePartError."""
    names = tuple(list_parts(output))
    keys, parts, offsets = _read_keys(output, names, KEY_COLUMNS)
    chosen = _chosen(keys)
    files, rows = (keys[column].to_numpy()[chosen].astype(np.int64) for column in ("file", "row"))
    done = keys["error_class"].is_null().to_numpy()[chosen]
    return Results(output, names, files, rows, parts[chosen], offsets[chosen], done)


def _read_keys(
    output: Location, names: Sequence[str], columns: Sequence[str], fingerprint: str = ""
) -> tuple[pa.Table, NDArray[np.int64], NDArray[np.int64]]:
    """Read columns of all parts, in the order of their commits, with each row's part [N] and place in it [N]."""
    fingerprint = fingerprint or recorded_fingerprint(output)
    tables = [read_part(output, name, columns, fingerprint) for name in names]
    sizes = np.array([len(table) for table in tables], np.int64)
    parts = np.repeat(np.arange(len(tables)), sizes)
    offsets = np.arange(len(parts)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return pa.concat_tables([_typed(PART_SCHEMA.empty_table(), columns), *tables]), parts, offsets


def _chosen(keys: pa.Table) -> NDArray[np.int64]:
    """Choose the row that counts for each key, among rows in the order of their commits.

    Done beats error, later beats earlier. Returns positions in `keys`, in the order of the keys.
    """
    files, rows = (keys[column].to_numpy() for column in ("file", "row"))
    order = np.lexsort((keys["error_class"].is_null().to_numpy(), rows, files))  # stable: later commits stay behind
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (np.diff(files[order]) != 0) | (np.diff(rows[order]) != 0)
    return order[is_last]


def list_parts(output: Location) -> list[str]:
    """List the names of the parts in the order of their commits."""
    return sorted((name for name in list_files(parts_folder(output)) if _NAME.fullmatch(name)), key=_order)


def recorded_fingerprint(output: Location) -> str:
    """Return the fingerprint in an output folder's manifest; empty if there is none."""
    manifest = read_manifest(output)
    return "" if manifest is None else str(manifest["fingerprint"])


def read_part(output: Location, name: str, columns: Sequence[str], fingerprint: str = "") -> pa.Table:
    """Read columns of one part with the types of PART_SCHEMA; null if an older version had no such column.

    Raises DamagedPartError if it cannot be read: none of our writers leaves such a part. Raises StrangePartError if it
    names another run than `fingerprint`; parts of older versions name none.
    """
    location = parts_folder(output).child(name)
    location.touch()
    try:
        with location.filesystem.open_input_file(location.path) as file, pq.ParquetFile(file) as parquet:
            found = (parquet.schema_arrow.metadata or {}).get(_FINGERPRINT, b"").decode()
            table = _typed(parquet.read([name for name in columns if name in parquet.schema_arrow.names]), columns)
    except (*DAMAGED, KeyError) as error:
        if not is_damaged(location, error):
            raise
        raise DamagedPartError(
            f"{location.path} is damaged ({one_line(error)}); delete it to do its documents again"
        ) from error
    if found and fingerprint and found != fingerprint:
        which = f"fingerprint {found[:12]}, here {fingerprint[:12]}"
        raise StrangePartError(f"{location.path} is a part of another run ({which}); move it away")
    return table


def _typed(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Cast the columns to their types in PART_SCHEMA. Raises KeyError for a part without keys, or ArrowException."""
    if missing := [name for name in KEY_COLUMNS if name in columns and name not in table.column_names]:
        raise KeyError(f"it has no column {missing[0]}")
    fields = [PART_SCHEMA.field(name) for name in columns]
    arrays = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(len(table), field.type)])
        for field in fields
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def run_id_of(name: str) -> str:
    """Return the run id of the start that wrote a part, from the part's name."""
    return _order(name)[1]


def _order(name: str) -> tuple[int, str]:
    """Return (seq, run id) of a part's name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match["seq"]), match["run_id"]

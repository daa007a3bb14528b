"""Choose the rows of a run: filter, sample, results of earlier runs, limit, in this order.

Begin at `select_rows`. Ids are checked among the rows left by the filter.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from specextend.core import Checkpoint, ReadOnly, counted
from specextend.data.database import Database, matches
from specextend.data.fingerprint import (
    num_input_rows,
    other_configuration,
    read_manifest,
    rows_digest,
)
from specextend.data.inputs import MOST_AHEAD_BYTES, InputError, InputFile
from specextend.data.listing import split_glob
from specextend.data.parquet import (
    Ints,
    damaged_as,
    gathered,
    open_parquet,
    plain_rows,
    read_file,
    write_table,
)
from specextend.data.results import CHOSEN, add_redone
from specextend.data.run_folder import errors_folder, list_results, selection_file, summaries_folder
from specextend.data.schema import task_failures
from specextend.data.source import ChosenRows, Source
from specextend.data.storage import Location, in_order, list_folders, resolve

Rows = list[Ints]
"""Sorted row numbers, one array per file of the whole input."""
_SELECTED = pa.schema([("file", "int32"), ("row", "int64")])
_CHANGED = 1
_UNCHANGED = 2
_FAILED = 3
"""States of a row in an earlier run: edited since, done, or failed for good."""
_BAD = """
    CREATE TABLE bad AS
    SELECT id, count(*) - 1 AS repeats, min(rowid) AS first
    FROM rows GROUP BY id HAVING count(*) > 1 OR id IS NULL
"""
_COUNT_BAD = """
    SELECT count(*) AS ids, sum(repeats) AS repeats, max(repeats + 1) FILTER (id IS NULL) AS nulls
    FROM bad
"""
_FIRST_BAD = """
    SELECT file, row, id FROM rows
    WHERE id IS NOT DISTINCT FROM (SELECT id FROM bad ORDER BY id IS NOT NULL, first LIMIT 1)
    ORDER BY rowid LIMIT 2
"""
_DRAWS = 1 << 64
_DRAW = "md5_number_upper('0:' || id)"
_LAST_DRAWN = f"SELECT max(draw) FROM (SELECT {_DRAW} AS draw FROM rows ORDER BY draw LIMIT {{}})"
_TABLES = (
    "CREATE TABLE earlier (origin INT, id TEXT, content TEXT, state INT)",
    "CREATE TABLE found (file INT, row BIGINT, content TEXT)",
)
_ADD_EARLIER = f"""
    INSERT INTO earlier SELECT {{}}, doc_id, content_sha256,
        if(retryable IS NULL, {_UNCHANGED}, {_FAILED})
    FROM given WHERE retryable IS NOT true
"""
"""Rows without `retryable` are done; retryable errors count as new rows."""
_KNOWN = """
    CREATE TABLE known AS
    SELECT file, row, content, state, (origin, file) IN (FROM given) AS is_same FROM earlier
        JOIN rows USING (id)
"""
_DOUBTFUL = """
    SELECT file, row FROM known GROUP BY file, row HAVING NOT bool_or(is_same) ORDER BY file, row
"""
_STATES = f"""
    CREATE TABLE states AS
    SELECT file, row, coalesce(min(state) FILTER (is_same OR known.content = found.content),
        {_CHANGED}) AS state
    FROM known LEFT JOIN found USING (file, row) GROUP BY file, row
"""
_FOUND = f"""
    SELECT count(*) FILTER (state = {_UNCHANGED}) AS unchanged, count(*)
        FILTER (state = {_FAILED}) AS failed_before
    FROM states
"""
_DONE = (
    "FROM rows USING states WHERE rows.file = states.file AND rows.row = states.row AND "
    f"state >= {_UNCHANGED}"
)
_WITHIN_LIMIT = "CREATE OR REPLACE TABLE rows AS FROM rows ORDER BY file, row LIMIT {}"
_LEFT = f"""
    SELECT count(*) FILTER (state = {_CHANGED}) AS changed, count(*) - changed AS new
    FROM rows LEFT JOIN states USING (file, row)
"""


def select_rows(
    source: Source,
    earlier: Sequence[EarlierOutput] = (),
    notes: tuple[str, ...] = (),
    checkpoint: Checkpoint = lambda: None,
    output: Location | None = None,
) -> Source:
    """Check the ids and choose the rows of a run.

    Args:
        source: The input; texts are read only from files modified since an earlier run.
        earlier: Outputs of earlier runs.
        notes: Notes about earlier runs.
        checkpoint: Called between tables; may raise.
        output: Folder of the run. For `redo`, it lies in the folder of the run to repeat.

    Returns:
        The source, limited to the files with chosen rows.

    Raises:
        InputError: Filter or sample leave no row.
    """
    options = source.options
    num_rows = source.num_rows
    if options.id_column is None and not options.selects:
        return source
    database = Database()
    database.select("CREATE TABLE rows (file INT, row BIGINT, id TEXT)")
    read = partial(_read, source, checkpoint)
    for table in in_order(read, source.files, cost=InputFile.bytes_ahead, most=MOST_AHEAD_BYTES):
        database.add(table, "INSERT INTO rows FROM given")
    counts: dict[str, int] = {}
    if options.filter is not None:
        counts["not_matching"] = num_rows - _size(database)
        _refuse_nothing(
            database, f"input.filter {options.filter!r} matches none of {counted(num_rows, 'row')}"
        )
    _check_ids(source, database)
    if not options.selects:
        return source
    if options.sample is not None:
        counts["not_in_sample"] = _draw(database, options.sample)
    if options.redo is not None:
        assert output is not None
        add_redone(database, output.parent.parent, options, source.files, checkpoint)
        counts["not_redone"] = _delete(database, f"FROM rows WHERE id NOT IN ({CHOSEN})")
    if options.except_done_in:
        _compare(source, database, earlier, checkpoint)
        [found] = database.select(_FOUND)
        counts |= {name: count for name, count in found.items() if count or name == "unchanged"}
        _delete(database, _DONE)
    if options.limit is not None:
        counts["over_limit"] = max(0, num_rows - sum(counts.values()) - options.limit)
        database.select(_WITHIN_LIMIT.format(options.limit))
    if options.except_done_in:
        [left] = database.select(_LEFT)
        counts |= left
    counts = {"input": num_rows, **counts, "selected": _size(database)}
    return _limited(source, database, counts, notes)


def _draw(database: Database, sample: float) -> int:
    """Keep a sample of the rows; return the number of the others."""
    among = counted(_size(database), "row")
    is_number = isinstance(sample, int)
    bound = _LAST_DRAWN.format(sample) if is_number else int(sample * _DRAWS)
    num_others = _delete(database, f"FROM rows WHERE {_DRAW} > ({bound})")
    _refuse_nothing(database, f"input.sample {sample} draws none of {among}")
    return num_others


def _read(source: Source, checkpoint: Checkpoint, file: InputFile) -> pa.Table:
    options = source.options
    number = file.number
    needs_ids = (
        options.id_column is not None or options.sample is not None or options.depends_on_runs
    )
    rows = np.arange(file.num_rows)
    if options.filter is not None:
        rows = _matching(source, options.filter, checkpoint, file)
    elif not needs_ids:
        rows = rows[: options.limit]
    ids = source.ids(number).take(rows) if needs_ids else pa.nulls(len(rows), "string")
    return pa.table({"file": np.full(len(rows), number, np.int32), "row": rows, "id": ids})


def _check_ids(source: Source, database: Database) -> None:
    column = source.options.id_column
    if column is None:
        return
    database.select(_BAD)
    [counts] = database.select(_COUNT_BAD)
    if not counts["ids"]:
        return
    first = database.select(_FIRST_BAD)
    places = [f"{source.files[each['file']].relative_path} row {each['row']}" for each in first]
    what = (
        f"nulls in column {column!r} (input.id_column): {counts['nulls']:,}, the first in "
        f"{places[0]}; give them ids"
        if counts["nulls"]
        else f"ids must be unique across all files: {counts['repeats']:,} repeated, the first is "
        f"{first[0]['id']!r} in {' and '.join(places)}; change them"
    )
    raise InputError(
        f"{what}, remove input.id_column, so that rows go by their places, or leave the rows out "
        "with input.filter"
    )


def _rows(database: Database, num_files: int) -> Rows:
    files, rows = database.arrays("SELECT file, row FROM rows ORDER BY file, row")
    return np.split(rows, files.searchsorted(np.arange(1, num_files)))[:num_files]


def _refuse_nothing(database: Database, what: str) -> None:
    if not _size(database):
        raise InputError(f"{what}; change it, or leave it out")


def _size(database: Database) -> int:
    [size] = database.select("SELECT count(*) AS n FROM rows")
    return int(size["n"])


def _delete(database: Database, which: str) -> int:
    [deleted] = database.select(f"DELETE {which}")
    return int(deleted["Count"])


def _limited(
    source: Source, database: Database, counts: Mapping[str, int], notes: tuple[str, ...]
) -> Source:
    rows = _rows(database, len(source.files))
    numbers = [number for number, each in enumerate(rows) if len(each)]
    files = tuple(replace(source.files[number], number=i) for i, number in enumerate(numbers))
    chosen = [rows[number] for number in numbers]
    return replace(source, files=files, selection=ChosenRows(chosen, counts, notes))


def _matching(source: Source, text: str, checkpoint: Checkpoint, file: InputFile) -> Ints:
    masks = [np.zeros(0, bool)]
    for table in gathered(source.filtered(file.number)):
        checkpoint()
        try:
            masks.append(matches(text, table))
        except ValueError as error:
            raise InputError(f"{file.relative_path}: {error}") from error
    return np.flatnonzero(np.concatenate(masks))


def _compare(
    source: Source, database: Database, earlier: Sequence[EarlierOutput], checkpoint: Checkpoint
) -> None:
    """Fill the table `states` with the state of each row known to earlier runs.

    Files with unchanged size, footer and time count as unchanged. Rows of other files are read.
    """
    for statement in _TABLES:
        database.select(statement)
    for origin, each in enumerate(earlier):
        names = ["doc_id", "content_sha256"]
        tasks = ["tasks"] if each.manifest["identity"].get("tasks") else []
        for table in each.read(summaries_folder(each.location), *names, *tasks):
            is_retryable = pa.nulls(len(table), "bool")
            if tasks:
                is_retryable = task_failures(table["tasks"])["retryable"]
            rows = table.select(names).append_column("retryable", is_retryable)
            database.add(rows, _ADD_EARLIER.format(origin))
        for table in each.read(errors_folder(each.location), *names, "retryable"):
            database.add(table, _ADD_EARLIER.format(origin))
    same = [
        {"origin": origin, "file": file.number}
        for origin, each in enumerate(earlier)
        for file in source.files
        if each.holds(file)
    ]
    schema = pa.schema([("origin", "int32"), ("file", "int32")])
    database.add(pa.Table.from_pylist(same, schema), _KNOWN)
    numbers, doubtful = database.arrays(_DOUBTFUL)
    written = [source.files[number] for number in np.unique(numbers)]

    def contents(file: InputFile) -> pa.Table:
        return _contents(source, file, doubtful[numbers == file.number], checkpoint)

    for table in in_order(contents, written, cost=InputFile.bytes_ahead, most=MOST_AHEAD_BYTES):
        database.add(table, "INSERT INTO found FROM given")
    database.select(_STATES)


def _contents(source: Source, file: InputFile, rows: Ints, checkpoint: Checkpoint) -> pa.Table:
    reader = source.reader
    contents: list[str] = []
    for batch in source.batches_of(file.number, reader.content_columns, rows):
        checkpoint()
        contents += map(reader.content, plain_rows(batch, reader.content_columns))
    return pa.table(
        {"file": np.full(len(rows), file.number, np.int32), "row": rows, "content": contents}
    )


def write_selection(source: Source, output: Location) -> None:
    """Save the selected rows before the manifest is written.

    A resumed run must keep its rows although other runs may finish more of them meanwhile.
    """
    assert source.selection is not None
    tables = [_SELECTED.empty_table()]
    for number, rows in enumerate(source.selection.rows):
        tables.append(pa.table([np.full(len(rows), number), rows], schema=_SELECTED))
    write_table(selection_file(output), pa.concat_tables(tables))


def recall_selection(source: Source, output: Location, manifest: ReadOnly) -> Source:
    """Restore the rows saved by `write_selection` for the remaining files."""
    location = selection_file(output)
    names = [*manifest["identity"]["files"]]
    damaged = damaged_as(InputError, location, "use another output folder")
    columns = _SELECTED.names
    table = read_file(location, lambda file: open_parquet(file).read().select(columns), damaged)
    database = Database()
    database.add(table, "CREATE TABLE rows AS FROM given")
    every = _rows(database, len(names))
    if rows_digest(names, every) != manifest["identity"]["selection"]["sha256"]:
        raise InputError(
            f"{location.path} does not hold the rows of its run; use another output folder"
        )
    places = {name: place for place, name in enumerate(names)}
    numbers = [places[file.relative_path] for file in source.files]
    selection = ChosenRows([every[number] for number in numbers], manifest["selection"])
    return replace(source, selection=selection)


class EarlierOutput(NamedTuple):
    """Output of an earlier run with the same configuration."""

    location: Location
    manifest: ReadOnly

    def holds(self, file: InputFile) -> bool:
        """Return True if the run recorded the path, size, footer and time of `file`."""
        before = self.manifest["identity"]["files"].get(file.relative_path)
        times = self.manifest.get("modified_ns", {})
        return (
            before == file.facts
            and file.modified_ns is not None
            and times.get(file.relative_path) == file.modified_ns
        )

    def read(self, folder: Location, *columns: str) -> Iterator[pa.Table]:
        """Read columns of its summaries or errors."""

        def read(name: str) -> pa.Table:
            damaged = damaged_as(
                InputError, folder.child(name), "repair it, or leave it out of input.except_done_in"
            )
            return read_file(
                folder.child(name),
                lambda file: open_parquet(file).read(columns).select(columns),
                damaged,
            )

        return in_order(read, list_results(folder))


def find_earlier(
    paths: Sequence[str],
    own: Location,
    manifest: ReadOnly,
    checkpoint: Checkpoint = lambda: None,
) -> tuple[list[EarlierOutput], tuple[str, ...]]:
    """Find the outputs of `input.except_done_in` with rows that count as done.

    Args:
        paths: Output folders, or globs of them.
        own: Output folder of this run, which is skipped.
        manifest: Manifest of this run before rows are selected.
        checkpoint: Called for each folder; may raise.

    Returns:
        The outputs, and notes about skipped outputs.

    Raises:
        InputError: A path without wildcards is not an output folder.
    """
    found: list[EarlierOutput] = []
    left_out: dict[str, list[Location]] = {}
    for path in paths:
        for location, is_named in find_folders(path):
            checkpoint()
            if location == own or any(location == each.location for each in found):
                continue
            try:
                recorded = read_manifest(location)
            except ValueError as error:
                raise InputError(f"input.except_done_in: {error}") from error
            if recorded is None and is_named:
                what = f"{location.path} is not an output folder; give one, or a glob"
                raise InputError(f"input.except_done_in: {what}")
            if recorded is None or not num_input_rows(recorded):
                continue
            if lines := other_configuration(recorded, manifest):
                left_out.setdefault(f", of another configuration: {lines[0]}", []).append(location)
            elif not list_results(summaries_folder(location)):
                left_out.setdefault(", which is not finished", []).append(location)
            else:
                found.append(EarlierOutput(location, recorded))
    return found, tuple(
        f"not counted as done: rows of {_name(each)}{reason}" for reason, each in left_out.items()
    )


def _name(locations: Sequence[Location]) -> str:
    first = locations[0]
    last = locations[-1]
    return (
        first.path if first == last else f"{len(locations)} outputs ({first.path} to {last.name})"
    )


def find_folders(path: str) -> list[tuple[Location, bool]]:
    """List the folders matched by a path or glob, each with True if the path is no glob."""
    root, pattern = split_glob(resolve(path))
    if "**" in pattern:
        raise InputError(f"{path}: `**` is not supported; give one `*` for each folder")
    found = [root]
    for each in pattern:
        found = [
            folder.child(name)
            for folder in found
            for name in list_folders(folder)
            if fnmatch.fnmatchcase(name, each)
        ]
    return [(each, not pattern) for each in found]

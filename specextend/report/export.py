"""The answers of runs as files for others: of a run while it goes on, of one that has ended, the
newest of several.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specextend.core import Values
from specextend.data.commits import KEY_COLUMNS, Settled, commit_sizes, read_commit
from specextend.data.database import Database
from specextend.data.fingerprint import (
    num_input_rows,
    other_configuration,
    output_columns,
    read_manifest,
)
from specextend.data.inputs import InputOptions
from specextend.data.parquet import (
    CHECKED,
    fitted,
    is_text,
    plain_text,
    read_file,
    read_stream,
    rows_where,
    stream,
    write_groups,
)
from specextend.data.results import (
    began,
    damaged_results,
    has_ended,
    redone_runs,
    result_files,
)
from specextend.data.run_folder import (
    check_results,
    list_results,
    summaries_folder,
)
from specextend.data.schema import COMMIT_SCHEMA, SUMMARY_SCHEMA, summary_columns, summary_fields
from specextend.data.selection import find_folders
from specextend.data.source import open_source
from specextend.data.storage import (
    Location,
    atomic_output,
    exists,
    in_order,
    is_folder,
    list_files,
    remove_temporary_files,
)

POLL_S = 2.0
"""Seconds between two looks for new commits."""
_DIGITS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
_EXECUTED = r"^(\s*[=+@\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}-]|[\t\r])"
"""Beginnings of cells that a spreadsheet takes for a formula, or may once it has removed what is
before them.
"""
_IDS = (
    "CREATE TABLE wanted AS FROM given WHERE doc_id IS NOT NULL",
    "CREATE TABLE ids (doc_id TEXT, is_answer BOOL, is_whole BOOL)",
)
_CHOSEN = """
    CREATE TABLE chosen AS
    SELECT min(rowid) AS newest, min(rowid) FILTER (is_whole) AS whole,
        coalesce(whole, min(rowid) FILTER (is_answer)) AS answer,
        ? OR doc_id IN (FROM wanted) AS is_wanted
    FROM ids GROUP BY doc_id
"""
"""The first row of each id, and the first one with an answer, of every task if there is one: the
newest run comes first.
"""
_COUNTS = """
    SELECT count(answer) FILTER (is_wanted) AS done,
        count(*) FILTER (is_wanted AND answer IS NULL) AS failed,
        count(*) FILTER (is_wanted AND newest < answer) AS outdated,
        count(answer) FILTER (NOT is_wanted) AS gone,
        count(answer) FILTER (is_wanted AND whole IS NULL) AS partial
    FROM chosen
"""
_Mask = tuple[Location, NDArray[np.bool_]]
"""A file of results, and which of its rows are wanted."""


class Exported(NamedTuple):
    """Count what an export has written, in documents."""

    done: int
    failed: int
    """Left without an answer."""
    rows: int | None = None
    """Those that the run is about; None if there are several runs, or if the folder has no
    manifest.
    """
    outdated: int = 0
    """With an answer that is older than an attempt which failed."""
    gone: int = 0
    """Left out, because the input has them no more."""
    difference: str = ""
    """How the runs differ in models or options, in one line; empty if they do not."""
    partial: int = 0
    """Written, with a task that failed."""
    open: Sequence[str] = ()
    """Paths of runs that did rows again and have not ended; their answers are not written."""


class Form(NamedTuple):
    """Say how answers are written."""

    kind: str
    """The format."""
    columns: Sequence[str] = ()
    """Only these, in this order; all if empty."""
    is_safe: bool = False
    """For spreadsheets, which concerns CSV."""


def format_of(place: Location) -> str | None:
    """Return the format that a file is given by its ending; None for a folder."""
    _, dot, ending = place.name.lower().rpartition(".")
    return ending if dot and ending in ("csv", *_WRITERS) else None


def follow(
    output: Location, folder: Location, form: Form, is_running: Callable[[], bool]
) -> Exported:
    """Write the answers of a run into a folder as they are committed, until the run has no driver
    any more.

    Each commit becomes a file, whole or not at all, which is also the record that it was written:
    another call goes on from there, and each document has one row. is_running: asked for a driver.
    Raises ValueError if there is no run, for a folder with other files, and for a column that
    commits do not have.
    """
    while (manifest := read_manifest(output)) is None and is_running():
        time.sleep(POLL_S)
    if manifest is None:
        raise ValueError(f"{output.path} holds no run")
    check_place([output], folder)
    written = {f"{name.removesuffix(form.kind)}parquet" for name in list_files(folder)}
    if others := sorted(written - commit_sizes(output).keys()):
        raise ValueError(
            f"{folder.path} holds {others[0]}, which is no commit of this run; name another folder"
        )
    remove_temporary_files(folder)
    named = output_columns(output)
    full = pa.schema(summary_fields(named))
    settled = Settled()
    seen = set[str]()
    schema = _narrowed(full, form.columns)
    is_last = False
    while not is_last:
        is_last = not is_running()
        sizes = commit_sizes(output)
        for name in sorted(
            (name for name in sizes if name not in seen), key=lambda name: name not in written
        ):
            needed = KEY_COLUMNS if name in written else COMMIT_SCHEMA.names
            commit = read_commit(output, name, needed, manifest["fingerprint"], sizes[name])
            done, *_ = settled.settle(commit)
            answers = commit.take(done)
            if len(answers) and name not in written:
                table = pa.table(summary_columns(answers, named), schema=full)
                file = folder.child(name.removesuffix("parquet") + form.kind)
                _write(file, form, schema, [table.select(schema.names)])
        seen |= sizes.keys()
        time.sleep(0 if is_last else POLL_S)
    return Exported(*settled.count(), num_input_rows(manifest))


def find_runs(paths: Sequence[str]) -> list[Location]:
    """Find the runs in folders, paths or URIs, or globs of them; a folder that a glob finds may
    hold none.

    Raises ValueError if none is found.
    """
    found = chain.from_iterable(map(find_folders, paths))
    runs = [
        folder
        for folder, is_named in found
        if is_named or read_manifest(folder) or list_results(summaries_folder(folder))
    ]
    if not runs:
        raise ValueError(f"there is no run in {', '.join(paths)}; name the output folders of runs")
    return runs


def export_answers(
    outputs: Sequence[Location],
    to: Location,
    form: Form,
    only_ids_in: str | None = None,
    replaces: bool = False,
) -> Exported:
    """Write `summaries/` of runs, of several runs the newest answer to each id, to a file or into a
    new folder.

    A run is newer than another if it began later, as its own record says. only_ids_in: an input;
    documents that it does not have are left out. replaces: a file that is there already. Texts are
    streamed; the ids of all rows are in memory. Raises ValueError for runs that have not ended or
    do not belong together, for a folder that holds files, and for a column that no run has.
    """
    redone = [redone_runs(output) for output in outputs]
    runs = [_Run.read(run) for run in chain(outputs, *(ended for ended, _ in redone))]
    check_place(outputs, to, replaces)
    rows = num_input_rows(runs[0].manifest) if len(outputs) == 1 and runs[0].manifest else None
    if len(runs) > 1 or only_ids_in is not None:
        runs = _newest_first(runs)
    schema = _narrowed(_common_schema(runs), form.columns)
    chosen, exported = _choose(
        runs, None if only_ids_in is None else _ids_of_input(only_ids_in, runs[0])
    )
    exported = exported._replace(rows=rows, open=[run.path for _, runs in redone for run in runs])
    answers = [_read(file, schema, mask) for file, mask in chosen if mask.any()]
    if format_of(to):
        _write(to, form, schema, chain.from_iterable(answers))
        return exported
    if list_files(to):
        raise ValueError(f"{to.path} is not empty; name another folder")
    for number, tables in enumerate(answers):
        _write(to.child(f"part-{number:05d}.{form.kind}"), form, schema, tables)
    return exported


def _narrowed(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Return the columns of that name, in that order; all if none is named. Raises ValueError for
    an unknown one.
    """
    if unknown := [name for name in columns if name not in schema.names]:
        raise ValueError(
            f"--columns: there is no {', '.join(unknown)}; there are {', '.join(schema.names)}"
        )
    return pa.schema([schema.field(name) for name in columns]) if columns else schema


def check_place(outputs: Sequence[Location], to: Location, replaces: bool = False) -> None:
    """Raise ValueError for a place in the folder of a run, and for a file that is there already if
    none `replaces`.
    """
    for output in outputs:
        if f"{to.path}/".startswith(f"{output.path}/"):
            raise ValueError(f"{to.path} is in the folder of the run; name a place outside")
    if not replaces and exists(to) and not is_folder(to):
        raise ValueError(
            f"{to.path} is there already; choose another name, or replace it with --replace"
        )


class _Run(NamedTuple):
    """The folder of a run."""

    path: str
    manifest: Values
    """Empty if there is none."""
    begin: float | None
    """When its first start began, in seconds since the epoch, as its record says."""
    columns: str
    """Those of the ids and the texts."""
    files: list[tuple[Location, bool]]
    """Those of `summaries/`, then those of `errors/`; True for the former."""

    @classmethod
    def read(cls, output: Location) -> _Run:
        """Read a folder. Raises ValueError if there is no run, or one that has not ended."""
        manifest = read_manifest(output) or {}
        files = result_files(output)
        if not manifest and not any(is_answer for _, is_answer in files):
            raise ValueError(f"{output.path} holds no run")
        if manifest:
            check_results(output, len(manifest["identity"]["files"]))
        if manifest and not has_ended(output, manifest):
            raise ValueError(
                f"{output.path} has not ended: run it again, or take what is done with --follow"
            )
        id_column = manifest.get("config", {}).get("input", {}).get("id_column")
        columns = f"ids in {id_column}, texts in {output_columns(output)[0]}"
        return cls(output.path, manifest, began(output), columns, files)


def _newest_first(runs: Sequence[_Run]) -> list[_Run]:
    """Sort runs by age. Raises ValueError unless it is known, and the columns of their ids and
    texts are the same.
    """
    for run in runs:
        if not run.manifest or run.begin is None:
            raise ValueError(
                f"{run.path} has no record of its start, so its age is not known; leave it out"
            )
        if run.columns != runs[0].columns:
            differ = f"{run.path} has {run.columns}, {runs[0].path} {runs[0].columns}"
            raise ValueError(f"{differ}; export them one by one")
    return sorted(runs, key=lambda run: run.begin or 0.0, reverse=True)


def _common_schema(runs: Sequence[_Run]) -> pa.Schema:
    """Return the columns of all runs. Raises ValueError if one has two types."""
    firsts = [file for run in runs for file, is_answer in run.files[:1] if is_answer]
    schemas = [
        read_file(file, pq.read_schema, damaged_results(file)).remove_metadata() for file in firsts
    ]
    try:
        return pa.unify_schemas(schemas or [SUMMARY_SCHEMA])
    except pa.ArrowException as error:
        raise ValueError(
            f"the runs differ in their columns ({error}); export them one by one"
        ) from error


def _ids_of_input(path: str, run: _Run) -> pa.ChunkedArray:
    """Read the ids of an input, whose columns have the names that a run knows. Raises
    InputError.
    """
    names = {name: run.manifest["config"]["input"][name] for name in ("text_column", "id_column")}
    source = open_source(InputOptions(path=path, **names))
    return pa.chunked_array(
        [each for file in source.files for each in source.ids(file.number).chunks]
    )


def _choose(runs: Sequence[_Run], wanted: pa.ChunkedArray | None) -> tuple[list[_Mask], Exported]:
    """Choose the first answer to each id of runs, the newest first. Returns the files, each with a
    mask of its rows.
    """
    files = [
        (file, is_answer, is_answer and bool(run.manifest.get("config", {}).get("tasks")))
        for run in runs
        for file, is_answer in run.files
    ]
    database = Database()
    sizes = []
    everything = pa.array([], "large_string")
    database.add(pa.table({"doc_id": everything if wanted is None else wanted}), *_IDS)
    for ids in in_order(_read_ids, files):
        database.add(ids, "INSERT INTO ids FROM given")
        sizes.append(len(ids))
    database.select(_CHOSEN, wanted is None)
    [counts] = database.select(_COUNTS)
    lines = (
        line for run in runs[1:] for line in other_configuration(run.manifest, runs[0].manifest)
    )
    mask = np.zeros(sum(sizes), bool)
    [answers] = database.arrays("SELECT answer FROM chosen WHERE is_wanted AND answer IS NOT NULL")
    mask[answers] = True
    masks = np.split(mask, np.cumsum(sizes))
    chosen = [
        (file, own) for (file, is_answer, _), own in zip(files, masks, strict=False) if is_answer
    ]
    return chosen, Exported(**counts, difference=next(lines, ""))


def _read_ids(of: tuple[Location, bool, bool]) -> pa.Table:
    """Read the ids of a file of results, whether each has an answer, and whether it has that of
    every task. of: the file, whether it has answers, and whether they are of several tasks.
    """
    file, is_answer, has_tasks = of

    def read(opened: pa.NativeFile) -> pa.Table:
        names = ["doc_id", "tasks.list.element.error_class"][: 1 + has_tasks]
        table = pq.ParquetFile(opened, **CHECKED).read(names)
        answers = np.full(len(table), is_answer)
        whole = answers.copy()
        if has_tasks:
            tasks = table["tasks"].combine_chunks()
            has_failed = pc.struct_field(tasks.flatten(), 0).is_valid()
            whole[pc.list_parent_indices(tasks).filter(has_failed).to_numpy()] = False
        return pa.table({"doc_id": table["doc_id"], "is_answer": answers, "is_whole": whole})

    return read_file(file, read, damaged_results(file))


def _read(file: Location, schema: pa.Schema, mask: NDArray[np.bool_]) -> Iterator[pa.Table]:
    """Yield those rows of a file, as small tables; a column that the file lacks is null."""

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        begin = 0
        for table in stream(
            parquet, [name for name in parquet.schema_arrow.names if name in schema.names]
        ):
            yield fitted(rows_where(table, mask[begin : begin + len(table)]), schema)
            begin += len(table)

    return read_stream(file, read, damaged_results(file))


def _write(file: Location, form: Form, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write a file, whole or not at all."""
    with atomic_output(file) as path:
        if form.kind == "csv":
            _write_csv(path, schema, tables, form.is_safe)
        else:
            _WRITERS[form.kind](path, schema, tables)


def _write_csv(path: str, schema: pa.Schema, tables: Iterable[pa.Table], is_safe: bool) -> None:
    with pa_csv.CSVWriter(path, _flat(schema.empty_table(), is_safe).schema) as writer:
        for table in tables:
            writer.write_table(_flat(table, is_safe))


def _write_json_lines(path: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for table in tables:
            spelled = pa.table([*map(_spelled, table.columns)], table.column_names)
            file.writelines(_json(row) + "\n" for row in spelled.to_pylist())


_WRITERS = {"parquet": write_groups, "jsonl": _write_json_lines}


def _flat(table: pa.Table, is_safe: bool) -> pa.Table:
    """Write lists and structs as JSON, for which CSV has no form; put a ' before what a spreadsheet
    would execute.
    """
    columns = []
    for column in map(_spelled, table.columns):
        _check_offsets(column)
        if column.type.num_fields:
            column = _as_text(column, _json)
        if is_safe and is_text(column.type):
            column = _harmless(column)
        columns.append(column)
    names = _harmless(pa.array(table.column_names)).to_pylist() if is_safe else table.column_names
    return pa.table(columns, names)


def _harmless(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return pc.replace_substring_regex(texts, pattern=_EXECUTED, replacement=r"'\1")


def _spelled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Write values as text for which neither CSV nor JSON has a form; what is not UTF-8 in text
    becomes U+FFFD.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _spelled(column.cast(kind.value_type))
    if kind.num_fields and "time64[ns]" in str(kind):  # Python's own have no nanoseconds
        raise ValueError(
            f"{kind} has nanoseconds inside, which only Parquet holds; export to .parquet"
        )
    if is_text(kind):
        try:
            return plain_text(column)
        except pa.ArrowInvalid:
            return _as_text(
                column.cast("large_binary"), lambda value: value.decode(errors="replace")
            )
    if pa.types.is_duration(kind):
        return _as_text(
            column.cast("int64"), lambda value: f"PT{Decimal(value).scaleb(_DIGITS[kind.unit]):f}S"
        )
    if kind in (pa.time64("ns"), pa.timestamp("ns", getattr(kind, "tz", None))):
        _check_offsets(column)
        return pc.replace_substring(column.cast("large_string"), pattern=" ", replacement="T")
    return (
        column
        if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or kind.num_fields
        else _as_text(column, _text)
    )


def _check_offsets(column: pa.ChunkedArray) -> None:
    """Raise ValueError for a time of whose offset Arrow's text would lose the seconds."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return
    times = column.drop_null()
    local = pc.local_timestamp(times).cast("int64")
    offsets = pc.subtract(local, times.cast("int64")).to_numpy()
    if (offsets % (60 * 10 ** -_DIGITS[kind.unit])).any():
        raise ValueError(
            f"{kind} has times whose offset has seconds, as before time zones, which only Parquet "
            "holds; export to .parquet, or write the column in UTC"
        )


def _as_text(column: pa.ChunkedArray, spell: Callable[[Any], str]) -> pa.ChunkedArray:
    texts = [None if value is None else spell(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, "large_string")])


def _json(value: Any) -> str:
    """Write a value as JSON: times as ISO 8601, bytes as Base64, NaN and infinity as null, all else
    as a string.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_text, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_text), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return f"PT{Decimal(value // timedelta(microseconds=1)).scaleb(-6):f}S"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)

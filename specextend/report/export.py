"""Export of answers, of one or several runs or of a run in progress."""

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
"""Seconds between two searches for commits."""
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
"""First row, answer and complete answer by id, newest run first."""
_COUNTS = """
    SELECT count(answer) FILTER (is_wanted) AS done,
        count(*) FILTER (is_wanted AND answer IS NULL) AS failed,
        count(*) FILTER (is_wanted AND newest < answer) AS outdated,
        count(answer) FILTER (NOT is_wanted) AS gone,
        count(answer) FILTER (is_wanted AND whole IS NULL) AS partial
    FROM chosen
"""
Mask = tuple[Location, NDArray[np.bool_]]
"""A file of results, and True for each row that is wanted."""
_DIGITS = {"s": 0, "ms": -3, "us": -6, "ns": -9}
EXECUTED = r"^(\x27*(\s*[=+@\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}-]|[\t\r]))"
"""Beginnings of cells that a spreadsheet executes, or that look like them after a quote."""


class Form(NamedTuple):
    """Format of a file."""

    kind: str
    """csv, jsonl or parquet."""
    columns: Sequence[str] = ()
    """Wanted columns in order; all if empty."""
    is_safe: bool = False
    """True for CSV that a spreadsheet does not execute."""


class Exported(NamedTuple):
    """Numbers of documents in an export."""

    done: int
    failed: int
    """Documents without an answer."""
    rows: int | None = None
    """Documents of the run; None for several runs, or without a manifest."""
    outdated: int = 0
    """Documents with an answer older than a failed attempt."""
    gone: int = 0
    """Documents that the input no longer has."""
    difference: str = ""
    """A difference of the runs in models or options; empty without one."""
    partial: int = 0
    """Documents with a failed task."""
    open: Sequence[str] = ()
    """Paths of unfinished runs that redo rows; their answers are not written."""


def follow(
    output: Location, folder: Location, form: Form, is_running: Callable[[], bool]
) -> Exported:
    """Write each new commit of a run as a file, until the run has no driver.

    Another call continues, and each document has one row.

    Raises:
        ValueError: There is no run, the destination has other files, or a column is unknown.
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
    schema = narrowed(full, form.columns)
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
                write_answers(file, form, schema, [table.select(schema.names)])
        seen |= sizes.keys()
        time.sleep(0 if is_last else POLL_S)
    return Exported(*settled.count(), num_input_rows(manifest))


def find_runs(paths: Sequence[str]) -> list[Location]:
    """Find the runs in folders or globs. Raises ValueError without a run."""
    found = chain.from_iterable(map(find_folders, paths))
    runs = [
        folder
        for folder, is_named in found
        if is_named or read_manifest(folder) or list_results(summaries_folder(folder))
    ]
    if not runs:
        raise ValueError(f"there is no run in {', '.join(paths)}; name the output folders of runs")
    return runs


class Answers(NamedTuple):
    """The newest answer to each id in one or several runs."""

    schema: pa.Schema
    """All columns of the runs."""
    files: Sequence[Mask]
    counts: Exported


def newest_answers(outputs: Sequence[Location], only_ids_in: str | None = None) -> Answers:
    """Find the newest answer to each id in runs and in the runs that redid rows.

    The newest run is the last to begin. Memory holds the ids of all rows.

    Args:
        only_ids_in: An input; documents that it lacks are left out.

    Raises:
        ValueError: A run has not ended, or the runs do not belong together.
    """
    redone = [redone_runs(output) for output in outputs]
    runs = [_Run.read(run) for run in chain(outputs, *(ended for ended, _ in redone))]
    rows = num_input_rows(runs[0].manifest) if len(outputs) == 1 and runs[0].manifest else None
    if len(runs) > 1 or only_ids_in is not None:
        runs = _newest_first(runs)
    schema = _common_schema(runs)
    files, counts = _choose(
        runs, None if only_ids_in is None else _ids_of_input(only_ids_in, runs[0])
    )
    still_open = [run.path for _, others in redone for run in others]
    return Answers(schema, files, counts._replace(rows=rows, open=still_open))


def export_answers(
    outputs: Sequence[Location],
    to: Location,
    form: Form,
    only_ids_in: str | None = None,
    replaces: bool = False,
) -> Exported:
    """Write `newest_answers` of runs to a file or into a new folder. Texts are streamed.

    Raises:
        ValueError: As `newest_answers`; or the folder holds files, or no run has a column.
    """
    for output in outputs:
        _Run.read(output)  # refuses a folder without a run
    check_place(outputs, to, replaces)
    found = newest_answers(outputs, only_ids_in)
    schema = narrowed(found.schema, form.columns)
    answers = [read_answers(file, schema, mask) for file, mask in found.files if mask.any()]
    if format_of(to):
        write_answers(to, form, schema, chain.from_iterable(answers))
        return found.counts
    if list_files(to):
        raise ValueError(f"{to.path} is not empty; name another folder")
    for number, tables in enumerate(answers):
        write_answers(to.child(f"part-{number:05d}.{form.kind}"), form, schema, tables)
    return found.counts


def narrowed(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Return columns in order, or all. Raises ValueError for an unknown column."""
    if unknown := [name for name in columns if name not in schema.names]:
        raise ValueError(
            f"--columns: there is no {', '.join(unknown)}; there are {', '.join(schema.names)}"
        )
    return pa.schema([schema.field(name) for name in columns]) if columns else schema


def check_place(outputs: Sequence[Location], to: Location, replaces: bool = False) -> None:
    """Raise ValueError for a destination in the folder of a run, or an existing file."""
    for output in outputs:
        if f"{to.path}/".startswith(f"{output.path}/"):
            raise ValueError(f"{to.path} is in the folder of the run; name a place outside")
    if not replaces and exists(to) and not is_folder(to):
        raise ValueError(
            f"{to.path} is there already; choose another name, or replace it with --replace"
        )


class _Run(NamedTuple):
    path: str
    manifest: Values
    """Empty without a manifest."""
    begin: float | None
    """Begin of its first start in seconds since the epoch."""
    columns: str
    """Names of the columns with ids and texts."""
    files: list[tuple[Location, bool]]
    """Files of `summaries/` (True), then of `errors/` (False)."""

    @classmethod
    def read(cls, output: Location) -> _Run:
        """Read a folder. Raises ValueError without a finished run."""
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
    """Raise ValueError for an unknown age or different columns."""
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
    """Raise ValueError for a column with two types."""
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
    names = {name: run.manifest["config"]["input"][name] for name in ("text_column", "id_column")}
    source = open_source(InputOptions(path=path, **names))
    return pa.chunked_array(
        [each for file in source.files for each in source.ids(file.number).chunks]
    )


def _choose(runs: Sequence[_Run], wanted: pa.ChunkedArray | None) -> tuple[list[Mask], Exported]:
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
    """Read ids, with `is_answer`, and `is_whole` if no task has failed."""
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


def read_answers(file: Location, schema: pa.Schema, mask: NDArray[np.bool_]) -> Iterator[pa.Table]:
    """Yield the wanted rows of a file as small tables. A missing column is null."""

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        begin = 0
        for table in stream(
            parquet, [name for name in parquet.schema_arrow.names if name in schema.names]
        ):
            yield fitted(rows_where(table, mask[begin : begin + len(table)]), schema)
            begin += len(table)

    return read_stream(file, read, damaged_results(file))


# Formats


def format_of(place: Location) -> str | None:
    """Return the format by the ending of a file; None for a folder."""
    _, dot, ending = place.name.lower().rpartition(".")
    return ending if dot and ending in ("csv", *_WRITERS) else None


def write_answers(
    file: Location, form: Form, schema: pa.Schema, tables: Iterable[pa.Table]
) -> None:
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
    """Write lists and structs as JSON, and make cells harmless."""
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
    return pc.replace_substring_regex(texts, pattern=EXECUTED, replacement=r"'\1")


def _spelled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Write values as text if CSV or JSON has no form for them."""
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
    """Raise ValueError for an offset with seconds, which Arrow's text would lose."""
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
    """Write a value as JSON: times as ISO 8601, bytes as Base64, NaN and infinity as null."""
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

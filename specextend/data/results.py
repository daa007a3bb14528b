"""Result files of a run, and runs that repeated some of its rows."""

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.core import Checkpoint, ReadOnly, did_you_mean, one_line
from specextend.data.database import Database, filter_columns, matches
from specextend.data.fingerprint import num_input_rows, output_columns, read_manifest
from specextend.data.inputs import InputError, InputFile, InputOptions
from specextend.data.parquet import Damaged, damaged_as, fitted, read_file, read_stream, stream
from specextend.data.run_folder import (
    REDONE,
    errors_folder,
    inner_runs,
    list_results,
    parse_time,
    read_starts,
    summaries_folder,
)
from specextend.data.schema import (
    ERROR_SCHEMA,
    FAILURE,
    SUMMARY_SCHEMA,
    summary_fields,
    task_failures,
)
from specextend.data.storage import Location

_TABLE = "CREATE TABLE results (id TEXT, worth INT, age INT, again BOOL)"
CHOSEN = "SELECT id FROM results GROUP BY id HAVING arg_max(again, (worth << 20) + age)"
"""Ids whose newest answer meets the condition. Complete answers precede answers with a failed task,
and these precede errors.
"""
_OF_ERRORS = {*ERROR_SCHEMA.names} - {*SUMMARY_SCHEMA.names}


def result_files(output: Location) -> list[tuple[Location, bool]]:
    """List the files of `summaries/` (True) and `errors/` (False)."""
    folders = ((summaries_folder(output), True), (errors_folder(output), False))
    return [
        (folder.child(name), is_done)
        for folder, is_done in folders
        for name in list_results(folder)
    ]


def damaged_results(file: Location) -> Damaged:
    """Return the error factory for a damaged result file."""
    return damaged_as(ValueError, file, "run its job again to write it anew")


def has_ended(output: Location, manifest: ReadOnly) -> bool:
    """Return True if the result files hold every row of the run."""
    footers = (
        read_file(file, pq.read_metadata, damaged_results(file)) for file, _ in result_files(output)
    )
    return sum(footer.num_rows for footer in footers) == num_input_rows(manifest)


def began(output: Location) -> float | None:
    """Return the time of the first start, in seconds since the epoch; None if unknown."""
    begins = (parse_time(start.begin) for start in read_starts(output))
    return min((begin for begin in begins if begin is not None), default=None)


def redone_runs(output: Location) -> tuple[list[Location], list[Location]]:
    """Return the runs that repeated rows: ended runs, earliest first, and unfinished runs."""
    ended: list[Location] = []
    others: list[Location] = []
    for run in sorted(inner_runs(output, REDONE), key=lambda run: began(run) or 0.0):
        manifest = read_manifest(run)
        (ended if manifest and has_ended(run, manifest) else others).append(run)
    return ended, others


def add_redone(
    database: Database,
    output: Location,
    options: InputOptions,
    files: Iterable[InputFile],
    checkpoint: Checkpoint,
) -> None:
    """Create the table `results` for CHOSEN, from a run and its repeated rows.

    Args:
        output: Folder of the run.
        options: Options with the condition `redo`.
        checkpoint: Called after each table; may raise.

    Raises:
        InputError: The run has not ended, its input has changed, or a column is missing.
    """
    manifest = read_manifest(output)
    if manifest is None or not has_ended(output, manifest):
        raise InputError(f"--redo: {output.path} holds no run that has ended; run it to its end")
    _check_same_input(output, manifest, options, files)
    text = str(options.redo)
    runs = [output, *redone_runs(output)[0]]
    names = filter_columns(text, "--redo")
    known = _schema(output, runs)
    for name in names:
        if name not in known.names:
            near = did_you_mean(name, known.names)
            raise InputError(f"--redo: the results of {output.path} have no column {name!r}{near}")
    schema = pa.schema(
        [known.field(name) for name in dict.fromkeys(["doc_id", "error_class", *names])]
    )
    has_tasks = bool(output_columns(output).others)
    database.select(_TABLE)
    for age, run in enumerate(runs):
        for file, is_answer in result_files(run):
            for table in _read(file, schema, is_answer, has_tasks):
                checkpoint()
                try:
                    found = pa.array(matches(text, table.select(names), "--redo"))
                except ValueError as error:
                    raise InputError(f"{file.path}: {error}") from error
                worth = pc.add(table["error_class"].is_null().cast("int32"), int(is_answer))
                rows = pa.table({"id": table["doc_id"], "worth": worth, "again": found})
                database.add(rows, f"INSERT INTO results SELECT id, worth, {age}, again FROM given")


def _check_same_input(
    output: Location, manifest: ReadOnly, options: InputOptions, files: Iterable[InputFile]
) -> None:
    now = {file.relative_path: file.facts for file in files}
    for name, facts in manifest["identity"]["files"].items():
        if now.get(name) != facts:
            what = "has changed" if name in now else "is gone"
            raise InputError(
                f"--redo: {name} {what} since {output.path} read it; restore it, or run anew in "
                "another output folder"
            )
    for key in ("id_column", "text_column", "pages_column", "passthrough", "gold"):
        there, here = manifest["config"]["input"][key], getattr(options, key)
        here = [*here] if isinstance(here, tuple) else here
        if here != there:
            raise InputError(
                f"--redo: input.{key} is {here!r}, and was {there!r} for {output.path}; restore it"
            )


def _schema(output: Location, runs: list[Location]) -> pa.Schema:
    firsts = {
        (run.path, is_answer): file for run in runs for file, is_answer in result_files(run)[::-1]
    }
    known = [pa.schema(summary_fields(output_columns(output))), FAILURE]
    for (_, is_answer), file in firsts.items():
        own = read_file(file, pq.read_schema, damaged_results(file))
        known.append(pa.schema([each.with_name(_shown(each.name, is_answer)) for each in own]))
    try:
        return pa.unify_schemas(known)
    except pa.ArrowException as error:
        raise ValueError(
            f"--redo: results of {output.path} differ in their columns ({one_line(error)}); run "
            "anew in another output folder"
        ) from error


def _shown(name: str, is_answer: bool) -> str:
    """Return the name of a column in conditions, which is its name in error rows."""
    return f"{name}_" if is_answer and name in _OF_ERRORS else name


def _read(
    file: Location, schema: pa.Schema, is_answer: bool, has_tasks: bool
) -> Iterator[pa.Table]:
    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        of_tasks = is_answer and has_tasks
        wanted = {*schema.names, *(["tasks"] if of_tasks else [])}
        stored = parquet.schema_arrow.names
        for table in stream(
            parquet, [name for name in stored if _shown(name, is_answer) in wanted]
        ):
            table = table.rename_columns([_shown(name, is_answer) for name in table.column_names])
            if of_tasks:
                failures = task_failures(table["tasks"])
                for name in FAILURE.names:
                    table = table.append_column(name, failures[name])
            yield fitted(table, schema)

    return read_stream(file, read, damaged_results(file))

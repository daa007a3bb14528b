"""The files with the results of a run, and the runs that did some of its rows again."""

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Checkpoint, ReadOnly, did_you_mean
from specextend.data.database import Database, filter_columns, matches
from specextend.data.fingerprint import num_input_rows, output_columns, read_manifest
from specextend.data.inputs import InputError, InputFile
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
from specextend.data.schema import FAILURE, summary_fields, task_failures
from specextend.data.storage import Location

_TABLE = "CREATE TABLE results (id TEXT, is_answer BOOL, age INT, again BOOL)"
CHOSEN = """
    SELECT id FROM results GROUP BY id
    HAVING arg_max(again, if(is_answer, 1 << 30, 0) + age)
"""
"""Ids whose newest answer, or newest error if there is no answer, meets the condition."""


def result_files(output: Location) -> list[tuple[Location, bool]]:
    """List the files of `summaries/`, then those of `errors/`, each with True if its documents are
    done.
    """
    folders = ((summaries_folder(output), True), (errors_folder(output), False))
    return [
        (folder.child(name), is_done)
        for folder, is_done in folders
        for name in list_results(folder)
    ]


def damaged_results(file: Location) -> Damaged:
    """Return what makes the error for a damaged file of `summaries/` or `errors/`."""
    return damaged_as(ValueError, file, "run its job again to write it anew")


def has_ended(output: Location, manifest: ReadOnly) -> bool:
    """Return True if the files of results hold all rows of a run."""
    footers = (
        read_file(file, pq.read_metadata, damaged_results(file)) for file, _ in result_files(output)
    )
    return sum(footer.num_rows for footer in footers) == num_input_rows(manifest)


def began(output: Location) -> float | None:
    """Return when the first start of a run began, in seconds since the epoch, by its record."""
    begins = (parse_time(start.begin) for start in read_starts(output))
    return min((begin for begin in begins if begin is not None), default=None)


def redone_runs(output: Location) -> tuple[list[Location], list[Location]]:
    """Return the runs that did rows of a run again: those that have ended, the earliest first, and
    the others.
    """
    ended: list[Location] = []
    others: list[Location] = []
    for run in sorted(inner_runs(output, REDONE), key=lambda run: began(run) or 0.0):
        manifest = read_manifest(run)
        (ended if manifest and has_ended(run, manifest) else others).append(run)
    return ended, others


def add_redone(
    database: Database,
    output: Location,
    text: str,
    files: Iterable[InputFile],
    checkpoint: Checkpoint,
) -> None:
    """Make the table `results` of CHOSEN: of all results of a run and of the runs that did its rows
    again, whether they meet a condition.

    files: of the input now. Raises InputError unless the run has ended, its results have the
    columns of the condition, and its input is what it was.
    """
    manifest = read_manifest(output)
    if manifest is None or not has_ended(output, manifest):
        raise InputError(f"--redo: {output.path} holds no run that has ended; run it to its end")
    before = manifest["identity"]["files"]
    for input_file in files:
        name = input_file.relative_path
        if before.get(name, input_file.facts) != input_file.facts:
            raise InputError(
                f"--redo: {name} has changed since {output.path} read it; restore it, or run anew "
                "in another output folder"
            )
    runs = [output, *redone_runs(output)[0]]
    names = filter_columns(text, "--redo")
    known = _schema(output, runs)
    for name in names:
        if name not in known.names:
            near = did_you_mean(name, known.names)
            raise InputError(f"--redo: the results of {output.path} have no column {name!r}{near}")
    schema = pa.schema([known.field(name) for name in dict.fromkeys(["doc_id", *names])])
    database.select(_TABLE)
    for age, run in enumerate(runs):
        for file, is_answer in result_files(run):
            for table in _read(file, schema):
                checkpoint()
                try:
                    found = pa.array(matches(text, table.select(names), "--redo"))
                except ValueError as error:
                    raise InputError(f"{file.path}: {error}") from error
                rows = pa.table({"id": table["doc_id"], "again": found})
                database.add(
                    rows, f"INSERT INTO results SELECT id, {is_answer}, {age}, again FROM given"
                )


def _schema(output: Location, runs: list[Location]) -> pa.Schema:
    """Return the columns of results. Raises ValueError if one has two types."""
    firsts = {
        (run.path, is_answer): file for run in runs for file, is_answer in result_files(run)[::-1]
    }
    own = [
        read_file(file, pq.read_schema, damaged_results(file)).remove_metadata()
        for file in firsts.values()
    ]
    return pa.unify_schemas([pa.schema(summary_fields(output_columns(output))), FAILURE, *own])


def _read(file: Location, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read columns of a file of results; why tasks have failed counts as why a document has."""

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        stored = parquet.schema_arrow.names
        of_tasks = [name for name in FAILURE.names if name in schema.names and name not in stored]
        of_tasks = of_tasks if "tasks" in stored else []
        wanted = {*schema.names, *(["tasks"] if of_tasks else [])}
        for table in stream(parquet, [name for name in stored if name in wanted]):
            for name in of_tasks:
                table = table.append_column(name, task_failures(table["tasks"])[name])
            yield fitted(table, schema)

    return read_stream(file, read, damaged_results(file))

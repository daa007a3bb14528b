"""Rows of a run as small tables, and as responses of OpenAI's Batch API."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.core import ReadOnly, Values
from specextend.data.commits import (
    DONE,
    FAILED,
    PARTIAL,
    commit_of,
    commit_sizes,
    read_results,
    run_id_of,
    state_of,
)
from specextend.data.database import Database
from specextend.data.fingerprint import (
    check_one_task,
    num_input_rows,
    output_columns,
    read_manifest,
)
from specextend.data.flags import RunWords
from specextend.data.parquet import halved, read_stream, rows_where, stream
from specextend.data.results import damaged_results, result_files
from specextend.data.schema import COMMIT_SCHEMA, task_failures
from specextend.data.storage import Location, atomic_output

RUN_ID = "run_id"
"""Added column: the start of a commit; null for rows of `summaries/`."""
ANSWERED = "answered"
"""Added column of error rows: True if other tasks of the document have an answer."""
_PIECE_BYTES = 4 << 20
"""Bytes of rows that are converted to JSON at a time."""
BATCH_ROWS = 16_384
"""Rows of a table."""
_RESPONSE = (
    "doc_id",
    "summary",
    "finish_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "started_at",
)
_FAILURE = ("doc_id", "error_class", "message")
_SOURCE = "source_path"
"""Column of `specextend prepare` with the path of a file."""

_NAMED = (
    "FROM (SELECT *, left(sha256(coalesce(run_id, 'None') || ':' || doc_id), 24) AS name "
    "FROM given)"
)
"""Rows with an identifier that every export repeats."""
_DONE = f"""
    SELECT to_json({{
        'id': 'batch_req_' || name, 'custom_id': doc_id,
        'response': {{
            'status_code': 200, 'request_id': 'req_' || name,
            'body': {{
                'id': 'chatcmpl-' || name, 'object': 'chat.completion',
                'created': coalesce(epoch_ms(started_at) // 1000, 0), 'model': model,
                'choices': [{{
                    'index': 0, 'message': {{'role': 'assistant', 'content': summary}},
                    'logprobs': NULL,
                    'finish_reason': if(finish_reason = 'repetition', 'length', finish_reason)
                }}],
                'usage': {{
                    'prompt_tokens': num_prompt_tokens,
                    'prompt_tokens_details': {{'cached_tokens': coalesce(num_cached_tokens, 0)}},
                    'completion_tokens': num_output_tokens,
                    'total_tokens': num_prompt_tokens + num_output_tokens
                }}
            }}
        }},
        'error': NULL
    }}) AS line {_NAMED} CROSS JOIN run
"""
"""Responses. The API has no reason for loops, so they count as cut."""
_FAILED = f"""
    SELECT to_json({{
        'id': 'batch_req_' || name, 'custom_id': doc_id, 'response': NULL,
        'error': {{'code': error_class, 'message': message}}
    }}) AS line {_NAMED}
"""


def read_rows(
    output: Location, done: Sequence[str], errors: Sequence[str], words: RunWords | None = None
) -> Iterator[tuple[bool, pa.Table]]:
    """Yield tables of finished (True) and failed documents, from commits or else from results.

    A document with failed tasks is in a table of each kind, and ANSWERED in the second.

    Args:
        done: Columns of finished documents; RUN_ID is added.
        errors: Columns of failed documents.
        words: Filled in from commits, for the flag `generic`.

    Raises:
        ValueError: The folder has no results, although its run has rows.
    """
    if commit_sizes(output):
        for table in read_results(output, COMMIT_SCHEMA.names):  # all, so that damage is found
            if words is not None:
                words.add(table)
            yield from told_apart(table, done, errors)
        return
    files = result_files(output)
    if not files:
        if (manifest := read_manifest(output)) is None:
            raise ValueError(f"{output.path} holds no run: neither _run/parts nor summaries")
        if num_input_rows(manifest):
            raise ValueError(f"{output.path} holds a run of which nothing is done yet")
    text = output_columns(output).text
    for file, is_done in files:
        columns = done if is_done else errors
        yield from ((is_done, table) for table in _read_file(file, columns, text))
        if is_done and errors:
            yield from ((False, table) for table in _read_failures(file, errors))


def told_apart(
    results: pa.Table, done: Sequence[str], errors: Sequence[str]
) -> Iterator[tuple[bool, pa.Table]]:
    """Yield a table of `read_results` in the form of `read_rows`."""
    state = state_of(results)
    run_ids = pa.repeat(pa.scalar(run_id_of(commit_of(results)), pa.string()), len(results))
    if state != FAILED:
        yield True, results.select(list(done)).append_column(RUN_ID, run_ids)
    if state != DONE:
        failed = results.select(list(errors)).append_column(RUN_ID, run_ids)
        yield False, failed.append_column(ANSWERED, pa.repeat(state == PARTIAL, len(results)))


def find_rows(output: Location, doc_ids: Sequence[str], columns: Sequence[str]) -> list[Values]:
    """Return columns of the finished documents with these ids."""
    wanted = pa.array(doc_ids, "string")
    tables = (table for is_done, table in read_rows(output, columns, ["doc_id"]) if is_done)
    return [
        row
        for table in tables
        for row in table.filter(pc.is_in(table["doc_id"], wanted)).to_pylist()
    ]


def find_pdfs(
    output: Location, manifest: ReadOnly | None, doc_ids: Sequence[str]
) -> dict[str, str]:
    """Return the URIs of documents that are local PDF files, by id.

    Files are known if `source_path` is passed through, and the run has ended.
    """
    passthrough = manifest["config"]["input"].get("passthrough", ()) if manifest else ()
    wanted = pa.array(doc_ids, "string")

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        for table in stream(parquet, ["doc_id", _SOURCE]):
            yield rows_where(table, pc.is_in(table["doc_id"], wanted).to_numpy())

    found: dict[str, str] = {}
    for file, is_done in result_files(output) if _SOURCE in passthrough else ():
        for table in read_stream(file, read, damaged_results(file)) if is_done else ():
            for row in table.to_pylist():
                path = str(row[_SOURCE])
                if path.startswith("/") and path.lower().endswith(".pdf"):
                    found[row["doc_id"]] = PurePosixPath(path).as_uri()
    return found


def _read_file(file: Location, columns: Sequence[str], text: str) -> Iterator[pa.Table]:
    """Read results with the names and types of COMMIT_SCHEMA."""
    schema = pa.schema([COMMIT_SCHEMA.field(name) for name in columns])
    stored = [text if name == "summary" else name for name in columns]

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        for batch in parquet.iter_batches(BATCH_ROWS, columns=stored):
            table = pa.table(batch)
            if "verdicts" in stored and "verdicts" not in table.column_names:
                table = table.append_column("verdicts", pa.nulls(len(batch)))
            table = table.select(stored).rename_columns(schema.names).cast(schema)
            table = table.append_column(RUN_ID, pa.nulls(len(batch), "string"))
            yield table.append_column(ANSWERED, pa.repeat(False, len(batch)))

    return read_stream(file, read, damaged_results(file))


def _read_failures(file: Location, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read failed tasks of `summaries/` as error rows."""

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        if "tasks" not in parquet.schema_arrow.names:
            return
        for batch in parquet.iter_batches(BATCH_ROWS, columns=["doc_id", "tasks"]):
            found = task_failures(pa.table(batch)["tasks"]).append_column("doc_id", batch["doc_id"])
            found = found.filter(found["error_class"].is_valid()).select(list(columns))
            found = found.append_column(RUN_ID, pa.nulls(len(found), "string"))
            yield found.append_column(ANSWERED, pa.repeat(True, len(found)))

    return read_stream(file, read, damaged_results(file))


def write_responses(output: Location, file: Location) -> tuple[int, int, int | None]:
    """Write a JSON line for each document of a run, in no particular order.

    Returns:
        Numbers of lines, of errors, and of documents of the run (None without a manifest).

    Raises:
        ValueError: The folder holds no run, or a run of several tasks.
    """
    manifest = read_manifest(output)
    check_one_task(manifest, f"{output.path}: --format openai")
    database = Database()
    model = "" if manifest is None else str(manifest["config"]["target"]["model"])
    database.select("CREATE TABLE run AS SELECT ? AS model", model)
    written = errors = 0
    with atomic_output(file) as path, open(path, "w", encoding="utf-8") as stream:
        for is_done, table in read_rows(output, _RESPONSE, _FAILURE):
            for piece in halved(table, _PIECE_BYTES):
                stream.writelines(
                    f"{row['line']}\n" for row in database.add(piece, _DONE if is_done else _FAILED)
                )
            written += len(table)
            errors += 0 if is_done else len(table)
    return written, errors, None if manifest is None else num_input_rows(manifest)

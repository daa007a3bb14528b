"""Documents from elsewhere, written as Parquet in small row groups."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import one_line
from specextend.data.inputs import InputError
from specextend.data.storage import Location, atomic_output

DOCUMENT_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("reference", pa.string())])
"""The columns that are written: id, text, and a reference summary if the data set has one."""

_GROUP_ROWS = 64
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A public data set: its repository and the columns that we read."""

    repository: str
    id_column: str | None
    """None: `<name>-<split>-<row>`."""
    text_column: str
    reference_column: str | None


HUB_DATASETS = {
    "govreport": HubDataset("ccdv/govreport-summarization", None, "report", "summary"),
    "booksum": HubDataset("kmfoda/booksum", None, "chapter", "summary_text"),
    "pg19": HubDataset("emozilla/pg19", "url", "text", None),
}


def read_hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Stream documents of GovReport, BookSum or PG-19 from the Hugging Face Hub.

    Raises InputError, in one line, if `datasets` is missing, the Hub cannot be reached, or the split is unknown.
    """
    if name not in HUB_DATASETS:
        raise InputError(f"unknown data set {name!r}; known are {', '.join(HUB_DATASETS)}")
    known = HUB_DATASETS[name]
    for number, row in enumerate(_hub_rows(known, split)):
        if known.text_column not in row:
            raise InputError(f"{known.repository} has no column {known.text_column!r}; it has {', '.join(row)}")
        doc_id = f"{name}-{split}-{number}" if known.id_column is None else str(row[known.id_column])
        reference = None if known.reference_column is None else row.get(known.reference_column)
        yield {"id": doc_id, "text": row[known.text_column], "reference": reference}


def _hub_rows(known: HubDataset, split: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise InputError("the package `datasets` is missing; pip install datasets") from error
    try:
        yield from datasets.load_dataset(known.repository, split=split, streaming=True)
    except ConnectionError as error:
        raise InputError(f"the Hugging Face Hub cannot be reached to fetch {known.repository}; run again") from error
    except (ValueError, OSError) as error:
        raise InputError(f"{known.repository}, split {split!r}: {one_line(error)}") from error


def read_jsonl(path: Path, text_field: str, id_field: str | None) -> Iterator[dict[str, Any]]:
    """Stream documents of a JSON Lines file, one object per line; empty lines are skipped.

    Without `id_field` the id is `<file>:<line>`. Raises InputError naming the line that has no such text or id.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _jsonl_document(f"{path.name}:{number}", line, text_field, id_field)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _jsonl_document(place: str, line: str, text_field: str, id_field: str | None) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get(text_field), str):
        raise InputError(f"{place} has no string {text_field!r}; name the field that holds the text")
    if id_field is not None and not isinstance(values.get(id_field), str | int):
        raise InputError(f"{place} has no string or integer {id_field!r}; every document needs an id")
    doc_id = place if id_field is None else str(values[id_field])
    reference = values.get("reference") if isinstance(values.get("reference"), str) else None
    for text in (doc_id, values[text_field], reference or ""):
        if not _is_utf8(text):
            raise InputError(f"{place} contains half of a surrogate pair, which is not a character; repair it")
    return {"id": doc_id, "text": values[text_field], "reference": reference}


def _is_utf8(text: str) -> bool:
    """Return True if text can be stored: JSON may escape half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text_folder(folder: Path, pattern: str = "*.txt") -> Iterator[dict[str, Any]]:
    """Stream one document per file, searched recursively, in path order; the id is the path below `folder`.

    Raises InputError if there is no file, or one that is not UTF-8.
    """
    paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
    if not paths:
        raise InputError(f"{folder} contains no {pattern}; give a folder of text files")
    for path in paths:
        if not _is_utf8(str(path)):
            raise InputError(f"the name of {path} is not UTF-8, so it cannot be an id; rename it")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error
        yield {"id": path.relative_to(folder).as_posix(), "text": text, "reference": None}


def write_documents(documents: Iterable[dict[str, Any]], output: Location, limit: int | None = None) -> int:
    """Write documents as one Parquet file, whole or not at all; return how many.

    Streams: row groups end at 1 MiB of text or 64 rows. limit: most documents. Raises InputError if there are none.
    """
    written = 0
    with atomic_output(output) as path, pq.ParquetWriter(path, DOCUMENT_SCHEMA, compression="zstd") as writer:
        for group in _groups(islice(documents, limit)):
            writer.write_table(pa.Table.from_pylist(group, schema=DOCUMENT_SCHEMA))
            written += len(group)
        if not written:
            raise InputError("there are no documents to write; give a source that has some")
    return written


def _groups(documents: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for document in documents:
        group.append(document)
        if len(group) == _GROUP_ROWS or sum(len(row["text"] or "") for row in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group

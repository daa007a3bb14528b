"""Documents from elsewhere, written as Parquet in small row groups."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from specextend.core import one_line
from specextend.data.inputs import InputError, unreadable
from specextend.data.listing import check_apart, list_input
from specextend.data.parquet import DAMAGED, gathered, is_damaged, open_parquet, stream
from specextend.data.storage import Location, atomic_output, resolve

DOCUMENT_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("reference", pa.string())])
"""The columns that are written: id, text, and a reference summary if the data set has one."""
REQUEST_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("max_new_tokens", pa.int32())])
"""The columns of requests that name their own limits."""

PDF_FILES = "*.[pP][dD][fF]"
"""Pattern of the names of PDF files."""
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
    values = parse_json(place, line)
    if not isinstance(values, dict) or not isinstance(values.get(text_field), str):
        raise InputError(f"{place} has no string {text_field!r}; name the field that holds the text")
    if id_field is not None and not isinstance(values.get(id_field), str | int):
        raise InputError(f"{place} has no string or integer {id_field!r}; every document needs an id")
    doc_id = place if id_field is None else str(values[id_field])
    reference = values.get("reference") if isinstance(values.get("reference"), str) else None
    check_characters(place, doc_id, values[text_field], reference or "")
    return {"id": doc_id, "text": values[text_field], "reference": reference}


def parse_json(place: str, line: str) -> Any:
    """Return the value in a line. Raises InputError that names its place."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON: {error}") from error


def check_characters(place: str, *texts: str) -> None:
    """Raise InputError for a text that cannot be stored."""
    if not all(map(_is_utf8, texts)):
        raise InputError(f"{place} contains half of a surrogate pair, which is not a character; repair it")


def _is_utf8(text: str) -> bool:
    """Return True if text can be stored: JSON may escape half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse(error: InputError) -> None:
    """Raise the error, with what can be done about a file that cannot be read."""
    raise InputError(f"{error}; repair or remove the file, or leave out all such files (--skip-unreadable)") from error


def read_text_folder(
    folder: Path, pattern: str, on_unreadable: Callable[[InputError], None] = refuse
) -> Iterator[dict[str, Any]]:
    """Stream one document per text file, searched recursively, in path order; the id is the path below `folder`.

    A file that is not UTF-8 is handed to `on_unreadable` as an error, and left out if that returns. Raises InputError
    if no file matches.
    """
    return _read_folder(folder, pattern, pattern, _text, on_unreadable)


def read_pdf_folder(folder: Path, on_unreadable: Callable[[InputError], None] = refuse) -> Iterator[dict[str, Any]]:
    """Stream the text of one PDF file after the other, as `read_text_folder` does; a blank line separates pages.

    Unreadable is a PDF that is damaged, that needs a password, or on whose pages there is no text, as in a scan.
    Raises InputError if there is no PDF file, or if `pypdf` is missing.
    """
    try:
        import pypdf  # noqa: F401  here, so that a missing package does not count as an unreadable file
    except ImportError as error:
        raise InputError("the package `pypdf` is missing; pip install 'pypdf[crypto]'") from error
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs what it repaired; what it could not, it raises
    yield from _read_folder(folder, PDF_FILES, "*.pdf", _pdf_text, on_unreadable)


def other_files(folder: Path, pattern: str) -> list[str]:
    """List the files below a folder that a pattern does not match, but no hidden ones (`.`)."""
    matched = set(folder.rglob(pattern))
    others = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path not in matched)
    return sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))


def _read_folder(
    folder: Path, pattern: str, shown: str, read: Callable[[Path], str], on_unreadable: Callable[[InputError], None]
) -> Iterator[dict[str, Any]]:
    """Stream the files that match. shown: the pattern in messages. Raises InputError if there are none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give the folder that holds the files")
    paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
    if not paths:
        raise InputError(f"{folder} contains no {shown}; give a folder of such files")
    for path in paths:
        try:
            if not _is_utf8(str(path)):
                raise InputError(f"the name of {path} is not UTF-8, so it cannot be an id")
            text = read(path)
        except InputError as error:
            on_unreadable(error)
        else:
            yield {"id": path.relative_to(folder).as_posix(), "text": text, "reference": None}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _pdf_text(path: Path) -> str:
    """Return the text of all pages. Raises InputError naming the file, and the page if it is one page's fault."""
    import pypdf

    place = str(path)
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError(f"{path} needs a password")
        pages = []
        for number, page in enumerate(reader.pages, start=1):
            place = f"{path}, page {number},"
            pages.append(page.extract_text().strip())
    except InputError:
        raise
    except Exception as error:  # on damaged bytes pypdf raises whatever its parser runs into
        raise InputError(f"{place} cannot be read: {one_line(error) or type(error).__name__}") from error
    if not any(pages):
        raise InputError(f"{path} has no text, as if it were scanned; text recognition (OCR) could add it")
    # A font's table may name half a character, which no file can store.
    return "\n\n".join(filter(None, pages)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write_documents(
    documents: Iterable[dict[str, Any]],
    output: Location,
    limit: int | None = None,
    schema: pa.Schema = DOCUMENT_SCHEMA,
) -> int:
    """Write documents as one Parquet file with the columns of `schema`, whole or not at all; return how many.

    Streams: row groups end at 1 MiB of text or 64 rows. limit: most documents. Raises InputError if there are none,
    or if the output is a folder.
    """
    if output.filesystem.get_file_info(output.path).type == fs.FileType.Directory:
        raise InputError(f"{output.path} is a folder; name the file to write, such as {output.path}/documents.parquet")
    written = 0
    with atomic_output(output) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(islice(documents, limit)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            written += len(group)
        if not written:
            raise InputError("there are no documents to write; give a source that has some")
    return written


def repartition(path: str, output: str) -> int:
    """Write the Parquet files of `input.path` anew in small row groups, under the same names in a folder; count them.

    Streams: a row group ends at about 16 MiB. Raises InputError for files that cannot be read.
    """
    listing = list_input(path)
    check_apart(listing, output)
    for name in listing.relative_paths:
        source = listing.root.child(name)
        try:
            with open_parquet(source) as parquet, atomic_output(resolve(output).child(name)) as written:
                schema = parquet.schema_arrow
                tables = ((table, table.nbytes) for table in stream(parquet, schema.names))
                with pq.ParquetWriter(written, schema, compression="zstd") as writer:
                    for table in gathered(schema, tables):
                        writer.write_table(table, row_group_size=len(table))
        except DAMAGED as error:
            if not is_damaged(source, error):
                raise
            raise unreadable(name, error) from error
    return len(listing.relative_paths)


def _groups(documents: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for document in documents:
        group.append(document)
        if len(group) == _GROUP_ROWS or sum(len(row["text"] or "") for row in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group

"""Documents from rows of CSV, JSON Lines and data sets of the Hugging Face Hub."""

import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, BinaryIO

from specextend.core import Values, one_line, unique_fields
from specextend.data.inputs import InputError, InputUnreachableError
from specextend.documents.document_set import COLUMNS
from specextend.documents.text import (
    HALF_CHARACTER,
    NOT_UTF8,
    DocumentOptions,
    UnreadableError,
    decoded_lines,
)

NumberedRow = tuple[int, Any]
"""Number of a row, and its values or its error."""
_SPACED = re.compile(r'[ \t]+"([^"]|"")*"?')
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*')
"""Excel names the separator in a line before the header."""


def as_row(values: Any, place: str, number: int, options: DocumentOptions) -> Values:
    """Return a row as columns of a document. Raises UnreadableError."""
    if isinstance(values, UnreadableError):
        raise values
    if not isinstance(values, Mapping):
        raise UnreadableError("bad row", "is no object with fields")
    if not isinstance(values.get(options.text_field), str):
        message = (
            f"has no string {options.text_field!r}; it has {', '.join(map(repr, [*values][:10]))}; "
            "--text-field names the one that holds the text"
        )
        raise UnreadableError("bad row", message)
    doc_id = place if options.id_field is None else values.get(options.id_field)
    if isinstance(doc_id, bool) or not isinstance(doc_id, str | int) or doc_id == "":
        raise UnreadableError(
            "bad row", f"has no string or integer {options.id_field!r}; every document needs an id"
        )
    title = values.get("title") if isinstance(values.get("title"), str) else None
    own = {
        "id": str(doc_id),
        "title": title,
        "text": values[options.text_field],
        "source_row": number,
    }
    used = (options.text_field, options.id_field, None if title is None else "title")
    if "\0" in own["text"]:
        raise UnreadableError("bad row", "has a NUL in its text, which is no character; remove it")
    return own | {
        f"{name}_" if name.rstrip("_") in COLUMNS else name: value
        for name, value in values.items()
        if name not in used
    }


def _json_rows(file: BinaryIO, options: DocumentOptions) -> Iterator[NumberedRow]:
    for number, line in enumerate(decoded_lines(file, options.encoding), start=1):
        if HALF_CHARACTER.search(line):
            yield number, UnreadableError("encoding", NOT_UTF8)
        elif line.strip():
            try:
                yield number, json_value(line)
            except UnreadableError as error:
                yield number, error


def json_value(text: str) -> Any:
    """Return a JSON value. Raises UnreadableError, also for halves of surrogate pairs."""
    try:
        value = json.loads(text, object_pairs_hook=unique_fields, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("bad row", f"is not JSON: {one_line(error)}") from error
    if "\\u" in text and HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
        raise UnreadableError(
            "bad row", "contains half of a surrogate pair, which is not a character; repair it"
        )
    return value


def _number(text: str) -> float:
    """Parse a number. Raises ValueError beyond floats."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is larger than a number can be; write it as text")
    return value


def _csv_rows(file: BinaryIO, options: DocumentOptions) -> Iterator[NumberedRow]:
    """Yield rows with their last line. Raises UnreadableError for ambiguous quotes."""
    csv.field_size_limit(sys.maxsize)
    lines = decoded_lines(file, options.encoding)
    separator = ""
    skipped = 0
    first = ""
    for skipped, first in enumerate(lines):  # noqa: B007
        if named := _SEPARATOR.fullmatch(first):
            separator = named[1]
        elif first.strip():
            break
    separator = separator or max(",;\t|", key=re.sub('"[^"]*"', "", first).count)
    reader = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    header: list[str] = []
    number = skipped
    try:
        for cells in filter(None, reader):
            number = reader.line_num + skipped
            if not header:
                header = cells
                [(name, count)] = Counter(header).most_common(1)
                if count > 1:
                    message = f"has {count} columns of the name {name!r}; rename all but one"
                    raise UnreadableError("bad table", message)
            elif any(map(HALF_CHARACTER.search, cells)):
                yield number, UnreadableError("encoding", NOT_UTF8)
            elif any(map(_SPACED.fullmatch, cells)):
                message = (
                    "has a space before a quote, so that nobody knows where its cell ends; "
                    "remove it"
                )
                yield number, UnreadableError("bad row", message)
            elif len(cells) != len(header):
                message = f"has {len(cells)} cells, and the header {len(header)}"
                yield number, UnreadableError("bad row", message)
            else:
                yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        message = (
            f"has a quote in the row at line {number + 1} that is not closed, or not "
            "doubled within a cell"
        )
        raise UnreadableError(
            "bad table", f"{message} ({error}); repair it, or write the table as JSON Lines"
        ) from error


ROW_READERS: dict[str, Callable[[BinaryIO, DocumentOptions], Iterator[NumberedRow]]] = {
    "csv": _csv_rows,
    "jsonl": _json_rows,
}


def hub_rows(
    name: str, subset: str | None, split: str, limit: int | None = None
) -> Iterator[NumberedRow]:
    """Stream rows of a data set of the Hub, or of a local folder.

    Raises InputUnreachableError or InputError.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        yield from enumerate(islice(rows, limit))
    except ConnectionError as error:
        raise InputUnreachableError(
            f"the Hugging Face Hub cannot be reached to fetch {name}; run again"
        ) from error
    except (ValueError, OSError) as error:
        raise InputError(f"{name}, split {split!r}: {one_line(error)}") from error

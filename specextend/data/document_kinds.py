"""The text of files: PDF, DOCX, HTML, Markdown and text hold one document, JSON Lines and CSV one in each row."""

from __future__ import annotations

import codecs
import csv
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath
from typing import Any, BinaryIO

from specextend.core import one_line
from specextend.data.document_set import COLUMNS
from specextend.data.inputs import InputError

KINDS = {
    ".pdf": "pdf",
    ".docx": "docx",
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
"""The kind of a file, by its extension in lower case."""
_PACKAGES = {"pdf": ("pypdfium2",), "docx": ("mammoth", "selectolax"), "html": ("selectolax",)}
_BLOCKS = "p,div,br,hr,li,dt,dd,tr,h1,h2,h3,h4,h5,h6,pre,blockquote,section,article,header,footer,table,ul,ol"
"""Elements of HTML that begin and end a line."""
_LINE = "\x1e"
"""Stands for the end of a line in HTML, where that of the source is white space."""
_ITEM = re.compile(r"([-•▪◦*]|\(?(\d{1,3}|[a-z])[.)])\s")
_CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", re.IGNORECASE)
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = "is not UTF-8; name its encoding, as in --encoding cp1252"
_FULL = 0.7
"""A line this long, relative to the long ones of its page, goes on in the next one."""
_DIVIDED = re.compile("[\x02\u00ad\ufffe]\n?")
"""How PDFium writes the end of a line that divides a word."""
_NO_TITLE = re.compile(r"(\(anonymous\)|\(unspecified\)|untitled)$|Microsoft Word - ", re.IGNORECASE)
"""Titles that programs write into a PDF by themselves."""


class UnreadableError(Exception):
    """Says why a file, or a row of one, is no document: two words that are counted, and a message."""

    def __init__(self, reason: str, message: str) -> None:
        """Take what follows the name of the file."""
        super().__init__(reason, message)
        self.reason, self.message = reason, message


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentOptions:
    """Which files become documents, and how."""

    patterns: Sequence[str] = ()
    """Ends of paths, of which a file must match one (`*.md`, `notes/*.txt`); none: all kinds that are read."""
    kind: str | None = None
    """Read every file as this kind, whatever its name."""
    encoding: str | None = None
    """Of what is not UTF-8; None refuses that."""
    keep_lines: bool = False
    """Keep the lines of PDFs; otherwise those of a paragraph are joined."""
    text_field: str = "text"
    """Field or column that holds the text of a row."""
    id_field: str | None = None
    """Field or column that holds the id; None: the id is `<file>:<line>`."""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that read files."""
    time_limit_s: float = 60.0
    """Seconds that a file may take, and one more for each MiB of it."""
    memory_gib: float = 4.0
    """Memory that a process which reads files may take."""
    limit: int | None = None
    """Most files that one call reads."""
    remove_gone: bool = False
    """Remove the documents of files that are not there any more."""

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError as error:
            raise ValueError(f"unknown encoding {self.encoding!r}; give one such as cp1252") from error


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name, or None if it is not read; it may be compressed."""
    path = PurePath(name.lower())
    return KINDS.get(PurePath(path.stem).suffix if path.suffix in (".gz", ".bz2", ".zst") else path.suffix)


def check_packages(kinds: Iterable[str]) -> None:
    """Raise InputError, in one line, if a package is missing that files of these kinds need."""
    for kind in sorted(kinds):
        missing = [name for name in _PACKAGES.get(kind, ()) if importlib.util.find_spec(name) is None]
        if missing:
            need = f"to read {kind.upper()} takes the package {' and '.join(missing)}"
            raise InputError(f"{need}: install specextend with its extra `documents`, or leave them out (--pattern)")


def read_document(kind: str, data: bytes, options: DocumentOptions) -> tuple[str, str]:
    """Return title, empty if there is none, and text of a file. Raises UnreadableError."""
    try:
        title, text = _READERS[kind](data, options)
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # on damaged bytes the parsers raise whatever they run into
        raise UnreadableError("damaged", f"cannot be read: {one_line(error) or type(error).__name__}") from error
    if not text.strip():
        hint = ", as if it were scanned; text recognition (OCR) could add it" if kind == "pdf" else ""
        raise UnreadableError("no text", f"has no text{hint}")
    return " ".join(_HALF_CHARACTER.sub("\ufffd", title).split()), _HALF_CHARACTER.sub("\ufffd", text)


def _read_pdf(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise UnreadableError("password", "needs a password") from error
        raise
    pages = []
    for page in pdf:
        text = page.get_textpage().get_text_range().replace("\r\n", "\n").strip()
        text = _DIVIDED.sub("-\n", text)
        pages.append(text if options.keep_lines else join_lines(text))
        page.close()
    title = pdf.get_metadata_value("Title").strip()
    return "" if _NO_TITLE.match(title) else title, "\n\n".join(filter(None, pages))


def join_lines(text: str) -> str:
    """Join the lines of each paragraph of a page, and the words that are divided between two.

    A short line ends its paragraph; an empty one and an item of a list begin another.
    """
    lines = [line.strip() for line in text.splitlines()]
    lengths = sorted(map(len, filter(None, lines))) or [0]
    full = _FULL * lengths[len(lengths) * 9 // 10]
    joined: list[str] = []
    previous = ""
    for line in lines:
        is_divided = previous.endswith("-") and bool(line)
        if not is_divided and (not line or len(previous) < full or _ITEM.match(line)):
            joined.append(line)
        elif is_divided:
            joined[-1] = (joined[-1][:-1] if line[0].islower() else joined[-1]) + line
        else:
            joined[-1] += f" {line}"
        previous = line
    return "\n".join(joined)


def _read_docx(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    import mammoth

    if not data.startswith(b"PK"):
        raise UnreadableError("damaged", "is no DOCX file, or needs a password; save it as DOCX without one")
    return _html_text(mammoth.convert_to_html(io.BytesIO(data), convert_image=lambda image: []).value)


def _read_html(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    named = _CHARSET.search(data[:4096])
    return _html_text(decode(data, options.encoding or (named[1].decode() if named else None)))


def _html_text(html: str) -> tuple[str, str]:
    """Return the title, or else the first heading, and the text with a line for each block."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(html)
    title = tree.css_first("title") or tree.css_first("h1")
    name = title.text() if title else ""
    for node in tree.css("script,style,noscript,template"):
        node.decompose()
    for node in tree.css("pre"):
        node.replace_with(node.text().replace("\n", _LINE).join((_LINE, _LINE)))
    for node in tree.css(_BLOCKS):
        node.insert_before(_LINE)
        node.insert_after(_LINE)
    for node in tree.css("td,th"):
        node.insert_after(" ")
    lines = (" ".join(line.split()) for line in (tree.body.text() if tree.body else "").split(_LINE))
    return name, "\n".join(filter(None, lines))


def _read_markdown(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    text = decode(data, options.encoding)
    heading = re.search(r"^#\s+(.+?)\s*#*$", text, re.MULTILINE)
    return heading[1] if heading else "", text


def _read_text(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    return "", decode(data, options.encoding)


_READERS: dict[str, Callable[[bytes, DocumentOptions], tuple[str, str]]] = {
    "pdf": _read_pdf,
    "docx": _read_docx,
    "html": _read_html,
    "markdown": _read_markdown,
    "text": _read_text,
}


def decode(data: bytes, encoding: str | None) -> str:
    """Decode text by its byte order mark, as UTF-8, or else by the encoding that is given. Raises UnreadableError."""
    marked = next((name for mark, name in _BOMS.items() if data.startswith(mark)), "utf-8")
    for name in (marked, encoding):
        try:
            return data.decode(name or marked)
        except UnicodeDecodeError as error:
            wrong = error
    raise UnreadableError("encoding", _NOT_UTF8) from wrong


def rows_of(kind: str, file: BinaryIO, options: DocumentOptions) -> Iterator[tuple[int, Any]]:
    """Yield the lines of JSON Lines or CSV with their numbers, each as its values or what is wrong with it."""
    return _csv_rows(file, options) if kind == "csv" else _json_rows(file, options)


def as_row(values: Any, place: str, number: int, options: DocumentOptions) -> dict[str, Any]:
    """Return a row's id, title, text and number, and its other fields. Raises UnreadableError for what is missing."""
    if isinstance(values, UnreadableError):
        raise values
    if not isinstance(values, Mapping) or not isinstance(values.get(options.text_field), str):
        has = f"; it has {', '.join(map(repr, [*values][:10]))}" if isinstance(values, Mapping) else ""
        message = f"has no string {options.text_field!r}{has}; --text-field names the one that holds the text"
        raise UnreadableError("bad row", message)
    doc_id = place if options.id_field is None else values.get(options.id_field)
    if isinstance(doc_id, bool) or not isinstance(doc_id, str | int) or doc_id == "":
        raise UnreadableError("bad row", f"has no string or integer {options.id_field!r}; every document needs an id")
    title = values.get("title") if isinstance(values.get("title"), str) else None
    own = {"id": str(doc_id), "title": title, "text": values[options.text_field], "source_row": number}
    used = (options.text_field, options.id_field, None if title is None else "title")
    others = {name: value for name, value in values.items() if name not in used}
    return own | {f"{name}_" if name in COLUMNS else name: value for name, value in others.items()}


def _json_rows(file: Iterable[bytes], options: DocumentOptions) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, json_value(decode(line, options.encoding))
            except UnreadableError as error:
                yield number, error


def json_value(text: str) -> Any:
    """Return a JSON value whose characters are whole. Raises UnreadableError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("bad row", f"is not JSON: {one_line(error)}") from error
    if "\\u" in text and _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
        raise UnreadableError("bad row", "contains half of a surrogate pair, which is not a character; repair it")
    return value


def _csv_rows(file: Iterable[bytes], options: DocumentOptions) -> Iterator[tuple[int, Any]]:
    """Yield the rows below the header, which shows what separates the cells; the number is that of the last line."""
    csv.field_size_limit(sys.maxsize)
    lines = _decoded_lines(file, options.encoding)
    first = next(lines, "")
    delimiter = max(",;\t|", key=first.count)
    [header] = csv.reader([first], delimiter=delimiter)
    reader = csv.reader(lines, delimiter=delimiter)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num + 1, UnreadableError("bad row", f"is not CSV: {error}")
            continue
        if any(map(_HALF_CHARACTER.search, cells)):
            yield reader.line_num + 1, UnreadableError("encoding", _NOT_UTF8)
        elif len(cells) not in (0, len(header)):
            message = f"has {len(cells)} cells, and the header {len(header)}"
            yield reader.line_num + 1, UnreadableError("bad row", message)
        elif cells:
            yield reader.line_num + 1, dict(zip(header, cells, strict=True))


def _decoded_lines(lines: Iterable[bytes], encoding: str | None) -> Iterator[str]:
    """Decode lines; in those that cannot be, halves of surrogate pairs stand for the bytes."""
    for number, line in enumerate(lines):
        try:
            yield line.decode("utf-8-sig" if number == 0 else "utf-8")
        except UnicodeDecodeError:
            yield line.decode(encoding or "utf-8", "surrogateescape")


def hub_rows(name: str, subset: str | None, split: str, limit: int | None = None) -> Iterator[tuple[int, Any]]:
    """Stream the numbered rows of a data set by its name on the Hugging Face Hub, or of a local folder of one.

    Raises InputError, in one line, if the Hub cannot be reached, or the data set or its split is unknown.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        yield from enumerate(islice(rows, limit))
    except ConnectionError as error:
        raise InputError(f"the Hugging Face Hub cannot be reached to fetch {name}; run again") from error
    except (ValueError, OSError) as error:
        raise InputError(f"{name}, split {split!r}: {one_line(error)}") from error

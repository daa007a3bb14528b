"""Formats of files and their readers."""

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import PurePath

from specextend.core import Values
from specextend.data.prepared import LEFT_OUT, PAGE_LABELS, PAGE_STARTS
from specextend.documents.document_options import DocumentOptions, Text, UnreadableError
from specextend.documents.docx import read_docx
from specextend.documents.html import read_html
from specextend.documents.pdf import read_pdf
from specextend.documents.text import HALF_CHARACTER, decode, read_markdown
from specextend.documents.zipped_xml import read_epub, read_odt, read_pptx

KINDS = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".epub": "epub",
    ".pptx": "pptx",
    ".odt": "odt",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "xhtml",
    ".xht": "xhtml",
    ".md": "markdown",
    ".markdown": "markdown",
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
"""JSON Lines and CSV have a document in each row."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4", ".zst": "zstd"}
_OTHERS = {
    b"{\\rtf": "RTF",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"PK\3\4": "a ZIP archive",
    b"PAR1": "Parquet",
}
"""Beginnings of files that are no text."""
OTHER = "other"
"""Files that only `--reader` may read."""
_INVISIBLE = re.compile(
    "[\u00ad\u200b\u2060\ufeff]|(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]+"
)
"""Soft hyphens, zero-width spaces, and tags outside of flags."""
_JOINT = "\n\n"


def kind_of(name: str) -> str | None:
    """Return a file's format by its name, if known."""
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        path = PurePath(path.stem)
    return KINDS.get(path.suffix)


def read_document(
    kind: str, data: bytes, options: DocumentOptions, given: Text | None = None
) -> Values:
    """Return title, text, counts and pages as columns. Raises any error for damaged bytes."""
    title, text, counts, pages, labels = given or _READERS[kind](data, options)
    texts = [*map(_clean, pages or [text])]
    text = _JOINT.join(filter(None, texts))
    if not text.strip():
        hint = (
            ", as if it were scanned; text recognition (OCR) could add it" if kind == "pdf" else ""
        )
        if counts.get("left_out_characters"):
            hint = " but that which --main-only leaves out; read it without"
        raise UnreadableError("no text", f"has no text{hint}")
    row = {"title": " ".join(_clean(title).split()), "text": text, **counts}
    if pages:
        # a page without text begins where the next page does
        lengths = (len(each) + len(_JOINT) * bool(each) for each in texts[:-1])
        starts = accumulate(lengths, initial=0)
        row[PAGE_STARTS] = [min(start, len(text)) for start in starts]
        row[PAGE_LABELS] = [*map(_clean, labels)] or None
    return row


def _clean(text: str) -> str:
    text = _INVISIBLE.sub("", HALF_CHARACTER.sub("\ufffd", text))
    return text.replace("\0", "\ufffd")


def _read_text(data: bytes, options: DocumentOptions) -> Text:
    for sign, name in _OTHERS.items():
        if data.startswith(sign):
            message = f"is {name} and no text; save it as DOCX or PDF, or read it with --reader"
            raise UnreadableError("other kind", message)
    return Text("", decode(data, options.encoding), {})


def _read_other(data: bytes, options: DocumentOptions) -> Text:
    raise UnreadableError(
        LEFT_OUT, f"is of a kind that is not read, and {options.reader} gave None"
    )


_READERS: dict[str, Callable[[bytes, DocumentOptions], Text]] = {
    "pdf": read_pdf,
    "docx": read_docx,
    "epub": read_epub,
    "pptx": read_pptx,
    "odt": read_odt,
    "html": read_html,
    "xhtml": partial(read_html, is_xml=True),
    "markdown": read_markdown,
    OTHER: _read_other,
    "text": _read_text,
}

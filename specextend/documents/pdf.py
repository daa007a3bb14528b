"""The text of PDFs, with their forms and annotations."""

import ctypes
import io
import re
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from specextend.documents.document_options import DocumentOptions, Text, UnreadableError

_ITEM = re.compile(r"([-•▪◦*]|\(?(\d{1,3}|[a-z])[.)])\s")
_HIDDEN = 0x02 | 0x20
"""Flags of annotations that a screen does not show."""
_FULL = 0.7
"""A line this long, relative to the long ones of its page, goes on in the next one."""
_DIVIDED = re.compile("[\x02\u00ad\ufffe]\n?")
"""How PDFium writes the end of a line that divides a word."""
_NO_TITLE = re.compile(
    r"(\(anonymous\)|\(unspecified\)|untitled)$|Microsoft Word - ", re.IGNORECASE
)
"""Titles that programs write into a PDF by themselves."""


def read_pdf(data: bytes, options: DocumentOptions) -> Text:
    """Return title and text of a PDF, and what its text lacks."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise UnreadableError("password", "needs a password") from error
        raise
    if pdf.count_attachments() and _is_portfolio(pdf):
        raise UnreadableError(
            "only a cover", "is a portfolio, whose documents are attached to it; save them as files"
        )
    form = pdf.get_formtype()
    if form == pypdfium2.raw.FORMTYPE_ACRO_FORM:
        pdf.init_forms()  # it draws fields that bring no appearance
    pages = []
    num_unmapped = 0
    has_fields = False
    for number in range(len(pdf)):
        text, unmapped, is_filled = _page_text(pdf, number)
        num_unmapped += unmapped
        has_fields |= is_filled
        pages.append(text if options.keep_lines else join_lines(text))
    is_static = form == pypdfium2.raw.FORMTYPE_XFA_FOREGROUND
    if form == pypdfium2.raw.FORMTYPE_XFA_FULL or (is_static and not has_fields):
        raise UnreadableError(
            "only a cover",
            "is an XFA form, which Adobe's programs alone show; print it as a new PDF",
        )
    if num_unmapped * 2 > sum(map(len, pages)):
        message = (
            "has fonts that do not say which characters they show; text recognition (OCR) could"
        )
        raise UnreadableError("no characters", message)
    title = pdf.get_metadata_value("Title").strip()
    text = "\n\n".join(filter(None, pages))
    counts = {"pages_without_text": pages.count(""), "unmapped_characters": num_unmapped}
    return "" if _NO_TITLE.match(title) else title, text, counts


def _is_portfolio(pdf: Any) -> bool:
    """Return True for a PDF that shows its attachments; PDFium tells it from others only when it
    writes it.
    """
    written = io.BytesIO()
    pdf.save(written)
    return re.search(rb"/Collection\s*(<<|\d)", written.getvalue()) is not None


def _page_text(pdf: Any, number: int) -> tuple[str, int, bool]:
    """Return a page's text with forms and annotations, how much of it no font maps, and whether it
    has such.
    """
    from pypdfium2 import raw

    page = pdf[number]
    texts = [*_free_texts(page)]
    is_filled = (
        raw.FPDFPage_GetAnnotCount(page) > 0
        and raw.FPDFPage_Flatten(page, 0) == raw.FLATTEN_SUCCESS
    )
    if is_filled:
        page.close()
        page = pdf[number]
    shown = page.get_textpage()
    text = shown.get_text_range().replace("\r\n", "\n").strip()
    num_unmapped = sum(
        map(raw.FPDFText_HasUnicodeMapError, repeat(shown.raw), range(shown.count_chars()))
    )
    page.close()
    return _DIVIDED.sub("-\n", "\n".join(filter(None, (text, *texts)))), num_unmapped, is_filled


def _free_texts(page: Any) -> Iterator[str]:
    """Yield what is typed onto a page without the appearance that PDFium needs to show it."""
    from pypdfium2 import raw

    for i in range(raw.FPDFPage_GetAnnotCount(page)):
        note = raw.FPDFPage_GetAnnot(page, i)
        is_text = raw.FPDFAnnot_GetSubtype(note) == raw.FPDF_ANNOT_FREETEXT
        is_shown = raw.FPDFAnnot_HasKey(note, b"AP") or raw.FPDFAnnot_GetFlags(note) & _HIDDEN
        if is_text and not is_shown:
            size = raw.FPDFAnnot_GetStringValue(note, b"Contents", None, 0)
            buffer = (ctypes.c_ushort * (size // 2))()
            raw.FPDFAnnot_GetStringValue(note, b"Contents", buffer, size)
            yield bytes(buffer).decode("utf-16-le").rstrip("\0")
        raw.FPDFPage_CloseAnnot(note)


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
        if line and previous.endswith("-"):
            joined[-1] = (joined[-1][:-1] if line[0].islower() else joined[-1]) + line
        elif not line or len(previous) < full or _ITEM.match(line):
            joined.append(line)
        else:
            joined[-1] += f" {line}"
        previous = line
    return "\n".join(joined)

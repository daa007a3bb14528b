"""Text of PDFs, with forms and annotations."""

import ctypes
import io
import logging
import math
import re
from collections.abc import Callable, Container, Iterator
from itertools import repeat
from typing import Any, NamedTuple

from specextend.documents.text import (
    DocumentOptions,
    Text,
    UnreadableError,
    hidden_counts,
    num_visible,
)

_ITEM = re.compile(r"([-•▪◦*]|\(?(\d{1,3}|[a-z])[.)])\s")
_HIDDEN = 0x02 | 0x20
_FULL = 0.7
"""Length of a full line, relative to the long lines of its page."""
_DIVIDED = re.compile("[\x02\u00ad\ufffe]\n?")
"""Divided words, as PDFium writes them."""
_SPACES = re.compile(r"[ \r]*([ \n])[ \r\n]*")
_PASSWORD = 1 << 13
_FAR = 40
"""Weight of vertical distances between a field and its label."""
_COMPOUND = re.compile(r"\w+(?:-\w+)+")
_LAST_WORD = re.compile(r"[\w-]*$")
_FIRST_WORD = re.compile(r"[\w-]*")
_AND = ("and", "or", "und", "oder", "bzw", "sowie", "et", "ou", "y")
"""Words that join halves of a pair, as in `pre- and postwar`."""
_LAYERS = (b"/OCProperties", b"/ObjStm")
"""Signs of layers, and of a compressed catalog that may name layers."""
_LAYER_OFF = re.compile(rb"/OFF\s*\[\s*\d|/BaseState\s*/OFF")
_SHOWING = (b"Tj", b"TJ", b"'", b'"', b"Do")
"""Operators that draw."""
_NO_TITLE = re.compile(
    r"(\(anonymous\)|\(unspecified\)|(untitled|document|presentation)[-_ ]?\d*|untitled document|"
    r"powerpoint presentation)$|"
    r"Microsoft \w+ - |.*\.(pdf|docx?|dotx?|odt|rtf|txt|tex|dvi|ps|indd|qxd|xlsx?|pptx?|html?)$",
    re.IGNORECASE | re.DOTALL,
)
"""Titles that programs write by themselves."""


def read_pdf(data: bytes, options: DocumentOptions) -> Text:
    """Return the text of a PDF by pages."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise UnreadableError("password", "needs a password") from error
        raise
    layers = ("", "")
    if any(sign in data for sign in _LAYERS) and _LAYER_OFF.search(written := _written(pdf)):
        every = _characters(pdf)
        pdf = pypdfium2.PdfDocument(_without_hidden_layers(written))
        layers = (every, _characters(pdf))
    if pdf.count_attachments() and re.search(rb"/Collection\s*(<<|\d)", _written(pdf)):
        raise UnreadableError(
            "only a cover", "is a portfolio, whose documents are attached to it; save them as files"
        )
    form = pdf.get_formtype()
    if form == pypdfium2.raw.FORMTYPE_ACRO_FORM:
        pdf.init_forms()
    read = [_page_text(pdf, number) for number in range(len(pdf))]
    pages = [page.text for page in read]
    num_unmapped = sum(page.num_unmapped for page in read)
    hidden = "\n".join([layers[0], *(page.hidden for page in read)])
    if not options.keep_lines:
        compounds = {word.lower() for page in pages for word in _COMPOUND.findall(page)}
        pages = [join_lines(page, compounds) for page in pages]
    is_static = form == pypdfium2.raw.FORMTYPE_XFA_FOREGROUND
    if form == pypdfium2.raw.FORMTYPE_XFA_FULL or (
        is_static and not any(page.has_notes for page in read)
    ):
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
    labels = [_string(pypdfium2.raw.FPDF_GetPageLabel, pdf, n) for n in range(len(pdf))]
    counts = {
        "pages_without_text": pages.count(""),
        "unmapped_characters": num_unmapped,
        **hidden_counts(hidden, layers[1]),
    }
    title = "" if _NO_TITLE.match(title) else title
    return Text(title, "", counts, pages, labels if any(labels) else ())


def _written(pdf: Any) -> bytes:
    from pypdfium2 import raw

    written = io.BytesIO()
    pdf.save(written, flags=raw.FPDF_REMOVE_SECURITY)
    return written.getvalue()


def _characters(pdf: Any) -> str:
    return "\n".join(page.get_textpage().get_text_range() for page in pdf)


def _without_hidden_layers(data: bytes) -> bytes:
    import pypdf
    from pypdf.generic import ContentStream, DictionaryObject, NameObject, NumberObject

    logging.getLogger("pypdf").setLevel(logging.ERROR)
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    layers: Any = writer.root_object["/OCProperties"]
    config = layers["/D"]
    off = config.get("/OFF", [])
    if config.get("/BaseState") == "/OFF":
        off = [layer for layer in layers["/OCGs"] if layer not in config.get("/ON", [])]
    empty = DictionaryObject()

    def is_hidden(holder: Any, key: Any = "/OC") -> bool:
        layer = holder.get(key, empty)
        rule = layer.get_object().get("/OCGs", layer)
        return all(each in off for each in (rule if isinstance(rule, list) else [rule]))

    def seen(holder: Any, stream: Any) -> Any:
        resources = holder.get("/Resources", empty).get_object()
        for each in resources.get("/XObject", empty).values():
            form = each.get_object()
            if form["/Subtype"] == "/Form":
                form.set_data(b"" if is_hidden(form) else seen(form, form).get_data())
        names = resources.get("/Properties", empty).get_object()
        content = ContentStream(stream, writer)
        blocks: list[bool] = []
        kept = []
        for operands, operator in content.operations:
            if operator in (b"BDC", b"BMC"):
                blocks.append(operands[0] == "/OC" and is_hidden(names, operands[1]))
            elif operator == b"EMC":
                blocks.pop()
            if not any(blocks) or operator not in _SHOWING:
                kept.append((operands, operator))
        content.operations = kept
        return content

    for page in writer.pages:
        page.replace_contents(seen(page, page.get_contents()))
        for note in page.annotations or []:
            if is_hidden(note.get_object()):
                note.get_object()[NameObject("/F")] = NumberObject(2)
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


class _Page(NamedTuple):
    text: str
    num_unmapped: int
    """Characters without a map to Unicode."""
    hidden: str
    has_notes: bool


def _page_text(pdf: Any, number: int) -> _Page:
    from pypdfium2 import raw

    page = pdf[number]
    paper = page.get_bbox()
    notes = sorted(_notes(pdf.formenv, page), key=lambda note: (-note.box[3], note.box[0]))
    is_filled = (
        raw.FPDFPage_GetAnnotCount(page) > 0
        and raw.FPDFPage_Flatten(page, 0) == raw.FLATTEN_SUCCESS
    )
    if is_filled:
        page.close()
        page = pdf[number]
    shown = page.get_textpage()
    text = shown.get_text_range()
    numbers = range(shown.count_chars())
    num_unmapped = sum(map(raw.FPDFText_HasUnicodeMapError, repeat(shown.raw), numbers))
    hidden = ""
    if notes or num_visible(text) != num_visible(shown.get_text_bounded(*paper)):
        glyphs = [
            _Glyph(
                chr(raw.FPDFText_GetUnicode(shown, each) or 0xFFFD),
                shown.get_charbox(each, loose=True),
            )
            for each in numbers
        ]
        seen = [glyph for glyph in glyphs if glyph.text in "\r\n" or glyph.is_on(paper)]
        hidden = "".join(glyph.text for glyph in glyphs if not glyph.is_on(paper))
        text = _with_notes(seen, [note for note in notes if note.is_on(paper)])
    page.close()
    text = _DIVIDED.sub("-\n", text.replace("\r\n", "\n").strip())
    return _Page(text, num_unmapped, hidden, is_filled or bool(notes))


class _Glyph(NamedTuple):
    """A character, field or annotation with its place."""

    text: str
    box: tuple[float, float, float, float]
    """Left, bottom, right and top."""

    def is_on(self, paper: tuple[float, float, float, float]) -> bool:
        left, bottom, right, top = self.box
        return left <= paper[2] and right >= paper[0] and bottom <= paper[3] and top >= paper[1]


def _notes(form: Any, page: Any) -> Iterator[_Glyph]:
    """Yield texts of fields and annotations, and remove them from the page."""
    from pypdfium2 import raw

    for i in reversed(range(raw.FPDFPage_GetAnnotCount(page))):
        note = raw.FPDFPage_GetAnnot(page, i)
        if not raw.FPDFAnnot_GetFlags(note) & _HIDDEN and (text := _value(form, note)):
            place = raw.FS_RECTF()
            raw.FPDFAnnot_GetRect(note, place)
            yield _Glyph(text, (place.left, place.bottom, place.right, place.top))
            raw.FPDFPage_RemoveAnnot(page, i)
        raw.FPDFPage_CloseAnnot(note)


def _value(form: Any, note: Any) -> str:
    from pypdfium2 import raw

    kind = raw.FPDFAnnot_GetFormFieldType(form, note) if form else raw.FPDF_FORMFIELD_UNKNOWN
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        return "[x]" if raw.FPDFAnnot_IsChecked(form, note) else "[ ]"
    if raw.FPDFAnnot_GetSubtype(note) == raw.FPDF_ANNOT_FREETEXT:
        return _string(raw.FPDFAnnot_GetStringValue, note, b"Contents")
    if (
        kind < raw.FPDF_FORMFIELD_COMBOBOX
        or raw.FPDFAnnot_GetFormFieldFlags(form, note) & _PASSWORD
    ):
        return ""
    labels = [
        _string(raw.FPDFAnnot_GetOptionLabel, form, note, option)
        for option in range(raw.FPDFAnnot_GetOptionCount(form, note))
        if raw.FPDFAnnot_IsOptionSelected(form, note, option)
    ]
    return ", ".join(labels) or _string(raw.FPDFAnnot_GetFormFieldValue, form, note)


def _string(get: Callable[..., int], *given: Any) -> str:
    size = get(*given, None, 0)
    buffer = (ctypes.c_ushort * (size // 2))()
    get(*given, buffer, size)
    return bytes(buffer).decode("utf-16-le", "replace").replace("\r", "\n").strip("\0 \n")


def _with_notes(glyphs: list[_Glyph], notes: list[_Glyph]) -> str:
    texts = [glyph.text for glyph in glyphs] + ["\n"]
    for note in notes:
        number, follows = _label(glyphs, note)
        there = texts[number]
        texts[number] = f"{there} {note.text} " if follows else f" {note.text} {there}"
    return _SPACES.sub(r"\1", "".join(texts))


def _label(glyphs: list[_Glyph], note: _Glyph) -> tuple[int, bool]:
    """Return the number of a character, and True if the note follows it.

    The label is the nearest word, preferably on the line of the note.
    """
    left, bottom, right, top = note.box
    nearest = math.inf
    number, follows = len(glyphs), True
    for each, (text, box) in enumerate(glyphs):
        middle = (box[1] + box[3]) / 2
        off_line = max(middle - top, bottom - middle, 0)
        distance = _FAR * off_line + max(left - box[2], box[0] - right, 0)
        is_before = middle > top or (middle >= bottom and box[0] < right)
        if not text.isspace() and (distance < nearest or (distance == nearest and is_before)):
            nearest = distance
            number, follows = each, is_before
    step = 1 if follows else -1
    while 0 <= number + step < len(glyphs) and not glyphs[number + step].text.isspace():
        number += step
    return number, follows


def join_lines(text: str, compounds: Container[str]) -> str:
    """Join the lines of each paragraph of a page; divided words keep their hyphen in `compounds`.

    Short lines end a paragraph; empty lines and items of lists begin one.
    """
    lines = [line.strip() for line in text.splitlines()]
    lengths = sorted(map(len, filter(None, lines))) or [0]
    full = _FULL * lengths[len(lengths) * 9 // 10]
    joined: list[str] = []
    previous = ""
    for line in lines:
        if line and previous.endswith("-"):
            joined[-1] = _welded(joined[-1], line, compounds)
        elif not line or len(previous) < full or _ITEM.match(line):
            joined.append(line)
        else:
            joined[-1] += f" {line}"
        previous = line
    return "\n".join(joined)


def _welded(begun: str, line: str, compounds: Container[str]) -> str:
    head = _LAST_WORD.search(begun)[0]  # type: ignore[index]
    tail = _FIRST_WORD.match(line)[0]  # type: ignore[index]
    if head == "-" or tail in _AND:
        return f"{begun} {line}"
    if not line[0].islower() or (head + tail).lower() in compounds:
        return begun + line
    return begun[:-1] + line

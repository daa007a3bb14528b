"""The text of files: PDF, DOCX, HTML, Markdown and text hold one document, JSON Lines and CSV one
in each row.
"""

import codecs
import csv
import ctypes
import importlib.util
import io
import json
import math
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from html.entities import entitydefs
from itertools import chain, islice, repeat
from pathlib import PurePath
from typing import Any, BinaryIO
from xml.etree import ElementTree

from specextend.core import Values, one_line
from specextend.data.document_set import COLUMNS, COUNTS
from specextend.data.inputs import InputError, InputUnreachableError

KINDS = {
    ".pdf": "pdf",
    ".docx": "docx",
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
"""The kind of a file, by its extension in lower case."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4", ".zst": "zstd"}
"""How a file is compressed, by its last extension in lower case."""
NumberedRow = tuple[int, Any]
"""The number of a row, and its values or what is wrong with it."""
_PACKAGES = {
    "pdf": ("pypdfium2",),
    "docx": ("mammoth", "selectolax"),
    "html": ("selectolax", "webencodings"),
    "xhtml": ("selectolax", "webencodings"),
}
_BLOCKS = (
    "p,div,br,hr,li,dt,dd,tr,h1,h2,h3,h4,h5,h6,pre,blockquote,section,article,header,footer,table,ul,ol,dl,main,nav,"
    "aside,figure,figcaption,details,summary,dialog,menu,search,hgroup,address,center,form,fieldset,legend,caption,"
    "option,optgroup,textarea,button,iframe,noframes,listing,xmp,plaintext"
)
"""Elements of HTML that begin and end a line."""
_LINE = "\x1e"
"""Stands for the end of a line in HTML, where that of the source is white space."""
_ITEM = re.compile(r"([-•▪◦*]|\(?(\d{1,3}|[a-z])[.)])\s")
_BOILERPLATE = (
    "nav,footer,aside,dialog,menu,body > header,[role=navigation],[role=banner],[role=contentinfo],"
    "[role=complementary],[role=dialog],[role=search],[id*=cookie i],[class*=cookie i],"
    "[id*=consent i],[class*=consent i],[id*=menu i],[class*=menu i],[id*=navbar i],"
    "[class*=navbar i],[id*=sidebar i],[class*=sidebar i],[id*=footer i],[class*=footer i]"
)
"""What surrounds the main part of a web page, by its element, its role, and words in its id and
classes.
"""
_MAIN = "main,article,h1"
"""Elements that no boilerplate contains, whatever its name."""
_HEAD = 1 << 16
"""Bytes in which a page names its encoding."""
_XHTML = "http://www.w3.org/1999/xhtml"
_XML_ENCODING = re.compile(r"\A\s*<\?xml[^>]*\sencoding\s*=\s*[\"']([^\"']+)")
_META_ENCODING = re.compile(r"charset\s*=\s*[\"']?\s*([^\s\"';]+)", re.IGNORECASE)
_ENTITY = re.compile(r"&(\w+);")
_ENTITIES = {name: text for name, text in entitydefs.items() if text not in "&<>"}
"""Characters that pages name and XML does not."""
_CODECS = {"utf-16-le": "utf-8", "utf-16-be": "utf-8", "x-user-defined": "cp1252", "gbk": "gb18030"}
"""What the web reads where a page names these."""
_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # which begins as that of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = "is not UTF-8; name its encoding, as in --encoding cp1252"
_SHIFT = re.compile("\0|\x1b\\$")
"""What UTF-8 has not: UTF-16 that is read as such, and the beginning of text in ISO-2022, whose
bytes are all ASCII.
"""
_SPACED = re.compile(r'[ \t]+"([^"]|"")*"?')
"""What a cell would hold whose quotes stand after a space, so that they do not count."""
_SEPARATOR = re.compile(r'"?sep=(.)"?\s*')
"""How Excel names what separates the cells, in a line before the header."""
_BODY = re.compile(r"(document|footnotes|endnotes)\d*\.xml")
"""Parts of a DOCX file that have its text."""
_DELETED = ("del", "moveFrom")
_READ_THROUGH = ("oMathPara", "fldSimple", "dir", "bdo", "subDoc")
"""Elements that mammoth leaves out with all that is in them."""
_OPERATORS = {"den": "/", "sup": "^", "sub": "_", "lim": "_", "deg": "^"}
"""What stands before the parts of an equation that is written on one line."""
_OPERANDS = (
    "f",
    "sSub",
    "sSup",
    "sSubSup",
    "sPre",
    "nary",
    "rad",
    "func",
    "limLow",
    "limUpp",
    "acc",
    "bar",
)
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


@dataclass(eq=False)
class UnreadableError(Exception):
    """Says why a file, or a row of one, is no document."""

    reason: str
    """Two words that are counted."""
    message: str
    """What follows the name of the file."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Which files become documents, and how."""

    patterns: Sequence[str] = ()
    """Ends of paths, of which a file must match one (`*.md`, `notes/*.txt`); none: all kinds that
    are read.
    """
    encoding: str | None = None
    """Of what is not UTF-8 and names no encoding; None refuses that."""
    keep_lines: bool = False
    """Keep the lines of PDFs; otherwise those of a paragraph are joined."""
    main_only: bool = False
    """Leave out menus, footers and cookie banners of HTML."""
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
            name = codecs.lookup(self.encoding or "utf-8").name
            "a".encode(name)  # raises for codecs that are no encodings of text
        except LookupError as error:
            raise ValueError(
                f"unknown encoding {self.encoding!r}; give one such as cp1252"
            ) from error
        if name in ("utf-16", "utf-32"):
            message = f"the order of its bytes is open in {name}; give {name}-le or {name}-be"
            raise ValueError(f"{message} (files with a mark need none)")


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name, or None if it is not read; it may be compressed."""
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        path = PurePath(path.stem)
    return KINDS.get(path.suffix)


def check_packages(kinds: Iterable[str]) -> None:
    """Raise InputError, in one line, if a package is missing that files of these kinds need."""
    for kind in sorted(kinds):
        missing = [
            name for name in _PACKAGES.get(kind, ()) if importlib.util.find_spec(name) is None
        ]
        if missing:
            need = f"to read {kind.upper()} takes the package {' and '.join(missing)}"
            raise InputError(
                f"{need}: install specextend with its extra `documents`, or leave them out "
                "(--pattern)"
            )


def read_document(kind: str, data: bytes, options: DocumentOptions) -> Values:
    """Return title, empty if there is none, and text of a file, and of a PDF what it lacks. Raises
    UnreadableError, and on damaged bytes whatever the parsers run into.
    """
    title, text, *counts = _READERS[kind](data, options)
    if not text.strip():
        hint = (
            ", as if it were scanned; text recognition (OCR) could add it" if kind == "pdf" else ""
        )
        raise UnreadableError("no text", f"has no text{hint}")
    whole = [_HALF_CHARACTER.sub("\ufffd", each).replace("\0", "\ufffd") for each in (title, text)]
    return {"title": " ".join(whole[0].split()), "text": whole[1]} | dict(
        zip(COUNTS, counts, strict=False)
    )


def _read_pdf(data: bytes, options: DocumentOptions) -> tuple[str, str, int, int]:
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
    return "" if _NO_TITLE.match(title) else title, text, pages.count(""), num_unmapped


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


def _read_docx(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    import mammoth

    if not data.startswith(b"PK"):
        raise UnreadableError(
            "damaged", "is no DOCX file, or needs a password; save it as DOCX without one"
        )
    plain = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(plain, "w") as copy:
        for name in archive.namelist():
            if name.endswith((".xml", ".rels")):
                part = archive.read(name)
                is_body = _BODY.fullmatch(PurePath(name).name)
                copy.writestr(name, _plain_word(part) if is_body else part)
    return _html_text(mammoth.convert_to_html(plain, convert_image=lambda image: []).value)


def _plain_word(part: bytes) -> bytes:
    """Return a part of a DOCX in which all that a reader sees is text that mammoth reads."""
    root = ElementTree.fromstring(part)
    space = root.tag.partition("}")[0] + "}"
    for node in [*root.iter()]:
        match _local(node):
            case "AlternateContent":
                texts = (each for each in node if each.findtext(".//{*}t"))
                node[:] = next(texts, ())
                node.tag = f"{space}smartTag"
            case "drawing" | "pict":
                node[:] = [*_boxes(node)]
                node.tag = f"{space}pict"
            case "oMath" | "ruby":
                formula = _formula(node)
                node.clear()
                node.tag = f"{space}r"
                ElementTree.SubElement(node, f"{space}t").text = formula
            case "r" | "tc" if _is_hidden(node):
                node.clear()
            case "cr":
                node.tag = f"{space}br"
            case "ptab":
                node.tag = f"{space}tab"
            # of no font of symbols
            case "sym" if (code := int(node.get(f"{space}char", "0"), 16)) < 0xE000:
                node.tag = f"{space}t"
                node.text = chr(code)
            case "altChunk":
                message = (
                    "has parts in other formats; open it in a word processor and save it as DOCX"
                )
                raise UnreadableError("damaged", message)
            case local if local in _READ_THROUGH:
                node.tag = f"{space}smartTag"
    return ElementTree.tostring(root)


def _local(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _is_hidden(node: ElementTree.Element) -> bool:
    """Return True for a run that is hidden, and a cell of a table that is deleted."""
    sign = next(chain(node.iterfind("{*}rPr/{*}vanish"), node.iterfind("{*}tcPr/{*}cellDel")), None)
    return sign is not None and not {"0", "false", "off"} & {*sign.attrib.values()}


def _boxes(node: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield the text boxes of a drawing, but not those in another one."""
    for child in node:
        if _local(child) == "txbxContent":
            yield child
        else:
            yield from _boxes(child)


def _formula(node: ElementTree.Element) -> str:
    """Return an equation on one line, such as (a+b)/c, x^2 and √(x+1)."""
    name = _local(node)
    if name == "t":
        return node.text or ""
    signs = {
        "begChr": "(",
        "endChr": ")",
        "sepChr": "|",
        "chr": "∫" if name == "nary" else "\u0302",
    }
    for sign in node.iterfind(f"{{*}}{name}Pr/*"):
        signs[_local(sign)] = next(iter(sign.attrib.values()), "")
    parts = []
    for child in node:
        which = _local(child)
        text = "" if which in _DELETED else _formula(child)
        if which == "fName":
            text += " "
        elif name in _OPERANDS and len(text) > 1 and not text.isdigit():
            text = f"({text.strip()})"
        if text:
            parts.append(_OPERATORS.get(which, "") + text)
    match name:
        case "nary":
            parts.insert(0, signs["chr"])
        case "rad":
            parts.insert(-1, "√")
        case "acc" | "bar":
            parts.append(signs["chr"])
        case "d" | "mr" | "eqArr" | "m":
            return signs["begChr"] + signs["sepChr"].join(parts) + signs["endChr"]
    return "".join(parts) + " " * (name in _OPERANDS)  # what follows is no part of it


def _read_html(data: bytes, options: DocumentOptions, *, is_xml: bool = False) -> tuple[str, str]:
    html = decode(data, options.encoding, _named_encoding(data))
    if is_xml:
        html = _xml_as_html(html)
    elif _XHTML in html[:_HEAD]:
        with suppress(ElementTree.ParseError):  # what is no XML is read as browsers do
            html = _xml_as_html(html)
    return _html_text(html, main_only=options.main_only)


def _xml_as_html(xml: str) -> str:
    """Return HTML in which no element ends at its beginning, as `<script src="x"/>` does in XML."""
    named = _ENTITY.sub(lambda found: _ENTITIES.get(found[1], found[0]), xml.lstrip())
    root = ElementTree.fromstring(named)
    for node in root.iter():
        node.tag = _local(node)
    return ElementTree.tostring(root, "unicode", "html")


def _named_encoding(data: bytes) -> str | None:
    """Return the codec for the encoding that a page names, as the web reads its label."""
    import webencodings
    from selectolax.lexbor import LexborHTMLParser

    head = data[:_HEAD].decode("latin-1")
    named = 'head meta[charset],head meta[http-equiv="content-type" i]'
    metas = LexborHTMLParser(head).css(named)
    labels = [label for meta in metas for label in _META_ENCODING.findall(meta.html or "")]
    labels += _XML_ENCODING.findall(head)
    found = next(filter(None, map(webencodings.lookup, labels)), None)
    return found and _CODECS.get(found.codec_info.name, found.codec_info.name)


def _html_text(html: str, *, main_only: bool = False) -> tuple[str, str]:
    """Return the title, or else the first heading, and the text with a line for each block."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(html)
    title = tree.css_first("head title") or tree.css_first("h1")
    name = title.text() if title else ""
    for node in tree.css("script,style,noscript,template"):
        node.decompose()
    for node in tree.css(_BOILERPLATE) if main_only else ():
        if not node.css_first(_MAIN):
            node.decompose()
    for node in tree.css(_BLOCKS):
        node.insert_before(_LINE)
        node.insert_after(_LINE)
    for node in tree.css("pre"):
        node.replace_with(node.text().replace("\n", _LINE))
    for node in tree.css("td,th"):
        node.insert_after(" ")
    lines = (
        " ".join(line.split()) for line in (tree.body.text() if tree.body else "").split(_LINE)
    )
    return name, "\n".join(filter(None, lines))


def _read_markdown(data: bytes, options: DocumentOptions) -> tuple[str, str]:
    text = decode(data, options.encoding)
    heading = re.search(r"^#[ \t]+(.+)", text, re.MULTILINE)
    return heading[1].rstrip().rstrip("#") if heading else "", text


_READERS: dict[str, Callable[[bytes, DocumentOptions], tuple[Any, ...]]] = {
    "pdf": _read_pdf,
    "docx": _read_docx,
    "html": _read_html,
    "xhtml": partial(_read_html, is_xml=True),
    "markdown": _read_markdown,
    "text": lambda data, options: ("", decode(data, options.encoding)),
}


def decode(data: bytes, encoding: str | None, named: str | None = None) -> str:
    """Decode text by its mark, or else as it names itself, or else as UTF-8 or as is given.

    Raises UnreadableError.
    """
    own = _marked(data) or named
    for name in (own,) if own else ("utf-8", encoding or "utf-8"):
        with suppress(UnicodeDecodeError):
            text = data.decode(name)
            if not _SHIFT.search(text):
                return text
    raise UnreadableError(
        "encoding", f"is not {own}, as it says; save it as UTF-8" if own else _NOT_UTF8
    )


def _marked(data: bytes) -> str | None:
    """Return the codec of the byte order mark."""
    return next((name for mark, name in _BOMS.items() if data.startswith(mark)), None)


def as_row(values: Any, place: str, number: int, options: DocumentOptions) -> Values:
    """Return a row's id, title, text and number, and its other fields. Raises UnreadableError for
    what is missing.
    """
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
    for number, line in enumerate(_lines(file, options.encoding), start=1):
        if _HALF_CHARACTER.search(line):
            yield number, UnreadableError("encoding", _NOT_UTF8)
        elif line.strip():
            try:
                yield number, json_value(line)
            except UnreadableError as error:
                yield number, error


def json_value(text: str) -> Any:
    """Return a JSON value whose characters are whole. Raises UnreadableError."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("bad row", f"is not JSON: {one_line(error)}") from error
    if "\\u" in text and _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
        raise UnreadableError(
            "bad row", "contains half of a surrogate pair, which is not a character; repair it"
        )
    return value


def _object(fields: list[tuple[str, Any]]) -> Values:
    """Return an object of JSON. Raises ValueError if it would lose a field."""
    values = dict(fields)
    if len(values) < len(fields):
        raise ValueError(f"two of the fields {', '.join(values)} have one name")
    return values


def _number(text: str) -> float:
    """Return a number of JSON. Raises ValueError for one that is larger than any floating-point
    number.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is larger than a number can be; write it as text")
    return value


def _csv_rows(file: BinaryIO, options: DocumentOptions) -> Iterator[NumberedRow]:
    """Yield the rows below the header, which shows what separates the cells; the number is that of
    the last line.

    Raises UnreadableError where nobody knows which cells were meant.
    """
    csv.field_size_limit(sys.maxsize)
    lines = _lines(file, options.encoding)
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
            elif any(map(_HALF_CHARACTER.search, cells)):
                yield number, UnreadableError("encoding", _NOT_UTF8)
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
"""What yields the lines of a kind of table with their numbers, each as its values or what is wrong
with it.
"""


def _lines(file: BinaryIO, encoding: str | None) -> Iterator[str]:
    """Decode lines by the mark of the file, as UTF-8, or as the encoding that is given.

    In those of UTF-8 that cannot be, halves of surrogate pairs stand for the bytes. Raises
    UnreadableError for others.
    """
    head = file.peek(4)[:4]  # type: ignore[attr-defined]
    own = _marked(head) or (encoding or "ascii" if b"\0" in head else "utf-8-sig")
    is_utf8 = own == "utf-8-sig"
    try:
        for line in io.TextIOWrapper(
            file, own, "surrogateescape" if is_utf8 else "strict", newline=""
        ):
            if is_utf8 and _HALF_CHARACTER.search(line):
                line = line.encode("utf-8", "surrogateescape").decode(
                    encoding or "utf-8", "surrogateescape"
                )
            if not is_utf8 and "\0" in line:
                raise UnreadableError("encoding", _NOT_UTF8)
            yield line
    except UnicodeDecodeError as error:
        message = (
            f"is not {own}; save it as UTF-8, or name its encoding, as in --encoding utf-16-le"
        )
        raise UnreadableError("encoding", message) from error


def hub_rows(
    name: str, subset: str | None, split: str, limit: int | None = None
) -> Iterator[NumberedRow]:
    """Stream the numbered rows of a data set by its name on the Hugging Face Hub, or of a local
    folder of one.

    Raises, in one line, InputUnreachableError if the Hub cannot be reached, InputError if the data
    set or its split is unknown.
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

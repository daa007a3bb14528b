"""Text of DOCX (by mammoth), EPUB, PPTX and ODT: zipped XML, read as HTML."""

import io
import posixpath
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import PurePath
from urllib.parse import unquote
from xml.etree import ElementTree

from specextend.documents.html import html_text, local_name, read_html
from specextend.documents.text import DocumentOptions, Text, UnreadableError, hidden_counts

_BODY = re.compile(r"(document|footnotes|endnotes)\d*\.xml")
_NOTE = re.compile(r'<li id="(foot|end)note-[^"]*"><p>')
"""mammoth's HTML lacks the mark of a note in the text."""
_BACK = re.compile(r'<a href="#(foot|end)note-ref-[^"]*">↑</a>')
_DELETED = ("del", "moveFrom")
_READ_THROUGH = ("oMathPara", "fldSimple", "dir", "bdo", "subDoc")
"""Elements that mammoth ignores with their content."""
_OPERATORS = {"den": "/", "sup": "^", "sub": "_", "lim": "_", "deg": "^"}
"""Signs before the parts of an equation on one line."""
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


def read_docx(data: bytes, options: DocumentOptions) -> Text:
    """Return the text of a DOCX; its title is the first heading."""
    import mammoth

    if not data.startswith(b"PK"):
        raise UnreadableError(
            "damaged", "is no DOCX file, or needs a password; save it as DOCX without one"
        )
    plain = io.BytesIO()
    hidden: list[str] = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(plain, "w") as copy:
        for name in archive.namelist():
            if name.endswith((".xml", ".rels")):
                part = archive.read(name)
                is_body = _BODY.fullmatch(PurePath(name).name)
                copy.writestr(name, _plain_word(part, hidden) if is_body else part)
    html = mammoth.convert_to_html(plain, convert_image=lambda image: []).value
    marks = count(1)
    html = _NOTE.sub(lambda _: f"<li><p>[{next(marks)}] ", _BACK.sub("", html))
    title, text, *_ = html_text(html)
    return Text(title, text, hidden_counts("".join(hidden)))


def _plain_word(part: bytes, hidden: list[str]) -> bytes:
    """Return XML of which mammoth reads all visible text; add the rest to `hidden`."""
    root = ElementTree.fromstring(part)
    space = root.tag.partition("}")[0] + "}"
    for node in [*root.iter()]:
        match local_name(node):
            case "AlternateContent":
                texts = (each for each in node if each.findtext(".//{*}t"))
                node[:] = next(texts, ())
                node.tag = f"{space}smartTag"
            case "drawing" | "pict":
                node[:] = [*_boxes(node)]
                node.tag = f"{space}pict"
            case "oMath" | "ruby":
                equation = formula(node)
                node.clear()
                node.tag = f"{space}r"
                ElementTree.SubElement(node, f"{space}t").text = equation
            case "p":
                hidden.append("\n")
            case "r" | "tc" if _is_hidden(node):
                hidden.append(text_in_lines(node))
                node.clear()
            case "del" | "moveFrom":
                hidden.append(text_in_lines(node))
                node.clear()
            case "r":
                for menu in node.iterfind("{*}fldChar/{*}ffData/{*}ddList"):
                    ElementTree.SubElement(node, f"{space}t").text = _chosen(menu)
            case "sdt" if node.find("{*}sdtPr/{*}showingPlcHdr") is not None:
                for text in node.iterfind(".//{*}t"):
                    text.text = ""
            case "dstrike":
                node.tag = f"{space}strike"
            case "cr" | "br":  # page and column breaks, too
                node.tag = f"{space}br"
                node.attrib.clear()
            case "ptab":
                node.tag = f"{space}tab"
            # fonts of symbols have codes for private use
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


def text_in_lines(node: ElementTree.Element) -> str:
    """Return all text of an element, with a line for each paragraph."""
    for each in node.iter():
        if local_name(each) in ("p", "h", "br", "line-break"):
            each.text = "\n" + (each.text or "")
    return "".join(node.itertext())


def _is_hidden(node: ElementTree.Element) -> bool:
    sign = next(chain(node.iterfind("{*}rPr/{*}vanish"), node.iterfind("{*}tcPr/{*}cellDel")), None)
    return sign is not None and not {"0", "false", "off"} & {*sign.attrib.values()}


def _chosen(menu: ElementTree.Element) -> str:
    entries = [value for each in menu.iterfind("{*}listEntry") for value in each.attrib.values()]
    names = [*menu.iterfind("{*}result"), *menu.iterfind("{*}default")]
    numbers = [int(value) for each in names for value in each.attrib.values()]
    return entries[numbers[0] if numbers else 0]


def _boxes(node: ElementTree.Element) -> Iterator[ElementTree.Element]:
    for child in node:
        if local_name(child) == "txbxContent":
            yield child
        else:
            yield from _boxes(child)


def formula(node: ElementTree.Element) -> str:
    """Return an equation on one line, such as (a+b)/c, x^2 and √(x+1)."""
    name = local_name(node)
    if name == "t":
        return node.text or ""
    signs = {
        "begChr": "(",
        "endChr": ")",
        "sepChr": "|",
        "chr": "∫" if name == "nary" else "\u0302",
    }
    for sign in node.iterfind(f"{{*}}{name}Pr/*"):
        signs[local_name(sign)] = next(iter(sign.attrib.values()), "")
    parts = []
    for child in node:
        which = local_name(child)
        text = "" if which in _DELETED else formula(child)
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
    return "".join(parts) + " " * (name in _OPERANDS)  # ends the last operand


_ELEMENTS = {
    "p": "p",
    "br": "br",
    "tbl": "table",
    "tr": "tr",
    "tc": "td",
    "h": "h1",
    "line-break": "br",
    "list-item": "li",
    "table": "table",
    "table-row": "tr",
    "table-cell": "td",
    "note-citation": "sup",
}
"""HTML for elements of PPTX and ODT."""
_TITLES = ("title", "ctrTitle")
_SPACES = ("tab", "s")
_REPLACED = (
    *_SPACES,
    "oMath",
    "timing",
    "Fallback",
    "tracked-changes",
    "annotation",
    "covered-table-cell",
)
"""Elements without text of the page, or with text in another form."""
_OFF = {("display", "none"), ("is-hidden", "true"), ("show", "0"), ("hidden", "1")}
"""Attributes of hidden elements or their styles."""


def read_epub(data: bytes, options: DocumentOptions) -> Text:
    """Return the text of an EPUB by chapters, in reading order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        locked = "META-INF/encryption.xml"
        if locked in archive.namelist() and b"html" in archive.read(locked):
            raise UnreadableError("password", "is encrypted by its seller (DRM)")
        container = _xml(archive, "META-INF/container.xml")
        path = next(container.iterfind(".//{*}rootfile")).attrib["full-path"]
        package = _xml(archive, path)
        files = {
            item.get("id"): unquote(item.attrib["href"]) for item in package.iterfind(".//{*}item")
        }
        chapters = []
        for item in package.iterfind(".//{*}itemref"):
            name = posixpath.join(posixpath.dirname(path), files[item.get("idref")])
            chapters.append(read_html(archive.read(posixpath.normpath(name)), options))
    title = package.findtext(".//{*}title", "")
    return Text(title, "", _sums(chapters), [each.text for each in chapters])


def read_pptx(data: bytes, options: DocumentOptions) -> Text:
    """Return the text of slides, without notes; the title is the first of a slide."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        links = _xml(archive, "ppt/_rels/presentation.xml.rels")
        files = {link.get("Id"): posixpath.join("/ppt", link.attrib["Target"]) for link in links}
        slides = _xml(archive, "ppt/presentation.xml").iterfind("{*}sldIdLst/{*}sldId")
        names = [files[value] for slide in slides for key, value in slide.items() if "}" in key]
        read = [_read(_xml(archive, name[1:]), {}) for name in names]
        title = next((each.title for each in read if each.title), "")
        return Text(title, "", _sums(read), [each.text for each in read])


def read_odt(data: bytes, options: DocumentOptions) -> Text:
    """Return the text of an ODT; its title is the first heading."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [_xml(archive, name) for name in ("styles.xml", "content.xml")]
    styles = {
        _values([style])["name"]: _values(style)
        for part in parts
        for style in part.iterfind(".//{*}style")
    }
    [body] = parts[1].iterfind("{*}body")
    return _read(body, styles)


def _xml(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(archive.read(name))


def _values(nodes: Iterable[ElementTree.Element]) -> dict[str, str]:
    return {name.rpartition("}")[2]: value for node in nodes for name, value in node.items()}


def _sums(texts: Iterable[Text]) -> Mapping[str, int]:
    return {name: sum(each.counts.get(name, 0) for each in texts) for name in hidden_counts("")}


def _read(root: ElementTree.Element, styles: Mapping[str, dict[str, str]]) -> Text:
    hidden: list[str] = []
    for node in [*root.iter()]:
        name = local_name(node)
        values = _values([node, *node.iterfind("{*}rPr"), *node.iterfind("*/{*}cNvPr")])
        values |= styles.get(values.get("style-name", ""), {})
        is_hidden = bool(_OFF & values.items())
        if name in ("p", "h"):
            hidden.append("\n")
        if is_hidden:
            hidden.append(text_in_lines(node))
        if is_hidden or name in _REPLACED:
            inner = formula(node) if name == "oMath" else " " * (name in _SPACES)
            node[:] = []
            node.text = inner
        for body in node.findall("{*}note-body"):
            node.remove(body)
            root.append(body)
        is_title = any(each.get("type") in _TITLES for each in node.iterfind("*/*/{*}ph"))
        node.tag = _ELEMENTS.get(name, "h1" if is_title else "span")
        node.attrib = {"class": name, "style": "" if name == "rPr" else _style(values)}
    title, text, *_ = html_text(ElementTree.tostring(root, "unicode", "html"))
    return Text(title, text, hidden_counts("".join(hidden)))


def _style(values: Mapping[str, str]) -> str:
    style = ""
    if {values.get("text-line-through-style"), values.get("strike")} - {None, "none", "noStrike"}:
        style = "text-decoration:line-through;"
    raised = values.get("text-position", values.get("baseline", "0"))
    if not raised.startswith("0"):
        style += f"vertical-align:{'sub' if raised.startswith(('-', 'sub')) else 'super'}"
    return style

"""Text of EPUB, PPTX and ODT: zipped XML, read as HTML."""

import io
import posixpath
import zipfile
from collections.abc import Iterable, Mapping
from urllib.parse import unquote
from xml.etree import ElementTree

from specextend.documents.document_options import DocumentOptions, Text, UnreadableError
from specextend.documents.docx import formula, text_in_lines
from specextend.documents.html import html_text, local_name, read_html
from specextend.documents.text import hidden_counts

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
"""Without text of the page, or with text in another form."""
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

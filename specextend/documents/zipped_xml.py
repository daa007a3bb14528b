"""The text of EPUB: zipped pages of XHTML."""

import io
import posixpath
import zipfile
from urllib.parse import unquote
from xml.etree import ElementTree

from specextend.documents.document_options import DocumentOptions, Text, UnreadableError
from specextend.documents.html import read_html


def read_epub(data: bytes, options: DocumentOptions) -> Text:
    """Return title and text of an EPUB, in the order in which it is read."""
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
    num_hidden = sum(counts["hidden_characters"] for _, _, counts in chapters)
    text = "\n\n".join(text for _, text, _ in chapters if text)
    return package.findtext(".//{*}title", ""), text, {"hidden_characters": num_hidden}


def _xml(archive: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(archive.read(name))

"""The text of HTML: a line for each block of the page."""

import re
from contextlib import suppress
from html.entities import entitydefs
from xml.etree import ElementTree

from specextend.documents.document_options import DocumentOptions, Text
from specextend.documents.text import decode

_BLOCKS = (
    "p,div,br,hr,li,dt,dd,tr,h1,h2,h3,h4,h5,h6,pre,blockquote,section,article,header,footer,table,ul,ol,dl,main,nav,"
    "aside,figure,figcaption,details,summary,dialog,menu,search,hgroup,address,center,form,fieldset,legend,caption,"
    "option,optgroup,textarea,button,iframe,noframes,listing,xmp,plaintext"
)
"""Elements of HTML that begin and end a line."""
_LINE = "\x1e"
"""Stands for the end of a line in HTML, where that of the source is white space."""
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


def read_html(data: bytes, options: DocumentOptions, *, is_xml: bool = False) -> Text:
    """Return title and text of a web page."""
    html = decode(data, options.encoding, _named_encoding(data))
    if is_xml:
        html = _xml_as_html(html)
    elif _XHTML in html[:_HEAD]:
        with suppress(ElementTree.ParseError):  # what is no XML is read as browsers do
            html = _xml_as_html(html)
    return html_text(html, main_only=options.main_only)


def _xml_as_html(xml: str) -> str:
    """Return HTML in which no element ends at its beginning, as `<script src="x"/>` does in XML."""
    named = _ENTITY.sub(lambda found: _ENTITIES.get(found[1], found[0]), xml.lstrip())
    root = ElementTree.fromstring(named)
    for node in root.iter():
        node.tag = local_name(node)
    return ElementTree.tostring(root, "unicode", "html")


def local_name(node: ElementTree.Element) -> str:
    """Return the name of an XML element without its namespace."""
    return node.tag.rpartition("}")[2]


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


def html_text(html: str, *, main_only: bool = False) -> Text:
    """Return the title, or else the first heading, and the text with a line for each block."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(html)
    title = tree.css_first("head title") or tree.css_first("h1")
    name = title.text() if title else ""
    for node in tree.css("script,style"):
        node.decompose()
    num_hidden = 0
    for node in tree.css("[hidden],noscript,template"):
        num_hidden += len("".join(node.text().split()))
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
    return name, "\n".join(filter(None, lines)), {"hidden_characters": num_hidden}

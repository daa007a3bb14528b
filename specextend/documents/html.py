"""Text of HTML as a browser shows it, with a line for each block.

Signs keep the meaning of elements: `[x]`, `10^6`, `[1]` for a note, `~~struck~~`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from html.entities import entitydefs
from itertools import chain
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from specextend.documents.text import DocumentOptions, Text, decode, hidden_counts, num_visible

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

_BLOCKS = (
    "p,div,br,hr,li,dt,dd,tr,h1,h2,h3,h4,h5,h6,pre,blockquote,section,article,header,footer,table,ul,ol,dl,main,nav,"
    "aside,figure,figcaption,details,summary,dialog,menu,search,hgroup,address,center,form,fieldset,legend,caption,"
    "textarea,button,iframe,noframes,listing,xmp,plaintext,dir,.katex-display,[display=block],[display=true]"
)
_LINE = "\x1e"
_RAISED = "\x01"
_LOWERED = "\x02"
_NOTE = "\x03"
_END = "\x04"
"""Marks around superscripts, subscripts and references to notes."""
_OPEN = "\x05"
_CLOSE = "\x06"
"""Marks around an operand, which gets parentheses if it is long."""
_STRIKE = "\x07"
_UNSTRIKE = "\x08"
_STRUCK = re.compile("\x07([^\x08]*)\x08")
_TEXT = re.compile("[^\\s\x1e](?:[^\x1e]*[^\\s\x1e])?")
_MARKS = re.compile("[\x01-\x08]")
_INNERMOST = re.compile("([\x01-\x03])([^\x01-\x04]*)\x04")
_FRACTION = re.compile("\x01(\\d+)\x04\\s*[/\u2044]\\s*\x02(\\d+)\x04")
_NOTE_BEGINS = re.compile("(?:^|\x1e)\\s*\x01\\s*(\\w{1,3}|\\W)\\s*\x04")
"""The reference in the text is the same."""
_IS_NOTE = re.compile(
    "\x03|\x011\x04|([\\s.,;:!?%\"'\u201d\u2019\u00bb\u2026]|\\b(19\\d\\d|20[0-3]\\d)|\\d,\\d{3})"
    "\x01(\\d{1,3}|[a-z])([,;\u2013-] ?(\\d{1,3}|[a-z]))*\x04"
)
"""Notes follow the ends of sentences, years, and numbers such as `1,000`."""
_IS_EXPONENT = re.compile(
    "(^|[\\W\\d_])(?<!\\d[.,])(?<!\\d)(10|[^\\W\\d_]|[kcmn\u00b5\u03bc]m|in|ft|yd|mi)\x01"
    "|[^\\S\x1e]\x01\\d+\x04\\w|[(/]\x01\\d+\x04\\w"
)
"""Exponents follow ten, letters and units; an isotope begins with a number."""
_IS_PLAIN = re.compile(
    "\\d\x01(st|nd|rd|th|er|re|ère|e|ème)\x04|([A-Z][a-z]?|[)\\]])\x02\\d+\x04(?!\\d)"
    "|[\\s(/][\x01\x02][^\x04]*\x04(?!\\w)|[\x01\x02][\\[^_]|[\x01\x02][^\\w+\u2212-]*\x04"
)
"""Ordinals and separate numbers need no sign."""
_IS_ONE = re.compile(
    "[\\s(/]\x01\\d+\x04|[\x01\x02]([+\u2212-]?\\w+[+\u2212-]?|[+\u2212-])\x04(?!\\w)"
)
_PERMALINK = re.compile("[\u00b6#\u00a7\U0001f517\u2693\ufe0e\ufe0f\uf0c1\u200b\\s]*")
"""Links from a heading to itself."""
_TWICE = (
    ".katex:has(math) .katex-html,mjx-container:has(math) > :not(mjx-assistive-mml),"
    ".MathJax:has(math) > :not(.MJX_Assistive_MathML)"
)
"""Second forms of formulas in MathML."""
_MATHJAX = ".MathJax,.MathJax_Preview,.MathJax_Display,.MathJax_SVG,.MathJax_CHTML"
_DISPLAY_STYLE = re.compile(r"\{\\(?:display|text)style\s(.*)\}", re.DOTALL)
_UNSEEN = (
    "[hidden]:not([hidden=until-found i]),template,noscript,dialog:not([open]),[popover],datalist,"
    "audio,video,canvas,svg title,svg desc,svg metadata"
)
"""Browsers hide them without a style sheet."""
_UNUSED = re.compile(r"/\*.*?\*/|@media print[^{]*\{([^{}]*\{[^{}]*\})*[^{}]*\}", re.S)
"""Comments, and rules for paper."""
_SOMETIMES = re.compile(r"@[^{};]*\{([^{}]*\{[^{}]*\})*[^{}]*\}")
_RULE = re.compile(r"([^{}]*)\{([^{}]*)\}")
_HIDES = re.compile(r"(?<![\w-])(display\s*:\s*none|visibility\s*:\s*(hidden|collapse))", re.I)
_SHOWS = re.compile(r"(?<![\w-])(display\s*:(?!\s*none)|visibility\s*:\s*visible)", re.I)
_STATE = re.compile(r":(?!not|is|where|root|empty|first|last|nth|only)[\w-]+(\([^)]*\))?")
"""Pseudo-classes of a reader's actions."""
_FILLED = (
    "input[value]:not([type=checkbox i],[type=radio i],[type=hidden i],[type=submit i],[type="
    "button i],[type=reset i],[type=image i],[type=password i],[type=file i])"
)
_NOT_CHOSEN = (
    "select:has([selected]) option:not([selected]),select[multiple] option:not([selected]),"
    "select:not([multiple]):not(:has([selected])) "
    ":is(option:not(:first-of-type),optgroup ~ optgroup)"
)
_BOILERPLATE = (
    "nav,footer,aside,dialog,menu,body > header,[role=navigation],[role=banner],[role=contentinfo],"
    "[role=complementary],[role=dialog],[role=search]"
)
"""Elements around the main part of a web page."""
_SURROUNDING = re.compile("cookie|consent|menu|navbar|sidebar|footer", re.IGNORECASE)
_LAYOUT = re.compile(r"(^|[-_])(has|no|not|with|without|is|js)([-_]|$)", re.IGNORECASE)
"""Words in ids and classes of layouts."""
_MAIN = "main,article,h1,[role=main]"
_AROUND = (
    (
        'sup:has(a[href*="#"],[role=doc-noteref]),a[href*="#"] sup,sup[class*=note i],'
        "sup[class*=reference i],sup[class*=cite i],[role=doc-noteref],[type~=noteref],"
        "a.footnote-reference",
        _NOTE,
        _END,
    ),
    ('sup,[style*="vertical-align:super"],[style*="vertical-align: super"]', _RAISED, _END),
    ('sub,[style*="vertical-align:sub"],[style*="vertical-align: sub"]', _LOWERED, _END),
    ("del,s,strike,[style*=line-through]", _STRIKE, _UNSTRIKE),
    ("mfrac > :first-child + *", f"/{_OPEN}", _CLOSE),
    (
        "msub > :first-child + *,msubsup > :first-child + *,munder > :first-child + *,"
        "munderover > :first-child + *",
        f"_{_OPEN}",
        _CLOSE,
    ),
    (
        "msup > :first-child + *,msubsup > :first-child + * + *,mover > :first-child + *,"
        "munderover > :first-child + * + *",
        f"^{_OPEN}",
        _CLOSE,
    ),
    ("mroot > :first-child + *", f"^(1/{_OPEN}", f"{_CLOSE})"),
    ("msqrt", f"\u221a{_OPEN}", _CLOSE),
    (
        ":is(mfrac,msup,msub,msubsup,munder,mover,munderover,mroot) > mrow:first-child",
        _OPEN,
        _CLOSE,
    ),
    ("mtd + mtd,mtr + mtr,mfenced > * + *", ", ", ""),
    ("mfenced,mtable,mtr", "(", ")"),
    ("ruby:not(:has(rp)) rt", "(", ")"),
    (f'{_BLOCKS},[style*="display:block"],[style*="display: block"]', _LINE, _LINE),
    ("td,th,svg text,option", "", " "),
    ("input:is([type=checkbox i],[type=radio i])[checked]", " [x] ", ""),
    ("input:is([type=checkbox i],[type=radio i]):not([checked])", " [ ] ", ""),
)
"""Marks before and after the elements of a selector."""
_HEAD = 1 << 16
"""Bytes that may name the encoding."""
_XHTML = "http://www.w3.org/1999/xhtml"
_XML_ENCODING = re.compile(r"\A\s*<\?xml[^>]*\sencoding\s*=\s*[\"']([^\"']+)")
_META_ENCODING = re.compile(r"charset\s*=\s*[\"']?\s*([^\s\"';]+)", re.IGNORECASE)
_ENTITY = re.compile(r"&(\w+);")
_ENTITIES = {name: text for name, text in entitydefs.items() if text not in "&<>"}
"""Names of characters that XML does not define."""
_CODECS = {"utf-16-le": "utf-8", "utf-16-be": "utf-8", "x-user-defined": "cp1252", "gbk": "gb18030"}
"""Codecs of browsers for these labels."""


def read_html(data: bytes, options: DocumentOptions, *, is_xml: bool = False) -> Text:
    """Return the text of a web page."""
    html = decode(data, options.encoding, _named_encoding(data))
    if is_xml:
        html = _xml_as_html(html)
    elif _XHTML in html[:_HEAD]:
        with suppress(ElementTree.ParseError):  # browsers read broken XML as HTML
            html = _xml_as_html(html)
    return html_text(html, main_only=options.main_only)


def _xml_as_html(xml: str) -> str:
    """Return XML as HTML, which has no elements such as `<script src="x"/>`."""
    named = _ENTITY.sub(lambda found: _ENTITIES.get(found[1], found[0]), xml.lstrip())
    root = ElementTree.fromstring(named)
    for node in root.iter():
        node.tag = local_name(node)
        node.attrib = {name.rpartition("}")[2]: value for name, value in node.items()}
    return ElementTree.tostring(root, "unicode", "html")


def local_name(node: ElementTree.Element) -> str:
    """Return the name of an XML element without its namespace."""
    return node.tag.rpartition("}")[2]


def _named_encoding(data: bytes) -> str | None:
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
    """Return the text of HTML; without a title, its title is the first heading."""
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(_MARKS.sub("", html.replace(_LINE, "")))
    if tree.body is None:
        return Text("", "", {})
    title = tree.css_first("head title")
    sheets = "\n".join(each.text() for each in tree.css("style:not([media=print])"))
    _open_shadow_roots(tree)
    _write_formulas(tree)
    _put_away(tree, tree.css("script,style"))
    for node in tree.css("template"):
        texts = (each.text(separator="\n") for each in node.template_fragments())
        node.insert_child("\n".join(texts))
    for selector, begin, end in _AROUND:
        for node in tree.css(selector):
            node.insert_before(begin)
            node.insert_after(end)
    assert tree.head is not None
    before = tree.head.text()
    _put_away(tree, _hidden(tree, sheets))
    counts = hidden_counts(*(_MARKS.sub("", each) for each in (tree.head.text(), before)))
    if main_only:
        counts["left_out_characters"] = _put_away(tree, _surroundings(tree))
    links = tree.css('a.headerlink,a[href^="#"]')
    _put_away(tree, (each for each in links if _PERMALINK.fullmatch(each.text())))
    _put_away(tree, tree.css(_NOT_CHOSEN))
    for node in tree.css(_FILLED):
        node.insert_before(f" {node.attributes['value']} ")
    lined = tree.css("pre,textarea")
    _put_instead(tree, [(node, node.text().replace("\n", _LINE)) for node in lined])
    text = tree.body.text()
    notes = {*_NOTE_BEGINS.findall(text)}
    names = (title, *tree.css("body :is(h1,h2,h3,h4,h5,h6)"))
    titles = (_flattened(each.text(), notes) for each in names if each)
    return Text(next(filter(None, titles), ""), _flattened(text, notes), counts)


def _flattened(text: str, notes: set[str]) -> str:
    text = _FRACTION.sub(r" \1/\2 ", text.replace("\u2061", " "))
    while _OPEN in text:
        text = re.sub("(?:(?<!\\s)\\s*([_^/]))?\x05(\\w|\\d+)\x06(?=\\w)", r"\1\2 ", text)
        text = re.sub("(?:(?<!\\s)\\s*([_^/]))?\x05(\\w?|\\d+)\x06", r"\1\2", text)
        text = re.sub("(?:(?<!\\s)\\s*([_^/]))?\x05([^\x05\x06]*)\x06", r"\1(\2)", text)
    count = 1
    while count:
        text, count = _INNERMOST.subn(partial(_script, notes), text)
    lines = (" ".join(line.split()) for line in _struck(text).split(_LINE))
    return "\n".join(filter(None, lines))


def _struck(text: str) -> str:
    depth = 0

    def outermost(found: re.Match[str]) -> str:
        nonlocal depth
        begins = found[0] == _STRIKE
        depth += 1 if begins else -1
        return found[0] if depth == begins else ""

    text = re.sub(f"[{_STRIKE}{_UNSTRIKE}]", outermost, text)
    return _STRUCK.sub(lambda found: _TEXT.sub(r"~~\g<0>~~", found[1]), text)


def _script(notes: set[str], found: re.Match[str]) -> str:
    text = " ".join(found[2].split())
    before = _MARKS.sub("", found.string[max(found.start() - 24, 0) : found.start()]) or _LINE
    after = found.string[found.end() : found.end() + 9].lstrip(_END)[:1]
    shown = f"{before}{found[1]}{text}{_END}{after}"
    is_note = _IS_NOTE.search(shown) or (found[1] == _RAISED and text in notes)
    if found[1] == _NOTE or (is_note and not _IS_EXPONENT.search(shown)):
        mark = text.strip("[^()]")
        return f"[{mark}]" if mark[:1].isalnum() else mark
    if _IS_PLAIN.search(shown):
        return text
    operand = text if _IS_ONE.search(shown) else f"({text})"
    return f"{'^' if found[1] == _RAISED else '_'}{operand}"


def _put_away(tree: LexborHTMLParser, nodes: Iterable[LexborNode]) -> int:
    """Move elements out of the body; count their characters without spaces."""
    assert tree.head is not None
    before = num_visible(_MARKS.sub("", tree.head.text()))
    for node in nodes:
        tree.head.insert_child("\n")
        tree.head.insert_child(node, move=True)
    return num_visible(_MARKS.sub("", tree.head.text())) - before


def _put_instead(tree: LexborHTMLParser, texts: list[tuple[LexborNode, str]]) -> None:
    for node, text in texts:
        node.insert_before(text)
    _put_away(tree, (node for node, _ in texts))


def _open_shadow_roots(tree: LexborHTMLParser) -> None:
    """Put shadow roots into the page, and other content into their slots."""
    while template := tree.css_first("template[shadowrootmode]"):
        [root, *_] = template.template_fragments()
        host = template.parent or template
        for slot in root.css("slot"):
            name = slot.attributes.get("name")
            fillings = [
                each
                for each in host.iter(include_text=True)
                if each != template and each.attributes.get("slot") == name
            ]
            for node in fillings:
                slot.insert_before(node, move=True)
            if fillings:
                slot.decompose()
        for node in [*root.iter(include_text=True)]:
            template.insert_before(node, move=True)
        template.decompose()


def _write_formulas(tree: LexborHTMLParser) -> None:
    scripts = tree.css('script[type^="math/tex"]')
    _put_away(tree, tree.css(f"{_TWICE},{_MATHJAX}" if scripts else _TWICE))
    for node in scripts:
        node.insert_before(node.text())
    for node in tree.css(".mwe-math-element math"):  # hidden beside an image
        (node.parent or node).insert_before(node, move=True)
    sources = [(each, each.css_first('annotation[encoding*="tex" i]')) for each in tree.css("math")]
    texts = [(node, tex.text().strip()) for node, tex in sources if tex]
    _put_instead(tree, [(node, _DISPLAY_STYLE.sub(r"\1", text)) for node, text in texts])
    _put_away(tree, tree.css("annotation,annotation-xml,mphantom"))
    for node in tree.css("img.math,img.tex,img.latex"):
        node.insert_before(node.attributes.get("alt") or "")


def _hidden(tree: LexborHTMLParser, sheets: str) -> Iterator[LexborNode]:
    """Yield elements that no rule or action shows."""
    css = _UNUSED.sub("", sheets)
    if re.search(r"visibility\s*:\s*visible", css):  # may be in a hidden element
        css = css.replace("visibility", "")
    styled = [(node, node.attributes["style"] or "") for node in tree.css("[style]")]
    hidden = tree.css(_UNSEEN)
    shown = {node.mem_id for node, style in styled if _SHOWS.search(style)}
    for selector, declarations in _RULE.findall(_SOMETIMES.sub("", css)):
        if _HIDES.search(declarations) and not _STATE.search(selector):
            hidden += _selected(tree, selector)
    for selector, declarations in _RULE.findall(css):
        if _SHOWS.search(declarations):
            shown |= {node.mem_id for node in _selected(tree, _STATE.sub("", selector))}
    own = [node for node, style in styled if _HIDES.search(style)]
    for node in own + [each for each in hidden if each.mem_id not in shown]:
        if node.tag not in ("html", "body"):
            yield node


def _selected(tree: LexborHTMLParser, selector: str) -> list[LexborNode]:
    from selectolax.lexbor import SelectolaxError

    with suppress(SelectolaxError):  # browsers ignore such rules, too
        return tree.css(selector)
    return []


def _surroundings(tree: LexborHTMLParser) -> Iterator[LexborNode]:
    assert tree.body is not None
    most = num_visible(tree.body.text()) / 2
    named = (
        node
        for node in tree.css("body [id],body [class]")
        for name in f"{node.attributes.get('id')} {node.attributes.get('class')}".split()
        if _SURROUNDING.search(name) and not _LAYOUT.search(name)
    )
    for node in chain(tree.css(_BOILERPLATE), named):
        if not node.css_first(_MAIN) and num_visible(node.text()) <= most:
            yield node

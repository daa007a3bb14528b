"""Options of `specextend prepare documents`, encodings of text, hidden text, and Markdown."""

import codecs
import io
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import yaml


class Text(NamedTuple):
    """Text of a file."""

    title: str
    text: str
    """Text of a file without pages."""
    counts: Mapping[str, int]
    """Counts by the columns of `COUNTS`."""
    pages: Sequence[str] = ()
    """Texts of pages, slides or chapters."""
    labels: Sequence[str] = ()
    """Labels of pages, such as `iv`."""


@dataclass(eq=False)
class UnreadableError(Exception):
    """A file or row that cannot become a document."""

    reason: str
    """Two words, by which failures are counted."""
    message: str
    """Continues a sentence that begins with the file."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Options of `specextend prepare documents`."""

    patterns: Sequence[str] = ()
    """Patterns of paths, such as `*.md`; empty: all known formats."""
    encoding: str | None = None
    """Encoding of files that are not UTF-8 and name none."""
    keep_lines: bool = False
    """Keep the lines of PDFs instead of joining paragraphs."""
    main_only: bool = False
    """Leave out menus, footers and cookie banners of HTML."""
    text_field: str = "text"
    """Field of a row with the text."""
    id_field: str | None = None
    """Field of a row with the id; None: the id is `<file>:<line>`."""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that read files."""
    time_limit_s: float = 60.0
    """Seconds for each file, plus one for each MiB."""
    memory_gib: float = 4.0
    reader: str | None = None
    """`module:function` from path and bytes to a text, texts of pages, or None."""
    limit: int | None = None
    remove_gone: bool = False

    def __post_init__(self) -> None:
        try:
            name = codecs.lookup(self.encoding or "utf-8").name
            "a".encode(name)  # raises for codecs of bytes
        except LookupError as error:
            raise ValueError(
                f"unknown encoding {self.encoding!r}; give one such as cp1252"
            ) from error
        if name in ("utf-16", "utf-32"):
            message = f"the order of its bytes is open in {name}; give {name}-le or {name}-be"
            raise ValueError(f"{message} (files with a mark need none)")


_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins like that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
NOT_UTF8 = "is not UTF-8; name its encoding, as in --encoding cp1252"
_SHIFT = re.compile("\0|\x1b\\$")
"""UTF-16 and ISO-2022, decoded as UTF-8."""


_IGNORE = (
    r"(?:ignore[zn]?|ignorier(?:e|t|en)|ignora\w*|disregard|forget|overlook|missachte\w*|vergiss|"
    r"vergesst|vergessen|oublie\w*|pas compte|olvid\w+|caso omiso|dimentica\w*|esque[cç]\w*|"
    r"desconsider\w*)"
)
_EARLIER = (
    r"(?:previous|prior|above|earlier|preceding|vorherig\w*|bisherig\w*|obig\w*|vorangegangen\w*|"
    r"pr[ée]c[ée]dent\w*|ant[ée]rieur\w*|ci-dessus|anterior\w*|pr[eé]vi[ao]s|preced\w+|sopra)"
)
_ORDERS = (
    r"(?:instru[ckçz]\w+|prompts?|directions|rules|guidelines|anweisung\w*|vorgaben?|befehle?|"
    r"consignes|dire[ct]ti[vf]\w+|indicacion\w*|[óo]rden\w*|istruzion\w*|indicazion\w*|"
    r"orientaç\w*|comandos)"
)
_MODEL = (
    r"(?:AI|KI|IA|LLM|GPT\w*|chatbot|(?:large\W+)?language\W+model|sprachmodell|assistant|"
    r"assistent\w*|mod[èe]le\W+de\W+langage|modelo\W+de\W+(?:lenguaje|linguagem)|"
    r"modello\W+linguistico|asistente)s?"
)
_FEW = r"\W+(?:\w+\W+){0,4}?"
_NEAR = r"\W+(?:\w+\W+){0,2}?"
_INSTRUCTION = re.compile(
    rf"\b{_IGNORE}{_FEW}(?:{_EARLIER}{_NEAR}{_ORDERS}|{_ORDERS}{_NEAR}{_EARLIER})\b"
    rf"|\b(?:you are|du bist|sie sind|tu es|vous êtes|eres|usted es|sei|você é){_FEW}{_MODEL}\b"
    rf"|\b(?:for|to|note|instructions?)\W+(?:the\W+|any\W+)?{_MODEL}\W+(?:reviewers?|agents?|:)",
    re.IGNORECASE,
)
"""Text that addresses a model, in six languages."""


def hidden_counts(text: str, shown: str = "") -> dict[str, int]:
    """Count characters and instructions to a model in `text`, less those in `shown`."""
    instructions = [len(_INSTRUCTION.findall(each)) for each in (text, shown)]
    return {
        "hidden_characters": num_visible(text) - num_visible(shown),
        "hidden_instruction": max(0, instructions[0] - instructions[1]),
    }


def num_visible(text: str) -> int:
    """Count characters without white space."""
    return sum(map(len, text.split()))


def decode(data: bytes, encoding: str | None, named: str | None = None) -> str:
    """Decode text by its byte order mark, or else as `named`, UTF-8 or `encoding`.

    Raises UnreadableError.
    """
    own = _marked(data) or named
    for name in (own,) if own else ("utf-8", encoding or "utf-8"):
        with suppress(UnicodeDecodeError):
            text = data.decode(name)
            if not _SHIFT.search(text):
                return text
    raise UnreadableError(
        "encoding", f"is not {own}, as it says; save it as UTF-8" if own else NOT_UTF8
    )


def _marked(data: bytes) -> str | None:
    return next((name for mark, name in _BOMS.items() if data.startswith(mark)), None)


def decoded_lines(file: BinaryIO, encoding: str | None) -> Iterator[str]:
    """Decode lines by the byte order mark of a file, or as UTF-8 or `encoding`.

    In UTF-8, halves of surrogate pairs stand for wrong bytes. Raises UnreadableError.
    """
    head = file.peek(4)[:4]  # type: ignore[attr-defined]
    own = _marked(head) or (encoding or "ascii" if b"\0" in head else "utf-8-sig")
    is_utf8 = own == "utf-8-sig"
    try:
        for line in io.TextIOWrapper(
            file, own, "surrogateescape" if is_utf8 else "strict", newline=""
        ):
            if is_utf8 and HALF_CHARACTER.search(line):
                line = line.encode("utf-8", "surrogateescape").decode(
                    encoding or "utf-8", "surrogateescape"
                )
            if not is_utf8 and "\0" in line:
                raise UnreadableError("encoding", NOT_UTF8)
            yield line
    except UnicodeDecodeError as error:
        message = (
            f"is not {own}; save it as UTF-8, or name its encoding, as in --encoding utf-16-le"
        )
        raise UnreadableError("encoding", message) from error


_FRONT = re.compile(r"(---|\+\+\+)[ \t]*\n(.*?)\n\1[ \t]*(?:\n|\Z)", re.DOTALL)
"""Metadata in YAML or TOML."""
_COMMENT = re.compile("<!--.*?-->", re.DOTALL)
_ANCHOR = re.compile(r" ?\{[#.:][^}]*\}\Z")
_PAYLOAD = re.compile(
    r"(data:[\w.+-]+/[\w.+-]+[\w.;=+-]*(?:(?<=;base64),|,(?=[^\s)>\"'\]]{64})))[^\s)>\"'\]]+"
)


def read_markdown(data: bytes, options: DocumentOptions) -> Text:
    """Return Markdown as it is, without comments and embedded files."""
    from markdown_it import MarkdownIt

    from specextend.documents.html import html_text

    text = re.sub("\r\n?", "\n", decode(data, options.encoding))
    title, begin = _front_matter(text)
    lines = text[begin:].split("\n")
    parser = MarkdownIt("commonmark")
    for token in reversed(parser.parse(text[begin:])):
        if token.type == "html_block" and token.map:
            place = slice(*token.map)
            lines[place] = [_COMMENT.sub("", "\n".join(lines[place]))]
    kept = text[:begin] + _PAYLOAD.sub(r"\1", "\n".join(lines))
    title = title or _ANCHOR.sub("", html_text(parser.render(text[begin:]))[0])
    counts = hidden_counts(text, kept) | {"hidden_characters": len(text) - len(kept)}
    return Text(title, kept, counts)


def _front_matter(text: str) -> tuple[str, int]:
    """Return the title and the end of the metadata."""
    found = _FRONT.match(text)
    values = None
    if found:
        with suppress(ValueError, yaml.YAMLError):
            values = (tomllib.loads if found[1] == "+++" else yaml.safe_load)(found[2])
    if not found or not isinstance(values, dict):
        return "", 0
    return str(values.get("title") or ""), found.end()

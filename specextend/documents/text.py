"""Files of text: their encoding, and Markdown's title."""

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

from specextend.documents.document_options import DocumentOptions, Text, UnreadableError

_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # which begins as that of UTF-16 does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
NOT_UTF8 = "is not UTF-8; name its encoding, as in --encoding cp1252"
_SHIFT = re.compile("\0|\x1b\\$")
"""What UTF-8 has not: UTF-16 that is read as such, and the beginning of text in ISO-2022, whose
bytes are all ASCII.
"""


def num_visible(text: str) -> int:
    """Return the number of characters that are no white space."""
    return sum(map(len, text.split()))


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
        "encoding", f"is not {own}, as it says; save it as UTF-8" if own else NOT_UTF8
    )


def _marked(data: bytes) -> str | None:
    """Return the codec of the byte order mark."""
    return next((name for mark, name in _BOMS.items() if data.startswith(mark)), None)


def decoded_lines(file: BinaryIO, encoding: str | None) -> Iterator[str]:
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


def read_markdown(data: bytes, options: DocumentOptions) -> Text:
    """Return the first heading, and the text as it is written."""
    text = decode(data, options.encoding)
    heading = re.search(r"^#[ \t]+(.+)", text, re.MULTILINE)
    return heading[1].rstrip().rstrip("#") if heading else "", text, {}

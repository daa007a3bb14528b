"""Options of `specextend prepare documents`, and the text and error of a file."""

import codecs
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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

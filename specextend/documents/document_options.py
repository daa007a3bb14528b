"""Options of files that become documents, and the error of a file that cannot become one."""

import codecs
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Text(NamedTuple):
    """Text of a file."""

    title: str
    """Empty if the file has none."""
    text: str
    """Empty if `pages` has the texts."""
    counts: Mapping[str, int]
    """Counts by the columns of `COUNTS`."""
    pages: Sequence[str] = ()
    """Texts of pages, slides or chapters in order; empty for formats without them."""
    labels: Sequence[str] = ()
    """Label of each page, such as `iv`; empty if the file has no labels."""


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
    reader: str | None = None
    """Function that gets the path and the bytes of each file and returns its text, the texts of its
    pages, or None to leave the file to specextend: `module:function`.
    """
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

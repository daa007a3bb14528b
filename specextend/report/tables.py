"""Tables of figures, rendered as text for a terminal and as Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from specextend.core import printable

LONGEST = 200
"""Most characters of an id or a message that a table shows."""
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|~&$@]|(?<=www)\.|:(?=//)", re.IGNORECASE)
"""Characters that Markdown, or GitHub's dialect of it, may not treat as text."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a title. The first column and those in `text_columns` hold text, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[str] = ()


def to_text(sections: Iterable[Section], sentences: Iterable[str] = (), width: int = 110) -> str:
    """Render tables, then sentences, for a terminal, without colours."""
    return _print([*map(_table, sections), *map(printable, sentences)], width)


def to_grid(rows: Iterable[tuple[str, str]], width: int = 110) -> str:
    """Render names and what is said of each, without lines between them, for a terminal."""
    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*map(printable, row))
    return _print([grid], width)


def _print(parts: Iterable[Table | str], width: int) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
    return text.getvalue()


def markdown_table(section: Section) -> list[str]:
    """Render the lines of a Markdown table. Cells are shown as text, whatever they contain."""
    head, *rows = (list(map(markdown_text, row)) for row in (section.header, *section.rows))
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def markdown_text(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, in one line.

    It cannot become an image, link, HTML, code, emphasis or cell border, nor a bare link or formula on GitHub.
    """
    return _MARKDOWN.sub(r"\\\g<0>", printable(text))


def number(value: float | None, digits: int = 2) -> str:
    """Format a number, with a comma between thousands; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share as a percentage; `-` for None."""
    return "-" if value is None else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Format seconds as `0.42 s`, `12.3 s`, `4 min 05 s` or `2 h 07 min`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def shortened(text: str) -> str:
    """Cut an id or a message to LONGEST characters."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left")
    for index, name in enumerate(section.header):
        is_text = index == 0 or name in section.text_columns
        table.add_column(name, justify="left" if is_text else "right")
    for row in section.rows:
        table.add_row(*map(printable, row))
    return table

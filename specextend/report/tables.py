"""Tables of figures, as text for a terminal and as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a title. The first column holds names, the others numbers, but for those in `text_columns`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[str] = ()


def to_text(sections: Iterable[Section], sentences: Iterable[str] = (), width: int = 110) -> str:
    """Tables, then sentences, for a terminal, without colours."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for section in sections:
        console.print(_table(section))
    for sentence in sentences:
        console.print(sentence)
    return text.getvalue()


def markdown_table(section: Section) -> list[str]:
    """The lines of a table."""
    rows = [section.header, ["---"] * len(section.header), *section.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def number(value: float | None, digits: int = 2) -> str:
    """A number, `-` for none; integers with thousands apart."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share, `-` for none."""
    return "-" if value is None else f"{value:.1%}"


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left")
    for index, name in enumerate(section.header):
        is_text = index == 0 or name in section.text_columns
        table.add_column(name, justify="left" if is_text else "right")
    for row in section.rows:
        table.add_row(*row)
    return table

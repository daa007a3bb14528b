"""Tables of figures as Markdown."""

from __future__ import annotations

import re

from specextend.core import printable
from specextend.report.sections import Section, number, percent, to_text

__all__ = ["Section", "markdown_table", "number", "percent", "to_text"]
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|~&$@]|(?<=www)\.|:(?=//)", re.IGNORECASE)
"""Characters that Markdown, or GitHub's dialect of it, may not treat as text."""


def markdown_table(section: Section) -> list[str]:
    """Render the lines of a Markdown table. Cells are shown as text, whatever they contain."""
    head, *rows = (list(map(markdown_text, row)) for row in (section.header, *section.rows))
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def markdown_text(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, in one line."""
    return _MARKDOWN.sub(r"\\\g<0>", printable(text))

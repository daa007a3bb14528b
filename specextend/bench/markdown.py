"""Benchmark figures as Markdown tables, so that no figure of a page is typed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specextend.bench.compare_tables import compare_tables, lengths, where
from specextend.bench.retrieval_tables import retrieval_tables
from specextend.report.tables import Section, markdown_table


def to_markdown(result: dict[str, Any]) -> str:
    """The tables of one section's figures. Raises ValueError for a section that has none."""
    tables = _TABLES.get(result.get("kind", ""))
    if tables is None:
        raise ValueError(f"tables are made of the sections {', '.join(_TABLES)}, not of {result.get('kind')!r}")
    sections, sentences = tables(result)
    lines = []
    for section in sections:
        lines += [f"**{section.title}**", "", *markdown_table(section), ""]
    return "\n".join([*lines, *sentences, ""])


def _compare(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    return compare_tables(result), [lengths(result), where(result)]


def _retrieval(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    return retrieval_tables(result), [where(result)]


_TABLES: dict[str, Callable[[dict[str, Any]], tuple[list[Section], list[str]]]] = {
    "compare": _compare,
    "retrieval": _retrieval,
}

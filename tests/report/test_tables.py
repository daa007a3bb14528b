"""Cells of tables: figures of ours, and texts of others."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from specextend.core import printable
from specextend.report.tables import Section, markdown_table, markdown_text, to_text

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
LIVE = [
    "![x](http://evil.example/x.png)",
    "![x][y]",
    "<img src=//evil.example>",
    "<!-- x -->",
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    "<http://evil.example>",
    "<a@evil.example>",
    "`code` ``co`de``",
    "a|b\\|c\\\\|d",
    "|",
    "\\",
    "a\\",
    "*em* __strong__ ~~gone~~ ***",
    "&lt;b&gt; &#60;b&#62; &amp;",
    "a\n\n# Owned\n\n| x |",
    "$x$ $$y$$",
    "# head",
    "- item",
    "---",
    "\ud800\x00\x1b[2J\u2028",
]
SPECIAL = st.sampled_from(
    [*"\\`*_[]()<>|~&$@!#\"'{}:;/.- \n\r\t", "http://", "www.a.b", "&lt;", "<img ", "](", "![", "\\|"]
)


def cells(text: str) -> list[Token]:
    """The inline tokens of a table with one row, whose first cell is the text and whose second is `end`."""
    lines = markdown_table(Section("Title", ("a", "b"), [(text, "end")]))
    tokens = RENDERER.parse("\n".join(["## Title", "", *lines, "", "After."]))
    kinds = [token.type for token in tokens]
    assert kinds.count("table_open") == 1
    assert (kinds.count("tr_open"), kinds.count("th_open"), kinds.count("td_open")) == (2, 2, 2)
    assert tokens[-2].content == "After."
    return [tokens[place + 1] for place, kind in enumerate(kinds) if kind == "td_open"]


@given(st.lists(SPECIAL | st.text(st.characters(codec=None), max_size=3), max_size=12).map("".join))
def test_no_text_comes_alive_in_a_table(text: str):
    """An id that is an image would be fetched by whoever reads the report; one with a bar would forge a column."""
    first, second = cells(text)
    assert {child.type for child in first.children or []} <= {"text"}
    assert "".join(child.content for child in first.children or []).strip() == printable(text).strip()
    assert second.content == "end"


for each in LIVE:
    test_no_text_comes_alive_in_a_table = example(each)(test_no_text_comes_alive_in_a_table)


@pytest.mark.parametrize("text", ["https://evil.example", "HTTP://x", "www.evil.example", "WWW.x.y", "ftp://x"])
def test_github_makes_no_link_of_a_bare_address(text: str):
    """It links what looks like an address without being asked, unless the sign it looks for is escaped."""
    shown = markdown_text(text)
    assert shown != text
    assert not re.search(r"(?<!\\)://|www\.", shown, re.IGNORECASE)


def test_a_table_on_a_terminal_shows_codes_and_no_markup():
    """Rich knows `[red]`, links and `:smile:`; a cell is text."""
    text = to_text(
        [Section("T", ("a",), [("[red]x[/red] :smile: [link=http://x]y[/link] \x1b[2J\u202e\nz",)])], ["\x1b[1m"]
    )
    assert r"[red]x[/red] :smile: [link=http://x]y[/link] \x1b[2J\u202e\nz" in text
    assert "\x1b" not in text

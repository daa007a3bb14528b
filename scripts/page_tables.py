"""Write the tables of PAGES from the results of benchmarks.

    python -m scripts.page_tables

A table stands between `<!-- table: FILE NAME -->` and `<!-- end of table -->`;
`benchmarks/tables.py` lists the names.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.command import read_result
from benchmarks.tables import to_markdown

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "benchmarks/README.md")
_TABLE = re.compile(r"(<!-- table: (\S+) (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the text of a page with all its tables made anew.

    Raises ValueError if a result has no such table, OSError if the file is missing.
    """
    return _TABLE.sub(
        lambda found: f"{found[1]}{to_markdown(read_result(ROOT / found[2]), found[3])}{found[4]}",
        page,
    )


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")

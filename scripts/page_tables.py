"""Write tables of benchmark results into the pages of PAGES.

    python -m scripts.page_tables

Tables are placed between `<!-- table: FILE NAME -->` and `<!-- end of table -->`. See
`benchmarks/tables.py` for the names.
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
    """Return a page with all tables written anew.

    Raises:
        ValueError: A result has no such table.
        OSError: The result file is missing.
    """
    return _TABLE.sub(
        lambda found: f"{found[1]}{to_markdown(read_result(ROOT / found[2]), found[3])}{found[4]}",
        page,
    )


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")

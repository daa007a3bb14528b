"""The tables of the pages are those of the committed figures."""

import re

import pytest

from scripts.page_tables import PAGES, ROOT, filled


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_its_files(name):
    """A figure that is typed by hand is wrong after the next measurement, and nobody notices."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in page
    assert filled(page) == page, "a table is stale; run: python -m scripts.page_tables"


def test_every_result_has_its_table():
    """What was measured and is not shown might as well have been left out because it was slow."""
    shown = {path for name in PAGES for path in re.findall(r"<!-- table: (\S+) .+? -->", (ROOT / name).read_text())}
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/results").glob("*.json")}
    told = {"benchmarks/results/soak.json", "benchmarks/results/sources-smollm2-xeon.json"}  # in docs/
    assert kept - told == shown

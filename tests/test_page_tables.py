"""The tables of the pages are those of the committed figures."""

from __future__ import annotations

import re

import pytest

from scripts.page_tables import PAGES, ROOT, filled


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_its_files(name):
    """A figure that is typed by hand is wrong after the next measurement, and nobody notices."""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "<!-- table: " in page
    assert filled(page) == page, "a table is stale; run: python -m scripts.page_tables"


def test_every_file_of_figures_has_its_table():
    """What was measured and is not shown might as well have been left out because it was slow."""
    shown = {path for name in PAGES for path in re.findall(r"<!-- table: \w+ (\S+) -->", (ROOT / name).read_text())}
    without = {
        "benchmarks/results/soak.json",
        "benchmarks/results/overhead.json",
    }  # docs/results.md says whose they are
    assert {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks/results").glob("*.json")
    } - without == shown


def test_a_stale_table_is_made_anew_and_the_text_around_it_stays():
    """Only what stands between the markers belongs to the script."""
    begin, end = "<!-- table: first benchmarks/results/tree-sweep-smollm2-cpu.json -->", "<!-- end of table -->"
    made = filled(f"Before.\n{begin}\n| old |\n{end}\nAfter.\n")
    assert made.startswith(f"Before.\n{begin}\n| nodes | depth |")
    assert made.endswith(f" |\n{end}\nAfter.\n")
    assert "| old |" not in made
    with pytest.raises(ValueError, match="one of all, first, ratios, acceptance, not 'most'"):
        filled(f"{begin.replace('first', 'most')}\n{end}")

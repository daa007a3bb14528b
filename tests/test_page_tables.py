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


def test_a_stale_table_is_made_anew_and_the_text_around_it_stays():
    """Only what stands between the markers belongs to the script."""
    begin = "<!-- table: benchmarks/results/ablation-smollm2-epyc.json acceptance -->"
    end = "<!-- end of table -->"
    made = filled(f"Before.\n{begin}\n| old |\n{end}\nAfter.\n")
    assert made.startswith(f"Before.\n{begin}\n| acceptance length | 2K (n=4) |")
    assert made.endswith(f" |\n{end}\nAfter.\n")
    assert "| old |" not in made
    with pytest.raises(ValueError, match=r"begins with one of decoding, .*; got 'most'"):
        filled(f"{begin.replace('acceptance', 'most')}\n{end}")

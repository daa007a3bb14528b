"""Pages that say what the code says: configuration keys, families, tables of figures, and tests of promises."""

import re

import pytest

from scripts import configuration_page
from scripts.page_tables import PAGES, ROOT, filled


def test_the_page_of_keys_says_what_the_code_says():
    """A key that is documented by hand is wrong after its first change; one without a docstring has no page at all."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == configuration_page.page(), "run: python -m scripts.configuration_page > docs/configuration.md"


@pytest.mark.slow
def test_the_page_of_families_says_what_the_check_finds():
    """All of them take ten minutes; every twelfth shows whether the page is stale."""
    from scripts.families_page import FAMILIES, HEAD, row

    page = (ROOT / "docs" / "families.md").read_text()
    assert page.startswith(HEAD)
    for family in FAMILIES[::12]:
        assert row(family) in page.splitlines(), "run: python -m scripts.families_page > docs/families.md"


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


def test_every_promise_of_security_names_tests_that_exist():
    """A file without a test's name stands for all of its tests."""
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    promises = [line for line in lines if not line.startswith("| promise |")]
    assert len(promises) >= 8
    for line in promises:
        names = re.findall(r"`(\S+?\.py)(?:::(\w+))?`", line)
        assert names, f"{line} names no test"
        for path, name in names:
            assert f"def {name or 'test_'}" in (ROOT / path).read_text(), f"{path} has no {name}"

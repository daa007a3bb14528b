"""`docs/families.md` says which models run."""

from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"


@pytest.mark.slow
def test_the_page_of_families_says_what_the_check_finds():
    """All of them take ten minutes; every twelfth shows whether the page is stale."""
    from scripts.families_page import FAMILIES, HEAD, row

    page = DOCUMENT.read_text()
    assert page.startswith(HEAD)
    for family in FAMILIES[::12]:
        assert row(family) in page.splitlines(), "run: python -m scripts.families_page > docs/families.md"

"""`docs/families.md` says which models run."""

from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"


@pytest.mark.slow
def test_the_page_of_families_says_what_the_check_finds():
    """The check runs over every causal LM of the installed transformers that can be made small."""
    from scripts.families_page import page

    assert DOCUMENT.read_text() == page(), "run: python -m scripts.families_page > docs/families.md"

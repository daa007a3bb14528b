"""The page of configuration keys is the code's own."""

from pathlib import Path

from scripts.configuration_page import page

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_the_page_of_keys_says_what_the_code_says():
    """A key that is documented by hand is wrong after its first change; one without a docstring has no page at all."""
    assert DOCUMENT.read_text() == page(), "run: python -m scripts.configuration_page > docs/configuration.md"

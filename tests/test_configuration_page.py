"""The page of configuration keys is the code's own."""

import re
from pathlib import Path

from scripts.configuration_page import page
from specextend.config import RunConfig

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_the_page_of_keys_says_what_the_code_says():
    """A key that is documented by hand is wrong after its first change."""
    assert DOCUMENT.read_text() == page(), "run: python -m scripts.configuration_page > docs/configuration.md"


def test_every_key_has_a_meaning():
    """A name and a default alone send the reader into the source."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*?) \| (.*) \|$", page(), re.MULTILINE)
    assert len(rows) > 40
    assert [key for key, _, meaning in rows if not meaning.endswith(".")] == []


def test_every_section_begins_with_a_sentence():
    """A table without one leaves the reader to guess what its keys have in common."""
    leads = re.findall(r"^## `\w+`\n\n(.*)\n\n\| key \|", page(), re.MULTILINE)
    assert len(leads) == len(RunConfig.model_fields)
    assert [lead for lead in leads if not (lead[0].isupper() and lead.endswith("."))] == []

"""What the nouns promise by themselves."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.core import printable

ORDINARY = [
    "Straße, naïve café “quoted” … 100 €",
    "Λόγος, слово",
    "בְּרֵאשִׁית, العربية ١٢٣ ۝٤",
    "می‌خواهم",  # Persian writes a non-joiner inside words
    "क्‍ष हिन्दी",  # a joiner chooses the half form
    "ភាសា\u200bខ្មែរ",  # Khmer has no spaces between words
    "東京\u3000大阪 한국어",
    "👩‍👩‍👧 ❤️ 🇨🇭",
    "a\u00a0b c\\n <b> | `x`",
]
HOSTILE = {
    "\x1b[2J": r"\x1b[2J",
    "\x9b31m": r"\x9b31m",
    "\x00\x07\x7f": r"\x00\x07\x7f",
    "a\nb\r\nc\td": r"a\nb\r\nc\td",
    "a\u0085b\u2028c\u2029d": r"a\x85b\u2028c\u2029d",
    "\u202egpj.exe\u202c": r"\u202egpj.exe\u202c",
    "\u2066x\u2069\u200e\u200f\u061c": r"\u2066x\u2069\u200e\u200f\u061c",
    "\ufeffa\u00adb\u2060c": r"\ufeffa\xadb\u2060c",
    "\U000e0041\U000e007f": r"\U000e0041\U000e007f",
    "\ud800": r"\ud800",
    "\ue000\U0010fffd": r"\ue000\U0010fffd",
}


@pytest.mark.parametrize("text, shown", [*((text, text) for text in ORDINARY), *HOSTILE.items()], ids=ascii)
def test_what_drives_a_terminal_or_reorders_a_line_is_shown_as_its_code(text, shown):
    """A name that reads `exe.jpg` and is `gpj.exe` passes as something else. Text of any language is shown as it is."""
    assert printable(text) == shown
    assert printable(f"{text}\n\x1b", keep="\n").endswith("\n\\x1b"), "a caller may keep line ends"


@given(st.text(st.characters(codec=None)))
def test_whatever_the_text_it_is_one_line_that_any_stream_can_write(text):
    """Log collectors split at every kind of line end, and halves of characters cannot be encoded at all."""
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert len(shown.encode()) >= len(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Co", "Zl", "Zp"}
    assert printable(shown) == shown

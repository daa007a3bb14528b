"""Each flag is raised by the text that it is about, and not by the one beside it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import Completion
from specextend.data.quality import QualityOptions, assess
from specextend.stats import DecodingStats

FLAGS = [
    "empty",
    "truncated",
    "repeated",
    "repeated_ngrams",
    "copied",
    "echo",
    "wrong_script",
    "wrong_language",
    "control_characters",
    "shortened",
    "short_document",
]
DOCUMENT = "The committee met on Monday in the old town hall and spoke about the budget for the schools of the county."
DEFAULTS = QualityOptions()
RUSSIAN = "Комитет собрался в понедельник, бюджет принят."

SUMMARIZE = "Summarize the document."
NAME = "Name what the committee decided on Monday about schools."


def assessed(
    text, document=DOCUMENT, options=DEFAULTS, token_ids=(), reason="stop", reference=None, dropped=0, **asked
):
    completion = Completion("x", list(token_ids), text, reason, DecodingStats())
    return assess(completion, document, dropped, reference, options, **asked)


@pytest.mark.parametrize(
    "text, given, flags",
    [
        ("A summary.", {}, []),
        (" \n", {}, ["empty"]),
        ("cut off", {"reason": "length"}, ["truncated"]),
        ("no no no", {"token_ids": [7] * 30, "reason": "repetition"}, ["repeated"]),
        ("no no no", {"token_ids": [7] * 24}, ["repeated"]),
        ("no no no", {"token_ids": [7] * 23}, []),
        ("one two three four " * 4, {}, ["repeated_ngrams"]),  # 13 runs, 4 of them different
        ("one two three four five one two three four six", {}, []),  # 1 of 7 runs
        (" ".join(DOCUMENT.split()[3:15]), {}, ["copied"]),
        ("The council met on Monday in the old town hall and chose a mayor.", {}, []),  # 2 of 7 runs
        (RUSSIAN, {}, ["wrong_script"]),
        ("The committee (комитет) met on Monday.", {}, []),
        ("It met.\u202edeveileb", {}, ["control_characters"]),
        ("It met.\r\n\tThen it left.", {}, []),
        # small models answer with eight words of their instruction in a row, or all of a shorter one
        ("Please summarize the document: it met.", {"instruction": SUMMARIZE}, ["echo"]),
        ("What the committee decided.", {"instruction": NAME}, []),
        # a text about which 2.5% of its document, or five words, decided looked as good as any other
        ("It met.", {"dropped": 1}, ["shortened"]),
        ("It met.", {"document": "See the\n" + "- " * 5_000 + "annex."}, ["short_document"]),
        ("开会", {"document": "委员会星期一开会讨论学校预算"}, []),
    ],
)
def test_flags_are_raised_by_what_is_unusual_alone(text, given, flags):
    """A flag that is raised by what is usual is one that nobody looks at."""
    assert assessed(text, **given).quality_flags == flags


EXAMPLE = "library, lending of tools, drills, ladders, sewing machines"
FORM = '{"kind": "law", "agency": "the office of lending and tools of Kent", "date": null}'


@pytest.mark.parametrize(
    "example, text, flags",
    [
        (EXAMPLE, "lending of tools, drills, ladders", ["echo"]),
        (EXAMPLE, f"school budget, {EXAMPLE}", ["echo"]),
        (EXAMPLE, "committee, town hall, budget, schools, county", []),
        ("The committee met in the town hall.", "The committee met on Monday in the old town hall.", []),
        ("law", "law", []),  # a label may be right
        (FORM, FORM, ["echo"]),
        (FORM, '{"kind": "law", "agency": "the schools of the county", "date": null}', []),
        (FORM, "[" * 100_000, []),
    ],
)
def test_an_answer_that_is_copied_from_an_example_is_flagged(example, text, flags):
    """It was unflagged that a text about something else lent tools; what the document says, too, is no copy."""
    found = assessed(text, examples=["The library lends tools since May.", example]).quality_flags
    assert [flag for flag in found if flag == "echo"] == flags


ENGLISH = "The committee met on Monday in the old town hall. It spoke about the schools and what their roofs cost."
GERMAN = "Der Ausschuss tagte am Montag im alten Rathaus. Er sprach über die Schulen und über die Kosten ihrer Dächer."
FRENCH = "Le comité s'est réuni lundi à l'ancienne mairie. Il a parlé des écoles et de ce que coûtent leurs toits."


@pytest.mark.parametrize(
    "text, document, flags",
    [
        (ENGLISH, GERMAN, ["wrong_language"]),
        (GERMAN, GERMAN[50:] + " Am Abend ging man nach Hause.", []),
        (ENGLISH, f"{ENGLISH} Der Ausschuss sprach.", []),
        (FRENCH[:60], ENGLISH, []),  # too short to tell
    ],
)
def test_the_language_is_the_documents_if_that_is_asked_for(text, document, flags):
    """Models like to answer in English whatever they read, and the script does not show it."""
    asked = QualityOptions(language=True)
    assert [flag for flag in assessed(text, document, asked).quality_flags if flag != "copied"] == flags
    assert "wrong_language" not in assessed(text, document).quality_flags


PUBLISHED = [
    (
        "The quick brown fox jumps over the lazy dog.",
        "The quick brown dog jumps on the log.",
        (12 / 17, 4 / 15, 10 / 17),
    ),
    ("Police killed the gunman.", "The gunman killed police!", (1.0, 1 / 3, 0.5)),
]
"""Summary, reference and what the package `rouge-score` 0.1.2 returns, without stemming."""


@pytest.mark.parametrize("summary, reference, scores", PUBLISHED)
def test_rouge_is_that_of_the_package_that_papers_use(summary, reference, scores):
    """Else nobody could compare with a published figure."""
    found = assessed(summary, reference=reference)
    assert (found.rouge1, found.rouge2, found.rougeL) == pytest.approx(scores)


ANY_TEXT = st.text(st.characters(), max_size=200)
"""With halves of surrogate pairs, unassigned characters and all else that Python's strings can hold."""


@given(ANY_TEXT, ANY_TEXT, st.none() | ANY_TEXT, st.sampled_from(["stop", "length", "repetition"]))
@settings(max_examples=200, derandomize=True)
def test_any_text_has_a_quality(text, document, reference, reason):
    """An odd character must not cost a document that was decoded; flags are in one order, each once."""
    options = QualityOptions(language=True)
    found = assessed(text, document, options, reason=reason, reference=reference)
    assert found.quality_flags == [flag for flag in FLAGS if flag in found.quality_flags]
    for share in (found.copied_fraction, found.rouge1, found.rouge2, found.rougeL):
        assert share is None or 0 <= share <= 1
    assert (found.rouge1 is None) == (reference is None)

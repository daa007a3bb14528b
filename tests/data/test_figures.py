"""Figures of a text, sought in its document: in any format, rounded, derived, or not there."""

import re
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend import find_figures
from tests.data.test_quality import assessed

ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
DOCUMENT = "The report says that the agency paid {} for harbours in the northern region, and that the committee agreed."


def in_words(number):
    """Write a number as English does."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {in_words(number % size)}" if number % size else ""
            return f"{in_words(number // size)} {name}{rest}"
    if number < 20:
        return ONES[number]
    return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")


def numbers(number):
    """Write a whole number as English, German, French, Swiss and other writers do."""
    signs = ("", ",", ".", "\u202f", "\u00a0", " ", "'", "\u2019")
    grouped = [f"{number:,}".replace(",", sign) for sign in signs]
    return [*grouped, in_words(number), f"{Decimal(number) / 1000} thousand"]


def sums(dollars):
    """Write a sum with a sign, a code or a word, whole or as so many millions."""
    plain = f"{dollars:,.2f}"
    millions = f"{dollars / 10**6:f}"
    german = plain.translate(str.maketrans(",.", ".,")), millions.replace(".", ",")
    french = plain.translate(str.maketrans(",.", "\u202f,"))
    english = [f"${plain}", f"USD {plain}", f"{plain} dollars", f"${millions} million", f"${millions}m"]
    others = [f"{german[0]} US-Dollar", f"{german[1]} Mio. Dollar", f"{french} $", plain.replace(",", "'") + " USD"]
    return [*english, *others, f"US${dollars / 10**9:f}bn"]


def dates(day):
    """Write a date in American, British and other orders."""
    in_letters = ("%B %-d, %Y", "%-d %B %Y", "the %-dth of %B %Y", "%b. %-d, %Y")
    in_digits = ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y/%m/%d", "%-d/%-m/%Y", "%m/%d/%y"]
    return [day.strftime(each) for each in (*in_letters, *in_digits)]


def found(text, document):
    return [(each["text"], each["found"]) for each in find_figures(text, document)]


@pytest.mark.parametrize(
    "spell, values",
    [
        (numbers, st.integers(2, 10**12 - 1)),
        (sums, st.integers(1, 10**12).map(lambda cents: Decimal(cents) / 100)),
        (dates, st.dates(date(1951, 1, 1), date(2049, 12, 31))),
    ],
)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_printed_in_one_of_ten_formats_is_found_in_another(spell, values, data):
    formats = spell(data.draw(values))
    written, read = (data.draw(st.sampled_from(formats)) for _ in range(2))
    document = DOCUMENT.format(written)
    [record] = find_figures(f"The agency paid {read} for harbours.", document)
    assert record["found"] == "yes", (written, read, record)
    assert document[record["begin"] : record["end"]].strip() in written
    assert record["text"].strip() in read


PIECES = st.sampled_from(
    re.findall(
        r"\S+",
        "1 2,500 3.75 4 000 5'000 $6 7% €8bn 9/10/2011 2018-19 twelve two-thirds one in five million a dozen May 5 (3) "
        "H-1B . , - to and about percent years people 2020 Mio. zwanzig vingt et un quatre ½ 1.2.3 0 00 Ⅷ ٣",
    )
)
TEXTS = st.lists(PIECES, max_size=14).map(" ".join) | st.text(max_size=40)


@settings(max_examples=300, deadline=None)
@given(before=TEXTS, text=TEXTS, behind=TEXTS)
def test_a_text_that_is_copied_from_its_document_has_no_figure_that_is_not_there(before, text, behind):
    """Whatever it holds; and every place is a slice of the document, every figure one of the text."""
    document = f"{before}\n\n{text}\n\n{behind}"
    for each in find_figures(text, document):
        assert each["found"] != "no", each
        assert each["text"] in text
        assert each["text"]
        assert 0 <= each["begin"] < each["end"] <= len(document)


@pytest.mark.parametrize(
    "text, document, expected",
    [
        ("It paid $3.5 million.", "Costs were $3,512,400.", ["rounded"]),
        ("It paid $3,512,400.", "Costs were $3.5 million.", ["no"]),
        ("It paid $5 million.", "Costs were £5 million.", ["no"]),
        ("It paid $5 million.", "Costs were $5 billion.", ["no"]),
        ("It fell by 5 percent.", "It fell by 5%.", ["yes"]),
        ("It fell by 5 percent.", "It fell to 5.", ["no"]),
        ("It took 5 years.", "It took 5 months.", ["no"]),
        ("Two-thirds of the ports agreed.", "67 percent of the ports agreed.", ["rounded"]),
        ("A dozen ports agreed.", "12 ports agreed.", ["yes"]),
        ("One in five ports agreed.", "20 percent of the ports agreed.", ["yes"]),
        ("It took 5 to 10 million euros.", "It took €5 million, then €10 million.", ["yes", "yes"]),
        ("In 2019 it ended.", "In fiscal year 2018-19 it ended.", ["yes"]),
        ("In 2019 it ended.", "It ended on 3 May 2019.", ["yes"]),
        ("It ended in May 2019.", "It ended on May 3, 2019.", ["rounded"]),
        ("It ended on May 3, 2019.", "In 2019, on May 3, it ended.", ["derived"]),
        ("It ended on May 4, 2019.", "It ended on May 3, 2019.", ["no"]),
        ("Le port a coûté 3,5 millions d'euros.", "The port cost €3.5 million.", ["yes"]),
        ("Der Hafen kostete 1,2 Mrd. Euro.", "The port cost EUR 1.2bn.", ["yes"]),
        ("(1) one of them", "nothing", []),
    ],
)
def test_units_scales_and_digits_count(text, document, expected):
    """A unit that differs is another figure; fewer digits are a rounding, more of them an invention."""
    assert [state for _, state in found(text, document)] == expected


@pytest.mark.parametrize("figure", ["$50 million", "$10 million", "67 percent", "50 percent"])
def test_what_follows_from_two_figures_of_a_passage_is_told_apart(figure):
    """Sum, difference, ratio and change."""
    document = "Other things happened.\n\nSpending on northern harbours rose from $20 million to $30 million in a year."
    text = f"Spending on northern harbours: {figure}."
    [record] = find_figures(text, document)
    assert record["found"] == "derived"
    assert document[record["begin"] : record["end"]] == "$20 million to $30 million"
    assert found("The cats of Rome ate 67 percent.", document) == [("67 percent", "no")]


def test_a_figure_of_few_digits_needs_words_around_it_in_common():
    """There is a 3 in every report; in another language no word is the same, and none is asked for."""
    document = "The inspectors visited three harbours, which the agency had chosen from northern regions."
    assert found("Inspectors visited 3 harbours.", document) == [("3", "yes")]
    wrong = "The committee proposed seventeen amendments, of which 3 were rejected by the northern senate."
    assert found(wrong, document) == [("seventeen", "no"), ("3", "no")]
    assert found("Die Prüfer besuchten 3 Häfen, welche das Ministerium im Norden auswählte.", document) == [
        ("3", "yes")
    ]


def test_figures_of_an_answer_are_those_of_its_free_fields():
    """A number of an answer has no unit to differ in; a label is no figure."""
    answer = '{"kind": "7", "sum": 5000000, "share": 2.5, "said": ["on 4 May 2020", "8 euros"], "n": null}'
    document = "On May 4, 2020 the port paid $5 million, 2.5 percent more."
    quality = assessed(answer, document, figures_for=frozenset({"sum", "share", "said", "n"}))
    states = [(each["text"], each["value"], each["found"]) for each in quality.figures]
    assert states == [
        ("5000000", "5000000", "yes"),
        ("2.5", "2.5", "yes"),
        ("4 May 2020", "2020-05-04", "yes"),
        ("8 euros", "8", "no"),
    ]
    assert "figure_not_found" in quality.quality_flags
    assert assessed(answer, document).figures is None


@pytest.mark.parametrize("text", ["five " + "hundred " * 200, "two " + "dozen " * 400])
def test_numbers_in_words_that_nobody_means_are_no_figures(text):
    """Degenerate answers repeat a word; the row still has its quality."""
    assert find_figures(text, "The port paid five hundred euros.") == []


@pytest.mark.parametrize("number", ["1e99999999999", "1e-99999999999", "1e" + "9" * 30, "0e99999999999"])
def test_a_number_of_an_answer_that_is_too_large_to_write_out_is_no_figure(number):
    answer = f'{{"sum": {number}, "share": 2.5e1}}'
    quality = assessed(answer, "25", figures_for=frozenset({"sum", "share"}))
    assert [each["text"] for each in quality.figures] == ["25"]


def test_a_figure_is_found_after_letters_that_become_two_in_lower_case():
    document = "\u0130" * 300 + " The inspectors visited three harbours of the agency in spring. " + "." * 300
    assert found("Inspectors visited 3 harbours of the agency in spring.", document) == [("3", "yes")]

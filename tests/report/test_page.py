"""The page of a report, without a browser: what is in it, and what can never be."""

import re
from html.parser import HTMLParser

import pytest

from specextend.data.run_folder import time_text
from specextend.report.build import TILES, to_html
from specextend.report.sections import sections
from tests.report.made_up import FIRST, NIGHT_S, SECOND

VOID = {"meta", "br", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """Its elements and text; refuses elements that are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.text = ""
        self._open = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data

    def values(self, name, *tags):
        """Values of an attribute, of elements with some tags or with any."""
        return [values[name] for tag, values in self.elements if name in values and tag in (tags or (tag,))]


def page_of(report, **changed):
    return Page(to_html(report | changed))


@pytest.fixture(scope="module")
def page(report):
    return page_of(report)


def test_the_page_holds_every_table_and_the_largest_figures(page, report):
    """The page and the terminal show the same sections; its tiles name where in report.json they come from."""
    for section in sections(report):
        for cell in (section.title, *section.header, *(cell for row in section.rows for cell in row)):
            assert cell in page.text
    assert {*page.values("data-figure")} == {*TILES.values()} - {"reviewed.good.share"}


def test_the_page_has_the_time_lines_and_every_finding(page, report):
    """What is left out is not missed by anybody but its reader; a place that no worker took has nothing to see."""
    assert "seat 2" in page.text
    assert "seat 3" not in page.text
    by_length = ["documents", "seconds_per_document", "mean_acceptance_length"]
    assert page.values("data-plot", "figure") == [*by_length, f"timeline_{FIRST}", f"timeline_{SECOND}"]
    assert page.values("data-rule", "li") == [advice["rule"] for advice in report["advice"]]


def test_nothing_in_the_page_is_fetched_or_run(page):
    """It is opened from disks, mails and artifact stores, next to a corpus that must not leave the house."""
    fetching = {"script", "img", "iframe", "object", "embed", "link", "base"}
    assert {tag for tag, _ in page.elements} & fetching == set()
    for tag, values in page.elements:
        assert not [name for name in values if name.startswith("on") or name in ("src", "srcset", "action")], tag
        assert all((values[name] or "").startswith("#") for name in values if name.endswith("href")), tag
        assert "url(" not in (values.get("style") or "").replace("url(#", "")
    policy = [values["content"] for _, values in page.elements if values.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_finding_leads_to_a_table_of_the_page(page, report):
    """A reader who is told of cut texts asks which ones; the ids of each flag are there."""
    links = page.values("href", "a")
    anchors = {f"#{each}" for each in page.values("id", "section")}
    assert sum(link in anchors for link in links) == len(report["advice"]) > 0
    assert {*links} <= {f"#{each}" for each in page.values("id")}
    for ids in (*report["flagged"].values(), *(error["doc_ids"] for error in report["errors"])):
        assert ", ".join(ids) in page.text


def test_the_page_says_first_what_was_done_and_left_out(report):
    """Of a night whose rows were done before, too, which has no figures that anybody needs."""
    chosen = {"input": 900, "not_matching": 100, "unchanged": 500, "selected": 300, "changed": 0, "new": 300}
    text = page_of(report, selection=chosen).text.split("Documents done")[0]
    assert "293 of 300 documents done, with one text each; 7 failed." in text
    assert "Of the input's 900 rows, this run left out 100 by input.filter, 500 as done before and unchanged." in text
    assert re.search(r"1,924.8 documents an hour, loading included\.\s+Of the workers' time: 56% waiting for doc", text)
    nothing = {"input": 0, "done": 0, "errors": 0, "pending": 0}
    text = page_of(report, rows=nothing, selection=chosen | {"unchanged": 800}).text
    assert "This run had nothing to do.\nOf the input's 900 rows, this run left out 100" in text
    assert "Documents done" not in text


def test_the_page_leads_with_what_the_texts_are_worth(report):
    """It praised the speed of a run of which most strings stood nowhere in their documents."""
    evidence = {"agency": {"documents": 9, "strings": 50, "found": 8}}
    figures = {"figures": 40, "rounded": 3, "derived": 1, "not_found": 4}
    unread = {"damaged": 2, "password": 1}
    text = page_of(report, evidence=evidence, figures=figures, not_prepared=unread).text
    first = text.split("documents an hour")[0]
    assert "293 of 293 documents (100%) have a flag, most often short_document." in first
    assert "1 of 293 documents (0%) has a flag" in page_of(report, flagged_texts=1).text
    assert "Of the strings of the answers, 16% stand in their documents." in first
    assert "Of 40 figures in the texts, 90% are in their documents or follow from two there." in first
    assert re.search(r"could not read 3 files or rows of the input: damaged 2, password 1\.", first)
    shown, _, folded = to_html(report).partition("<details>")
    titles = ("Texts drawn at random", "Texts to look at", "The workers&#39; time")
    places = [shown.index(f"<h2>{title}</h2>") for title in titles]
    assert places == sorted(places)
    assert "<h2>Slowest documents</h2>" in folded


def test_each_sentence_with_a_source_is_a_link_to_its_passages(page):
    """Nothing else in the page says where a text comes from."""
    places = [f"#{values['id']}" for _, values in page.elements if values.get("class") == "sources"]
    assert len({*places}.intersection(page.values("href", "a"))) == len(places) > 0
    assert re.search(r"0 to 13, \d+%: Another text\.", page.text)
    assert "Of the sentences of the texts, 50% have a source in their documents." in page.text


def test_a_source_in_a_pdf_is_a_link_to_its_page(report):
    """Of other documents the page is named, or the characters where no page is known."""
    [text, other, *rest] = report["texts"]["random"]
    source = {"sentence": "x", "begin": 3, "end": 9, "score": 50.0, "passage": "A passage."}
    shown = text | {"summary": "x", "sources": [source | {"page": 2}], "pdf": "file:///in/a%20%22b.pdf"}
    named = other | {"summary": "x", "sources": [source | {"page": 7}]}
    page = page_of(report, texts={"random": [shown, named, *rest], "flagged": []})
    assert "file:///in/a%20%22b.pdf#page=2" in page.values("href", "a")
    assert re.search(r"page 2, 50%: A passage\..*page 7, 50%: A passage\.", page.text, re.S)


def test_a_start_without_a_worker_has_its_place_in_time(report):
    """A Ray that did not start has taken time, too, which nobody saw."""
    failed = report["timeline"][0] | {"run_id": "0000000c", "workers": [], "seconds": 80.0, "exit_code": 1}
    said = "Start 0000000c: no worker; it ended after 1 min 20 s with exit 1"
    assert said in page_of(report, timeline=[failed]).text


@pytest.mark.parametrize(
    "code, age_s, said",
    [(0, None, "complete"), (75, None, "stopped"), (1, None, "failed with exit 1"), (None, 300, "no end")],
)
def test_the_page_says_how_the_run_stands(report, code, age_s, said):
    """Also while it is going, and after its driver was killed."""
    sign = None if age_s is None else time_text(NIGHT_S - age_s)
    last = report["starts"][-1] | {"exit_code": code, "last_sign": sign}
    page = page_of(report, as_of=time_text(NIGHT_S), starts=[last])
    assert said in page.text.split("Documents done")[0]


def test_a_fault_of_the_page_costs_the_page_alone(report):
    """The texts of a night are done: a mistake in a template must not turn that into a failure."""
    page = Page(to_html({name: value for name, value in report.items() if name != "wall_clock"}))
    assert "This page could not be made (KeyError: 'wall_clock'). report.json holds" in page.text

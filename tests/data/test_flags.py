"""Answers that fit any document of their run are flagged, once all of its answers are known."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.finalize import finalize, unfinished
from specextend.data.fingerprint import read_manifest, write_manifest
from specextend.data.flags import LEAST_ANSWERS, RunWords
from specextend.data.quality import answer_words
from specextend.data.schema import COMMIT_SCHEMA
from specextend.report import RunFigures, build_report, write_report
from tests.data.conftest import opened
from tests.properties.rows import done, failed
from tests.report.made_up import begin_run

PLACES = ("Aaren Bisk Corl", "Dunmar Ebel Fosk", "Garn Hult Ivel", "Jorn Kelm Lask", "Morv Nelk Ospel")
DOCUMENTS = [
    f"The council of {names} met in {year} about the {thing}. It gave the report on what a new {thing} costs."
    for names, year, thing in zip(
        (*PLACES, "Pelt Quarn Risk", "Surn Telm Ulk", "Varn Welk Yost"),
        range(1990, 1998),
        ("bridge", "school", "harbour", "library", "tramway", "market", "theatre", "stadium"),
        strict=True,
    )
]
GENERIC = {3: "A report on a report.", 6: "The report is about a council, and gives what it met about."}
ANSWERS = [
    GENERIC.get(
        row,
        f"The council of {' '.join(text.split()[3:6])} met. It gave a report about what the new {text.split()[-2]} is.",
    )
    for row, text in enumerate(DOCUMENTS)
]


@pytest.fixture
def source(write):
    return opened(write("in/a.parquet", {"text": DOCUMENTS}))


def told(row, text, *tasks):
    """A row of a document done, with the words of its answer; with tasks, the same for each."""
    entries = [
        {"name": name, "text": each, "quality_flags": [], "words": answer_words(each, DOCUMENTS[row])}
        for name, each in zip(("first", "second"), (text, *tasks), strict=False)
    ]
    more = {"words": entries[0]["words"], "tasks": entries if tasks else None}
    return done(DocumentKey(0, row), text) | more


def flagged(output):
    found = pq.read_table(f"{output.path}/summaries/part-00000.parquet").to_pylist()
    return {row for row, each in enumerate(found) if "generic" in each["quality_flags"]}


@pytest.mark.parametrize("seed", range(3))
def test_texts_that_fit_any_document_are_flagged(seed, source, output, tmp_path):
    """A model that is at its end writes them, and nothing in such a text is wrong by itself. Whatever the order of
    rows and commits, the files, the report of the run and one that is made again say the same.
    """
    begin_run(output.path, len(DOCUMENTS))
    order = random.Random(seed).sample(range(len(DOCUMENTS)), len(DOCUMENTS))
    writer = CommitWriter(output, "0000000a")
    for begin in range(0, len(order), seed + 1):
        writer.commit([told(row, ANSWERS[row]) for row in order[begin : begin + seed + 1]])
    figures = RunFigures()
    finalize(source, output, observe=figures.add, words=figures.words)
    assert flagged(output) == GENERIC.keys()
    assert "words" not in pq.read_schema(f"{output.path}/summaries/part-00000.parquet").names
    write_report(output.path, output, figures=figures)
    made = json.loads((tmp_path / "output" / "report.json").read_text())
    for report in made, build_report(output.path):
        assert report["quality_flags"] == {"generic": 2}
        assert report["flagged"] == {"generic": [f"0.parquet:{row}" for row in GENERIC]}


def test_rows_that_are_done_again_change_the_flags_of_others(source, output):
    """A text is generic beside others: if they become better or worse, files that nobody wrote to are stale."""
    writer = CommitWriter(output, "0000000a")
    missing = range(LEAST_ANSWERS - 1, len(DOCUMENTS))
    writer.commit([told(row, ANSWERS[row]) for row in range(LEAST_ANSWERS - 1)])
    writer.commit([failed(DocumentKey(0, row)) for row in missing])
    finalize(source, output)
    assert flagged(output) == set(), "there are too few answers"
    writer.commit([told(row, ANSWERS[row]) for row in missing])
    assert unfinished(source, output) == ["part-00000.parquet"]
    finalize(source, output)
    assert flagged(output) == GENERIC.keys()
    assert unfinished(source, output) == []


def test_each_of_several_tasks_is_compared_with_itself(source, output):
    """The second task's answers are labels, which no document has: they say nothing about a document, and need not."""
    begin_run(output.path, len(DOCUMENTS))
    manifest = read_manifest(output)
    second = {"output": {"column": "label", "schema": None}}
    manifest["config"]["tasks"] = {"first": {"output": {"column": "summary", "schema": None}}, "second": second}
    write_manifest(output, manifest)
    CommitWriter(output, "0000000a").commit([told(row, ANSWERS[row], "positive") for row in range(len(DOCUMENTS))])
    finalize(source, output)
    assert flagged(output) == GENERIC.keys()
    for row, each in enumerate(pq.read_table(f"{output.path}/summaries/part-00000.parquet").to_pylist()):
        wanted = [["generic"] if row in GENERIC else [], []]
        assert [task["quality_flags"] for task in each["tasks"]] == wanted
        assert "words" not in each["tasks"][0]


@given(st.lists(st.lists(st.sampled_from(DOCUMENTS[0].split()), max_size=17), min_size=5, max_size=12), st.data())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_text_with_names_that_its_document_alone_has_is_not_flagged(texts, data):
    """Three names among twenty words are enough, whatever all other answers are."""
    own = data.draw(st.integers(0, len(texts) - 1))
    texts[own] = [*texts[own], "Xaver", "Yolanda", "Zeno"]
    rows = [
        {"file": 0, "row": row, "doc_id": str(row), "words": answer_words(" ".join(text), " ".join(texts[own]))}
        for row, text in enumerate(texts)
    ]
    words = RunWords()
    words.add(pa.Table.from_pylist(rows, COMMIT_SCHEMA))
    assert own not in {found["row"] for found in words.flagged()}

"""Answers beside the right ones that the input holds: the report of a run, and two runs."""

import json
from math import exp

import pytest

from tests.job.conftest import TEXT, on, read_json, rows, specextend, write_corpus

SCHEMA = "output.schema={kind: audit | budget | other, closed: 'boolean?'}"
KINDS = ["audit", "budget", "other", "Audit ", None, "audit", "budget", "speech"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, summarize_here):
    """Two runs over eight documents whose kinds somebody knows, by two instructions."""
    folder = tmp_path_factory.mktemp("gold")
    texts = [f"{number} {TEXT}" * (number + 1) for number in range(len(KINDS))]
    by_hand = {"kind_by_hand": KINDS, "closed_by_hand": ["true", "false"] * 4}
    corpus = write_corpus(folder / "in" / "a.parquet", texts, doc=[*"abcdefgh"], **by_hand)
    gold = "input.gold={kind: kind_by_hand, closed: closed_by_hand}"
    for name, instruction in (("one", "{{ document }} What is it?"), ("two", "t9 {{ document }}")):
        own = (SCHEMA, "output.column=answer", "input.id_column=doc", gold, "decoding.max_new_tokens=80")
        own = (*own, "decoding.temperature=1.5", f"prompt.instruction='{instruction}'")
        summarize_here(*on(corpus, folder / name, *own)).exits(0)
    return folder / "one", folder / "two"


def right(row, field):
    """Whether an answer is right, as people would say; None if nobody knows."""
    gold = row[f"{field}_by_hand"]
    return None if gold is None else gold.strip().lower() == str(row[field]).lower()


def test_values_are_scored(runs):
    """Each has its probability, and the likeliest is the answer, whatever the temperature is."""
    asked = {"kind": ["audit", "budget", "other"], "closed": ["true", "false", "null"]}
    for row in rows(runs[0] / "summaries"):
        assert json.loads(row["answer"]) == {field: row[field] for field in asked}
        for field, values in asked.items():
            log_probs = {each["value"]: each["log_prob"] for each in row["choices"] if each["field"] == field}
            assert [*log_probs] == values
            assert sum(map(exp, log_probs.values())) == pytest.approx(1)
            best = max(log_probs, key=log_probs.__getitem__)
            assert best == (row[field] if field == "kind" else json.dumps(row[field]))
        assert row["num_spec_steps"] + row["num_plain_steps"] == 0
    found = read_json(runs[0] / "report.json")["choices"]
    assert found.keys() == asked.keys()
    for values in found.values():
        assert sum(of["documents"] for of in values.values()) == len(KINDS)
        assert all(0 < of["probability_sum"] <= of["documents"] for of in values.values())


def test_the_report_says_how_many_answers_are_right(runs):
    """With an interval, of each label how often it was right and found, and every confusion."""
    printed = specextend("report", runs[0], "--json", "-").exits(0).stdout
    found = json.loads(printed)["gold"]
    assert found == read_json(runs[0] / "report.json")["gold"]
    own = rows(runs[0] / "summaries")
    for field, of in found.items():
        judged = [(row, each) for row in own if (each := right(row, field)) is not None]
        assert (of["rows"], of["right"]) == (len(judged), sum(each for _, each in judged))
        assert of["interval"][0] <= of["accuracy"] <= of["interval"][1]
        assert sum(count for *_, count in of["confusion"]) == of["rows"]
        assert sum(count for gold, answer, count in of["confusion"] if gold == answer) == of["right"]
        for label, each in of["labels"].items():
            answers = [is_right for row, is_right in judged if str(row[field]).lower() == label]
            assert each["answers"] == len(answers)
            assert each["precision"] == (sum(answers) / len(answers) if answers else None)
            assert each["recall"] == (sum(answers) / each["gold"] if each["gold"] else None)
    assert found["kind"]["labels"]["audit"]["gold"] == 3, "case and space around a label are none of its"
    for page in specextend("report", runs[0]).stdout, (runs[0] / "report.html").read_text():
        assert "Against the right answers" in page
    assert own[0]["kind_by_hand"] == "audit", "the right answers are passed through"


def test_two_runs_stand_beside_each_other_with_the_rows_that_changed_sides(runs):
    found = json.loads(specextend("compare", *runs, "--json", "-").exits(0).stdout)["gold"]
    here, there = ({row["doc_id"]: row for row in rows(run / "summaries")} for run in runs)
    for field, of in found.items():
        judged = {doc_id: (right(row, field), right(there[doc_id], field)) for doc_id, row in here.items()}
        known = {doc_id: pair for doc_id, pair in judged.items() if None not in pair}
        assert of["rows"] == len(known)
        assert of["right_only_here"] == [doc_id for doc_id, pair in known.items() if pair == (True, False)]
        assert of["right_only_there"] == [doc_id for doc_id, pair in known.items() if pair == (False, True)]
        assert of["accuracy"] == [sum(side) / len(known) for side in zip(*known.values(), strict=True)]
        assert of["interval"][0] <= of["difference"] <= of["interval"][1]
        assert 0 < of["p"] <= 1
    assert "Against the right answers" in specextend("compare", *runs).stdout


def test_texts_are_measured_by_their_words(tmp_path, summarize_here):
    corpus = write_corpus(tmp_path / "a.parquet", [TEXT * 3, TEXT * 5], doc=["a", "b"], said=["x", None])
    own = ("input.id_column=doc", "input.gold={summary: said}", "decoding.max_new_tokens=6")
    summarize_here(*on(corpus, tmp_path / "out", *own)).exits(0)
    of = read_json(tmp_path / "out" / "report.json")["gold"]["summary"]
    assert (of["rows"], of["right"], of["f1"], of["kappa"], of["labels"]) == (1, 0, 0.0, None, {})

"""Answers beside the right ones that the input holds: the report of a run, and two runs."""

import json

import pytest

from tests.job.conftest import CONFIG, TEXT, in_process, on, read_json, rows, specextend, write_corpus

SCHEMA = "output.schema={kind: audit | budget | other, closed: 'boolean?'}"
KINDS = ["audit", "budget", "other", "Audit ", None, "audit", "budget", "speech"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, kept_kernels, local_ray):
    """Two runs over eight documents whose kinds somebody knows, by two instructions."""
    folder = tmp_path_factory.mktemp("gold")
    texts = [f"{number} {TEXT}" * (number + 1) for number in range(len(KINDS))]
    by_hand = {"kind_by_hand": KINDS, "closed_by_hand": ["true", "false"] * 4}
    corpus = write_corpus(folder / "in" / "a.parquet", texts, doc=[*"abcdefgh"], **by_hand)
    gold = "input.gold={kind: kind_by_hand, closed: closed_by_hand}"
    for name, instruction in (("one", "{{ document }} What is it?"), ("two", "t9 {{ document }}")):
        own = (SCHEMA, "output.column=answer", "input.id_column=doc", gold, "decoding.max_new_tokens=80")
        own = (*own, f"prompt.instruction='{instruction}'")
        in_process("summarize.py", "--config", CONFIG, *on(corpus, folder / name, *own)).exits(0)
    return folder / "one", folder / "two"


def right(row, field):
    """Whether an answer is right, as people would say; None if nobody knows."""
    gold = row[f"{field}_by_hand"]
    return None if gold is None else gold.strip().lower() == str(row[field]).lower()


def test_the_report_says_how_many_answers_are_right(runs):
    """With an interval, of each label how often it was right and found, and every confusion."""
    printed = specextend("report", runs[0], "--json", "-").exits(0).stdout
    found = json.loads(printed)["gold"]
    assert found == read_json(runs[0] / "report.json")["gold"]
    own = rows(runs[0] / "summaries")
    for field in ("kind", "closed"):
        judged = [each for row in own if (each := right(row, field)) is not None]
        of = found[field]
        assert (of["rows"], of["right"]) == (len(judged), sum(judged))
        assert of["interval"][0] <= of["accuracy"] <= of["interval"][1]
        assert sum(count for *_, count in of["confusion"]) == of["rows"]
        assert sum(count for gold, answer, count in of["confusion"] if gold == answer) == of["right"]
        for label, each in of["labels"].items():
            answers = [row for row in own if right(row, field) is not None and str(row[field]).lower() == label]
            assert each["answers"] == len(answers)
            hits = sum(right(row, field) for row in answers)
            assert each["precision"] == (hits / len(answers) if answers else None)
            assert each["recall"] == (hits / each["gold"] if each["gold"] else None)
    assert found["kind"]["labels"]["audit"]["gold"] == 3, "case and space around a label are none of its"
    assert "Against the right answers" in specextend("report", runs[0]).stdout
    assert "Against the right answers" in (runs[0] / "report.html").read_text()
    assert own[0]["kind_by_hand"] == "audit", "the right answers are passed through"


def test_two_runs_stand_beside_each_other_with_the_rows_that_changed_sides(runs):
    found = json.loads(specextend("compare", *runs, "--json", "-").exits(0).stdout)["gold"]
    sides = [{row["doc_id"]: row for row in rows(run / "summaries")} for run in runs]
    for field, of in found.items():
        judged = {doc_id: [right(side[doc_id], field) for side in sides] for doc_id in sides[0]}
        known = {doc_id: pair for doc_id, pair in judged.items() if None not in pair}
        assert of["rows"] == len(known)
        assert of["right_only_here"] == [doc_id for doc_id, pair in known.items() if pair == [True, False]]
        assert of["right_only_there"] == [doc_id for doc_id, pair in known.items() if pair == [False, True]]
        assert of["accuracy"] == [sum(side) / len(known) for side in zip(*known.values(), strict=True)]
        assert of["interval"][0] <= of["difference"] <= of["interval"][1]
        assert 0 < of["p"] <= 1
    assert "Against the right answers" in specextend("compare", *runs).stdout


def test_texts_are_measured_by_their_words(tmp_path, kept_kernels, local_ray):
    corpus = write_corpus(tmp_path / "a.parquet", [TEXT * 3, TEXT * 5], doc=["a", "b"], said=["x", None])
    own = ("input.id_column=doc", "input.gold={summary: said}", "decoding.max_new_tokens=6")
    in_process("summarize.py", "--config", CONFIG, *on(corpus, tmp_path / "out", *own)).exits(0)
    of = read_json(tmp_path / "out" / "report.json")["gold"]["summary"]
    assert (of["rows"], of["right"], of["f1"], of["kappa"], of["labels"]) == (1, 0, 0.0, None, {})
    plain = on(corpus, tmp_path / "plain", *(own[0], own[2]))
    in_process("summarize.py", "--config", CONFIG, *plain).exits(0)
    assert read_json(tmp_path / "plain" / "report.json")["gold"] == {}


@pytest.mark.parametrize(
    "gold, said",
    [
        ("{kid: by_hand}", "answers have no field 'kid'; did you mean kind?"),
        ("{kind: by_han}", "no column 'by_han' (input.passthrough)"),
        ("{kind: many}", "many is list<"),
    ],
)
def test_right_answers_that_cannot_be_compared_are_refused(call, tmp_path, gold, said):
    corpus = write_corpus(tmp_path / "a.parquet", ["one"], by_hand=["x"], many=[["a"]])
    own = (SCHEMA, "output.column=answer", "input.id_column=null", f"input.gold={gold}")
    assert said in call("--config", CONFIG, *on(corpus, tmp_path / "out", *own)).line()

"""A finished run is decoded again without a draft: what it says, what it refuses, and what its report has of it."""

import json
import shlex
import shutil
from itertools import accumulate, repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.job.conftest import ROOT, TEXT, on, read_json, specextend, write_corpus

TARGET = ROOT / ".models" / "tiny-random" / "target"
ALL = {"documents": 5, "equal": 5, "near_ties": 0, "different": 0, "failed": 0}


@pytest.fixture(scope="module")
def decoded(summarize_here):
    """Run a corpus of six rows, the third of which is an error, with a target of its own; `run` returns the output."""

    def run(folder, *settings):
        shutil.copytree(TARGET, folder / "target", dirs_exist_ok=True)
        texts = [TEXT * number for number in (3, 9, 0, 5, 30, 14)]
        corpus = write_corpus(folder / "in" / "a.parquet", texts, doc=[*"abcdef"])
        own = ("input.id_column=doc", f"target.model={folder / 'target'}", "job.max_error_fraction=0.5", *settings)
        summarize_here(*on(corpus, folder / "out", *own)).exits(0)
        return folder / "out"

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, decoded):
    return decoded(tmp_path_factory.mktemp("finished"))


def audited(*arguments, code=0):
    """What an audit finds."""
    return json.loads(specextend("audit", *arguments, "--json", "-").exits(code).stdout)


def test_a_run_is_equal_and_its_report_has_a_speed_up_from_then_on(finished):
    """Without an audit there is neither: nothing was compared. A table for people, and JSON for programs."""
    assert specextend("report", finished).code == 0
    assert read_json(finished / "report.json")["audit"] is None
    ended = specextend("audit", finished, "--json", finished.parent / "found.json").exits(0)
    assert ended.stderr == ""
    found = read_json(finished.parent / "found.json")
    assert found.items() >= ALL.items()
    assert found["batch_size"] == 3
    assert found["not_equal"] == []
    assert found["speedup"].keys() == {"decode", "end_to_end"}
    for spread in found["speedup"].values():
        assert spread["n"] == 4
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    said = specextend("report", finished).stdout
    assert read_json(finished / "report.json")["audit"] == found
    assert "speed-up of decoding" in said
    assert "speed-up of decoding" in ended.stdout


def test_a_machine_that_slows_down_meanwhile_does_not_favour_a_side(finished, monkeypatch):
    """The sides were decoded one after the other: beside other load the default draft seemed to lose."""

    def measured(slower):
        seconds = accumulate(repeat(1.0), lambda now, _: now + slower ** (now / 1000))
        monkeypatch.setattr("specextend.decoding.sequence.perf_counter", lambda: next(seconds))
        return audited(finished)["speedup"]["end_to_end"]

    steady = measured(1.0)
    assert steady["max"] < 1.01 * steady["min"]
    slowing = measured(1.2)
    assert slowing["max"] > 1.05 * slowing["min"]
    assert slowing["median"] == pytest.approx(steady["median"], rel=0.03)


def test_an_audit_of_no_rows_says_so(finished, decoded, tmp_path):
    """On most nights nothing is new."""
    night = decoded(tmp_path, f"input.except_done_in=['{finished}']")
    assert f"{night} has no rows to compare" in specextend("audit", night).line()


def test_a_sample_is_as_small_as_it_is_asked_for(finished):
    """Long documents take minutes each."""
    found = audited(finished, "--rows", "2", "--seed", "1")
    assert found["equal"] == found["batch_size"] == found["documents"] <= 2


@pytest.mark.parametrize(
    "settings, outcome, code",
    [((), "different", 3), (("target.dtype=bfloat16", "attention.backend=sdpa"), "near tie", 0)],
)
def test_a_text_that_is_not_the_targets_own_is_found(settings, outcome, code, tmp_path, decoded):
    """One that somebody changed stands for a fault in the verification; a token that nearly ties, for rounding."""
    output = decoded(tmp_path, *settings)
    shutil.rmtree(output / "_run" / "parts")  # what is left is read where the change is
    path = output / "summaries" / "part-00000.parquet"
    table = pq.read_table(path)
    texts = [f"No{text[2:]}" if number == 2 else text for number, text in enumerate(table["summary"].to_pylist())]
    place = table.column_names.index("summary")
    pq.write_table(table.set_column(place, table.field(place), pa.array(texts)), path)
    found = audited(output, code=code)
    outcomes = {each["doc_id"]: each["outcome"] for each in found["not_equal"]}
    assert found["failed"] == 0
    assert outcomes["d"] == outcome
    assert {*outcomes.values()} == {outcome}
    assert code == 0 or [*outcomes] == ["d"]


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("_run/manifest.json", Path.unlink, "holds no run"),
        ("../in/a.parquet", lambda path: write_corpus(path, [TEXT], doc=["a"]), "has changed since"),
        (
            "../target/model.safetensors",
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"),
            "has changed since",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(finished, name, change, said):
    """Other documents or weights give other texts."""
    path = finished / name
    before = path.read_bytes()
    change(path)
    ended = specextend("audit", finished)
    path.write_bytes(before)
    assert ended.stdout == ""
    assert said in ended.line()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "target.dtype=bfloat16",
        "prompt.length_policy=parts parts.tokens=64 prompt.max_prompt_tokens=200 decoding.temperature=1",
        "decoding.repetition_penalty=1.3 decoding.temperature=0.7 decoding.top_p=0.9",
        "'output.schema={kind: audit | budget, said: {type: string, maxLength: 9}}' decoding.max_new_tokens=99",
        "'output.schema={kind: audit | budget | other}' decoding.temperature=1.5 output.column=answer",
    ],
)
def test_whatever_was_asked_for_agrees(tmp_path, decoded, settings):
    """In bfloat16 texts may differ where two tokens nearly tie, which is no fault."""
    found = audited(decoded(tmp_path, *shlex.split(settings)))
    assert found["equal"] + found["near_ties"] == 5

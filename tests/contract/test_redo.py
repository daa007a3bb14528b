"""Rows of a finished run that are done again, with what else the command line says."""

import json
import shlex
import signal
from functools import partial

import pytest

from tests.job.conftest import (
    TEXT,
    dying_command,
    end_of,
    on,
    rows,
    specextend,
    write_corpus,
)
from tests.tables import cases

NAMES = [*"abcdef"]
CUT = "finish_reason = 'length'"
OWN = ("input.id_column=doc", "job.max_error_fraction=0.5", "decoding.stop=[Cut, provid]")


@pytest.fixture
def ask(tmp_path, summarize_here):
    """Run the job over six documents, of which the third has no text, into one folder."""
    texts = [TEXT * number for number in (3, 9, 0, 5, 30, 14)]
    corpus = write_corpus(tmp_path / "in" / "a.parquet", texts, doc=NAMES, message=[*range(6)])

    def run(*settings, flags=(), code=0):
        return summarize_here(*on(corpus, tmp_path / "out", *OWN, *settings), *flags).exits(code)

    return run


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def exported(output, *arguments):
    """The newest answers by id, and what the export said."""
    to = output.parent / "all.jsonl"
    said = specextend("export", output, "--to", to, "--replace", *arguments).exits(0).stdout
    return {row["doc_id"]: row for row in map(json.loads, to.read_text().strip().split("\n"))}, said


def files_of(output):
    return {path: path.read_bytes() for path in (output / "summaries").iterdir()}


def test_texts_that_were_cut_are_done_again_with_more_tokens_and_the_newest_answer_counts(ask, output):
    """Both are kept. The same command again has nothing to do, and the next one looks at the newest answers."""
    ask("decoding.max_new_tokens=8")
    before = {row["doc_id"]: row for row in rows(output / "summaries")}
    kept = files_of(output)
    cut = [name for name, row in before.items() if row["finish_reason"] == "length"]
    assert 0 < len(cut) < len(before)
    specextend("export", output, "--sample", "3", "--to", review := output.parent / "review.csv").exits(0)
    more = ("decoding.max_new_tokens=24", "job.workers=1")
    said = ask(*more, flags=("--redo", CUT)).stderr
    assert f"this run is about {len(cut)} of 6 rows: {6 - len(cut)} not to be done again" in said
    assert files_of(output) == kept
    again = {row["doc_id"]: row for row in rows(output / "redone" / "again" / "summaries")}
    assert [*again] == cut
    for name, row in again.items():
        assert row["max_new_tokens"] == 24
        assert row["summary"].startswith(before[name]["summary"])
        assert len(row["summary"]) > len(before[name]["summary"])
    found, said = exported(output)
    assert {name: row["summary"] for name, row in found.items()} == {
        name: row["summary"] for name, row in (before | again).items()
    }
    assert "5 of 6 documents" in said
    assert "decoding.max_new_tokens: 8 there, 24 here" in said
    assert "before rows of this one were done again" in specextend("report", output, "--reviewed", review).line()
    assert f"\nredone/again: complete: {len(cut)} of {len(cut)} rows done" in specextend("status", output).stdout
    assert "complete already" in ask(*more, flags=("--redo", CUT)).stderr
    assert "input.redo: " in ask(*more, flags=("--redo", f"{CUT} AND doc_id != 'a'"), code=5).stderr
    still = [name for name, row in again.items() if row["finish_reason"] == "length"]
    assert still
    ask("decoding.max_new_tokens=30", "decoding.seed=3", flags=("--redo", CUT, "--redo-as", "longer"))
    assert [row["doc_id"] for row in rows(output / "redone" / "longer" / "summaries")] == still
    found, _ = exported(output)
    assert {name for name, row in found.items() if row["max_new_tokens"] == 30} == {*still}
    for arguments in ["--follow", "--to", "live"], ["--format", "openai", "--to", "x"]:
        assert "do not know rows that were done again" in specextend("export", output, *arguments).line()


def test_rows_of_a_rule_or_an_error_are_chosen_too_and_a_failure_hides_no_answer(ask, output):
    """By anything that results say: flags, columns of the input, the class of an error."""
    rules = "output.rules={short: num_output_tokens < 5}"
    ask("decoding.max_new_tokens=8", rules)
    flagged = [row["doc_id"] for row in rows(output / "summaries") if "rule:short" in row["quality_flags"]]
    assert flagged
    condition = "list_contains(quality_flags, 'rule:short') OR error_class = 'EmptyText'"
    short = ("prompt.max_prompt_tokens=40", "prompt.length_policy=error", "job.max_error_fraction=1")
    said = ask(rules, *short, flags=("--redo", condition)).stderr
    assert f"this run is about {len(flagged) + 1} of 6 rows" in said
    again = output / "redone" / "again"
    redone = {row["doc_id"]: row["error_class"] for row in rows(again / "errors")}
    assert redone["c"] == "EmptyText"
    assert "PromptTooLong" in redone.values()
    found, said = exported(output)
    assert len(found) == 5, "each has its older answer"
    assert "with an older answer, because a newer attempt failed" in said
    nothing = ask(rules, flags=("--redo", "error_class = 'WorkerDied'", "--redo-as", "none")).stderr
    assert "this run is about 0 of 6 rows" in nothing


TWO_TASKS = r"""
tasks:
  - name: one
    prompt: {instruction: "{{ document }} One?"}
    output: {column: one}
  - name: form
    prompt: {instruction: "{{ document }}\n\nFill in."}
    output: {column: form, schema: {agency: {type: string, minLength: 20, maxLength: 60}}}
    decoding: {max_new_tokens: LIMIT, stop_repetition: false}
"""


@pytest.mark.slow
def test_an_answer_that_lacks_a_task_hides_no_whole_one(ask, output, tmp_path):
    """Answers of several tasks are done again together. Of a row whose task failed in the newer run, the column of that
    task would be null.
    """

    def tasks(limit):
        (file := tmp_path / f"{limit}.yaml").write_text(TWO_TASKS.replace("LIMIT", str(limit)))
        return ("--config", file)

    always = "job.max_error_fraction=1"
    ask(always, flags=tasks(100))
    before = {row["doc_id"]: row for row in rows(output / "summaries")}
    whole = [name for name, row in before.items() if row["form"]]
    lacking = len(before) - len(whole)
    assert whole
    again = ("decoding.temperature=1", "decoding.seed=5")
    said = ask(always, *again, flags=(*tasks(14), "--redo", "tasks[1].finish_reason IS NOT NULL")).stderr
    assert "5 of 6 rows" in said
    newer = {row["doc_id"]: row for row in rows(output / "redone" / "again" / "summaries")}
    assert {row["form"] for row in newer.values()} == {None}
    assert any(newer[name]["one"] != row["one"] for name, row in before.items())
    found, said = exported(output)
    assert {name: row["form"] for name, row in found.items()} == {name: row["form"] for name, row in before.items()}
    assert f"{len(whole)} with an older answer, because a newer attempt failed" in said
    assert f"{lacking} with a task that failed" in said or not lacking
    said = ask(always, flags=(*tasks(100), "--redo", "error_class IS NOT NULL", "--redo-as", "b")).stderr
    assert f"this run is about {1 + lacking} of 6 rows" in said


@pytest.mark.slow
def test_a_column_of_the_input_that_is_called_as_one_of_ours_has_the_name_of_error_rows(ask, output):
    """It hid why rows had failed, or broke off with a traceback where it was no text."""
    passed = ("input.passthrough=[message]", "decoding.max_new_tokens=2")
    ask(*passed)
    said = ask(*passed, flags=("--redo", "message_ = 4 OR message LIKE '%'")).stderr
    assert "this run is about 2 of 6 rows" in said


REFUSED = cases(r"""
    --redo "fnish_reason = 'x'" -> have no column 'fnish_reason'; did you mean finish_reason?
    --redo 'count(summary) > 1' -> count() is not allowed
    --redo 'summary > 1 + [2]' -> does not fit its columns
    --redo "finish_reason = 'length'" --redo-as ../x -> '../x' becomes a folder
    --redo "finish_reason = 'length'" --set output.column=other
        -> leave output.column, output.schema and tasks unchanged
    --redo "finish_reason = 'length'" --set input.id_column=null -> input.id_column is None, and was 'doc' for
    --redo "finish_reason = 'length'" --set input.text_column=doc -> input.text_column is 'doc', and was 'text' for
    --redo "finish_reason = 'length'" --set 'input.passthrough=[message]'
        -> input.passthrough is ['message'], and was [] for
    --redo-as large -> --redo-as needs --redo
    --set 'input.redo=a > 1' --output nowhere
        -> input.redo chooses from the results of a run; give it with --redo
""")


def test_what_cannot_be_done_again_is_refused_in_one_line(ask, output):
    ask("decoding.max_new_tokens=2")
    for arguments, said in REFUSED:
        assert said in ask(flags=shlex.split(arguments), code=2).line()
    assert not (output / "redone").exists()


def test_rows_of_a_run_that_has_not_ended_or_whose_input_has_changed_are_not_done_again(ask, output, tmp_path):
    """Rows would be missing, or another document would get the id of the first."""
    assert "holds no run" in ask(flags=("--redo", CUT), code=2).stderr
    ask("decoding.max_new_tokens=2")
    path = output / "errors" / "part-00000.parquet"
    kept = path.read_bytes()
    path.unlink()
    assert "holds no run that has ended" in ask(flags=("--redo", CUT), code=2).stderr
    path.write_bytes(kept)
    (tmp_path / "in" / "a.parquet").rename(tmp_path / "in" / "b.parquet")
    assert "a.parquet is gone since" in ask(flags=("--input", tmp_path / "in", "--redo", CUT), code=2).line()
    write_corpus(tmp_path / "in" / "a.parquet", [TEXT] * 6, doc=NAMES)
    assert "a.parquet has changed since" in ask(flags=("--redo", CUT), code=2).line()


@pytest.mark.slow
def test_one_that_was_killed_goes_on_with_its_rows_and_until_then_the_older_answers_count(ask, output, start, tmp_path):
    """The rows are chosen once: what has become of them meanwhile changes nothing."""
    ask("decoding.max_new_tokens=8")
    more = ("decoding.max_new_tokens=24", "job.commit_every_s=0.01")
    given = [*on(tmp_path / "in", output, *OWN, *more), "--redo", CUT]
    end_of(start(*given, command=partial(dying_command, "SIGKILL", 1)), -signal.SIGKILL)
    assert "redone/again: stopped, run again to resume" in specextend("status", output).stdout
    found, said = exported(output)
    assert "redone/again has not ended, and these are the answers before it" in said
    assert {row["max_new_tokens"] for row in found.values()} == {8}
    parts = {*(output / "redone" / "again" / "_run" / "parts").iterdir()}
    ask(*more, flags=("--redo", CUT))
    assert parts < {*(output / "redone" / "again" / "_run" / "parts").iterdir()}
    found, _ = exported(output)
    assert {row["max_new_tokens"] for row in found.values() if row["finish_reason"] == "length"} == {24}

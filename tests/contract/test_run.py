"""`jobs/summarize.py` end to end: real process, real Ray, real engine, a pair of random models."""

import json
import re
import shutil
import signal
from collections import Counter
from functools import partial

import pyarrow.parquet as pq
import pytest

from tests.contract.columns import ERRORS, SUMMARIES, assert_has
from tests.job.conftest import (
    CONFIG,
    ROOT,
    TEXT,
    dying_command,
    end_of,
    long_corpus,
    on,
    parts,
    read_json,
    rows,
    sets,
    summarize,
    wait_for,
    write_corpus,
)

DEMO = ["--set", "input.passthrough=[length_bucket]", "--set", "input.reference_column=reference_summary"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory, kept_kernels):
    """The demo's documents through the tiny pair; several tests look at what came out."""
    output = tmp_path_factory.mktemp("demo") / "out"
    return summarize("--output", output, *DEMO).exits(0), output


@pytest.fixture(scope="module")
def output(demo):
    return demo[1]


@pytest.fixture(scope="module")
def done(output):
    return rows(output / "summaries")


@pytest.fixture
def copy(output, tmp_path):
    """A folder of the same run that may be written to."""
    return shutil.copytree(output, tmp_path / "copy")


def test_a_run_gives_every_document_its_summary(output, done):
    """The job's one promise, with the real engine."""
    documents = rows(ROOT / "examples" / "demo")
    assert [row["doc_id"] for row in done] == [row["doc_id"] for row in documents]
    assert [row["length_bucket"] for row in done] == [row["length_bucket"] for row in documents]
    assert read_json(output / "_SUCCESS") == {"rows": 8, "done": 8, "errors": 0}
    for row in done:
        assert row["num_output_tokens"] == 24 or row["finish_reason"] == "stop"
        assert sum(row["acceptance_histogram"]) == row["num_spec_steps"] > 0
        assert row["num_first_accepted"] <= row["num_network_steps"] <= row["num_spec_steps"]
        assert row["total_s"] == pytest.approx(row["ttft_s"] + row["decode_s"])
        assert row["attempts"] == row["num_requests"] == 1
        assert row["mean_acceptance_length"] == 1 + row["num_accepted_tokens"] / row["num_spec_steps"]
        assert row["draft_acceptance_rate"] == row["num_accepted_tokens"] / row["num_draft_tokens"]
        accepted = sum(number * steps for number, steps in enumerate(row["acceptance_histogram"]))
        assert accepted == row["num_accepted_tokens"]
        assert (row["num_dropped_tokens"], row["length_policy"]) in ((0, None), (0, "middle")) or row["coverage"] < 1
        assert row["output_tokens_per_s"] == pytest.approx(row["num_output_tokens"] / row["total_s"])
        assert len(row["content_sha256"]) == 64
        assert 0 <= row["rouge2"] <= row["rouge1"] <= 1
        assert row["copied_fraction"] is None or 0 <= row["copied_fraction"] <= 1
        assert ("truncated" in row["quality_flags"]) == (row["finish_reason"] == "length")
    flags = Counter(flag for row in done for flag in row["quality_flags"])
    assert read_json(output / "report.json")["quality_flags"] == flags


def test_the_columns_have_their_names_and_types(output):
    """Other programs read them by name, the input's columns behind ours; a file names its run, models and versions."""
    schema = pq.read_schema(output / "summaries" / "part-00000.parquet")
    [source] = (ROOT / "examples" / "demo").glob("*.parquet")
    assert_has(schema, SUMMARIES)
    assert schema.names[:3] == ["doc_id", "summary", "finish_reason"]
    assert schema.field(len(schema) - 1).equals(pq.read_schema(source).field("length_bucket"))
    origin = json.loads(schema.metadata[b"specextend"])
    assert origin["fingerprint"] == read_json(output / "_run" / "manifest.json")["fingerprint"]
    assert {len(model["sha256"]) for model in origin["models"].values()} == {64}
    [start] = origin["starts"]
    assert {"python", "specextend", "torch", "transformers", "ray", "pyarrow"} <= start["versions"].keys()


def test_a_run_leaves_what_it_promises_and_nothing_else(output):
    """Other programs read this folder: its layout is a contract."""
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    [run_id] = {re.fullmatch(r"part-([0-9a-f]{8})-\d{6}\.parquet", path.name)[1] for path in parts(output)}
    commits = {f"_run/parts/{path.name}" for path in parts(output)}
    records = {"_run/manifest.json", f"_run/attempts/{run_id}.json"}
    results = {"_SUCCESS", "report.json", "report.html", "summaries/part-00000.parquet"}
    assert names - commits == results | records
    record = read_json(output / "_run" / "attempts" / f"{run_id}.json")
    assert (record["run_id"], record["exit_code"]) == (run_id, 0)
    assert record["begin"] < record["end"]
    assert {"versions", "git_commit", "models", "job", "workers", "memory"} <= record.keys()


def test_a_run_says_which_kernels_its_workers_tried(output):
    """In the start's record, in the report and in each file: with other kernels figures and last bits are others."""
    [path] = (output / "_run" / "attempts").iterdir()
    [worker] = read_json(path)["workers"]
    assert {kernel["name"] for kernel in worker["kernels"]} == {"compiled attention", "compiled layers"}
    reported = read_json(output / "report.json")["kernels"]
    assert sum(kernel["workers"] for kernel in reported) == len(worker["kernels"])
    schema = pq.read_schema(output / "summaries" / "part-00000.parquet")
    [start] = json.loads(schema.metadata[b"specextend"])["starts"]
    assert start["kernels"] == reported


def test_a_run_says_what_memory_it_planned_and_used(demo):
    """One line after the first document, and both figures in the report: a plan that is wrong is seen."""
    ended, output = demo
    [start] = read_json(output / "report.json")["starts"]
    planned = start["memory_gib"]["planned"]
    used = start["memory_gib"]["used"]
    assert used / 2 < planned < 2 * used  # on a CPU all of the process: it was planned without its libraries
    [(plan, use)] = re.findall(r"memory: planned ([\d.]+) GiB, used ([\d.]+) GiB at most", ended.stderr)
    assert float(plan) == pytest.approx(planned, abs=0.06)
    assert 0 < float(use) <= used + 0.06


def test_a_run_says_what_it_did(demo, done):
    """Progress on stderr without escape codes; on stdout a few lines that fit on a screen, the paths and a summary.

    And three texts drawn at random: it called one the best, which said something that its source did not.
    """
    ended, output = demo
    assert "8 rows: 8 done, 0 failed" in ended.stderr
    assert "\x1b" not in ended.stderr + ended.stdout
    for said in ("rows done", "decode tokens/s", f"{output}/summaries", f"{output}/report.html"):
        assert said in ended.stdout
    outcome, _, shown = ended.stdout.partition("\n3 of 8 texts, drawn at random:\n")
    assert len(outcome.splitlines()) <= 25
    assert sum(bool(re.search(rf"\n{re.escape(row['doc_id'])}( \(.*\))?:\n.", shown)) for row in done) == 3
    assert "best" not in ended.stdout


def test_a_plan_is_close_to_what_a_run_takes(plan, done, tmp_path):
    """It orders the work and feeds the time left; a sample makes it fit language and tokenizer."""
    given = ["--config", CONFIG, *DEMO, "--output", tmp_path / "out", "--json", tmp_path / "plan.json"]
    plan(*given).exits(0)
    taken = sum(row["num_prompt_tokens"] for row in done)
    assert read_json(tmp_path / "plan.json")["prompt_tokens"] == pytest.approx(taken, rel=0.1)


def test_somebody_elses_file_among_the_summaries_is_not_read(copy, call):
    """The run was a success; a note of somebody's must not turn that into a traceback."""
    write_corpus(copy / "summaries" / "a-note.parquet", ["mine"])
    assert "texts, drawn at random" in call("--config", CONFIG, "--output", copy, *DEMO).exits(0).stdout


def test_a_folder_of_another_run_is_refused_with_the_difference(output, call):
    """Another tree is another run, more workers are not."""
    others = sets("tree.nodes=5", "job.workers=2")
    said = call("--config", CONFIG, "--output", output, *others).exits(5).stderr
    assert "belongs to another run; choose another output.path, or undo these differences:" in said
    assert "tree.nodes: 8 there, 5 here" in said
    assert "input.passthrough" in said
    assert "workers" not in said


def test_bad_rows_become_dead_letters_and_the_exit_code_says_so(tmp_path, summarize_here):
    """Exit 3: finished, but look at errors/."""
    texts = [TEXT * 3, None, "   ", TEXT * 2000]
    corpus = write_corpus(tmp_path / "in" / "a.parquet", texts, length=[4] * 4, doc=[3, 1, 4, 15])
    changes = ["input.id_column=doc", "prompt.length_policy=error", "input.options_column=length"]
    summarize_here(*on(corpus, tmp_path / "out", *changes, "input.passthrough=[length]")).exits(3)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    [done] = rows(tmp_path / "out" / "summaries")
    assert (done["doc_id"], done["num_output_tokens"]) == ("3", 4)
    assert_has(pq.read_schema(tmp_path / "out" / "errors" / "part-00000.parquet"), ERRORS)
    errors = rows(tmp_path / "out" / "errors")
    assert [(row["doc_id"], row["error_class"], row["stage"], row["key"]["row"]) for row in errors] == [
        ("1", "NullText", "read", 1),
        ("4", "EmptyText", "read", 2),
        ("15", "PromptTooLong", "prompt", 3),
    ]
    for row in errors:
        assert (row["attempts"], row["retryable"]) == (1, False)
        assert row["length"] == 4, "passthrough columns tell which rows failed"


@pytest.mark.slow
def test_two_workers_give_what_one_gives(done, tmp_path, summarize_here):
    """Who does what, and beside whom, changes no summary."""
    others = sets("job.workers=2", "decoding.max_batch_size=1")
    summarize_here("--output", tmp_path / "two", *others).exits(0)
    found = rows(tmp_path / "two" / "summaries")
    assert [row["summary"] for row in found] == [row["summary"] for row in done]


@pytest.mark.slow
def test_a_run_that_is_ended_by_force_says_so_and_holds_no_folder(tmp_path, start):
    """Who reads the log in the morning, or the folder, must not have to guess."""
    arguments = long_corpus(tmp_path)
    output = tmp_path / "out"
    process = start(*arguments, "--output", output, command=partial(dying_command, "HANG", 1))
    wait_for(lambda: parts(output) or process.poll() is not None, "part")
    process.send_signal(signal.SIGTERM)
    assert "ended by force; committed work is kept" in end_of(process, 75)
    [attempt] = (output / "_run" / "attempts").iterdir()
    assert read_json(attempt)["exit_code"] == 75
    assert not (output / "_run" / "lock").exists()


@pytest.mark.slow
def test_a_job_deadline_ends_a_run_as_an_interrupt_does(tmp_path):
    """A nightly window: exit 75, run again tomorrow."""
    arguments = [*long_corpus(tmp_path, 5000), "--set", "job.deadline_s=15"]
    ended = summarize(*arguments, "--output", tmp_path / "out").exits(75)
    assert "job.deadline_s has passed" in ended.stderr
    assert not (tmp_path / "out" / "_SUCCESS").exists()

"""`jobs/summarize.py` end to end: real process, real Ray, real engine, a pair of random models."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from specextend import RunConfig, Summarizer, load_engine
from tests.contract.columns import ERRORS, SUMMARIES, assert_has
from tests.contract.conftest import settings
from tests.job.conftest import (
    CONFIG,
    LONGEST_S,
    ROOT,
    TEXT,
    Ended,
    dying_command,
    listening,
    long_corpus,
    long_texts,
    parts,
    pausing_command,
    rows,
    summarize,
    wait_for,
    wait_for_pause,
    write_corpus,
)
from tests.tiny_models import write_looping_pair

DEMO = ["--set", "input.passthrough=[length_bucket]", "--set", "input.reference_column=reference_summary"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, kept_kernels: None) -> tuple[Ended, Path]:
    """The demo's documents through the tiny pair; several tests look at what came out."""
    output = tmp_path_factory.mktemp("demo") / "out"
    return summarize("--output", str(output), *DEMO), output


def test_a_run_gives_every_document_its_summary(demo: tuple[Ended, Path]):
    """The job's one promise, with the real engine."""
    ended, output = demo
    assert ended.code == 0, ended.stderr
    [source] = sorted((ROOT / "examples" / "demo").glob("*.parquet"))
    documents = pq.read_table(source).to_pylist()
    done = rows(output / "summaries")
    assert [row["doc_id"] for row in done] == [row["doc_id"] for row in documents]
    assert [row["length_bucket"] for row in done] == [row["length_bucket"] for row in documents]
    assert json.loads((output / "_SUCCESS").read_text()) == {"rows": 8, "done": 8, "errors": 0}
    for row in done:
        assert row["num_output_tokens"] == 24 or row["finish_reason"] == "stop"
        assert sum(row["acceptance_histogram"]) == row["num_spec_steps"] > 0
        assert row["total_s"] == pytest.approx(row["ttft_s"] + row["decode_s"])
        assert row["attempts"] == 1


def test_every_summary_is_compared_with_its_document_and_its_reference(demo: tuple[Ended, Path]):
    """The flags are in the report by name."""
    _, output = demo
    flags: Counter[str] = Counter()
    for row in rows(output / "summaries"):
        assert 0 <= row["rouge2"] <= row["rouge1"] <= 1
        assert row["copied_fraction"] is None or 0 <= row["copied_fraction"] <= 1
        assert ("truncated" in row["quality_flags"]) == (row["finish_reason"] == "length")
        flags.update(row["quality_flags"])
    assert json.loads((output / "report.json").read_text())["quality_flags"] == flags


def test_the_columns_have_their_names_and_types(demo: tuple[Ended, Path]):
    """Other programs read them by name; the input's columns come behind ours, as they were."""
    schema = pq.read_schema(demo[1] / "summaries" / "part-00000.parquet")
    [source] = sorted((ROOT / "examples" / "demo").glob("*.parquet"))
    assert_has(schema, SUMMARIES)
    assert schema.names[:3] == ["doc_id", "summary", "finish_reason"]
    assert schema.field(len(schema) - 1).equals(pq.read_schema(source).field("length_bucket"))


def test_a_file_of_summaries_says_where_it_comes_from(demo: tuple[Ended, Path]):
    """Copied elsewhere it still names the run, the models and the versions."""
    metadata = pq.read_schema(demo[1] / "summaries" / "part-00000.parquet").metadata
    origin = json.loads(metadata[b"specextend"])
    manifest = json.loads((demo[1] / "_run" / "manifest.json").read_text())
    assert origin["fingerprint"] == manifest["fingerprint"]
    assert {len(model["sha256"]) for model in origin["models"].values()} == {64}
    [start] = origin["starts"]
    assert {"python", "specextend", "torch", "transformers", "ray", "pyarrow"} <= start["versions"].keys()


def test_counts_and_seconds_of_a_summary_add_up(demo: tuple[Ended, Path]):
    """Sums over rows are the work of the run."""
    for row in rows(demo[1] / "summaries"):
        assert row["mean_acceptance_length"] == 1 + row["num_accepted_tokens"] / row["num_spec_steps"]
        assert row["draft_acceptance_rate"] == row["num_accepted_tokens"] / row["num_draft_tokens"]
        accepted = sum(number * steps for number, steps in enumerate(row["acceptance_histogram"]))
        assert accepted == row["num_accepted_tokens"]
        assert row["num_prompt_tokens"] > 500
        assert (row["num_dropped_tokens"], row["length_policy"]) in ((0, None), (0, "middle")) or row["coverage"] < 1
        assert row["num_requests"] == 1
        assert row["output_tokens_per_s"] == pytest.approx(row["num_output_tokens"] / row["total_s"])
        phases = ("prefill_s", "draft_prefill_s", "draft_s", "verify_s", "retrieval_s", "other_s")
        assert all(row[name] >= 0 for name in phases)
        assert len(row["content_sha256"]) == 64


def test_a_run_leaves_what_it_promises_and_nothing_else(demo: tuple[Ended, Path]):
    """Other programs read this folder: its layout is a contract."""
    _, output = demo
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    run_ids = {re.fullmatch(r"part-([0-9a-f]{8})-\d{6}\.parquet", path.name)[1] for path in parts(output)}
    assert len(run_ids) == 1
    results = {name for name in names if not name.startswith("_run/")}
    assert results == {"_SUCCESS", "report.json", "report.html", "summaries/part-00000.parquet"}
    records = {"_run/manifest.json", *(f"_run/attempts/{run_id}.json" for run_id in run_ids)}
    assert names - results >= records
    assert "_run/lock" not in names
    assert not any(name.endswith(".tmp") for name in names)


def test_the_record_of_a_start_says_who_did_what_and_how_it_ended(demo: tuple[Ended, Path]):
    """Months later somebody asks which code and which models made a file."""
    [path] = (demo[1] / "_run" / "attempts").iterdir()
    record = json.loads(path.read_text())
    assert record["run_id"] == path.stem
    assert (record["exit_code"], record["begin"] < record["end"]) == (0, True)
    assert {"versions", "git_commit", "models", "job", "workers", "memory"} <= record.keys()


def test_a_run_says_what_it_did(demo: tuple[Ended, Path]):
    """Progress on stderr without escape codes; on stdout a few lines that fit on a screen, the paths and a summary."""
    ended, output = demo
    assert "8 rows: 8 done, 0 failed" in ended.stderr
    assert "\x1b" not in ended.stderr + ended.stdout
    for said in (
        "rows done",
        "mean acceptance length",
        "decode tokens/s",
        f"{output}/summaries",
        f"{output}/report.html",
    ):
        assert said in ended.stdout
    outcome, _, _ = ended.stdout.partition(f"Summary of {rows(output / 'summaries')[0]['doc_id']}:")
    assert len(outcome.splitlines()) <= 25
    assert len(outcome) < len(ended.stdout)


def test_a_complete_run_is_left_alone(demo: tuple[Ended, Path], call):
    """Run again by a scheduler that retries: no model, no Ray, no file touched."""
    _, output = demo
    before = {path: path.stat().st_mtime_ns for path in (output / "summaries").iterdir()}
    ended = call("--config", str(CONFIG), "--output", str(output), *DEMO)
    assert ended.code == 0
    assert "complete already" in ended.stderr
    assert {path: path.stat().st_mtime_ns for path in (output / "summaries").iterdir()} == before


def test_somebody_elses_file_among_the_summaries_is_not_read(demo: tuple[Ended, Path], tmp_path: Path, call):
    """The run was a success; a note of somebody's must not turn that into a traceback."""
    output = tmp_path / "copy"
    shutil.copytree(demo[1], output)
    pq.write_table(pa.table({"text": ["mine"]}), output / "summaries" / "a-note.parquet")
    ended = call("--config", str(CONFIG), "--output", str(output), *DEMO)
    assert ended.code == 0, ended.stderr
    assert "Summary of " in ended.stdout


def test_a_folder_of_another_run_is_refused_with_the_difference(demo: tuple[Ended, Path], call):
    """Another tree is another run, more workers are not."""
    _, output = demo
    settings = ["--set", "tree.nodes=5", "--set", "job.workers=2"]
    ended = call("--config", str(CONFIG), "--output", str(output), *settings)
    assert ended.code == 5
    assert "tree.nodes: 8 there, 5 here" in ended.stderr
    assert "input.passthrough" in ended.stderr
    assert "workers" not in ended.stderr


def test_bad_rows_become_dead_letters_and_the_exit_code_says_so(tmp_path: Path, summarize_here):
    """Exit 3: finished, but look at errors/."""
    corpus = write_corpus(
        tmp_path / "in" / "a.parquet", [TEXT * 3, None, "   ", TEXT * 2000], length=[4, 4, 4, 4], doc=[3, 1, 4, 1_5]
    )
    arguments = ["--input", str(corpus), "--output", str(tmp_path / "out"), "--set", "input.id_column=doc"]
    arguments += ["--set", "prompt.length_policy=error", "--set", "input.max_new_tokens_column=length"]
    ended = summarize_here(*arguments)
    assert ended.code == 3, ended.stderr
    [done] = rows(tmp_path / "out" / "summaries")
    assert (done["doc_id"], done["num_output_tokens"]) == ("3", 4)
    errors = {row["doc_id"]: row for row in rows(tmp_path / "out" / "errors")}
    assert {name: row["error_class"] for name, row in errors.items()} == {
        "1": "NullText",
        "4": "EmptyText",
        "15": "PromptTooLong",
    }
    assert all(row["attempts"] == 1 and not row["retryable"] for row in errors.values())
    assert errors["15"]["stage"] == "prompt"
    assert_has(pq.read_schema(tmp_path / "out" / "errors" / "part-00000.parquet"), ERRORS)
    assert errors["1"]["key"] == {"file": 0, "row": 1}
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    allowed = summarize_here(*arguments, "--set", "job.max_error_fraction=0.75")
    assert allowed.code == 0, allowed.stderr
    assert json.loads((tmp_path / "out" / "_SUCCESS").read_text()) == {"rows": 4, "done": 1, "errors": 3}


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """What the engine alone makes of that corpus: no Ray, nothing happens to it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits, and on a busy machine for long
    config = RunConfig.load(CONFIG, ["decoding.max_new_tokens=64", "input.id_column=id", "output.path=unused"])
    documents = pa.table({"id": [str(row) for row in range(40)], "text": long_texts()})
    texts = Summarizer(config, load_engine)(documents)["summary"].to_pylist()
    torch.set_num_threads(num_threads)
    return texts


def summaries(output: Path) -> list[str]:
    """In input order, one of each document."""
    found = rows(output / "summaries")
    assert [row["doc_id"] for row in found] == [f"in.parquet:{row}" for row in range(40)]
    return [row["summary"] for row in found]


@pytest.mark.slow
def test_a_stopped_run_is_resumed_and_ends_as_if_it_had_not_been_stopped(tmp_path: Path, start, alone):
    """SIGTERM, exit 75 within the grace, finished rows kept; the resumed summaries equal an undisturbed run's."""
    arguments, output = long_corpus(tmp_path), tmp_path / "out"
    process = start(*arguments, "--output", str(output), command=pausing_command)
    wait_for_pause(process)
    holder = json.loads((output / "_run" / "lock").read_text())
    assert holder["pid"] == process.pid
    assert listening(psutil.Process(process.pid)) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 75, said
    kept = {path: path.read_bytes() for path in parts(output)}
    assert 0 < len(kept) < 40
    assert not (output / "_run" / "lock").exists()
    assert not (output / "summaries").exists()
    assert summarize(*arguments, "--output", str(output), "--set", "decoding.max_batch_size=2").code == 0
    assert {path: path.read_bytes() for path in parts(output)}.items() >= kept.items()
    assert summaries(output) == alone


@pytest.mark.slow
def test_documents_that_end_in_a_loop_are_counted_and_finish_for_that_reason(tmp_path: Path, summarize_here):
    """From the configuration to the row and the report; the same run without it is another run."""
    pair = write_looping_pair(tmp_path)
    corpus = write_corpus(tmp_path / "in.parquet", ["t5 t6 t7", "t8 t9 t10"])
    places = ["--input", str(corpus), "--output", str(tmp_path / "out"), "--set", "input.id_column=null"]
    models = settings(target={"model": pair.target}, draft={"model": pair.drafts["good"]})
    arguments = [*places, *models, "--set", "decoding.max_new_tokens=150"]
    ended = summarize_here(*arguments, "--set", "decoding.stop_repetition=true")
    assert ended.code == 0, ended.stderr
    for row in rows(tmp_path / "out" / "summaries"):
        assert (row["finish_reason"], row["quality_flags"][0]) == ("repetition", "repeated")
        assert row["num_output_tokens"] < 150
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["finish_reasons"] == {"repetition": 2}
    assert summarize_here(*arguments).code == 5


@pytest.mark.slow
def test_a_run_that_is_ended_by_force_says_so_and_holds_no_folder(tmp_path: Path, start):
    """Who reads the log in the morning, or the folder, must not have to guess."""
    arguments, output = long_corpus(tmp_path), tmp_path / "out"
    hanging_command = partial(dying_command, "HANG", 1)
    process = start(*arguments, "--output", str(output), command=hanging_command)
    wait_for(lambda: parts(output) or process.poll() is not None, "part")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 75
    assert "ended by force; what was committed is there" in said
    [attempt] = (output / "_run" / "attempts").iterdir()
    assert json.loads(attempt.read_text())["exit_code"] == 75
    assert not (output / "_run" / "lock").exists()


@pytest.mark.slow
def test_a_killed_driver_is_resumed_without_a_double(tmp_path: Path, start, alone):
    """Kill -9 leaves a lock, half a batch and orphans: the next start clears the lock and does the rest."""
    arguments, output = long_corpus(tmp_path), tmp_path / "out"
    process = start(*arguments, "--output", str(output), command=partial(dying_command, "SIGSTOP", 3))
    wait_for_pause(process)
    process.kill()
    process.wait(LONGEST_S)
    assert (output / "_run" / "lock").exists()
    ended = summarize(*arguments, "--output", str(output))
    assert ended.code == 0, ended.stderr
    assert summaries(output) == alone


@pytest.mark.slow
def test_a_job_deadline_ends_a_run_as_an_interrupt_does(tmp_path: Path, start):
    """A nightly window: exit 75, run again tomorrow."""
    arguments, output = long_corpus(tmp_path, 5000), tmp_path / "out"
    ended = summarize(*arguments, "--output", str(output), "--set", "job.deadline_s=15")
    assert ended.code == 75, ended.stderr
    assert "job.deadline_s has passed" in ended.stderr
    assert not (output / "_SUCCESS").exists()


@pytest.mark.slow
def test_two_workers_give_what_one_gives(demo: tuple[Ended, Path], tmp_path: Path, summarize_here):
    """Who does what, and beside whom, changes no summary."""
    _, output = demo
    others = settings(job={"workers": 2}, decoding={"max_batch_size": 1})
    ended = summarize_here("--output", str(tmp_path / "two"), *others)
    assert ended.code == 0, ended.stderr
    pairs = zip(rows(tmp_path / "two" / "summaries"), rows(output / "summaries"), strict=True)
    assert all(mine["summary"] == theirs["summary"] for mine, theirs in pairs)

"""What can be asked of, and done with, the folder of a run that has ended: by its status, reports and further starts.

Nothing is left to decode, so no Ray may start.
"""

import csv
import json
import shutil
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from tests.job.conftest import (
    CONFIG,
    TEXT,
    environment,
    on,
    read_json,
    rows,
    specextend,
    write_corpus,
)

REPORT = """schema_version as_of output run selection rows wall_clock starts tokens acceptance speed time retrieval
    retries per_document buckets finish_reasons quality_flags flagged workers slowest errors drafting audit timeline
    advice gold"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, summarize_here):
    """A run of five rows, two of which are errors; nobody writes into its folder."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder / "in" / "a.parquet", [TEXT * 3, None, TEXT * 9, " ", TEXT * 30], doc=[*"abcde"])
    summarize_here(*arguments(folder)).exits(3)
    return folder


def arguments(folder, *more):
    """The command line of the run."""
    return [*on(folder / "in", folder / "out", "input.id_column=doc"), *more]


@pytest.fixture
def folder(finished, tmp_path):
    """The same run in a folder that may be written to. Its input stays where it was."""
    shutil.copytree(finished / "out", tmp_path / "out")
    (tmp_path / "in").symlink_to(finished / "in")
    return tmp_path


@pytest.fixture
def again(call, folder):
    """Start the run once more, with other arguments behind its own."""
    return lambda *more: call("--config", CONFIG, *arguments(folder, *more))


def stamps(folder):
    """When each file of the results and each start's record was written."""
    names = ("summaries", "errors", "_run/parts", "_run/attempts")
    return {str(path): path.stat().st_mtime_ns for name in names for path in (folder / "out" / name).iterdir()}


def test_the_status_says_how_the_run_ended(finished):
    """On any machine: rows, errors by class, every start."""
    ended = specextend("status", finished / "out").exits(0)
    assert ended.stderr == ""
    first, *lines = ended.stdout.splitlines()
    assert first == "finished with errors: 3 of 5 rows done, 2 failed, 0 left"
    assert {"errors: 1 NullText", "errors: 1 EmptyText"} <= set(lines)
    assert [line.endswith("exit 3") for line in lines if line.startswith("start ")] == [True]


def test_the_status_of_a_run_that_somebody_drives_names_the_driver(folder):
    """Who must be told to stop, and where."""
    holder = {"run_id": "feedbeef", "host": "another-host", "pid": 1, "heartbeat": time.time(), "pid_namespace": ""}
    (folder / "out" / "_run" / "lock").write_text(json.dumps(holder))
    said = specextend("status", folder / "out").stdout
    assert said.startswith("running: 3 of 5 rows done")
    assert "driver: run feedbeef (process 1 on another-host), last heartbeat " in said


@pytest.mark.parametrize("flags", [(), ("--retry-errors",)])
def test_a_run_that_is_finished_with_errors_ends_the_same_when_it_is_started_again(again, folder, flags):
    """Nothing is decoded or written, the exit code still says that rows failed, and the report has no empty start."""
    before = stamps(folder)
    ended = again(*flags).exits(3)
    assert "complete already, 5 rows: 3 done, 2 failed\nexit 3, no _SUCCESS" in ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.endswith(
        "allows 0 failed rows; see errors/, --retry-errors does none of them again, --retry-errors=all does"
    )
    assert stamps(folder) == before
    assert not (folder / "out" / "_SUCCESS").exists()


def test_a_retry_says_which_error_rows_it_leaves_out(again, plan, finished):
    """A thousand null texts would be planned, read and refused again with every outage that is made good."""
    left_out = "not tried again: 2 error rows with `retryable` false"
    for flags, num_to_do, is_said in ((), 0, False), (["--retry-errors"], 0, True), (["--retry-errors=all"], 2, False):
        said = plan("--config", CONFIG, *arguments(finished, *flags)).exits(0).stdout
        assert said.startswith(f"{num_to_do} of 5 rows to do")
        assert (left_out in said) == is_said
    again("--retry-errors=some").exits(2)


def test_a_retry_in_vain_leaves_what_is_done_and_counts_the_attempts(again, folder):
    """Only a new part says that they were tried. A row that says 1 after the tenth retry hides what it has cost."""
    before = stamps(folder)
    for attempts in 2, 3:
        again("--retry-errors=all").exits(3)
        assert [row["attempts"] for row in rows(folder / "out" / "errors")] == [attempts] * 2
    kept = {name: stamp for name, stamp in before.items() if "errors" not in name}
    assert stamps(folder).items() >= kept.items()
    assert sum("/parts/" in name for name in stamps(folder).keys() - before.keys()) == 2


def test_a_retry_of_nothing_is_refused(call, plan, folder):
    """With a mistyped output folder it did every row again, for a night."""
    nowhere = ["--config", CONFIG, *arguments(folder, "--output", folder / "nowhere")]
    for command, flag in (call, "--retry-errors"), (plan, "--retry-errors=all"):
        assert "--retry-errors: " in command(*nowhere, flag).line()
        assert not (folder / "nowhere").exists()


def test_errors_that_are_allowed_make_the_run_a_success_which_is_not_started_again(again, folder):
    """The limit may be set when the errors have been looked at. An hourly cron job filled the report with starts that
    did nothing.
    """
    allowed = ("--set", "job.max_error_fraction=0.5")
    again(*allowed).exits(0)
    assert read_json(folder / "out" / "_SUCCESS") == {"rows": 5, "done": 3, "errors": 2}
    assert specextend("status", folder / "out").stdout.startswith("complete: 3 of 5 rows done, 2 failed")
    before = stamps(folder)
    assert again(*allowed).exits(0).stderr == "complete already, 5 rows: 3 done, 2 failed\n"
    assert stamps(folder) == before


@pytest.mark.parametrize("name", ["summaries", "errors", "report.json", "report.html"])
def test_results_that_somebody_deleted_are_written_again(again, finished, folder, name):
    """The commits hold all that is needed; `_SUCCESS` would be a lie beside half of the results."""
    path = folder / "out" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert again().code == 3
    assert path.exists()
    if path.is_dir():
        assert rows(path) == rows(finished / "out" / name)


def test_a_file_among_the_results_that_is_not_of_the_run_is_named(again, folder, tmp_path):
    """Whoever reads `summaries/` counts its rows in; an export said to run again, and the run that it was complete."""
    summaries = folder / "out" / "summaries"
    shutil.copy(summaries / "part-00000.parquet", summaries / "part-00099.parquet")
    for line in again().line(), specextend("export", folder / "out", "--to", tmp_path / "a.csv").line():
        assert "summaries/part-00099.parquet is not of this run, which has 1 input file: move it out of" in line


def test_a_run_whose_input_has_grown_says_how_to_do_what_is_new(again, plan, folder, finished):
    """Its night is over: nothing need be restored, and nothing done twice."""
    (folder / "in").unlink()
    shutil.copytree(finished / "in", folder / "in")
    write_corpus(folder / "in" / "b.parquet", [TEXT, TEXT * 2], doc=["f", "g"])
    ended = again().exits(5)
    assert f"choose another output.path and input.except_done_in=['{folder / 'out'}']" in ended.stderr
    new = ["--output", folder / "new", "--set", f"input.except_done_in=['{folder / 'out'}']"]
    said = plan("--config", CONFIG, *arguments(folder, *new)).exits(0).stdout
    assert "\n2 of 2 rows to do" in said, "the empty texts are still empty"


def test_a_night_on_which_only_known_failures_are_left_is_a_good_one(again, folder):
    """Bad rows counted as new and loaded the models each night, and the end named a folder that is not there."""
    (folder / "corpus").mkdir()
    table = pq.read_table(folder / "in" / "a.parquet")
    pq.write_table(table, folder / "corpus" / "a.parquet", row_group_size=2)
    night = on(folder / "corpus", folder / "night", f"input.except_done_in=['{folder / 'out'}']")
    ended = again(*night).exits(0)
    said = "3 done before and unchanged, 2 failed before and would again, 0 changed, 0 new"
    assert ended.stderr.startswith(f"this run is about 0 of 5 rows: {said}")
    assert "summaries: none, because nothing was left to do\n" in ended.stdout
    assert not (folder / "night" / "summaries").exists()
    report = read_json(folder / "night" / "report.json")
    counts = {"input": 5, "unchanged": 3, "failed_before": 2, "changed": 0, "new": 0, "selected": 0}
    assert report["selection"] == counts
    hourly = again(*night).exits(0)
    assert hourly.stderr.startswith("complete already, 0 rows")


def test_rows_with_bad_ids_are_refused_until_a_filter_leaves_them_out(again, folder):
    texts = [*pq.read_table(folder / "in" / "a.parquet")["text"].to_pylist(), "no id", "the id of another"]
    write_corpus(folder / "corpus" / "a.parquet", texts, doc=[*"abcde", None, "a"])
    night = on(folder / "corpus", folder / "night", f"input.except_done_in=['{folder / 'out'}']")
    first = "nulls in column 'doc' (input.id_column): 1, the first in a.parquet row 5; "
    repeated = "1 repeated, the first is 'a' in a.parquet row 0 and a.parquet row 6; "
    for condition, said in (("doc IS NULL OR doc <> 'x'", first), ("doc IS NOT NULL", repeated)):
        assert said in again(*night, "--set", f"input.filter={condition}").exits(2).line()
    again(*night, "--set", "input.filter=doc IS NOT NULL AND text NOT LIKE '%another'").exits(0)


@pytest.fixture
def bad_night(again, folder):
    """Start a night on which only empty texts came; other arguments behind its own."""
    write_corpus(folder / "bad" / "a.parquet", [None, " "], doc=[*"xy"])
    settings = ("input.passthrough=[doc]", f"input.except_done_in=['{folder}/none/*']")
    return lambda *more: again(*on(folder / "bad", folder / "night", *settings, *more))


def test_a_run_of_rows_that_no_model_has_to_see_loads_none(bad_night, folder):
    """A night on which only empty texts came started Ray and loaded the models to say so."""
    bad_night().exits(3)
    names = ("doc_id", "error_class", "attempts", "doc")
    errors = [tuple(row[name] for name in names) for row in rows(folder / "night" / "errors")]
    assert errors == [("x", "NullText", 1, "x"), ("y", "EmptyText", 1, "y")]
    bad_night("job.max_error_fraction=1").exits(0)


def test_a_night_that_is_complete_stays_so_when_its_files_are_replaced(bad_night, folder):
    """It chose its rows once: what came since is for the next night, and one that is not complete says what is gone."""
    allowed = "job.max_error_fraction=1"
    bad_night(allowed).exits(0)
    write_corpus(folder / "bad" / "b.parquet", [TEXT], doc=["z"])
    (folder / "bad" / "a.parquet").unlink()
    ended = bad_night(allowed).exits(0)
    assert "complete already, 2 rows: 0 done, 2 failed; files that determined its rows have changed" in ended.stderr
    (folder / "night" / "_SUCCESS").unlink()
    ended = bad_night(allowed).exits(5)
    assert "files that determined its rows have changed or are gone: to do only new rows, choose" in ended.stderr
    assert '\n  input file a.parquet: "2 rows' in ended.stderr


def test_the_report_has_its_keys_and_its_sums(finished):
    """Dashboards read it."""
    report = read_json(finished / "out" / "report.json")
    assert {*REPORT.split()} <= report.keys()
    done = rows(finished / "out" / "summaries")
    counts = {name: report["rows"][name] for name in ("input", "done", "errors", "pending")}
    assert counts == {"input": 5, "done": 3, "errors": 2, "pending": 0}
    for name in ("prompt", "output", "dropped"):
        assert report["tokens"][name] == sum(row[f"num_{name}_tokens"] for row in done)
    for name in ("num_spec_steps", "num_plain_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert report["acceptance"][name] == sum(row[name] for row in done)
    assert [(each["run_id"], each["exit_code"]) for each in report["starts"]] == [(report["starts"][0]["run_id"], 3)]
    assert report["wall_clock"]["seconds"] > 0
    assert report["gold"] == {}, "nobody gave right answers"


def test_a_report_can_be_made_again_and_is_the_same(folder):
    """Also on another machine, where the folder lies elsewhere."""
    made = read_json(folder / "out" / "report.json")
    (folder / "out" / "report.json").unlink()
    ended = specextend("report", folder / "out").exits(0)
    assert ended.stderr == ""
    assert "rows done" in ended.stdout
    again = read_json(folder / "out" / "report.json")
    names = ("rows", "tokens", "acceptance", "errors", "buckets", "wall_clock", "starts")
    assert {name: again[name] for name in names} == {name: made[name] for name in names}


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.csv", "answers.parquet", "answers"])
def test_an_export_has_each_answer_once(finished, tmp_path, monkeypatch, name):
    """As rows of files that other programs read, each column as far as the format has its type."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    to = tmp_path / name
    ended = specextend("export", finished / "out", "--to", to).exits(0)
    assert ended.stderr == ""
    assert ended.stdout == f"3 of 5 documents in {to}; 2 failed\n"
    wanted = rows(finished / "out" / "summaries")
    if to.suffix == ".csv":
        found = list(csv.DictReader(to.read_text(encoding="utf-8").splitlines(keepends=True)))
        wanted = [{"doc_id": row["doc_id"], "quality_flags": json.dumps(row["quality_flags"])} for row in wanted]
        found = [{column: row[column] for column in wanted[0]} for row in found]
    elif to.suffix == ".jsonl":
        found = [json.loads(line) for line in to.read_text(encoding="utf-8").splitlines()]
        wanted = [row | {"started_at": row["started_at"].isoformat()} for row in wanted]
    elif to.suffix == ".parquet":
        found = pq.read_table(to).to_pylist()
    else:
        found = load_dataset(str(to), split="train").to_list()
    assert found == wanted


@pytest.mark.parametrize(
    "to, said",
    [
        ("out/summaries", "is in the folder of the run; name a place outside"),
        ("in", "is not empty; name another folder"),
    ],
)
def test_an_export_that_would_spoil_something_is_refused(finished, to, said):
    """The folder of the run is its own, and files of two exports in one folder would be read as one data set."""
    line = specextend("export", finished / "out", "--to", finished / to).line()
    assert line == f"error: {finished / to} {said}"


@pytest.mark.parametrize("command", [["report"], ["export", "--to", "x.jsonl"], ["status"]])
def test_a_folder_without_a_run_is_refused_in_one_line(command, tmp_path, monkeypatch):
    """And stays empty: no file that looks like a result."""
    monkeypatch.chdir(tmp_path)
    assert "holds no run" in specextend(*command, tmp_path).line()
    assert not list(tmp_path.iterdir())


def test_a_stdout_that_takes_no_more_is_said_in_one_line(finished):
    """`specextend status out > file` on a full disk: an empty file and exit 0 would look like an empty run."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        whole = [sys.executable, "-m", "specextend", "status", finished / "out"]
        ended = subprocess.run(whole, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: stdout cannot be written: [Errno 28]")

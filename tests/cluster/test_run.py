"""The driver over real Ray actors whose engines do what the documents tell them to."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster import lock as lock_module
from specextend.cluster import roster
from specextend.cluster.environment import worker_device
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_TOO_MANY_ERRORS,
    Interrupt,
    InterruptedRunError,
    LockLostError,
    OtherRunError,
    WorkersFailError,
)
from specextend.cluster.prepare import prepare
from specextend.cluster.rates import find_rates, keep_rates, pair_key
from specextend.cluster.worker import document_seed
from specextend.pairing import pair_hashes
from tests.cluster.conftest import Screen
from tests.cluster.fakes import LoadsLater, NeverLoads, SwapsWeights
from tests.cluster.test_forecast import RATES

GOOD = [f"text number {number} " * (number + 1) for number in range(6)]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a run up after two workers that cannot be built, without a pause between them."""
    monkeypatch.setattr(roster, "MAX_FAILED_STARTS", 2)
    monkeypatch.setattr(roster, "FIRST_PAUSE_S", 0.01)


def test_every_row_ends_in_one_summary_in_input_order(job):
    """The whole contract of an undisturbed run: rows, parts, attempts, lock, seeds."""
    run = job(GOOD, commit_every_rows=4)
    assert run.run() == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(6)]
    assert all(row["attempts"] == 1 and row["num_output_tokens"] == 5 for row in run.summaries().values())
    assert all(row["queue_s"] >= 0 for row in run.summaries().values())
    assert run.summaries()["d3"]["summary"].startswith(f"seed {document_seed(0, 'd3')}:")
    assert len(list((run.output / "_run" / "parts").iterdir())) == 2, "at 4 rows, and the last 2 at the end"
    assert json.loads((run.output / "_SUCCESS").read_text()) == {"rows": 6, "done": 6, "errors": 0}
    assert not (run.output / "_run" / "lock").exists()
    [attempt] = [json.loads(path.read_text()) for path in (run.output / "_run" / "attempts").iterdir()]
    assert (attempt["exit_code"], len(attempt["workers"])) == (0, 1)
    assert attempt["end"] >= attempt["begin"]
    assert attempt["memory"]["cache"]["longest_sequences_that_fit"] >= 1
    assert [note for note in run.screen.notes if "the longest documents at once" in note]
    assert attempt["versions"].keys() >= {"python", "torch", "transformers", "ray", "pyarrow", "specextend"}


def test_a_run_over_a_folder_says_which_files_it_does_not_read(job):
    """Once, and not a word about hidden ones."""
    run = job(GOOD[:2])
    folder = run.folder / "in"
    folder.mkdir()
    run.input.rename(folder / "a.pq")
    run.input = folder
    for name in ("b.csv", "c.CSV", "_SUCCESS"):
        (folder / name).write_text("")
    assert run.run() == EXIT_DONE
    said = [note for note in run.screen.notes if "not read" in note]
    assert said == [f"warning: files not read in {folder}: 1 .CSV, 1 .csv"]


def test_a_document_that_cannot_be_done_becomes_an_error_row_and_its_worker_lives_on(job):
    """One bad row must not stop a night's work, nor cost a model load.

    A failed batch does not say whose fault it was: its documents are tried again one by one, on the same worker.
    """
    run = job([*GOOD, "raise", "oom", None])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    errors = {name: (row["error_class"], row["stage"], row["retryable"]) for name, row in run.errors().items()}
    assert errors == {
        "d6": ("ValueError", "decode", False),
        "d7": ("OutOfMemoryError", "decode", True),
        "d8": ("NullText", "read", False),
    }
    assert run.errors()["d6"]["message"] == "this document cannot be done"
    assert len({row["worker"] for row in run.summaries().values()}) == 1
    assert len(run.summaries()) == 6
    assert not (run.output / "_SUCCESS").exists()
    [why] = [note for note in run.screen.notes if note.startswith("exit 3, ")]
    assert "job.max_error_fraction 0 allows 0 failed rows; see errors/" in why


def test_files_that_were_taken_from_a_finished_run_are_written_again_and_nothing_is_decoded(job):
    """`_SUCCESS` alone is no reason to say that all is there."""
    run = job([*GOOD, "raise"], max_error_fraction=1.0)
    assert run.run() == EXIT_DONE
    before = {path: path.read_bytes() for folder in ("summaries", "errors") for path in (run.output / folder).iterdir()}
    assert len(before) == 2
    for path in before:
        path.unlink()
        assert run.run(NeverLoads()) == EXIT_DONE
    assert {path: path.read_bytes() for path in before} == before
    run.screen.notes.clear()
    assert run.run(NeverLoads()) == EXIT_DONE
    assert run.screen.notes == ["complete already, 7 rows: 6 done, 1 failed"]


def test_workers_for_which_the_machine_has_no_room_are_said(job, monkeypatch):
    """Otherwise somebody waits for 48 of 50 all night."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    run = job(["one"], workers=500)
    assert run.run() == EXIT_DONE
    assert any(note.endswith("of 500 workers (job.workers)") for note in run.screen.notes)


def test_a_start_records_how_long_it_should_take(job, monkeypatch, tmp_path: Path):
    """By rates that are kept; a report can say afterwards how far off they were."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = job(["one", None], max_error_fraction=1.0)
    prepared = prepare(run.config())
    key = pair_key(prepared.config, prepared.manifest["identity"]["hashes"])
    keep_rates(key, replace(RATES, device=worker_device(prepared.config.job)))
    assert run.run() == EXIT_DONE
    [record] = [json.loads(path.read_text()) for path in (run.output / "_run" / "attempts").iterdir()]
    assert (record["forecast"]["documents"], record["forecast"]["workers"]) == (2, 1)
    assert record["forecast"]["basis"].startswith("a calibration of 100 documents on ")
    assert any(note.startswith("expected to take 0:00:") for note in run.screen.notes)
    assert find_rates(key, None).num_documents == 100, "another engine than ours leaves no rates"


@pytest.mark.slow
def test_copies_of_large_row_groups_are_kept_for_a_resume_and_removed_at_the_end(job, hasty):
    """They are as large as the corpus, and nobody looks into `_run` once there are summaries."""
    run = job([])
    texts = [*(text.encode() for text in GOOD[:2]), b"\xff" * (65 << 20)]  # the last is an error row at once
    text = pa.array(texts).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"id": ["d0", "d1", "d2"], "text": text}), run.input)
    copy = run.output / "_run" / "input" / "file-00000.parquet"
    with pytest.raises(WorkersFailError):
        run.run(NeverLoads())
    written = copy.stat().st_mtime_ns
    run.screen.on_show = lambda snapshot: seen.append(copy.stat().st_mtime_ns)
    seen: list[int] = []
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(seen) == {written}, "used again, not written again"
    assert not copy.exists()
    assert len(run.summaries()) == 2
    copy.write_bytes(b"of a driver that was killed at the very end")
    assert run.run(NeverLoads(), max_error_fraction=0.5) == EXIT_DONE
    assert not copy.exists()


def test_errors_within_the_allowed_fraction_are_a_success_without_decoding_again(job):
    """`job.*` is not part of what a run is: a second start may allow more errors."""
    run = job([*GOOD, "raise"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert run.run(NeverLoads(), max_error_fraction=0.2) == EXIT_DONE
    assert json.loads((run.output / "_SUCCESS").read_text()) == {"rows": 7, "done": 6, "errors": 1}
    assert run.run(NeverLoads()) == EXIT_TOO_MANY_ERRORS
    assert not (run.output / "_SUCCESS").exists()


@pytest.mark.slow
def test_a_worker_that_dies_once_costs_its_started_documents_an_attempt(job, tmp_path: Path):
    """A preempted process: everything is done in the end, on another worker."""
    run = job([*GOOD, f"kill:{tmp_path}/killed"])
    assert run.run() == EXIT_DONE
    assert len(run.summaries()) == 7
    assert max(row["attempts"] for row in run.summaries().values()) <= 2
    assert len({row["worker"] for row in run.summaries().values()}) >= 1
    assert any("died" in note for note in run.screen.notes)


@pytest.mark.slow
def test_a_document_that_kills_every_worker_is_given_up_and_takes_nobody_along(job):
    """The poison document: its neighbours are done, it is a dead letter after max_attempts."""
    run = job([*GOOD, "kill"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.summaries()) == {f"d{row}" for row in range(6)}
    [poison] = run.errors().values()
    assert (poison["doc_id"], poison["error_class"], poison["attempts"]) == ("d6", "WorkerDied", 2)
    assert poison["retryable"]


@pytest.mark.slow
def test_a_document_over_its_deadline_is_cancelled_while_its_neighbours_go_on(job):
    """Aborted between two steps: no worker dies of it."""
    run = job([*GOOD, "crawl"], deadline_base_s=1.0, deadline_s_per_token=0.001)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [late] = run.errors().values()
    assert (late["doc_id"], late["error_class"], late["attempts"]) == ("d6", "DeadlineExceeded", 2)
    assert len(run.summaries()) == 6
    assert len({row["worker"] for row in run.summaries().values()}) == 1
    assert not any("died" in note or "killed" in note for note in run.screen.notes)


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(job, tmp_path: Path):
    """A kernel that never returns: no step for stall_s, kill, retry."""
    run = job([*GOOD[:2], f"hang:{tmp_path}/hung"], stall_s=2.5)
    assert run.run() == EXIT_DONE
    assert run.summaries()["d2"]["attempts"] == 2
    assert any("no step for 2 s" in note for note in run.screen.notes)


@pytest.mark.slow
def test_what_waits_behind_a_long_document_is_done_by_an_idle_worker(job, tmp_path: Path):
    """The long document ends only when all others are done: two of them had been given to its worker first."""
    (tmp_path / "long").touch()
    run = job([f"crawl@{tmp_path}/long " * 9, *GOOD[:5]], workers=2)
    run.max_batch_size = 1

    def release(snapshot) -> None:
        if snapshot.num_done == 5:
            (tmp_path / "long").unlink(missing_ok=True)

    run.screen.on_show = release
    assert run.run() == EXIT_DONE
    assert len(run.summaries()) == 6
    assert {row["attempts"] for row in run.summaries().values()} == {1}


@pytest.mark.slow
def test_an_engine_that_breaks_is_replaced_and_its_reason_is_said(job):
    """A failure outside any step: nothing of it can be trusted any more."""
    run = job([*GOOD[:3], "break"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [broken] = run.errors().values()
    assert (broken["doc_id"], broken["error_class"]) == ("d3", "WorkerDied")
    assert "RuntimeError: the engine is broken" in broken["message"]
    assert len(run.summaries()) == 3


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_run_after_a_few_tries(job, hasty):
    """A wrong path or a full disk: backing off for ever would hide it. The reason is said."""
    run = job(GOOD)
    with pytest.raises(WorkersFailError, match=r"2 tries in a row failed: .*the weights are gone"):
        run.run(NeverLoads())
    [attempt] = [json.loads(path.read_text()) for path in (run.output / "_run" / "attempts").iterdir()]
    assert attempt["exit_code"] == 1
    assert not (run.output / "_run" / "lock").exists()


@pytest.mark.slow
def test_a_worker_whose_weights_are_not_the_runs_takes_no_document(job, hasty, tmp_path: Path):
    """Half of the summaries by one model, half by another, and nobody would know: the second worker refuses."""
    run = job([GOOD[0], f"kill:{tmp_path}/killed"])
    run.target = Path(shutil.copytree(run.target, tmp_path / "target"))
    weights = run.target / "model.safetensors"
    expected = pair_hashes(run.config().target, None)["target"][:12]
    why = rf"the target in {run.target} on \S+ is not the run's: its files have the hash \w{{12}}, the run's {expected}"
    with pytest.raises(WorkersFailError, match=f"2 tries in a row failed: .*{why}"):
        run.run(SwapsWeights(weights))
    [attempt] = [json.loads(path.read_text()) for path in (run.output / "_run" / "attempts").iterdir()]
    assert sum(worker["ready"] is not None for worker in attempt["workers"]) == 1


@pytest.mark.slow
def test_a_model_that_loads_the_second_time_is_enough(job, tmp_path: Path):
    """A file system that hiccups must not end a run."""
    run = job(GOOD[:2])
    assert run.run(LoadsLater(tmp_path / "marker")) == EXIT_DONE
    assert any("could not be built, next try in 1 s" in note for note in run.screen.notes)


def interrupt_after(run, num_done: int) -> Interrupt:
    interrupt = Interrupt(60.0)

    def look(snapshot) -> None:
        if snapshot.num_done >= num_done:
            interrupt.tell("SIGTERM received")

    run.screen.on_show = look
    return interrupt


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_is_finished_and_resumes_with_the_rest(job):
    """Finished work is never done again: the resumed rows are equal, byte for byte."""
    run = job(GOOD, commit_every_rows=64, commit_every_s=3600)
    interrupt = interrupt_after(run, 2)
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        run.run(interrupt=interrupt, max_attempts=2)
    interrupt.disarm()
    assert not (run.output / "summaries").exists()
    parts = {path.name: path.read_bytes() for path in (run.output / "_run" / "parts").iterdir()}
    assert len(parts) == 1
    run.screen.on_show = lambda snapshot: None
    assert run.run() == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(6)]
    assert {path.name: path.read_bytes() for path in (run.output / "_run" / "parts").iterdir()}.items() >= parts.items()
    codes = sorted(json.loads(path.read_text())["exit_code"] for path in (run.output / "_run" / "attempts").iterdir())
    assert codes == [0, 75]


@pytest.mark.slow
def test_retry_errors_does_error_rows_again_and_nothing_else(job, tmp_path: Path):
    """Done rows keep every value, also those that a second decoding would change (times, worker)."""
    (tmp_path / "outage").touch()
    run = job([*GOOD[:3], f"raise@{tmp_path}/outage", "raise"])
    assert run.run() == EXIT_TOO_MANY_ERRORS
    before = run.summaries()
    assert set(run.errors()) == {"d3", "d4"}
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert set(run.errors()) == {"d3", "d4"}, "a plain resume leaves error rows alone"
    (tmp_path / "outage").unlink()
    num_leases = len(run.screen.told("document_leased"))
    assert run.run(retry_errors="retryable") == EXIT_TOO_MANY_ERRORS
    assert len(run.screen.told("document_leased")) == num_leases, "an exception of its own is not retryable"
    assert any(note.startswith("2 error rows are left as they are") for note in run.screen.notes)
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    assert set(run.errors()) == {"d4"}
    after = run.summaries()
    assert set(after) == {*before, "d3"}
    assert all(after[name] == row for name, row in before.items())


@pytest.mark.slow
def test_a_document_that_kills_its_worker_does_not_get_all_its_attempts_in_every_start(job):
    """A driver on a machine that is taken away now and then never gave such a document up, and ran it for ever."""
    run = job(["kill"], max_attempts=3)
    interrupt = Interrupt(60.0)

    def look(snapshot) -> None:
        if any(facts["attempt"] == 3 for facts in run.screen.told("document_leased")):
            interrupt.tell("SIGTERM received")

    run.screen.on_show = look
    with pytest.raises(InterruptedRunError):
        run.run(interrupt=interrupt)
    interrupt.disarm()
    run.screen = Screen()
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [poison] = run.errors().values()
    assert poison["attempts"] == 3
    assert [facts["attempt"] for facts in run.screen.told("document_leased")] == [3]


@pytest.mark.slow
def test_attempts_are_counted_over_retries(job):
    """A row that says 1 after the tenth retry hides what it has cost."""
    run = job(["raise"])
    for start in range(1, 4):
        assert run.run(retry_errors="all" if start > 1 else "none") == EXIT_TOO_MANY_ERRORS
        [failed] = run.errors().values()
        assert failed["attempts"] == start


def test_a_driver_that_loses_its_lock_stops_and_commits_nothing_more(job, monkeypatch):
    """Another driver believed it dead and has taken over: two writers would be one too many."""
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.1)
    run = job([*GOOD, "crawl"], commit_every_s=3600)
    lock = run.output / "_run" / "lock"

    def steal(snapshot) -> None:
        if snapshot.num_done >= 1:
            thief = json.loads(lock.read_text()) | {"run_id": "feedbeef", "pid": 1}
            own = lock.with_name("feedbeef")
            own.write_text(json.dumps(thief))
            own.replace(lock)
            run.screen.on_show = lambda snapshot: None

    run.screen.on_show = steal
    with pytest.raises(LockLostError, match="taken over by run feedbeef"):
        run.run()
    assert json.loads(lock.read_text())["run_id"] == "feedbeef"
    assert not (run.output / "_run" / "parts").exists()


@pytest.mark.slow
def test_a_run_goes_on_with_less_memory_when_it_is_resumed(job):
    """The report advises to lower `decoding.cache_gib`; whoever did was refused as another run."""
    run = job(GOOD, commit_every_s=3600)
    interrupt = interrupt_after(run, 2)
    with pytest.raises(InterruptedRunError):
        run.run(interrupt=interrupt)
    interrupt.disarm()
    run.screen.on_show = lambda snapshot: None
    run.cache_gib, run.max_batch_size = 1.0, 1
    assert run.run() == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(6)]
    assert run.run(NeverLoads()) == EXIT_DONE
    assert run.screen.notes[-1].startswith("complete already")


def test_another_configuration_may_not_continue_a_run(job):
    """Half of the summaries by one prompt, half by another: refused, and the difference named."""
    run = job(GOOD[:1])
    assert run.run() == EXIT_DONE
    other = job(["another text altogether"])
    with pytest.raises(OtherRunError, match=r"(?s)belongs to another run:.*input file"):
        other.run()

"""The driver over real Ray actors whose engines do what the documents tell them to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specextend.cluster import lock as lock_module
from specextend.cluster import workers
from specextend.cluster.exits import (
    EXIT_DONE,
    EXIT_TOO_MANY_ERRORS,
    Interrupt,
    InterruptedRunError,
    LockLostError,
    OtherRunError,
    WorkersFailError,
)
from specextend.document_requests import document_seed
from specextend.pairing import pair_hashes
from tests.cluster.conftest import Job, Screen
from tests.cluster.fakes import LoadsLater, NeverLoads, SwapsWeights
from tests.job.conftest import kept_handlers

MANY_ATTEMPTS = {"max_attempts": 9}
GOOD = [f"text number {number} " * (number + 1) for number in range(6)]

CHOSEN_BATCH = 4
"""What `decoding.max_batch_size: auto` is on a CPU with room."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a run up after two workers that cannot be built, without a pause between them."""
    monkeypatch.setattr(workers, "MAX_FAILED_STARTS", 2)
    monkeypatch.setattr(workers, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Job:
    """A run of a folder to which nothing happens. Tests only read it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Job(folder, GOOD, {})
    run.max_batch_size = "auto"
    (folder / "in").mkdir()
    run.input = run.input.rename(folder / "in" / "a.pq").parent
    for name in ("b.csv", "c.CSV", "_SUCCESS"):
        (run.input / name).write_text("")
    with kept_handlers():
        assert run.run() == EXIT_DONE
    return run


def records_of(run: Job) -> list[dict[str, Any]]:
    """What each start has left."""
    return [json.loads(path.read_text()) for path in (run.output / "_run" / "attempts").iterdir()]


def test_every_row_ends_in_one_summary_in_input_order(undisturbed: Job):
    """The whole contract of an undisturbed run: rows, parts, attempts, lock, seeds."""
    run, [attempt] = undisturbed, records_of(undisturbed)
    assert list(run.summaries()) == [f"d{row}" for row in range(6)]
    assert all(row["attempts"] == 1 and row["num_output_tokens"] == 5 for row in run.summaries().values())
    assert all(row["queue_s"] >= 0 for row in run.summaries().values())
    assert run.summaries()["d3"]["summary"].startswith(f"seed {document_seed(0, 'd3')}:")
    assert json.loads((run.output / "_SUCCESS").read_text()) == {"rows": 6, "done": 6, "errors": 0}
    assert not (run.output / "_run" / "lock").exists()
    assert (attempt["exit_code"], len(attempt["workers"])) == (0, 1)
    assert attempt["end"] >= attempt["begin"]
    assert attempt["memory"]["cache"]["longest_sequences_that_fit"] >= 4
    assert attempt["memory"]["cache"]["max_batch_size"] == CHOSEN_BATCH
    assert [note for note in run.screen.notes if "the longest documents at once" in note]
    assert attempt["versions"].keys() >= {"python", "torch", "transformers", "ray", "pyarrow", "specextend"}


def test_a_run_over_a_folder_says_which_files_it_does_not_read(undisturbed: Job):
    """Once, and not a word about hidden ones."""
    said = [note for note in undisturbed.screen.notes if "not read" in note]
    assert said == [f"warning: files not read in {undisturbed.input}: 1 .CSV, 1 .csv"]


@pytest.fixture(scope="module")
def with_errors(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Job:
    """A finished run in which three documents could not be done. Tests only read it."""
    run = Job(tmp_path_factory.mktemp("with_errors"), [*GOOD, "raise", "oom", None], MANY_ATTEMPTS)
    with kept_handlers():
        assert run.run() == EXIT_TOO_MANY_ERRORS
    return run


@pytest.fixture
def finished(with_errors: Job, job) -> Job:
    """The same documents and a copy of what came out, for one more start."""
    run: Job = job(with_errors.texts, **MANY_ATTEMPTS)
    shutil.copytree(with_errors.output, run.output)
    return run


def test_a_document_that_cannot_be_done_becomes_an_error_row_and_its_worker_lives_on(with_errors: Job):
    """One bad row must not stop a night's work, nor cost a model load.

    A failed batch does not say whose fault it was: its documents are tried again one by one, on the same worker.
    """
    run = with_errors
    errors = {name: (row["error_class"], row["stage"], row["retryable"]) for name, row in run.errors().items()}
    assert errors == {
        "d6": ("ValueError", "decode", False),
        "d7": ("OutOfMemoryError", "decode", True),
        "d8": ("NullText", "read", False),
    }
    assert run.errors()["d6"]["message"] == "this document cannot be done"
    assert run.errors()["d6"]["attempts"] <= 2, "in its batch and alone; another one would fail the same way"
    assert run.errors()["d8"]["attempts"] == 1
    assert len({row["worker"] for row in run.summaries().values()}) == 1
    assert len(run.summaries()) == 6
    assert not (run.output / "_SUCCESS").exists()
    [why] = [note for note in run.screen.notes if note.startswith("exit 3, ")]
    assert "job.max_error_fraction 0 allows 0 failed rows; see errors/" in why


def test_files_that_were_taken_from_a_finished_run_are_written_again_and_nothing_is_decoded(finished: Job):
    """`_SUCCESS` alone is no reason to say that all is there."""
    run, tolerant = finished, {"max_error_fraction": 1.0}
    before = {path: path.read_bytes() for folder in ("summaries", "errors") for path in (run.output / folder).iterdir()}
    assert len(before) == 2
    assert run.run(NeverLoads(), **tolerant) == EXIT_DONE
    for path in before:
        path.unlink()
        assert run.run(NeverLoads(), **tolerant) == EXIT_DONE
    assert {path: path.read_bytes() for path in before} == before
    run.screen.notes.clear()
    assert run.run(NeverLoads(), **tolerant) == EXIT_DONE
    assert run.screen.notes == ["complete already, 9 rows: 6 done, 3 failed"]


def interrupt_after(run, num_done: int) -> Interrupt:
    interrupt = Interrupt(600.0)

    def look(snapshot) -> None:
        if snapshot.num_done >= num_done:
            interrupt.tell("SIGTERM received")

    run.screen.on_show = look
    return interrupt


def test_workers_for_which_the_machine_has_no_room_are_said(job):
    """Otherwise somebody waits for 48 of 50 all night."""
    run = job(["one"], workers=500)
    interrupt = interrupt_after(run, 0)
    with pytest.raises(InterruptedRunError):
        run.run(interrupt=interrupt)
    interrupt.disarm()
    assert any(note.endswith("of 500 workers (job.workers)") for note in run.screen.notes)


def test_errors_within_the_allowed_fraction_are_a_success_without_decoding_again(finished: Job):
    """`job.*` is not part of what a run is: a second start may allow more errors."""
    run = finished
    assert run.run(NeverLoads(), max_error_fraction=0.4) == EXIT_DONE
    assert json.loads((run.output / "_SUCCESS").read_text()) == {"rows": 9, "done": 6, "errors": 3}
    assert run.run(NeverLoads()) == EXIT_TOO_MANY_ERRORS
    assert not (run.output / "_SUCCESS").exists()


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
    [attempt] = records_of(run)
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
    [attempt] = records_of(run)
    assert sum(worker["ready"] is not None for worker in attempt["workers"]) == 1


@pytest.mark.slow
def test_a_model_that_loads_the_second_time_is_enough(job, tmp_path: Path):
    """A file system that hiccups must not end a run."""
    run = job(GOOD[:2])
    assert run.run(LoadsLater(tmp_path / "marker")) == EXIT_DONE
    assert any("could not be built, next try in 1 s" in note for note in run.screen.notes)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> tuple[Job, dict[str, bytes]]:
    """A run that was interrupted and resumed with less memory, and the parts that it had before. Tests only read it."""
    folder = tmp_path_factory.mktemp("resumed")
    run = Job(folder, [*GOOD[:5], f"crawl@{folder}/held"], {"commit_every_s": 3600})
    (folder / "held").touch()  # or all might be done before the interrupt is heard
    with kept_handlers():
        interrupt = interrupt_after(run, 2)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            run.run(interrupt=interrupt, max_attempts=2)
        interrupt.disarm()
        assert not (run.output / "summaries").exists()
        parts = parts_of(run)
        (folder / "held").unlink()
        run.screen.on_show = lambda snapshot: None
        run.cache_gib, run.max_batch_size = 1.0, 1
        assert run.run() == EXIT_DONE
    return run, parts


def parts_of(run: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.output / "_run" / "parts").iterdir()}


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_is_finished_and_resumes_with_the_rest(resumed: tuple[Job, dict[str, bytes]]):
    """Finished work is never done again: the resumed rows are equal, byte for byte."""
    run, parts = resumed
    assert len(parts) == 1
    assert list(run.summaries()) == [f"d{row}" for row in range(6)]
    assert parts_of(run).items() >= parts.items()
    assert sorted(record["exit_code"] for record in records_of(run)) == [0, 75]


@pytest.mark.slow
def test_a_run_goes_on_with_less_memory_when_it_is_resumed(resumed: tuple[Job, dict[str, bytes]]):
    """The report advises to lower `decoding.cache_gib`; whoever did was refused as another run."""
    records = {record["exit_code"]: record["memory"]["cache"] for record in records_of(resumed[0])}
    assert {code: (each["cache_gib"], each["max_batch_size"]) for code, each in records.items()} == {
        75: (2.0, 3),
        0: (1.0, 1),
    }


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
    assert any(note.startswith("not tried again: 2 error rows whose `retryable` is false") for note in run.screen.notes)
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    assert set(run.errors()) == {"d4"}
    after = run.summaries()
    assert set(after) == {*before, "d3"}
    assert all(after[name] == row for name, row in before.items())


@pytest.mark.slow
def test_a_document_that_kills_its_worker_does_not_get_all_its_attempts_in_every_start(job):
    """A driver on a machine that is taken away now and then never gave such a document up, and ran it for ever."""
    run = job(["kill"], max_attempts=3)
    interrupt = Interrupt(600.0)

    def look(name: str, facts: dict[str, Any]) -> None:
        if name == "document_leased" and facts["attempt"] == 3:
            interrupt.tell("SIGTERM received")
            interrupt.check()  # now, before the worker can die of it once more

    run.screen.on_event = look
    with pytest.raises(InterruptedRunError):
        run.run(interrupt=interrupt)
    interrupt.disarm()
    run.screen = Screen()
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [poison] = run.errors().values()
    assert poison["attempts"] == 3
    assert [facts["attempt"] for facts in run.screen.told("document_leased")] == [3]


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
            own.replace(lock)  # again and again: a heartbeat that is under way writes over the first one

    run.screen.on_show = steal
    with pytest.raises(LockLostError, match="taken over by run feedbeef"):
        run.run()
    assert json.loads(lock.read_text())["run_id"] == "feedbeef"
    assert not (run.output / "_run" / "parts").exists()


def test_another_configuration_may_not_continue_a_run(finished: Job):
    """Half of the summaries by one prompt, half by another: refused, and the difference named."""
    other = Job(finished.folder, finished.texts, {}, sections={"prompt": {"instruction": "In one word?"}})
    with pytest.raises(
        OtherRunError,
        match=r"(?s)belongs to another run; give another output.path, or restore what differs:\n  prompt",
    ):
        other.run()


def test_a_run_whose_input_has_grown_says_how_to_do_what_is_new(finished: Job):
    """Its night is over: nothing need be restored, and nothing done twice."""
    grown = Job(finished.folder, [*finished.texts, "a new document"], {})
    with pytest.raises(OtherRunError) as caught:
        grown.run()
    said, *lines = str(caught.value).splitlines()
    assert (
        f"to do only what is new, give another output.path and input.except_done_in=['{finished.output}']; to" in said
    )
    assert [line.split(":")[0] for line in lines] == ["  input file input.parquet"]

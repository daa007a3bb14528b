"""The driver or a worker is killed, the driver is told to stop, or started twice."""

import signal
import subprocess
import sys
from functools import partial

import psutil
import pytest

from tests.contract.conftest import commits, committed
from tests.job.conftest import (
    DYING_DRIVER,
    LONGEST_S,
    ROOT,
    end_of,
    environment,
    is_paused,
    read_json,
    rows,
    sets,
    specextend,
    wait_for,
    wait_for_pause,
)
from tests.tables import cases

FIRST_PART = ("after", "*/_run/parts/part-*", "1")
MOMENTS = dict(
    cases("""
        writes a part -> before */_run/parts/part-* 2
        has written a part -> after */_run/parts/part-* 2
        writes the manifest -> before */_run/manifest.json 1
        writes summaries -> before */summaries/part-00000.parquet 1
        writes the report -> before */report.json 1
        writes _SUCCESS -> before */_SUCCESS 1
    """)
)
FAST, *SLOW = MOMENTS


@pytest.fixture
def resume(run, summarize_here, undisturbed):
    """Start the run again: what was committed stays as it was, and nothing is done again."""

    def resume():
        kept = commits(run.output)
        said = summarize_here(*sets(*run.settings())).exits(0).stderr
        assert run.result() == undisturbed
        assert commits(run.output).items() >= kept.items()
        keys = committed(run.output)
        assert len(keys) == len(set(keys)) == len(undisturbed)
        assert not list(run.output.rglob(".*.tmp")), "nothing is left of what broke off"
        return said

    return resume


@pytest.mark.parametrize("kind", [FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_a_driver_killed_at_any_write_is_resumed_as_if_nothing_had_happened(run, resume, kind):
    """Half a file under its final name, or a row done twice, would show only in the morning."""
    end_of(run.start(DYING_DRIVER, "SIGKILL", *MOMENTS[kind].split()), -signal.SIGKILL)
    assert (run.output / "_run" / "lock").exists()
    assert not (run.output / "_SUCCESS").exists()
    assert "is held by" not in resume(), "its process is gone"
    first, second = read_json(run.output / "report.json")["starts"]
    is_recorded = kind == "writes _SUCCESS"  # which comes last: the start's record says its end by then
    assert (first["end"] is not None) == is_recorded
    assert first["exit_code"] == (0 if is_recorded else None)
    assert second["exit_code"] == 0
    assert first["seconds"] > 0, "its last sign of life stands for its end"
    assert first["paid_s"] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, moment",
    [("SIGTERM", "has written a part"), ("SIGINT", "has written a part"), ("SIGTERM", "writes summaries")],
)
def test_a_run_told_to_stop_commits_what_is_finished_and_says_75(run, resume, kind, moment):
    """Whoever preempts a machine sends SIGTERM first; 75 means that running it again goes on where it stopped.

    Summaries of a large corpus take minutes, and the report: longer than whoever preempts waits.
    """
    said = end_of(run.start(DYING_DRIVER, kind, *MOMENTS[moment].split()), 75)
    assert f"interrupted: {kind} received; finished work is on disk" in said
    assert not [*run.temporary.iterdir()]
    assert not (run.output / "_run" / "lock").exists()
    assert not (run.output / "_SUCCESS").exists()
    done = len(committed(run.output))
    said = f"stopped, run again to resume: {done} of 12 rows done, 0 failed, {12 - done} left"
    assert specextend("status", run.output).stdout.startswith(said)
    assert moment != "writes summaries" or done == 12
    resume()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_run_whose_ray_loses_a_process_says_so_and_is_resumed(run, resume, name):
    """The system ends the largest process when memory is short; Ray took the driver along, and said nothing to do."""
    process = run.start(DYING_DRIVER, "SIGSTOP", *FIRST_PART, address="local")
    wait_for_pause(process)
    [child] = [each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == name]
    child.kill()
    process.send_signal(signal.SIGCONT)
    said = end_of(process, 75)
    assert f"interrupted: Ray's {name} has ended (-9); finished work is on disk, run again to resume" in said
    resume()


@pytest.mark.slow
def test_a_run_told_to_stop_at_the_very_end_ends_as_if_it_had_not_been(run, undisturbed):
    """Ray is shut down by then and has taken its own handler along: once that killed the process half-way."""
    end_of(run.start(DYING_DRIVER, "SIGTERM", *MOMENTS["writes _SUCCESS"].split()))
    assert (run.output / "_SUCCESS").exists()
    assert run.result() == undisturbed


@pytest.mark.slow
def test_of_two_runs_started_at_once_one_wins_and_the_other_says_so(run, undisturbed):
    """A scheduler that fires twice: two writers would double rows. The winner waits until the other has seen it."""
    racers = [run.start(DYING_DRIVER, "SIGSTOP", *FIRST_PART) for _ in range(2)]
    winner = wait_for(lambda: next((racer for racer in racers if is_paused(racer.pid)), None), "winner")
    [loser] = set(racers) - {winner}
    said = ""
    with loser.stderr:
        while f"{run.output} is held by run " not in said:
            line = loser.stderr.readline()
            assert line, said
            said += line
        winner.send_signal(signal.SIGCONT)
        said += loser.stderr.read()
    loser.wait(LONGEST_S)
    end_of(winner)
    if "complete already" in said:  # the winner came to its end before it gave the next sign of life
        assert loser.returncode == 0
    else:
        assert loser.returncode == 4
        assert f"error: {run.output} " in said
    assert "Traceback" not in said
    assert run.result() == undisturbed
    assert read_json(run.output / "_SUCCESS")["done"] == len(undisturbed)


@pytest.mark.slow
def test_answers_can_be_read_while_the_run_goes_on_each_once(run, undisturbed):
    """Also if whoever writes them is killed: the next one goes on, and ends when the run does."""
    process = run.start(DYING_DRIVER, "SIGSTOP", *FIRST_PART)
    wait_for_pause(process)
    live = run.folder / "live"
    command = [sys.executable, "-m", "specextend", "export", run.output, "--follow", "--to", live]
    follow = partial(subprocess.Popen, command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    killed = follow()
    wait_for(lambda: list(live.glob("*.parquet")), "answer")
    assert not (run.output / "summaries").exists()
    assert set(answers(rows(live))) <= set(answers(undisturbed))
    killed.kill()
    process.send_signal(signal.SIGCONT)
    other = follow()
    end_of(process)
    killed.communicate()
    assert end_of(other) == ""
    assert sorted(answers(rows(live))) == sorted(answers(undisturbed))


def answers(found):
    return [(row["doc_id"], row["summary"]) for row in found]

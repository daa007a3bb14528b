"""The driver is killed, told to stop, or started twice."""

from __future__ import annotations

import json
import signal

from specextend.cluster.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_LOCKED
from specextend.report import build_report
from tests.faults.conftest import RealJob, committed, parts, start, twice
from tests.job.conftest import DYING_DRIVER, LONGEST_S, is_paused, wait_for

MOMENTS = {
    "writes a part": ("before", "*/_run/parts/part-*", "2"),
    "has written its first part": ("after", "*/_run/parts/part-*", "1"),
    "has written a part": ("after", "*/_run/parts/part-*", "2"),
    "writes the manifest": ("before", "*/_run/manifest.json", "1"),
    "writes summaries": ("before", "*/summaries/part-00000.parquet", "1"),
    "writes the report": ("before", "*/report.json", "1"),
    "writes _SUCCESS": ("before", "*/_SUCCESS", "1"),
}


@twice(*MOMENTS, fast=0)
def test_a_driver_killed_at_any_write_is_resumed_as_if_nothing_had_happened(real_job: RealJob, undisturbed, kind: str):
    """Half a file under its final name, or a row done twice, would show only in the morning."""
    when, pattern, number = MOMENTS[kind]
    killed = start(real_job, DYING_DRIVER, "SIGKILL", when, pattern, number)
    _, stderr = killed.communicate(timeout=LONGEST_S)
    assert killed.returncode == -signal.SIGKILL, stderr
    output, kept = real_job.output, parts(real_job.output)
    assert (output / "_run" / "lock").exists()
    assert not (output / "_SUCCESS").exists()
    assert real_job.run() == EXIT_DONE
    assert real_job.result() == undisturbed
    assert parts(output).items() >= kept.items(), "what was committed stays as it was"
    assert len(committed(output)) == len(set(committed(output))) == len(undisturbed), "and is not done again"
    assert not list(output.rglob(".*.tmp")), "nothing is left of what broke off"
    first, second = build_report(str(output))["starts"]
    assert (first["end"], first["exit_code"], second["exit_code"]) == (None, None, EXIT_DONE)
    assert first["seconds"] > 0, "its last sign of life stands for its end"
    assert first["paid_s"] is not None


@twice("SIGTERM", "SIGINT", fast=0)
def test_a_run_told_to_stop_commits_what_is_finished_and_says_75(real_job: RealJob, undisturbed, kind: str):
    """Whoever preempts a machine sends SIGTERM first; 75 means that running it again goes on where it stopped."""
    process = start(real_job, DYING_DRIVER, kind, *MOMENTS["has written a part"], commit_every_s=0)
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == EXIT_INTERRUPTED, stderr
    assert f"interrupted: {kind} received; finished work is on disk" in stderr
    kept = parts(real_job.output)
    assert not (real_job.output / "_run" / "lock").exists()
    assert real_job.run(commit_every_s=0) == EXIT_DONE
    assert real_job.result() == undisturbed
    assert parts(real_job.output).items() >= kept.items()


@twice("writes _SUCCESS", fast=0)
def test_a_run_told_to_stop_at_the_very_end_ends_as_if_it_had_not_been(real_job: RealJob, undisturbed, kind: str):
    """Ray is shut down by then and has taken its own handler along: once that killed the process half-way."""
    process = start(real_job, DYING_DRIVER, "SIGTERM", *MOMENTS[kind])
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == EXIT_DONE, stderr
    assert (real_job.output / "_SUCCESS").exists()
    assert real_job.result() == undisturbed


@twice("writes summaries", fast=0)
def test_a_run_told_to_stop_while_it_writes_summaries_says_75_and_the_next_start_completes_it(
    real_job: RealJob, undisturbed, kind: str
):
    """Those of a large corpus take minutes, and the report: longer than whoever preempts a machine waits."""
    process = start(real_job, DYING_DRIVER, "SIGTERM", *MOMENTS[kind])
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == EXIT_INTERRUPTED, stderr
    assert not (real_job.output / "_SUCCESS").exists()
    assert real_job.run() == EXIT_DONE
    assert (real_job.output / "_SUCCESS").exists()
    assert real_job.result() == undisturbed
    assert len(committed(real_job.output)) == len(undisturbed), "nothing is decoded again"


@twice("two starts", fast=0)
def test_of_two_runs_started_at_once_one_wins_and_the_other_says_so(real_job: RealJob, undisturbed, kind: str):
    """A scheduler that fires twice: two writers would double rows. The winner waits until the other has seen it."""
    racers = [start(real_job, DYING_DRIVER, "SIGSTOP", *MOMENTS["has written its first part"]) for _ in range(2)]
    winner = wait_for(lambda: next((racer for racer in racers if is_paused(racer.pid)), None), "winner")
    [loser] = set(racers) - {winner}
    said = ""
    with loser.stderr:
        while f"{real_job.output} is held by run " not in said:
            line = loser.stderr.readline()
            assert line, said
            said += line
        winner.send_signal(signal.SIGCONT)
        said += loser.stderr.read()
    loser.wait(LONGEST_S)
    _, won = winner.communicate(timeout=LONGEST_S)
    assert winner.returncode == EXIT_DONE, won
    if "complete already" in said:  # the winner came to its end before it gave the next sign of life
        assert loser.returncode == EXIT_DONE
    else:
        assert loser.returncode == EXIT_LOCKED
        assert f"error: {real_job.output} " in said
    assert "Traceback" not in said
    assert real_job.result() == undisturbed
    assert json.loads((real_job.output / "_SUCCESS").read_text())["done"] == len(undisturbed)

"""Machines that go away, and machines that come back."""

import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from specextend.cluster.exits import EXIT_DONE
from tests.contract.conftest import committed
from tests.faults.conftest import during
from tests.faults.nodes import CPUS, thaw
from tests.job.conftest import DYING_DRIVER, LONGEST_S, ROOT, environment, wait_for_pause

TEXTS = [f"text number {number} " * 5 for number in range(40)]
MANY_TEXTS = [f"{number} {text}" for number in range(10) for text in TEXTS]
"""More than a worker finishes before the driver looks again."""


def is_worker(process):
    """It names itself after its class."""
    with suppress(psutil.NoSuchProcess):  # it may have ended
        return "ray::Worker" in " ".join(process.cmdline())
    return False


def is_head(process):
    with suppress(psutil.NoSuchProcess):
        return process.name() == "gcs_server"
    return False


def noted(run, text):
    return any(text in note for note in run.screen.notes)


def all_done_once(run, texts=TEXTS):
    assert list(run.summaries()) == [f"d{row}" for row in range(len(texts))]
    assert len(committed(run.output)) == len(texts), "a late result was committed beside the one that counts"


@pytest.mark.slow
def test_a_node_that_is_removed_charges_no_document(job, nodes):
    """A reclaimed machine is nobody's fault: its documents are done elsewhere, at their first attempt."""
    first = nodes.add()
    run = job(MANY_TEXTS, cpus_per_worker=CPUS, commit_every_s=0)

    during(run, first.kill, nodes.add, num_done=3)
    assert run.run() == EXIT_DONE
    all_done_once(run, MANY_TEXTS)
    assert set(run.column("attempts")) == {1}
    assert len(set(run.column("worker"))) == 2


@pytest.mark.slow
def test_a_node_that_is_about_to_go_is_emptied(job, nodes):
    """What runs there ends, what waits goes elsewhere, and nobody is charged. Then its worker is let go."""
    first = nodes.add()
    run = job(MANY_TEXTS, cpus_per_worker=CPUS, commit_every_s=0)

    during(run, first.drain, nodes.add, num_done=3)
    assert run.run() == EXIT_DONE
    assert len(run.summaries()) == len(MANY_TEXTS)
    assert set(run.column("attempts")) == {1}
    assert len(set(run.column("worker"))) == 2
    [drained] = run.screen.told("worker_drains")
    assert run.screen.told("worker_released")[0] == {"worker": drained["worker"]}
    assert not noted(run, "died")


@pytest.mark.slow
def test_a_node_that_hangs_until_ray_gives_it_up_charges_no_document(job, nodes):
    """After about a minute Ray calls it dead. What it says when it wakes up is too late."""
    first = nodes.add()
    run = job(TEXTS, cpus_per_worker=CPUS, commit_every_s=0)
    frozen = []

    def hang():
        frozen.extend(first.freeze())

    def come_back():
        if first.is_alive or not noted(run, "died"):
            return False
        return thaw(frozen)

    during(run, hang, come_back, nodes.add, num_done=3)
    try:
        assert run.run() == EXIT_DONE
    finally:
        thaw(frozen)
    all_done_once(run)
    assert set(run.column("attempts")) == {1}


@pytest.fixture
def other_cluster():
    """A cluster in processes of its own: its address, and the process that started them."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "tests.job.nodes"], env=environment(), cwd=ROOT, **pipes)
    address = process.stdout.readline().strip()
    family = psutil.Process(process.pid)
    process.stdin.write("add\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    yield address, family
    process.communicate(timeout=LONGEST_S)


@pytest.mark.slow
def test_the_head_dies_and_a_run_on_another_cluster_goes_on(real_job, undisturbed, other_cluster):
    """Ray ends a driver whose head is gone, without an exception: what was committed is what counts."""
    address, cluster = other_cluster
    moment = ("SIGSTOP", "after", "*/_run/parts/part-*", "2")
    process = real_job.start(DYING_DRIVER, *moment, address=address, commit_every_s=0)
    wait_for_pause(process)
    family = cluster.children(recursive=True)
    [head] = filter(is_head, family)
    workers = list(filter(is_worker, family))
    for worker in workers:
        worker.suspend()  # or all might be done before Ray misses its head
    head.kill()
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=LONGEST_S)
    thaw(workers)
    assert process.returncode not in (0, 2, 3, 4, 5)
    kept = real_job.commits()
    assert not (real_job.output / "_SUCCESS").exists()
    assert real_job.run(commit_every_s=0) == EXIT_DONE
    assert real_job.result() == undisturbed
    assert real_job.commits().items() >= kept.items()

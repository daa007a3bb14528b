"""Machines that go away, and machines that come back."""

import pytest

from specextend.cluster.exits import EXIT_DONE
from tests.contract.conftest import committed
from tests.faults.conftest import during
from tests.faults.nodes import CPUS, Node, thaw

TEXTS = [f"text number {number} " * 5 for number in range(40)]
MANY_TEXTS = [f"{number} {text}" for number in range(10) for text in TEXTS]
"""More than a worker finishes before the driver looks again."""


def finish_on_two_nodes(run, nodes, *actions):
    """Do something to a node in the middle of a run, and add another: nobody is charged, and nothing comes twice."""
    run.job |= {"cpus_per_worker": CPUS, "commit_every_s": 0}
    during(run, *actions, nodes.add, num_done=3)
    assert run.run() == EXIT_DONE
    assert list(run.summaries()) == [f"d{row}" for row in range(len(run.texts))]
    assert len(committed(run.output)) == len(run.texts), "a late result was committed beside the one that counts"
    assert set(run.column("attempts")) == {1}
    assert len(set(run.column("worker"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("happens", [Node.kill, Node.drain])
def test_a_node_that_goes_charges_no_document(job, nodes, happens):
    """A reclaimed machine is nobody's fault: its documents are done elsewhere, at their first attempt.

    If it is announced, what runs there ends, what waits goes elsewhere, and then the worker is let go.
    """
    first = nodes.add()
    run = job(MANY_TEXTS)
    finish_on_two_nodes(run, nodes, lambda: happens(first))
    drained = [{"worker": facts["worker"]} for facts in run.screen.told("worker_drains")]
    assert len(drained) == (happens is Node.drain)
    assert run.screen.told("worker_released")[: len(drained)] == drained
    assert len(run.screen.told("worker_died")) == (happens is Node.kill)


@pytest.mark.slow
def test_a_node_that_hangs_until_ray_gives_it_up_charges_no_document(job, nodes):
    """After about a minute Ray calls it dead. What it says when it wakes up is too late."""
    first = nodes.add()
    run = job(TEXTS)
    frozen = []

    def hang():
        frozen.extend(first.freeze())

    def come_back():
        if first.is_alive or not run.screen.told("worker_died"):
            return False
        return thaw(frozen)

    try:
        finish_on_two_nodes(run, nodes, hang, come_back)
    finally:
        thaw(frozen)

"""More machines for the Ray of the tests: raylets of their own on this one."""

import time
from contextlib import suppress

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from tests.job.nodes import kill_machine

CPUS = 5
"""More than the first node has: a worker that asks for so many lands on another."""


class Node:
    """A node that can be killed, and frozen and thawed."""

    def __init__(self, cluster):
        self._node = cluster.add_node(num_cpus=CPUS, object_store_memory=80 << 20)
        [self._raylet] = self._node.all_processes["raylet"]

    @property
    def is_alive(self):
        """Whether Ray believes so."""
        return any(node["NodeID"] == self._node.node_id and node["Alive"] for node in ray.nodes())

    def workers(self):
        """Its processes that do work."""
        return psutil.Process(self._raylet.process.pid).children(recursive=True)

    def kill(self):
        """The machine is gone, and all that ran on it."""
        kill_machine(self._node)

    def drain(self):
        """The cloud gives notice that it reclaims the machine, within the hour."""
        client = ray._private.worker.global_worker.gcs_client
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        is_accepted, why = client.drain_node(self._node.node_id, reason, "reclaimed", 1000 * (int(time.time()) + 3000))
        assert is_accepted, why

    def freeze(self):
        """The machine hangs; returns what hangs. The raylet does so first: it starts no process any more."""
        raylet = psutil.Process(self._raylet.process.pid)
        raylet.suspend()
        frozen = [raylet, *self.workers()]
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return frozen

    def close(self):
        """End what is left of it."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


class Nodes:
    """Adds nodes to the Ray that this process has joined."""

    def __init__(self):
        self._cluster = Cluster()
        self._cluster.head_node = ray._private.worker._global_node
        self.added = []

    def add(self):
        self.added.append(Node(self._cluster))
        return self.added[-1]


def thaw(frozen):
    """The machine goes on as if nothing had been."""
    for process in frozen:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.fixture
def nodes(local_ray, monkeypatch):
    """None yet. The job sees a cluster that it did not start."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    found = Nodes()
    yield found
    for node in found.added:
        node.close()

from __future__ import annotations

import pytest

from specextend.cluster.cluster import claimed, say_no_node
from specextend.cluster.exits import LockHeldError
from specextend.config import JobOptions


@pytest.fixture
def shared(local_ray: None, monkeypatch) -> None:
    """As if this Ray were one that others use, too."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")


@pytest.mark.slow
def test_two_drivers_of_a_cluster_cannot_hold_one_folder(shared: None):
    """On an object store two lock files can be written at once; a name in the cluster cannot be taken twice."""
    with (
        claimed("s3://bucket/out"),
        claimed("s3://bucket/other"),
        pytest.raises(LockHeldError, match="another driver of this cluster"),
        claimed("s3://bucket/out", wait_s=1.0),
    ):
        pass


def test_a_cluster_without_a_node_for_a_worker_is_said(shared: None):
    """Ray would wait for one in silence; only a cluster that grows may yet start it."""
    assert say_no_node(JobOptions(cpus_per_worker=2)) is None
    said = say_no_node(JobOptions(cpus_per_worker=4096, gpus_per_worker=1))
    assert said is not None
    assert "no node of the cluster has room for a worker of job.cpus_per_worker 4096 and job.gpus_per_worker 1;" in said
    assert said.endswith("unless it grows, the run ends after 3600 s")

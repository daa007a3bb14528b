from __future__ import annotations

import pytest
import ray
from ray.exceptions import ActorUnavailableError, OutOfDiskError, RayTaskError

from specextend.cluster.cluster import claimed, say_no_node
from specextend.cluster.exits import ClusterError, LockHeldError
from specextend.cluster.workers import unexpected
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


@pytest.mark.slow
def test_a_folder_is_free_again_when_its_driver_has_ended(shared: None):
    """Resuming is the normal case."""
    with claimed("s3://bucket/again"):
        pass
    with claimed("s3://bucket/again"), pytest.raises(LockHeldError), claimed("s3://bucket/again", wait_s=1.0):
        pass


@pytest.mark.parametrize(("cause", "is_retryable"), [(OutOfDiskError("Local disk is full"), True), (KeyError(), False)])
def test_a_result_that_finds_no_room_may_be_tried_again_and_a_mistake_of_ours_may_not(
    local_ray: None, cause: Exception, is_retryable: bool
):
    """Ray says so in the name of the method, whose own exceptions look the same."""

    @ray.remote
    def answer() -> str:
        raise cause

    with pytest.raises(RayTaskError) as caught:
        ray.get(answer.remote())
    failed = unexpected(caught.value)
    assert (failed.error_class, failed.stage, failed.retryable) == (type(cause).__name__, "worker", is_retryable)


def test_a_cluster_that_grants_no_name_is_said_in_one_line(shared: None, monkeypatch):
    """Its head may have died a moment ago."""

    def lost(*arguments: object) -> None:
        raise ActorUnavailableError("the head is gone\nstack", None)

    monkeypatch.setattr(ray, "get", lost)
    with (
        pytest.raises(ClusterError, match=r"^Ray cannot create the actor that claims s3://bucket/new: .*; run again$"),
        claimed("s3://bucket/new"),
    ):
        pass


def test_a_cluster_without_a_node_for_a_worker_is_said(shared: None):
    """Ray would wait for one in silence; only a cluster that grows may yet start it."""
    assert say_no_node(JobOptions(cpus_per_worker=2)) is None
    said = say_no_node(JobOptions(cpus_per_worker=4096, gpus_per_worker=1))
    assert said is not None
    assert "no node of the cluster has room for a worker of job.cpus_per_worker 4096 and job.gpus_per_worker 1;" in said
    assert said.endswith("unless it grows, the run ends after 3600 s")

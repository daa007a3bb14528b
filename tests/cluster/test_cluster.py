from __future__ import annotations

import pytest

from specextend.cluster import cluster
from specextend.cluster.cluster import claimed
from specextend.cluster.exits import LockHeldError


@pytest.fixture
def shared(local_ray: None, monkeypatch) -> None:
    """As if this Ray were one that others use, too."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster, "_CLAIM_S", 1.0)


def test_two_drivers_of_a_cluster_cannot_hold_one_folder(shared: None):
    """On an object store two lock files can be written at once; a name in the cluster cannot be taken twice."""
    with (
        claimed("s3://bucket/out"),
        claimed("s3://bucket/other"),
        pytest.raises(LockHeldError, match="another driver of this cluster"),
        claimed("s3://bucket/out"),
    ):
        pass


def test_a_folder_is_free_again_when_its_driver_has_ended(shared: None):
    """Resuming is the normal case."""
    with claimed("s3://bucket/again"):
        pass
    with claimed("s3://bucket/again"), pytest.raises(LockHeldError), claimed("s3://bucket/again"):
        pass

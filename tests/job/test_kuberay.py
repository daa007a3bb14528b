"""`deploy/kuberay/`, checked offline: what KubeRay would be told, and that it agrees with the code it starts."""

import re
import shlex
import tomllib

import pytest
import yaml

from specextend.cluster.exits import GRACE_S
from tests.job.conftest import submitted, text_of

START_S = 900
"""Generous time for a cluster to come up before the driver begins."""


MANIFEST = yaml.safe_load(text_of("deploy/kuberay/rayjob.yaml"))
SPEC = MANIFEST["spec"]
CLUSTER = SPEC["rayClusterSpec"]
HEAD = CLUSTER["headGroupSpec"]
[GROUP] = CLUSTER["workerGroupSpecs"]
CONTAINERS = [*HEAD["template"]["spec"]["containers"], *GROUP["template"]["spec"]["containers"]]


@pytest.fixture
def config():
    """What the job makes of the entrypoint, as a submitted job reads it."""
    return submitted(shlex.split(SPEC["entrypoint"].removeprefix("specextend run ")))


def test_the_job_ends_by_itself_before_its_cluster_is_taken_away(config):
    """The deadline of the RayJob kills without a word; the job's own one commits and exits with 75."""
    assert config.job.deadline_s > 0
    assert START_S + config.job.deadline_s + GRACE_S <= SPEC["activeDeadlineSeconds"]


def test_all_workers_of_the_job_find_a_pod(config):
    """Resources that no pod has are waited for until the deadline."""
    _, worker = CONTAINERS
    limits = worker["resources"]["limits"]
    assert limits == worker["resources"]["requests"], "what Ray counts must be there"
    fitting = int(int(limits["nvidia.com/gpu"]) / config.job.gpus_per_worker)
    assert int(limits["cpu"]) >= fitting * config.job.cpus_per_worker
    assert fitting * GROUP["maxReplicas"] >= config.job.workers


def test_nobody_reaches_the_cluster_without_its_token():
    """Whoever reaches a Ray port runs code: tokens on, and no door to the outside."""
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert HEAD["serviceType"] == "ClusterIP"


def test_versions_agree():
    """A driver and workers of different Rays or Pythons do not speak to each other."""
    dockerfile = text_of("deploy/kuberay/Dockerfile")
    [base] = re.findall(r"^FROM (\S+) AS specextend$", dockerfile, re.MULTILINE)
    assert base == yaml.safe_load(text_of("ray_cluster.yaml"))["docker"]["image"]
    assert base.startswith(f"rayproject/ray:{CLUSTER['rayVersion']}-py311-")
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    wheel = f"out/wheel/specextend-{version}-py3-none-any.whl"
    assert wheel in dockerfile
    assert wheel in yaml.safe_load(text_of("ray_cluster.yaml"))["file_mounts"].values()
    assert {container["image"] for container in CONTAINERS} == {f"registry.example.com/specextend:{version}"}

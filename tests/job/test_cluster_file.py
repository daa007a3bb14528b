"""`ray_cluster.yaml`, checked offline: Ray's own check, and what that does not look at."""

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from specextend.config import RunConfig
from tests.job.conftest import ROOT, text_of

CLUSTER = yaml.safe_load(text_of("ray_cluster.yaml"))


def test_ray_accepts_the_file():
    """A key that Ray does not know would stop `ray up`, or be ignored."""
    prepared = prepare_config(CLUSTER)
    validate_config(prepared)
    assert set(prepared["available_node_types"]) == set(CLUSTER["available_node_types"])


def test_the_image_has_the_ray_the_python_and_the_cuda_that_we_pin():
    """A driver and a cluster of different versions do not speak to each other; torch needs its CUDA."""
    constraints = text_of("constraints.txt").splitlines()
    pins = dict(line.split("==") for line in constraints if "==" in line)
    cuda = "cu" + "".join(pins["cuda-toolkit"].split(".")[:2])
    assert CLUSTER["docker"]["image"] == f"rayproject/ray:{pins['ray']}-py311-{cuda}"
    assert not any("wheels" in command for command in CLUSTER["setup_commands"]), "Ray's defaults install a nightly"
    assert CLUSTER["setup_commands"]


def test_the_head_drives_and_runs_no_worker():
    """A worker on the head would take the driver's node down with it. An idle node of GPUs goes."""
    assert CLUSTER["idle_timeout_minutes"] <= 15
    head = CLUSTER["available_node_types"][CLUSTER["head_node_type"]]
    assert head["resources"] == {"CPU": 0}


def test_nobody_outside_reaches_the_cluster_without_its_token():
    """Whoever reaches a Ray port runs code: dashboard on loopback, tokens on."""
    for commands in (CLUSTER["head_start_ray_commands"], CLUSTER["worker_start_ray_commands"]):
        [start] = [command for command in commands if "ray start" in command]
        assert "RAY_AUTH_MODE=token" in start
        assert "RAY_AUTH_TOKEN_PATH=" in start
    assert "--dashboard-host=127.0.0.1" in " ".join(CLUSTER["head_start_ray_commands"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*a100*.yaml")), ids=lambda path: path.name)
def test_a_worker_of_every_a100_configuration_fits_a_node(path):
    """Resources that no node type has are waited for without end. Of 80 GB a target of 8 billion parameters takes 16
    GiB, activations a tenth, and the cache the rest.
    """
    config = RunConfig.load(path, ["input.path=s3://bucket/in", "output.path=s3://bucket/out"])
    for name, kind in CLUSTER["available_node_types"].items():
        if name == CLUSTER["head_node_type"]:
            continue
        fitting = kind["resources"]["GPU"] // config.job.gpus_per_worker
        assert fitting >= 1
        assert fitting * config.job.cpus_per_worker <= kind["resources"]["CPU"]
    assert config.decoding.cache_gib + 16 < 0.9 * 80e9 / 2**30

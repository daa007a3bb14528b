import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from specextend.cluster.environment import cores_per_worker, prepare_environment, say_room
from specextend.config import JobOptions
from tests.job.conftest import ran, wait_for
from tests.tables import cases


def prepared(**before):
    environment = dict(before)
    prepare_environment(environment)
    return environment


def test_a_ray_of_our_own_is_closed_to_others():
    """By default Ray listens on every interface and writes a token into the home folder that binds later starts."""
    environment = prepared()
    assert environment["RAY_ADDRESS"] == "local"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert environment["RAY_worker_niceness"] == "0", "at Ray's own 15 workers waited for everything else that ran"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] != prepared()["RAY_AUTH_TOKEN"]


def test_a_cluster_is_joined_as_it_is_and_what_the_user_has_set_stays():
    """Address, network and tokens are their owner's."""
    environment = prepared(RAY_ADDRESS="10.0.0.1:6379")
    waits = "RAY_gcs_server_port_wait_time_s"  # one that is no Ray was tried for a quarter of an hour
    own = {"RAY_ADDRESS", "RAY_COLOR_PREFIX", "RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED", waits}
    assert environment.keys() == own
    mine = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"}
    environment = prepared(**mine)
    assert mine.items() <= environment.items()
    assert "RAY_AUTH_TOKEN" not in environment


PRIVATE = """if True:
    import os, stat, subprocess, sys
    import psutil, ray
    from ray._private import node, worker
    from specextend.cluster.environment import connected
    from specextend.cluster.exits import Interrupt
    from specextend.folders import leave

    interrupt = Interrupt()
    before = dict(vars(node.Node))
    try:
        with connected(interrupt):
            started = " ".join(" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True))
            assert "--listen-port=0 " in started, "the next run waited four seconds for the port of this one's agent"
            assert "dashboard/dashboard.py" not in started and "_private/monitor.py" not in started
            sockets = worker._global_node.get_sockets_dir_path()
            assert len(f"{sockets}/plasma_store") <= 107, sockets
            above = os.path.dirname(worker._global_node.get_temp_dir_path())
            state = os.stat(above)
            assert (stat.S_IMODE(state.st_mode), state.st_uid) == (0o700, os.getuid())
            if os.getuid() == 0:
                assert subprocess.run(["ls", sockets], user="nobody", capture_output=True).returncode
            print(above, flush=True)
            if sys.argv[1] == "error":
                raise ZeroDivisionError
            if sys.argv[1] == "SIGTERM":
                os.kill(os.getpid(), 15)
                while True:
                    interrupt.check()
            if sys.argv[1] == "force":
                leave(0)
    except (ZeroDivisionError, InterruptedError, Exception) as error:
        print(type(error).__name__, flush=True)
    assert dict(vars(node.Node)) == before, "the Ray of a notebook that starts one after a run is whole"
"""


@pytest.mark.parametrize("end", ["error", *(pytest.param(end, marks=pytest.mark.slow) for end in ("SIGTERM", "force"))])
def test_a_ray_of_our_own_lives_where_no_other_user_can_go_and_leaves_nothing(tmp_path, end):
    """In Ray's folder, which is everybody's, a process of `nobody` took the place of a run's `plasma_store`, and was
    connected to. Of what Ray starts beside it a run needs no dashboard and no autoscaler, which take seconds.
    """
    long = tmp_path / ("a folder with a long name " * 4)
    long.mkdir()
    environment = prepared(**os.environ | {"TMPDIR": str(long), "RAY_TMPDIR": ""})
    ended = ran(sys.executable, "-c", PRIVATE, end, env=environment).exits(0)
    folder, *error = ended.stdout.splitlines()
    assert error == {"error": ["ZeroDivisionError"], "SIGTERM": ["InterruptedRunError"], "force": []}[end], ended.stderr
    wait_for(
        lambda: not any(folder in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])),
        "end of Ray",
    )
    assert not Path(folder).exists()


EARLY = """if True:
    import os, sys
    from specextend.cluster.environment import early_ray
    from specextend.cluster.exits import Interrupt
    from specextend.config import JobOptions

    early = early_ray(JobOptions(workers=4096, cpus_per_worker=1), sys.argv[2], Interrupt())
    if sys.argv[1] == "entered":
        import ray
        with early as workers:
            hosts = [worker.begun.remote() for worker in workers]
            assert ray.get(hosts) == [os.uname().nodename] * int(ray.cluster_resources()["CPU"])
    early.close()
    assert not os.listdir(sys.argv[2])
"""


@pytest.mark.parametrize("end", [pytest.param("entered", marks=pytest.mark.slow), "refused"])
def test_a_ray_that_comes_up_while_a_run_is_planned_has_its_worker_and_leaves_nothing(end):
    """A refused run does not enter it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = prepared(**os.environ | {"RAY_TMPDIR": folder})
        subprocess.run([sys.executable, "-c", EARLY, end, folder], env=environment, check=True)


@pytest.mark.parametrize(
    "limit, arguments, said",
    cases("""
        -v 3000000 -> run --config tiny-random
            -> a process has at most 2.86 GiB of addresses (ulimit -v), and a run needs 4; raise
        -n 40 -> run --config tiny-random
            -> a process has at most 40 open files (ulimit -n), and a run needs 128; raise
        -v 400000 -> report nowhere -> the limit of 0.4 GiB of memory (ulimit -v) is reached; raise it
        -n 5 -> plan --config tiny-random -> the limit of 5 open files (ulimit -n) is reached; raise it
    """),
)
def test_a_limit_of_the_process_is_named_in_one_line(limit, arguments, said):
    """Ray waited for a minute and hung, or aborted; a traceback was followed by what some library had leaked."""
    command = f"ulimit {limit}; exec {sys.executable} -m specextend {arguments}"
    ended = subprocess.run(["sh", "-c", command], env=prepared(**os.environ), capture_output=True, check=False)
    [line] = ended.stderr.decode().splitlines()
    assert line.startswith(f"error: {said}")
    assert ended.returncode in (1, 2)


@pytest.mark.parametrize(
    "job, nodes, cores",
    [
        ({}, [(2, 0)], 2),
        ({"workers": 4}, [(2, 0)], 1),
        ({"workers": 4}, [(16, 0), (16, 0), (0, 0)], 8),
        ({"workers": 8, "gpus_per_worker": 0.5}, [(8, 0), (16, 1)], 8),
        ({"workers": 2, "gpus_per_worker": 1}, [], 1),
        ({"cpus_per_worker": 4}, [(2, 0)], 4),
    ],
)
def test_a_worker_gets_as_many_cores_as_leave_room_for_all(job, nodes, cores):
    """A number in a shipped configuration was too much for one machine and too little for another."""
    assert cores_per_worker(JobOptions(**job), nodes) == cores


def test_a_cluster_without_a_node_for_a_worker_is_said(local_ray, monkeypatch):
    """Ray would wait for one in silence; only a cluster that grows may yet start it."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert say_room(JobOptions(cpus_per_worker=2)) is None
    said = say_room(JobOptions(cpus_per_worker=4096, gpus_per_worker=1))
    assert said is not None
    assert "no node of the cluster has room for a worker of job.cpus_per_worker 4096 and job.gpus_per_worker 1;" in said
    assert said.endswith("unless it grows, the run ends after 3600 s")


@pytest.mark.parametrize(
    "modules, slow",
    [
        ("core stats", {"ray", "torch", "pyarrow"}),
        ("cluster.environment cluster.records cluster.scheduler config job report", {"ray", "torch"}),
    ],
)
def test_what_must_be_quick_or_pure_imports_neither_ray_nor_torch(modules, slow):
    """Ray reads its variables when it is imported; `status` and a mistyped option must not wait for torch."""
    imported = "; ".join(f"import specextend.{module}" for module in modules.split())
    code = f"{imported}; import sys; sys.exit(sorted({slow} & sys.modules.keys()) or 0)"
    ran(sys.executable, "-c", code).exits(0)

"""The Ray of a run: the variables that it reads when it is imported, the connection to it, and room
for workers.

Imports Ray and torch only inside functions, because `prepare_environment` sets what they read.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, cast

from specextend.cluster.exits import Interrupt, RefusedError, RunError
from specextend.core import counted, first_line
from specextend.folders import make_temporary, remove

if TYPE_CHECKING:  # they import torch
    from specextend.config import JobOptions, RunConfig

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that `ray job submit` sets for the driver."""
LOCAL_OBJECT_STORE_BYTES = 100 << 20
"""Size of the object store of a private Ray: nothing large goes through it."""
_LEAST_ADDRESSES = 4 << 30
"""Bytes of addresses of a process with which Ray starts; with 3.1 GiB it waits for a minute, with
less it aborts.
"""
_LEAST_ROOM = 32 << 20
"""Bytes of a disk for the logs and sockets of a private Ray."""
_LEAST_FILES = 128
"""Open files of a process with which Ray starts and a run has some to spare; with 40 Ray waits for
half a minute.
"""
KNOCK_S = 10.0
"""Seconds in which the head must accept a connection."""
_LONGEST_PARENT = 29
"""Bytes of a folder in which the folder of a Ray can be made: the path of a socket has at most
107.
"""
_TAKE_BACK_S = 0.001
"""Seconds between two calls that take SIGTERM back while Ray shuts down."""


def is_submitted(environment: MutableMapping[str, str]) -> bool:
    """Return True for the driver of `ray job submit`, whose current folder is a temporary copy."""
    return SUBMITTED in environment


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set, so that a Ray which the job starts is private.

    It listens on loopback, asks for a token that nobody else knows and reports nothing. Without
    `RAY_ADDRESS` the job starts such a Ray; by default it would join any Ray that was left running
    on this machine.
    """
    environment.setdefault("RAY_DEDUP_LOGS", "0")
    # no colour codes before the workers' lines on stderr
    environment.setdefault("RAY_COLOR_PREFIX", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ADDRESS", "local")
    if environment["RAY_ADDRESS"] != "local":
        # tries of 40 s; by default 20 of them
        environment.setdefault("RAY_gcs_server_port_wait_time_s", "2")
        return
    # Ray's own 15 leaves the cores to anything else that runs
    environment.setdefault("RAY_worker_niceness", "0")
    # loopback only, on Linux too, despite its name
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # else a process for each core, all at once
    environment.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray connects to its own store before that listens, and would try again only after a second.
    environment.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
    environment.setdefault("RAY_raylet_client_num_connect_attempts", "500")
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        # else Ray would write one into the home folder
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def is_local() -> bool:
    """Return True if the job starts a private Ray (`RAY_ADDRESS=local`)."""
    return os.environ.get("RAY_ADDRESS") == "local"


def num_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


Node = tuple[float, float]
"""CPU cores and GPUs of a machine."""


def this_machine() -> Node:
    """Count what a private Ray has to give to workers."""
    import torch

    return num_cores(), torch.cuda.device_count()


def nodes_up() -> list[Node]:
    """List what each node of the cluster that was joined has to give to workers."""
    import ray

    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in alive]


def cores_per_worker(job: JobOptions, nodes: Sequence[Node]) -> int:
    """Return `job.cpus_per_worker`; `auto` is the largest number that leaves room for all workers,
    and at least 1.
    """
    if job.cpus_per_worker != "auto":
        return job.cpus_per_worker
    workers = min(job.workers, max(1, _room(job, nodes, 1)))
    most = max((int(cores) for cores, _ in nodes), default=1)
    return next(
        (number for number in range(most, 1, -1) if _room(job, nodes, number) >= workers), 1
    )


def _room(job: JobOptions, nodes: Sequence[Node], cores_each: int) -> int:
    """Count the workers that nodes have room for at a time, each with so many cores."""
    each = job.gpus_per_worker
    return sum(
        int(min(cores // cores_each, gpus / each if each else math.inf)) for cores, gpus in nodes
    )


def check_limits() -> None:
    """Raise RefusedError if the limits of this process are too low for a private Ray, which would
    not say so, and RunError if there is no room for its folder.
    """
    wanted = {
        "GiB of addresses (ulimit -v)": (resource.RLIMIT_AS, _LEAST_ADDRESSES, 1 << 30),
        "open files (ulimit -n)": (resource.RLIMIT_NOFILE, _LEAST_FILES, 1),
    }
    _parent()
    for name, (kind, least, unit) in wanted.items():
        limit = resource.getrlimit(kind)[0]
        if 0 <= limit < least:
            limits = f"{limit / unit:.3g} {name}, and a run needs {least / unit:g}"
            raise RefusedError(f"a process has at most {limits}; raise the limit")


def check_resources(job: JobOptions) -> None:
    """Raise RefusedError if this machine could never give a worker what it needs: a private Ray
    would wait for ever.
    """
    check_limits()
    cores, gpus = this_machine()
    # of both it is the GPU that matters
    for key, count in (("gpus_per_worker", gpus), ("cpus_per_worker", cores)):
        wanted = getattr(job, key)
        if wanted != "auto" and wanted > count:
            raise RefusedError(f"job.{key} is {wanted:g} but this machine has {count:g}")


def settle_cores(config: RunConfig) -> RunConfig:
    """Return the configuration with a number in the place of `job.cpus_per_worker: auto`, by the
    nodes that are up.
    """
    cores = cores_per_worker(config.job, nodes_up())
    return config.model_copy(update={"job": replace(config.job, cpus_per_worker=cores)})


def say_room(job: JobOptions) -> str | None:
    """Say that a private Ray has room for fewer workers than `job.workers`, or a cluster for none;
    None otherwise.

    A cluster that grows may start a node with room. In any other the job would wait in silence
    until `JobOptions.silence_s`. Needs a Ray if that is not private.
    """
    nodes = [this_machine()] if is_local() else nodes_up()
    fit = min(job.workers, _room(job, nodes, cores_per_worker(job, nodes)))
    if is_local() and fit < job.workers:
        return f"this machine has room for {fit} of {counted(job.workers, 'worker')} (job.workers)"
    if fit:
        return None
    wanted = (
        f"job.cpus_per_worker {job.cpus_per_worker} and job.gpus_per_worker {job.gpus_per_worker:g}"
    )
    end = f"unless it grows, the run ends after {job.silence_s:g} s"
    return f"no node of the cluster has room for a worker of {wanted}; {end}"


class WorkerActor:
    """A worker as Ray sees it: it imports at once, which takes seconds, and knows its run only when
    that is planned.
    """

    def __init__(self) -> None:
        """Import what a worker needs."""
        import specextend.cluster.worker as module

        self._make = module.Worker

    async def begun(self) -> str:
        """Answer as soon as there is a process, with its host."""
        return os.uname().nodename

    async def ready(self, *options: Any) -> Any:
        """Load the models. options: those of `Worker`."""
        self._worker = self._make(*options)
        return await self._worker.ready()

    async def run(self, *lease: Any) -> Any:
        """Decode the document of a lease."""
        return await self._worker.run(*lease)

    async def progress(self) -> Any:
        """Report what has been decoded."""
        return await self._worker.progress()


def early_ray(job: JobOptions, output: str, interrupt: Interrupt) -> EarlyRay | None:
    """Begin to start a private Ray if the run will need one; what a folder holds already may be
    complete, or another run.

    output: the folder of the run.
    """
    is_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if is_joined or not is_local() or os.path.exists(os.path.join(output, "_run")):
        return None
    return EarlyRay(job, interrupt)


def start_worker(job: JobOptions) -> Any:
    """Start an actor with the resources of one worker. The driver replaces actors that die, Ray
    does not.
    """
    import ray

    actor = ray.remote(WorkerActor)
    return actor.options(
        num_cpus=job.num_cores, num_gpus=job.gpus_per_worker, max_restarts=0, max_task_retries=0
    ).remote()


class EarlyRay(ExitStack):
    """A private Ray that comes up, and whose workers import what they need, while this process does
    the same.
    """

    def __init__(self, job: JobOptions, interrupt: Interrupt):
        """Begin to start it."""
        super().__init__()
        self._interrupt = interrupt
        # Ray's processes end with the thread that started them
        self._thread = ThreadPoolExecutor(1)
        self._workers = self._thread.submit(self._start, job)

    def _start(self, job: JobOptions) -> list[Any]:
        self.enter_context(connected(self._interrupt))
        nodes = nodes_up()
        cores = cores_per_worker(job, nodes)
        # Any other would wait for a place that one of these has, and might never use.
        num_workers = min(job.workers, _room(job, nodes, cores))
        return [start_worker(replace(job, cpus_per_worker=cores)) for _ in range(num_workers)]

    def __enter__(self) -> list[Any]:  # type: ignore[override]
        """Wait until it is up; return its workers. Raises what `connected` raises."""
        workers = self._workers.result()
        self._interrupt.install()
        return workers

    def close(self) -> None:
        """Shut it down if it is up."""
        wait([self._workers])
        super().close()


@contextmanager
def connected(interrupt: Interrupt) -> Iterator[list[Any]]:
    """Connect to Ray for a `with` block: to the cluster that this process has joined already, to a
    private one (`RAY_ADDRESS=local`), or to the one that `ray.init()` finds.

    Yields the workers that have been started; here none. `interrupt` takes SIGTERM back whenever
    Ray has taken it. Raises RunError and InterruptedRunError.
    """
    import ray

    if ray.is_initialized():
        yield []
        return
    with (
        _private_folder() if is_local() else nullcontext("") as folder,
        _attached(interrupt, folder),
    ):
        yield []


@contextmanager
def _attached(interrupt: Interrupt, folder: str) -> Iterator[None]:
    """Connect to Ray for a `with` block. folder: of a private one."""
    try:
        _connect(folder)
    except SystemExit:  # raised by Ray's own handler of SIGTERM while it starts
        _shut_down(interrupt)
        interrupt.tell("SIGTERM received")
        interrupt.check()
    except Exception as error:  # Ray raises many classes here
        _shut_down(interrupt)
        what = "started" if folder else "joined"
        raise RunError(
            f"Ray cannot be {what}: {first_line(error)}; nothing was decoded, run again"
        ) from error
    interrupt.install()
    over = _watch(interrupt) if folder else Event()
    try:
        interrupt.check()  # Ray may have swallowed what its own handler raised
        yield
    finally:
        over.set()
        _shut_down(interrupt)


def _watch(interrupt: Interrupt) -> Event:
    """Tell the run to stop when a process of its private Ray ends before the event that is returned
    is set.

    Ray ends this process then, seconds or a minute later, and says nothing of what to do.
    """
    from ray._private import worker

    over, node = Event(), cast("Any", worker._global_node)

    def wait_for(name: str, process: Any) -> None:
        code = process.wait()
        if not over.is_set():
            interrupt.tell(f"Ray's {name} has ended ({code})")

    for name, [started] in node.all_processes.items():
        Thread(target=wait_for, args=(name, started.process), daemon=True).start()
    return over


def _parent() -> str:
    """Return the folder in which the folder of a private Ray is made. Raises RunError if it has
    no room, for which Ray would wait half a minute.
    """
    places = map(os.path.abspath, (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"))
    parent = next(place for place in places if len(os.fsencode(place)) <= _LONGEST_PARENT)
    with suppress(OSError):  # `make_temporary` says it
        if (free := shutil.disk_usage(parent).free) < _LEAST_ROOM:
            raise RunError(
                f"{parent} has room for {free >> 20} MiB, and Ray's logs and sockets need "
                f"{_LEAST_ROOM >> 20}; make room there, or set TMPDIR to another folder"
            )
    return parent


@contextmanager
def _private_folder() -> Iterator[str]:
    """Make a folder for a Ray that no other user can enter; remove it at the end, also if that
    comes by force.

    In Ray's own one, which is everybody's, another user could put a socket in the place of one of
    ours.
    """
    try:
        folder = make_temporary(_parent(), "sx-")
    except OSError as error:
        raise RunError(
            f"Ray cannot be started: {first_line(error)}; set TMPDIR to another folder"
        ) from error
    try:
        yield folder
    finally:
        remove(folder)


def _shut_down(interrupt: Interrupt) -> None:
    """Shut Ray down, and keep taking SIGTERM back meanwhile: near its end Ray makes that signal
    deadly.
    """
    import ray

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(ray.shutdown)
        while wait([ending], _TAKE_BACK_S).not_done:
            interrupt.install()
    interrupt.install()
    ending.result()


def _connect(folder: str) -> None:
    import ray

    if folder:
        with _bare_head(), _tmpdir(folder):
            ray.init(
                address="local",
                num_cpus=num_cores(),
                include_dashboard=False,
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,  # it warns of other threads than the main one
                _temp_dir=f"{folder}/ray",  # which Ray lets everybody into
            )
    else:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(logging_level=logging.WARNING)


@contextmanager
def _tmpdir(folder: str) -> Iterator[None]:
    """Let processes that are started meanwhile keep temporary files in a folder that goes with
    Ray's, because workers are killed.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


@contextmanager
def _bare_head() -> Iterator[None]:
    """Start no autoscaler and no server of the dashboard with a Ray: `ray.init` waits for both, and
    has no option.
    """
    from ray._private.node import Node

    def leave_out(node: Any, **_: object) -> None:
        # any: for Ray's own a second Ray waits seconds, in vain
        node._ray_params.dashboard_agent_listen_port = 0

    started = {
        name: vars(Node)[name]
        for name in ("start_monitor", "start_api_server")
        if name in vars(Node)
    }
    for name in started:
        setattr(Node, name, leave_out)
    try:
        yield
    finally:
        for name, method in started.items():
            setattr(Node, name, method)


def _knock(address: str) -> None:
    """Raise OSError if nobody listens at `host:port`: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"nobody answers at {address} ({error})") from error

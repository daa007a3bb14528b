"""The Ray of a run: its environment variables, the connection, and room for workers.

Ray and torch are imported inside functions, after `prepare_environment`.
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
"""Set by `ray job submit` for the driver."""
LOCAL_OBJECT_STORE_BYTES = 100 << 20
"""Object store of a private Ray, for small objects only."""
_LEAST_ADDRESSES = 4 << 30
"""Ray hangs for a minute with 3.1 GiB of addresses, and aborts with less."""
_LEAST_ROOM = 32 << 20
"""Bytes for the logs and sockets of a private Ray."""
_LEAST_FILES = 128
"""Ray hangs for half a minute with 40 files."""
KNOCK_S = 10.0
"""Seconds to connect to the head."""
_LONGEST_PARENT = 29
"""Socket paths are limited to 107 bytes."""
_TAKE_BACK_S = 0.001
"""Seconds between attempts to regain SIGTERM."""


def is_submitted(environment: MutableMapping[str, str]) -> bool:
    """Return True in a driver of `ray job submit`, with a temporary working directory."""
    return SUBMITTED in environment


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables of a private Ray that the user has not set.

    It listens on loopback and requires a secret token. Ray's default is to join any Ray here.
    """
    environment.setdefault("RAY_DEDUP_LOGS", "0")
    environment.setdefault("RAY_COLOR_PREFIX", "0")
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ADDRESS", "local")
    if environment["RAY_ADDRESS"] != "local":
        # an attempt takes 40 s; the default is 20
        environment.setdefault("RAY_gcs_server_port_wait_time_s", "2")
        return
    # the default, 15, yields the cores to other programs
    environment.setdefault("RAY_worker_niceness", "0")
    # loopback only, also on Linux
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # the default starts a process per core at once
    environment.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray connects too early, and retries only after a second
    environment.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
    environment.setdefault("RAY_raylet_client_num_connect_attempts", "500")
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        # the default writes a token into the home folder
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def is_local() -> bool:
    """Return True if the job starts a private Ray (`RAY_ADDRESS=local`)."""
    return os.environ.get("RAY_ADDRESS") == "local"


def num_cores() -> int:
    """Count the cores available to this process."""
    return len(os.sched_getaffinity(0))


Node = tuple[float, float]


def this_machine() -> Node:
    """Return the cores and GPUs here."""
    import torch

    return num_cores(), torch.cuda.device_count()


def nodes_up() -> list[Node]:
    """List the cores and GPUs of live nodes."""
    import ray

    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in alive]


def cores_per_worker(job: JobOptions, nodes: Sequence[Node]) -> int:
    """Resolve `job.cpus_per_worker`: `auto` is the largest number that fits all workers, or 1."""
    if job.cpus_per_worker != "auto":
        return job.cpus_per_worker
    workers = min(job.workers, max(1, _room(job, nodes, 1)))
    most = max((int(cores) for cores, _ in nodes), default=1)
    return next(
        (number for number in range(most, 1, -1) if _room(job, nodes, number) >= workers), 1
    )


def _room(job: JobOptions, nodes: Sequence[Node], cores_each: int) -> int:
    each = job.gpus_per_worker
    return sum(
        int(min(cores // cores_each, gpus / each if each else math.inf)) for cores, gpus in nodes
    )


def check_limits() -> None:
    """Check the limits of a private Ray, which would hang silently.

    Raises:
        RefusedError: A limit is too low.
        RunError: The disk is full.
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
    """Raise RefusedError if this machine has no room for a worker; Ray would wait forever."""
    check_limits()
    cores, gpus = this_machine()
    for key, count in (("gpus_per_worker", gpus), ("cpus_per_worker", cores)):
        wanted = getattr(job, key)
        if wanted != "auto" and wanted > count:
            raise RefusedError(f"job.{key} is {wanted:g} but this machine has {count:g}")


def settle_cores(config: RunConfig) -> RunConfig:
    """Resolve `job.cpus_per_worker: auto`."""
    cores = cores_per_worker(config.job, nodes_up())
    return config.model_copy(update={"job": replace(config.job, cpus_per_worker=cores)})


def say_room(job: JobOptions) -> str | None:
    """Warn if a private Ray has too little room, or a cluster none for a worker.

    The job would wait silently; a cluster may grow.
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
    """Ray actor around `Worker`. It imports slow modules at once, and learns its run in `ready`."""

    def __init__(self) -> None:
        import specextend.cluster.worker as module

        self._make = module.Worker

    async def begun(self) -> str:
        """Return the host name as soon as the process runs."""
        return os.uname().nodename

    async def ready(self, *options: Any) -> Any:
        """Load the models. Takes the arguments of `Worker`."""
        self._worker = self._make(*options)
        return await self._worker.ready()

    async def run(self, *lease: Any) -> Any:
        """Decode a lease."""
        return await self._worker.run(*lease)

    async def progress(self) -> Any:
        """Report the progress."""
        return await self._worker.progress()


def early_ray(job: JobOptions, output: str, interrupt: Interrupt) -> EarlyRay | None:
    """Start a private Ray early, unless `output` holds a run."""
    is_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if is_joined or not is_local() or os.path.exists(os.path.join(output, "_run")):
        return None
    return EarlyRay(job, interrupt)


def start_worker(job: JobOptions) -> Any:
    """Start an actor, which the driver replaces if it dies."""
    import ray

    actor = ray.remote(WorkerActor)
    return actor.options(
        num_cpus=job.num_cores, num_gpus=job.gpus_per_worker, max_restarts=0, max_task_retries=0
    ).remote()


class EarlyRay(ExitStack):
    """A private Ray whose start overlaps with the imports of this process."""

    def __init__(self, job: JobOptions, interrupt: Interrupt):
        super().__init__()
        self._interrupt = interrupt
        # Ray's processes end with the thread that started them
        self._thread = ThreadPoolExecutor(1)
        self._workers = self._thread.submit(self._start, job)

    def _start(self, job: JobOptions) -> list[Any]:
        self.enter_context(connected(self._interrupt))
        nodes = nodes_up()
        cores = cores_per_worker(job, nodes)
        # a further actor would wait for resources it may never need
        num_workers = min(job.workers, _room(job, nodes, cores))
        return [start_worker(replace(job, cpus_per_worker=cores)) for _ in range(num_workers)]

    def __enter__(self) -> list[Any]:  # type: ignore[override]
        workers = self._workers.result()
        self._interrupt.install()
        return workers

    def close(self) -> None:
        """Shut Ray down if it is up."""
        wait([self._workers])
        super().close()


@contextmanager
def connected(interrupt: Interrupt) -> Iterator[list[Any]]:
    """Connect to Ray: the one already joined, a private one, or the one found by `ray.init()`.

    Yields an empty list, in place of early workers. Raises RunError, or InterruptedRunError.
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
    try:
        _connect(folder)
    except SystemExit:  # from Ray's SIGTERM handler
        _shut_down(interrupt)
        interrupt.tell("SIGTERM received")
        interrupt.check()
    except Exception as error:
        _shut_down(interrupt)
        what = "started" if folder else "joined"
        raise RunError(
            f"Ray cannot be {what}: {first_line(error)}; nothing was decoded, run again"
        ) from error
    interrupt.install()
    over = _watch(interrupt) if folder else Event()
    try:
        interrupt.check()  # Ray's handler may have swallowed the exception
        yield
    finally:
        over.set()
        _shut_down(interrupt)


def _watch(interrupt: Interrupt) -> Event:
    """Tell the run to stop when a Ray process ends before the returned event is set.

    Otherwise Ray would end this process later, without advice for the user.
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
    places = map(os.path.abspath, (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"))
    parent = next(place for place in places if len(os.fsencode(place)) <= _LONGEST_PARENT)
    with suppress(OSError):  # `make_temporary` reports it
        if (free := shutil.disk_usage(parent).free) < _LEAST_ROOM:
            raise RunError(
                f"{parent} has room for {free >> 20} MiB, and Ray's logs and sockets need "
                f"{_LEAST_ROOM >> 20}; make room there, or set TMPDIR to another folder"
            )
    return parent


@contextmanager
def _private_folder() -> Iterator[str]:
    """Make a folder that other users cannot enter: in Ray's default they could replace a socket."""
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
    """Shut Ray down while regaining SIGTERM, which Ray makes deadly near its end."""
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
                logging_level=logging.ERROR,  # it warns about other threads than the main one
                _temp_dir=f"{folder}/ray",  # Ray makes this folder accessible to everybody
            )
    else:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(logging_level=logging.WARNING)


@contextmanager
def _tmpdir(folder: str) -> Iterator[None]:
    """Set TMPDIR for child processes: killed workers cannot clean up."""
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
    """Start Ray without its autoscaler and dashboard servers, a long wait that no option avoids."""
    from ray._private.node import Node

    def leave_out(node: Any, **_: object) -> None:
        # any value: waiting for the default port would take seconds
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
    """Raise OSError if nobody listens: Ray would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"no answer from {address} ({error})") from error

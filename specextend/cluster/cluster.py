"""Joining a Ray cluster or starting one, and being the only driver of a folder inside it."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specextend.cluster.exits import ClusterError, LockHeldError, RefusedError
from specextend.core import first_line

if TYPE_CHECKING:  # not at run time: the actor of a claim must not load torch
    from specextend.cluster.interrupt import Interrupt
    from specextend.config import JobOptions
    from specextend.models import TargetOptions

LOCAL_OBJECT_STORE_BYTES = 100 << 20
"""Of a Ray that we start for ourselves: nothing large goes through it."""
KNOCK_S = 10.0
"""Seconds in which the head must take a connection."""
_TAKE_BACK_S = 0.001
"""Seconds between two takings back of SIGTERM while Ray shuts down."""
_NAMESPACE = "specextend"
_CLAIM_S = 10.0
"""Seconds that the name of a driver that has died may live on."""


def is_local() -> bool:
    """Whether the job starts a Ray of its own (`RAY_ADDRESS=local`)."""
    return os.environ.get("RAY_ADDRESS") == "local"


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_resources(target: TargetOptions, job: JobOptions) -> None:
    """Raise RefusedError where no worker could have what it needs: a Ray of our own would wait for ever."""
    if target.device.startswith("cuda") and not job.gpus_per_worker:
        raise RefusedError(f"target.device {target.device} needs job.gpus_per_worker above 0")
    if not is_local():
        return
    import torch

    there = {"cpus_per_worker": num_cores(), "gpus_per_worker": torch.cuda.device_count()}
    for key, count in there.items():
        if getattr(job, key) > count:
            raise RefusedError(f"job.{key} is {getattr(job, key):g} but this machine has {count}")


def workers_that_fit(job: JobOptions) -> int:
    """How many of `job.workers` a Ray of our own has room for at a time."""
    import torch

    fit = [num_cores() // job.cpus_per_worker]
    if job.gpus_per_worker:
        fit.append(int(torch.cuda.device_count() / job.gpus_per_worker))
    return min(job.workers, *fit)


@contextmanager
def connected(interrupt: Interrupt) -> Iterator[None]:
    """Connect to Ray for the length of a `with` block: to the cluster that this process has joined already, to a
    local one of its own (`RAY_ADDRESS=local`), or to the one that `ray.init()` finds.

    `interrupt` has SIGTERM again wherever Ray takes it. Raises ClusterError and InterruptedRunError.
    """
    if ray.is_initialized():
        yield
        return
    try:
        _connect()
    except SystemExit:  # while Ray starts, its own handler of SIGTERM raises this
        _shut_down(interrupt)
        interrupt.tell("SIGTERM received")
        interrupt.check()
    except Exception as error:  # Ray raises no class of its own
        _shut_down(interrupt)
        what = "started" if is_local() else "joined"
        raise ClusterError(f"Ray cannot be {what}: {first_line(error)}; nothing was decoded, run again") from error
    interrupt.install()
    try:
        yield
    finally:
        _shut_down(interrupt)


def _shut_down(interrupt: Interrupt) -> None:
    """Shut Ray down, with our handlers put back all the while: a second before its end, Ray makes SIGTERM deadly."""
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(ray.shutdown)
        while wait([ending], _TAKE_BACK_S).not_done:
            interrupt.install()
    interrupt.install()
    ending.result()


def _connect() -> None:
    if is_local():
        ray.init(
            address="local",
            num_cpus=num_cores(),
            include_dashboard=False,
            object_store_memory=LOCAL_OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
        )
    else:
        _knock(os.environ.get("RAY_ADDRESS", ""))
        ray.init(logging_level=logging.WARNING)


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at `host:port`: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"nobody answers at {address} ({error})") from error


@contextmanager
def claimed(output: str) -> Iterator[None]:
    """Hold the name of an output folder among the drivers of this cluster. Raises LockHeldError.

    A second guard behind the lock file, whose file system may not exclude a second writer.
    """
    if is_local():
        yield
        return
    name = hashlib.sha256(output.encode()).hexdigest()[:16]
    holder = _claim(f"output-{name}", output)
    try:
        yield
    finally:
        ray.kill(holder)


class _Claim:
    """An actor that only has a name."""

    def ping(self) -> None:
        """Returns once the actor lives."""


def _claim(name: str, output: str) -> Any:
    """The actor of a name, on the driver's own node: elsewhere a node that dies would take it along."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    give_up_at = time.monotonic() + _CLAIM_S
    while True:
        try:
            actor: Any = ray.remote(_Claim)
            options = {"name": name, "namespace": _NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
            holder = actor.options(**options).remote()
            ray.get(holder.ping.remote())
        except ValueError:
            if time.monotonic() >= give_up_at:
                raise LockHeldError(f"{output} is held by another driver of this cluster") from None
            time.sleep(0.5)
        except RayError as error:
            raise ClusterError(f"Ray does not do as it is asked: {first_line(error)}; run again") from error
        else:
            return holder

"""The connection to a Ray cluster, joined or started, and the claim of one driver to a folder inside it."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specextend.cluster.environment import cores_per_worker, is_local, num_cores
from specextend.cluster.exits import ClusterError, Interrupt, LockHeldError
from specextend.config import JobOptions, RunConfig
from specextend.core import first_line

LOCAL_OBJECT_STORE_BYTES = 100 << 20
"""Size of the object store of a private Ray: nothing large goes through it."""
KNOCK_S = 10.0
"""Seconds in which the head must accept a connection."""
CLAIM_S = 10.0
"""Seconds to wait for a claim: that of a driver which has died may outlive it by as much."""
_TAKE_BACK_S = 0.001
"""Seconds between two calls that take SIGTERM back while Ray shuts down."""
_NAMESPACE = "specextend"


@contextmanager
def connected(interrupt: Interrupt) -> Iterator[None]:
    """Connect to Ray for a `with` block: to the cluster that this process has joined already, to a private one
    (`RAY_ADDRESS=local`), or to the one that `ray.init()` finds.

    `interrupt` takes SIGTERM back whenever Ray has taken it. Raises ClusterError and InterruptedRunError.
    """
    if ray.is_initialized():
        yield
        return
    try:
        _connect()
    except SystemExit:  # raised by Ray's own handler of SIGTERM while it starts
        _shut_down(interrupt)
        interrupt.tell("SIGTERM received")
        interrupt.check()
    except Exception as error:  # Ray raises many classes here
        _shut_down(interrupt)
        what = "started" if is_local() else "joined"
        raise ClusterError(f"Ray cannot be {what}: {first_line(error)}; nothing was decoded, run again") from error
    interrupt.install()
    try:
        interrupt.check()  # Ray may have swallowed what its own handler raised
        yield
    finally:
        _shut_down(interrupt)


def _shut_down(interrupt: Interrupt) -> None:
    """Shut Ray down, and keep taking SIGTERM back meanwhile: near its end Ray makes that signal deadly."""
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
    """Raise OSError if nobody listens at `host:port`: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(f"nobody answers at {address} ({error})") from error


@contextmanager
def claimed(output: str, wait_s: float = CLAIM_S) -> Iterator[None]:
    """Claim an output folder among the drivers of this cluster. Raises LockHeldError if it is claimed for `wait_s`.

    This is a second guard behind the lock file, whose file system may be unable to exclude a second writer.
    """
    if is_local():
        yield
        return
    name = hashlib.sha256(output.encode()).hexdigest()[:16]
    holder = _claim(f"output-{name}", output, wait_s)
    try:
        yield
    finally:
        ray.kill(holder)


class _Claim:
    """An actor that does nothing but hold a name."""

    def ping(self) -> None:
        """Return once the actor lives."""


def _claim(name: str, output: str, wait_s: float) -> Any:
    """Create the actor of a name on the driver's own node, so that it does not die with another one."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    give_up_at = time.monotonic() + wait_s
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
            what = f"Ray cannot create the actor that claims {output}"
            raise ClusterError(f"{what}: {first_line(error)}; run again") from error
        else:
            return holder


def settle_cores(config: RunConfig) -> RunConfig:
    """Return the configuration with a number in the place of `job.cpus_per_worker: auto`, by the nodes that are up."""
    nodes = [(each.get("CPU", 0.0), each.get("GPU", 0.0)) for each in _nodes()]
    cores = cores_per_worker(config.job, nodes)
    return config.model_copy(update={"job": replace(config.job, cpus_per_worker=cores)})


def _nodes() -> list[dict[str, float]]:
    """Return the resources of each node that is up."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def say_no_node(job: JobOptions) -> str | None:
    """Say that no node of the cluster that was joined could hold a worker, even an idle one; None if one could.

    A cluster that grows may start such a node. In any other the job would wait in silence until `JobOptions.silence_s`.
    """
    needed = {"CPU": job.num_cores, "GPU": job.gpus_per_worker}
    if any(all(node.get(name, 0.0) >= number for name, number in needed.items()) for node in _nodes()):
        return None
    wanted = f"job.cpus_per_worker {job.cpus_per_worker} and job.gpus_per_worker {job.gpus_per_worker:g}"
    end = f"unless it grows, the run ends after {job.silence_s:g} s"
    return f"no node of the cluster has room for a worker of {wanted}; {end}"

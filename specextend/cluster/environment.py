"""The environment of a run: the variables that Ray reads when it is imported, and the resources of this machine.

Imports neither Ray nor torch, because it sets what they read.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from specextend.cluster.exits import RefusedError
from specextend.core import counted

if TYPE_CHECKING:  # they import torch
    from specextend.config import JobOptions
    from specextend.models import TargetOptions

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that `ray job submit` sets for the driver."""


def is_submitted(environment: MutableMapping[str, str]) -> bool:
    """Return True for the driver of `ray job submit`, whose current folder is a temporary copy."""
    return SUBMITTED in environment


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set, so that a Ray which the job starts is private.

    It listens on loopback, asks for a token that nobody else knows and reports nothing. Without `RAY_ADDRESS` the job
    starts such a Ray; by default it would join any Ray that was left running on this machine.
    """
    environment.setdefault("RAY_DEDUP_LOGS", "0")
    environment.setdefault("RAY_COLOR_PREFIX", "0")  # no colour codes before the workers' lines on stderr
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment.setdefault("RAY_ADDRESS", "local")
    if environment["RAY_ADDRESS"] != "local":
        return
    environment.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 leaves the cores to anything else that runs
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only, on Linux too, despite its name
    if "RAY_AUTH_MODE" not in environment:
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray would write one into the home folder


def is_local() -> bool:
    """Return True if the job starts a private Ray (`RAY_ADDRESS=local`)."""
    return os.environ.get("RAY_ADDRESS") == "local"


def num_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Node = tuple[float, float]
"""CPU cores and GPUs of a machine."""


def this_machine() -> Node:
    """Count what a private Ray has to give to workers."""
    import torch

    return num_cores(), torch.cuda.device_count()


def cores_per_worker(job: JobOptions, nodes: Sequence[Node]) -> int:
    """Return `job.cpus_per_worker`; `auto` is the largest number that leaves room for all workers, and at least 1."""
    if job.cpus_per_worker != "auto":
        return job.cpus_per_worker
    workers = min(job.workers, max(1, _room(job, nodes, 1)))
    most = max((int(cores) for cores, _ in nodes), default=1)
    return next((number for number in range(most, 1, -1) if _room(job, nodes, number) >= workers), 1)


def _room(job: JobOptions, nodes: Sequence[Node], cores_each: int) -> int:
    """Count the workers that nodes have room for at a time, each with so many cores."""
    each = job.gpus_per_worker
    return sum(int(min(cores // cores_each, gpus / each if each else math.inf)) for cores, gpus in nodes)


def check_device(target: TargetOptions, job: JobOptions) -> None:
    """Raise RefusedError if a worker would have no GPU for a target that needs one, on whichever machine."""
    if target.device.startswith("cuda") and not job.gpus_per_worker:
        raise RefusedError(f"target.device {target.device} needs job.gpus_per_worker above 0")


def check_resources(job: JobOptions) -> None:
    """Raise RefusedError if this machine could never give a worker what it needs: a private Ray would wait for ever."""
    cores, gpus = this_machine()
    for key, count in (("gpus_per_worker", gpus), ("cpus_per_worker", cores)):  # of both it is the GPU that matters
        wanted = getattr(job, key)
        if wanted != "auto" and wanted > count:
            raise RefusedError(f"job.{key} is {wanted:g} but this machine has {count:g}")


def worker_device(job: JobOptions) -> str:
    """Return the name of what a worker on this machine computes on: its GPU, or the processor."""
    import torch

    from specextend.decoding.device import device_name

    return device_name(torch.device("cuda" if job.gpus_per_worker else "cpu"))


def workers_that_fit(job: JobOptions) -> int:
    """Count how many of `job.workers` a private Ray has room for at a time."""
    here = [this_machine()]
    return min(job.workers, _room(job, here, cores_per_worker(job, here)))


def say_room(job: JobOptions) -> str | None:
    """Say that a private Ray has room for fewer workers than `job.workers`; None if it has room for all."""
    fit = workers_that_fit(job)
    if fit == job.workers:
        return None
    return f"this machine has room for {fit} of {counted(job.workers, 'worker')} (job.workers)"

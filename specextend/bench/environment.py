"""Where a figure was measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from specextend.config import RunConfig
from specextend.decoding.device import device_name
from specextend.models import resolve_device

_PACKAGES = ("specextend", "torch", "transformers")


def use_configured_threads(config: RunConfig) -> None:
    """On a CPU, as many threads as the job's workers have."""
    if resolve_device(config.target.device).type == "cpu":
        torch.set_num_threads(config.job.cpus_per_worker)


def environment(config: RunConfig) -> dict[str, Any]:
    """Device, versions, threads, and the load of the machine before the measuring."""
    device = resolve_device(config.target.device)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_type": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

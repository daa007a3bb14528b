"""Stage `machine`: device, versions, and the ceilings that other stages' times are held against."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from specextend.bench.gpu_check.stage import Row, Setting, read_rows
from specextend.decoding.limits import measure_copy, measure_limits

_PACKAGES = (
    "torch", "transformers", "triton", "flash-attn", "pyarrow", "numpy", "safetensors", "tokenizers", "pydantic",
    "pytest", "ray", "gguf", "rich",
)  # fmt: skip


def run(setting: Setting) -> Iterator[Row]:
    """Yield the device and the versions first, then the limits."""
    device = torch.device(setting.device)
    yield {
        "device": device_name(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    limits = measure_limits(device, torch.bfloat16)
    copied = measure_copy(device)
    yield {
        "read_bytes_per_s": limits.read_bytes_per_s,
        "copy_bytes_per_s": copied,
        "bytes_per_s": max(limits.read_bytes_per_s, copied),
        "bf16_flop_per_s": limits.flop_per_s,
    }


def ceiling(out: Path, name: str) -> float | None:
    """Return what this stage measured earlier, `bytes_per_s` or `bf16_flop_per_s`; None if it did not get there."""
    return next((row[name] for row in read_rows(out, "machine") if name in row), None)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for a CPU, its architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

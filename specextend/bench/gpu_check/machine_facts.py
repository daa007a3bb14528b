"""Stage `machine`: device, versions, and the ceilings that other stages' times are held against."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from specextend.bench.gpu_check.stage import Row, Setting, read_rows
from specextend.decoding.device import device_name
from specextend.decoding.limits import measure_copy, measure_limits
from specextend.versions import package_version

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
        "versions": {name: package_version(name) for name in _PACKAGES},
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

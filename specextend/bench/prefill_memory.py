"""`memory`: the peak memory of a prefill, and the part of it that is neither weights nor cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specextend.bench.sides import load_side
from specextend.bench.workload import BenchOptions, Say, bench_documents, describe, use_configured_threads
from specextend.config import RunConfig
from specextend.loading import rows_per_sequence
from specextend.models import DTYPES, TargetOptions, read_facts, resolve_device, skeleton

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def measure_memory(config: RunConfig, options: BenchOptions, num_tokens: int, say: Say) -> dict[str, Any]:
    """Measure peak bytes while target and draft read a prompt of `num_tokens` tokens and decode two more.

    On a CPU this is the resident memory of the process, libraries included; on a GPU, what torch has allocated.
    `over_bytes` is the peak minus the target's weights and the prompt's rows of its cache, so it includes the draft's.
    Raises ValueError if the prompt would be empty, or the input or a model cannot be used.
    """
    if num_tokens < 1:
        raise ValueError(f"the prompt must have at least 1 token, got {num_tokens}; raise --tokens")
    use_configured_threads(config)
    documents = bench_documents(config, options)
    token_ids = [token_id for document in documents for token_id in document.prompt_token_ids]
    prompt = (token_ids * (num_tokens // len(token_ids) + 1))[:num_tokens]
    header = describe(config, options, documents)
    device = resolve_device(config.target.device)
    say("loading specextend")
    side = load_side("specextend", config)
    loaded = resident_bytes(device)
    since_load = reset_peak(device)
    say(f"prefill of {num_tokens} tokens")
    side.run(prompt, 2)
    return {
        "kind": "memory",
        **header,
        "num_tokens": num_tokens,
        "loaded_bytes": loaded,
        "peak_holds_loading": not since_load,
        **account(config, num_tokens, peak_bytes(device)),
    }


def account(config: RunConfig, num_tokens: int, peak: int) -> dict[str, int]:
    """Split the peak into the target's weights, its cache for the prompt, and everything else."""
    facts = read_facts(config.target.model, config.target.revision)
    weights = weight_bytes(config.target)
    cache = rows_per_sequence(config, num_tokens) * facts.kv_bytes_per_token(config.target.dtype)
    return {"peak_bytes": peak, "weight_bytes": weights, "cache_bytes": cache, "over_bytes": peak - weights - cache}


def weight_bytes(target: TargetOptions) -> int:
    """Count the bytes of a model's parameters without loading them; tied ones count once."""
    return sum(parameter.numel() for parameter in skeleton(target).parameters()) * DTYPES[target.dtype].itemsize


def resident_bytes(device: torch.device) -> int:
    """Return the bytes in use now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM")


def reset_peak(device: torch.device) -> bool:
    """Reset the recorded peak; return False if the system does not allow it, so that the peak includes loading."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    """Read a size from /proc/self/status. Raises ValueError on a system without it."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    if not sizes:
        raise ValueError("peak memory cannot be measured here: it is read from /proc/self/status, which only Linux has")
    return int(sizes[0]) * 1024

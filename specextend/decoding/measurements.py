"""Measurements of the machine: how they are kept between two starts, and what it can do at most.

A measurement is one JSON file in the user's cache folder. It is kept only if nothing else used the cores meanwhile:
beside another busy process, kernels of several threads can take thirty times as long, and the wrong one looks fastest.
If a file is missing, damaged or about something else, there is nothing; if the folder cannot be written, nothing is
kept.

A decoding step of one sequence reads every weight and the whole cache, so memory bandwidth limits it; prefill is
limited by the rate of matrix products.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specextend.attention.backends import shortest_runs
from specextend.decoding.device import device_name, synchronise, traits_of
from specextend.decoding.layers import pack_if_faster

VERSION = 4
_MOST_PREEMPTIONS_PER_S = 100.0
"""Two idle cores show 20 to 45, beside one more busy process 150 and more."""
_PATIENCE_S = 1.5
"""Seconds within which a disturbed measurement is repeated."""
_REPEATS = 5


def kept_or_measured(kind: str, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """Return the JSON value that was kept as `kind` for `key`, JSON values that say what it is about, or measure it."""
    path = _path(kind, key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        stored = {}
    if isinstance(stored, dict) and stored.get("version") == VERSION and stored.get("key") == dict(key):
        return stored["value"]
    value, is_quiet = measure_undisturbed(measure)
    if is_quiet and path:
        with suppress(OSError):
            _write(path, json.dumps({"version": VERSION, "key": dict(key), "value": value}, indent=1))
    return value


def measure_undisturbed(measure: Callable[[], Any]) -> tuple[Any, bool]:
    """Measure until the machine was quiet, for a second or two; return the last result, and True if it was quiet."""
    started_at = time.perf_counter()
    while True:
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        result = measure()
        end, preemptions = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        is_quiet = preemptions <= _MOST_PREEMPTIONS_PER_S * (end - begin) + 1
        if is_quiet or end - started_at > _PATIENCE_S:
            return result, is_quiet


def cache_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`; None if there is no home either."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard says to ignore relative ones
        return Path(base, "specextend")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "specextend") if os.path.isabs(home) else None


def _path(kind: str, key: Mapping[str, Any]) -> Path | None:
    folder = cache_folder()
    text = json.dumps(dict(key), sort_keys=True)
    return folder and folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The best of several measurements, with as many threads as torch has."""

    read_bytes_per_s: float
    """Of a sum over a large tensor."""
    flop_per_s: float
    """Of a product like those of prefill, in the target's dtype, with the weight packed as in the engine."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The bytes and operations that plain decoding with a model takes at least."""

    weight_bytes: int
    """Weights that a step reads."""
    kv_bytes_per_token: int
    layer_parameters: int
    """Weights of the linear layers that every token of a prompt passes."""
    head_parameters: int
    """Weights of the last layer, which only the prompt's last token passes."""
    attention_flop_per_pair: int
    """Of a token and one that it attends to, in all layers."""

    def prefill_flop(self, num_tokens: int, num_cached: int = 0) -> int:
        """Count the floating-point operations of a prompt, of which the first `num_cached` tokens were read before."""
        products = 2 * ((num_tokens - num_cached) * self.layer_parameters + self.head_parameters)
        pairs = (num_tokens * (num_tokens + 1) - num_cached * (num_cached + 1)) // 2
        return products + self.attention_flop_per_pair * pairs


def measure_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Measure memory bandwidth and matrix rate, which takes a few seconds."""
    num_bytes, size = traits_of(device).probe_bytes, traits_of(device).probe_size
    values = torch.ones(num_bytes // 4, device=device)
    read_s = _best_s(values.sum, device)
    del values
    product_s = _best_s(_product(size, device, dtype), device)
    return MachineLimits(num_bytes / read_s, 2 * size**3 / product_s)


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Make a matrix product as the engine computes it."""
    linear = nn.Linear(size, size, bias=False, device=device, dtype=dtype).requires_grad_(False)
    layer = nn.Sequential(linear)
    pack_if_faster(layer)
    rows = torch.ones(size, size, device=device, dtype=dtype)
    return lambda: layer(rows)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls after a first one."""

    def run() -> None:
        work()
        synchronise(device)

    return shortest_runs({"": run}, _REPEATS)[""]


def load_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Return the limits of a device, kept or measured now."""
    key = {"device": device_name(device), "threads": torch.get_num_threads(), "dtype": str(dtype)}
    key["torch"] = str(torch.__version__)
    return MachineLimits(**kept_or_measured("limits", key, lambda: asdict(measure_limits(device, dtype))))


def count_work(model: Any, dtype: torch.dtype) -> ModelWork:
    """Count what decoding with a transformers causal LM takes, whose weights may be on `meta`."""
    config = model.config
    head = model.lm_head.weight.numel()
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    unread = 0 if config.tie_word_embeddings else head  # of an embedding of its own, a step reads one row
    num_weights = sum(parameter.numel() for parameter in model.parameters()) - unread
    head_dim = head_size(config)
    return ModelWork(
        weight_bytes=num_weights * dtype.itemsize,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize,
        layer_parameters=linears - head,
        head_parameters=head,
        attention_flop_per_pair=4 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def head_size(config: Any) -> int:
    """Return the elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

"""What the machine can do at most, what a model asks of it, and which share of the one the other reaches.

A decoding step of one sequence reads every weight and the whole cache, so memory bandwidth limits it; prefill is
limited by the rate of matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specextend.decoding.packing import pack_if_faster
from specextend.model_files import find_files
from specextend.models import DTYPES, Dtype, TargetOptions

_READ_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
"""Size of the tensor that is read: more than a cache holds, and so much that starting a kernel takes no share."""
_PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
"""Rows, inputs and outputs of the product."""
_REPEATS = 5


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

    def step_bytes(self, num_tokens: float) -> float:
        """Count the bytes that a step reads with `num_tokens` tokens in the cache."""
        return self.weight_bytes + num_tokens * self.kv_bytes_per_token

    def prefill_flop(self, num_tokens: int) -> int:
        """Count the floating-point operations of a prompt."""
        products = 2 * (num_tokens * self.layer_parameters + self.head_parameters)
        return products + self.attention_flop_per_pair * num_tokens * (num_tokens + 1) // 2


def measure_limits(device: torch.device, dtype: Dtype) -> MachineLimits:
    """Measure memory bandwidth and matrix rate, which takes a few seconds."""
    num_bytes, size = _READ_BYTES[device.type], _PRODUCT_SIZE[device.type]
    values = torch.ones(num_bytes // 4, device=device)
    read_s = _best_s(values.sum, device)
    del values
    product_s = _best_s(_product(size, device, DTYPES[dtype]), device)
    return MachineLimits(num_bytes / read_s, 2 * size**3 / product_s)


def measure_copy(device: torch.device) -> float:
    """Measure the bytes per second of a copy inside the device's memory, those read and those written together."""
    source = torch.ones(_READ_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Make a matrix product as the engine computes it."""
    linear = nn.Linear(size, size, bias=False, device=device, dtype=dtype).requires_grad_(False)
    layer = nn.Sequential(linear)
    pack_if_faster(layer)
    rows = torch.ones(size, size, device=device, dtype=dtype)
    return lambda: layer(rows)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls after a first one."""
    seconds = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def work_of(target: TargetOptions) -> ModelWork:
    """Count what decoding with a target takes, without loading its weights."""
    return work_of_model(skeleton(target), DTYPES[target.dtype])


def work_of_model(model: Any, dtype: torch.dtype) -> ModelWork:
    """Count what decoding with a causal LM takes, its weights and cache in `dtype`. Its layers are the stock ones."""
    config, head = model.config, model.lm_head.weight.numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    unread = 0 if config.tie_word_embeddings else head  # of an embedding of its own, a step reads one row
    num_weights = sum(parameter.numel() for parameter in model.parameters()) - unread
    return ModelWork(
        weight_bytes=num_weights * dtype.itemsize,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize,
        layer_parameters=linears - head,
        head_parameters=head,
        attention_flop_per_pair=4 * config.num_hidden_layers * config.num_attention_heads * head_dim,
    )


def skeleton(target: TargetOptions) -> Any:
    """Make a target's modules without their weights."""
    location = find_files(target.model, target.revision, weights=False)
    config = AutoConfig.from_pretrained(location.folder, trust_remote_code=False, **location.gguf_argument())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)

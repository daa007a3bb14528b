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
from specextend.models import DTYPES, Dtype, TargetOptions, read_facts

_READ_BYTES = 512 << 20  # more than a cache holds
_PRODUCT_SIZE = 2048  # rows, inputs and outputs
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
    values = torch.ones(_READ_BYTES // 4, device=device)
    read_s = _best_s(values.sum, device)
    del values
    product_s = _best_s(_product(device, DTYPES[dtype]), device)
    return MachineLimits(_READ_BYTES / read_s, 2 * _PRODUCT_SIZE**3 / product_s)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Make a matrix product as the engine computes it."""
    linear = nn.Linear(_PRODUCT_SIZE, _PRODUCT_SIZE, bias=False, device=device, dtype=dtype).requires_grad_(False)
    layer = nn.Sequential(linear)
    pack_if_faster(layer)
    rows = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=dtype)
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
    facts = read_facts(target.model, target.revision)
    model = skeleton(target)
    head = model.lm_head.weight.numel()
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    unread = 0 if model.config.tie_word_embeddings else head  # of an embedding of its own, a step reads one row
    num_weights = sum(parameter.numel() for parameter in model.parameters()) - unread
    return ModelWork(
        weight_bytes=num_weights * DTYPES[target.dtype].itemsize,
        kv_bytes_per_token=facts.kv_bytes_per_token(target.dtype),
        layer_parameters=linears - head,
        head_parameters=head,
        attention_flop_per_pair=4 * facts.num_layers * facts.num_heads * facts.head_dim,
    )


def skeleton(target: TargetOptions) -> Any:
    """Make a target's modules without their weights."""
    location = find_files(target.model, target.revision, weights=False)
    config = AutoConfig.from_pretrained(location.folder, trust_remote_code=False, **location.gguf_argument())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)

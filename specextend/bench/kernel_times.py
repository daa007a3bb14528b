"""Times of the attention kernels: in a decoding step, in a chunk of a prompt, and of whole steps with each of them.

Shapes: `T` queries, `L` layers, `H` query heads, `K` key heads, `R` cache rows, `D` head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from specextend.attention.hybrid import attend_plan
from specextend.attention.plan import Attend, AttentionPlan
from specextend.decoding.device import CPU
from specextend.decoding.graphs import Graphs
from specextend.decoding.model import CachedModel
from specextend.decoding.step_costs import time_step
from specextend.decoding.tree import tree_mask
from specextend.report.statistics import spread, spread_json

NUM_QUERIES = (1, 4, 8, 16)
"""Rows of a decoding step: a plain one, and trees of several sizes."""
STEP_ROWS = (1, 16)
"""Rows of the whole steps."""
CHUNK_LAYERS = 3
"""Layers over which a chunk is timed; a rate does not depend on their number."""
REFERENCE: Final = "reference"
REFERENCE_KEYS = 2048
"""Most keys with which `reference` is timed; chunks never are. It takes seconds for more."""


def fill(stored: Tensor) -> None:
    """Fill a cache with normal numbers; fresh memory may hold NaN."""
    stored.normal_(generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def attention_times(
    target: CachedModel, kernels: Mapping[str, Attend], num_keys: Sequence[int], rounds: int, bytes_per_s: float
) -> list[dict[str, Any]]:
    """Measure attention in one decoding step, over all layers, in ms; `read_ms` is the time to read the keys once.

    Every layer reads its own part of the cache, as in a step, so that the processor's caches do not help. More than one
    query attend as a tree, with one call for prefix and tree.
    """
    cells = []
    for length in num_keys:
        read_ms = 1e3 * target.cache.stored[..., :length, :].numel() * target.dtype.itemsize / bytes_per_s
        for queries in NUM_QUERIES:
            seconds = take_turns(_calls(target, timed(kernels, length), queries, length, masked=queries > 1), rounds)
            cells.append({"queries": queries, "keys": length, "read_ms": read_ms, "kernels": _ms(seconds)})
    return cells


@torch.inference_mode()
def chunk_rates(
    target: CachedModel, kernels: Mapping[str, Attend], num_keys: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Measure a chunk of a prompt, whose queries see `num_keys` keys at most, in GFLOP/s; hidden pairs do not count."""
    fast = {name: kernel for name, kernel in kernels.items() if name != REFERENCE}
    layers, queries = min(CHUNK_LAYERS, len(target.cache.stored)), CPU.prefill_chunk
    cells = []
    for length in num_keys:
        pairs = queries * length - queries * (queries - 1) // 2
        flop = 4 * layers * target.config.num_attention_heads * target.head_dim * pairs
        measured = take_turns(_calls(target, fast, queries, length, masked=False, layers=layers), rounds)
        rates = {name: spread_json(spread(flop / 1e9 / each for each in seconds)) for name, seconds in measured.items()}
        cells.append({"queries": queries, "keys": length, "kernels": rates})
    return cells


def step_times(
    target: CachedModel, kernels: Mapping[str, Attend], num_keys: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Measure whole steps of the target, from token ids to the likeliest next tokens, in ms."""

    def step(kernel: Attend, queries: int, length: int) -> float:
        target.attend = kernel
        return time_step(target, "dense", queries, length - queries, Graphs())

    cells = []
    for length in num_keys:
        for queries in STEP_ROWS:
            calls = {name: partial(step, kernel, queries, length) for name, kernel in timed(kernels, length).items()}
            cells.append({"queries": queries, "keys": length, "kernels": _ms(take_turns(calls, rounds))})
    return cells


def timed(kernels: Mapping[str, Attend], num_keys: int) -> dict[str, Attend]:
    """Leave `reference` out where it takes too long."""
    return {name: kernel for name, kernel in kernels.items() if name != REFERENCE or num_keys <= REFERENCE_KEYS}


def take_turns(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each once, which does not count, then all of them in each round, and each time another one first.

    A call returns its seconds. A machine that is busy for a while slows all of them.
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = [*calls]
    for _ in range(rounds):
        for name in names:
            seconds[name].append(calls[name]())
        names.append(names.pop(0))
    return seconds


def _calls(
    target: CachedModel,
    kernels: Mapping[str, Attend],
    num_queries: int,
    num_keys: int,
    *,
    masked: bool,
    layers: int | None = None,
) -> dict[str, Callable[[], float]]:
    """Make a call for each kernel that attends in the first `layers` layers and returns its seconds."""
    num_heads, num_groups = target.config.num_attention_heads, target.cache.stored.shape[2]
    rows = torch.randn(1, num_queries, num_heads + num_groups, target.head_dim).to(target.dtype)
    q = rows[:, :, :num_heads]  # beside the new keys, as a layer hands it over
    mask = tree_mask(_binary_tree(num_queries), num_queries) if masked else None

    def call(kernel: Attend) -> float:
        begin = time.perf_counter()
        plan = AttentionPlan([0], [num_keys], num_queries, mask, tree="dense")
        for keys, values in target.cache.stored[:layers]:
            attend_plan(kernel, q, keys, values, plan, target.scale)
        return time.perf_counter() - begin

    return {name: partial(call, kernel) for name, kernel in kernels.items()}


def _binary_tree(num_nodes: int) -> Tensor:
    """Make the parents [1, N] of a tree in which every node has two children."""
    return (torch.arange(num_nodes) - 1).div(2, rounding_mode="floor").unsqueeze(0)


def _ms(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any] | None]:
    return {name: spread_json(spread(1e3 * each for each in runs)) for name, runs in seconds.items()}

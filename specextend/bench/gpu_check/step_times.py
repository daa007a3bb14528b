"""Stage `steps`: the parts of a decoding step at the shapes of models in use, each beside its floor.

The cache holds random keys and values instead of a prompt's. A floor is the bytes that a part must read, divided by the
bandwidth that the stage `machine` measured. The base is a plain step of transformers with its own cache.

Shapes: `B` sequences, `N` nodes of a tree, `F` features, `K` key heads, `D` head size.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.plan import AttentionPlan
from specextend.bench.gpu_check.machine_facts import ceiling
from specextend.bench.gpu_check.shapes import FULL, GRAPHS, STOCK_LAYERS, TINY, EngineParts, Pair
from specextend.bench.gpu_check.stage import NO_TIME, Row, Setting, attempt
from specextend.decoding.device import release_cached, synchronise
from specextend.decoding.drafter import Decided
from specextend.decoding.graphs import CALLS_BEFORE_CAPTURE
from specextend.decoding.retrieval import CachePolicy, mean_mass, scored_layers
from specextend.decoding.tree import DraftTrees, roots_only, tree_mask
from specextend.stats import DecodingStats, ratio

BACKENDS = (GRAPHS, "triton", "sdpa")
"""What the kernels of a layer save is measured in the first cell alone."""
BASE = "transformers sdpa"
PARTS = ("plain", "verify", "draft", "absorb", "retrieve")
GRID = {"full": ((16384, 8192, 2048, 32768), (1, 4, 8)), "tiny": ((256,), (1, 2))}
"""Tokens in the cache, the most telling first, and sequences."""
MOST_WARM_UPS = CALLS_BEFORE_CAPTURE + 2
MOST_RUNS = 15
PART_S = 0.25
"""Seconds after which a part is not run again."""
CELL_S = 3.0
"""Seconds that a cell needs at least; with less left it is skipped."""
ABSORBED = 3
"""Tokens of each sequence that the draft absorbs after a step."""


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each pair, backend, length, batch and part. Each pair has an equal share of the time left."""
    device, bandwidth = torch.device(setting.device), ceiling(setting.out, "bytes_per_s")
    shapes = FULL if setting.shapes == "full" else TINY
    for number, shape in enumerate(shapes):
        until = time.monotonic() + setting.seconds_left / (len(shapes) - number)
        pair = Pair(shape, device, torch.bfloat16)
        for batch, num_tokens, backend in cells(setting):
            cell: Row = {"pair": shape.name, "backend": backend, "tokens": num_tokens, "batch": batch}
            if time.monotonic() + CELL_S > until:
                yield cell | {"skipped": NO_TIME}
                continue
            for row in attempt(setting, cell, partial(_measure, pair, backend, batch, num_tokens)):
                yield _with_floor(row, bandwidth)
            release(device)
        del pair
        release(device)


def cells(setting: Setting) -> Iterator[tuple[int, int, str]]:
    """List batch, tokens and backend of each cell; the base comes last, since its own cache takes memory and time."""
    lengths, batches = GRID[setting.shapes]
    for number, (batch, num_tokens) in enumerate(product(batches, lengths)):
        for backend in (*BACKENDS, BASE) if number else (*BACKENDS, STOCK_LAYERS, BASE):
            yield batch, num_tokens, backend


def _measure(pair: Pair, backend: str, batch: int, num_tokens: int) -> Iterator[Row]:
    if backend == BASE:
        yield base_step(pair, batch, num_tokens)
    else:
        yield from StepParts(pair, backend, batch, num_tokens).measure()


def _with_floor(row: Row, bandwidth: float | None) -> Row:
    """Put the floor in milliseconds beside the time, and how many times the floor it is."""
    num_bytes = row.pop("bytes", None)
    if num_bytes is None or bandwidth is None:
        return row
    floor = 1e3 * num_bytes / bandwidth
    return row | {"floor_ms": floor, "times_floor": ratio(row["ms"]["median"], floor)}


class StepParts:
    """The parts of one step, on caches full of random numbers."""

    @torch.inference_mode()
    def __init__(self, pair: Pair, backend: str, batch: int, num_tokens: int) -> None:
        """Fill the caches of a batch of sequences with `num_tokens` tokens each."""
        room = ABSORBED * (MOST_WARM_UPS + MOST_RUNS + 2)
        self._work, self._draft_work = pair.work(), pair.draft_work()
        self._parts = parts = EngineParts(pair, backend, batch, num_tokens + room)
        self._target, self._drafter = parts.target, parts.drafter
        self._num_tokens, self._slots = num_tokens, [*range(batch)]
        self._device = self._target.device
        self._target.cache.stored.normal_()
        rows = [self._target.cache.rows.take(num_tokens + parts.shape.tree.most_nodes + 1) for _ in self._slots]
        self._starts = [region.start for region in rows if region is not None]
        self._first_rows = torch.tensor(self._starts, device=self._device).unsqueeze(1)
        self._layers = scored_layers(parts.shape.cache, self._target.config.num_hidden_layers)
        self._queries = self._random(len(self._layers), self._target.config.num_attention_heads, self._target.head_dim)
        for slot in self._slots:
            admitted = self._drafter.admit(slot, num_tokens, room)
            assert admitted, "the caches were made for this batch"
            self._fill_draft(slot)
        self._roots = roots_only([1] * batch, self._device)
        self._features = self._plain()
        self._retrieve()
        self._absorb()
        self._trees = self._drafter.propose(self._slots)

    def measure(self) -> Iterator[Row]:
        """Yield a row for each part: its name, the spread of its milliseconds, and the bytes that it must read."""
        works: dict[str, Callable[[], object]] = {
            "plain": self._plain,
            "verify": self._verify,
            "draft": lambda: self._drafter.propose(self._slots),
            "retrieve": self._retrieve,
            "absorb": self._absorb,
        }
        more: dict[str, Row] = {
            "verify": {"nodes": self._trees.num_nodes},
            "retrieve": {"every": self._parts.shape.cache.refresh_every},
        }
        for name, work in works.items():
            ms = spread_ms(work, self._device, self._parts.graphs.num_warm_ups + 1)
            row: Row = {"part": name, "ms": ms, "bytes": self._floor_bytes(name)}
            yield row | more.get(name, {})

    def _floor_bytes(self, part: str) -> float:
        """Count the bytes that a part reads at least: weights once a forward pass, and the keys and values in view."""
        batch, work, draft = len(self._slots), self._work, self._draft_work
        shape = self._parts.shape
        level = draft.step_bytes(batch * min(self._num_tokens, shape.cache.top_k_chunks * shape.cache.chunk_size))
        lm_head = draft.head_parameters * self._target.dtype.itemsize
        if part == "draft":  # the first level takes the LM head alone
            return (shape.tree.depth - 1) * level + lm_head
        if part == "absorb":
            return level - lm_head
        if part == "retrieve":  # the keys of the layers that score
            share = len(self._layers) / (2 * self._target.config.num_hidden_layers)
            return share * batch * self._num_tokens * work.kv_bytes_per_token
        return work.step_bytes(batch * self._num_tokens)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._target.dtype)

    def _fill_draft(self, slot: int) -> None:
        """Fill the full cache of the draft with keys and values [L, n, K, D]."""
        cache = self._parts.network.cache
        num_layers, _, num_heads, _, head_dim = cache.working.stored.shape
        keys = self._random(num_layers, self._num_tokens, num_heads, head_dim)
        cache.store(slot, keys, keys)

    def _forward(self, trees: DraftTrees) -> Tensor:
        """Run the trees behind the cache, wait for the target's choices, and return the features [B, N, F]."""
        num_new, depth = trees.num_nodes, self._parts.shape.tree.depth

        def run(token_ids: Tensor, parents: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
            offsets = torch.arange(self._num_tokens, self._num_tokens + num_new, device=self._device)
            plan = AttentionPlan(
                self._starts,
                [self._num_tokens + num_new] * len(self._slots),
                num_new,
                mask=tree_mask(parents, depth) if num_new > 1 else None,
                tree=self._parts.tree_attention,
                keep_layers=frozenset(self._layers),
                on_device=(self._first_rows, self._first_rows + offsets),
            )
            positions, layers = self._num_tokens + depths, self._drafter.hidden_layers
            hidden, features = self._target.forward_with_features(token_ids, positions, plan, layers)
            return self._target.logits(hidden).argmax(-1), features

        chosen, features = self._parts.graphs.run("verify", run, trees.token_ids, trees.parents, trees.depths)
        chosen.tolist()
        return features

    def _plain(self) -> Tensor:
        return self._forward(self._roots)

    def _verify(self) -> Tensor:
        return self._forward(self._trees)

    def _absorb(self) -> None:
        new = [[1] * ABSORBED for _ in self._slots]
        features = [features.expand(ABSORBED, -1) for features in self._features]
        self._drafter.absorb(self._slots, Decided.pad(new, features))

    def _retrieve(self) -> None:
        """Choose what the draft sees, for every sequence."""
        options = self._parts.shape.cache
        for slot, start in zip(self._slots, self._starts, strict=True):
            rows = slice(start, start + self._num_tokens)
            keys = [self._target.cache.keys[layer, :, rows] for layer in self._layers]
            mass = mean_mass([*self._queries], keys, options.chunk_size, self._target.scale)
            positions = CachePolicy(options).select(self._num_tokens, mass, DecodingStats())
            self._drafter.select(slot, positions)


@torch.inference_mode()
def base_step(pair: Pair, batch: int, num_tokens: int) -> Row:
    """Measure a plain step of transformers behind `num_tokens` tokens; its own cache grows by one token a run."""
    model, config = pair.model, pair.model.config
    model.set_attn_implementation("sdpa")
    try:
        cache = DynamicCache()
        shape = (batch, config.num_key_value_heads, num_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys = torch.randn(shape, device=model.device, dtype=model.dtype)
            cache.update(keys, keys, layer)
        token_ids = torch.ones(batch, 1, dtype=torch.int64, device=model.device)
        num_bytes = pair.work().step_bytes(batch * num_tokens)

        def step() -> object:
            return model(token_ids, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()

        return {"part": "plain", "ms": spread_ms(step, model.device), "bytes": num_bytes}
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


@torch.inference_mode()
def spread_ms(work: Callable[[], object], device: torch.device, num_warm_ups: int = 2) -> dict[str, Any]:
    """Run the work after some warm-ups, up to a number of times or seconds; return the spread of its milliseconds."""
    times: list[float] = []
    begin = time.monotonic()
    for run_number in range(num_warm_ups + MOST_RUNS):
        if run_number == num_warm_ups:
            begin = time.monotonic()
        if run_number > num_warm_ups + 2 and time.monotonic() - begin > PART_S:
            break
        started = time.perf_counter()
        work()
        synchronise(device)
        times.append(1e3 * (time.perf_counter() - started))
    times = times[num_warm_ups:]
    return {"n": len(times), "median": median(times), "min": min(times), "max": max(times)}


def release(device: torch.device) -> None:
    """Give freed memory back, so that the next cell finds it in one piece."""
    gc.collect()
    release_cached(device)

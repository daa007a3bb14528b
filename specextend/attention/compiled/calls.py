"""Entry points of the compiled kernels: attention, products, all layers of a model, and an EAGLE
head.

A call fills records with addresses, strides and counts, and starts torch's threads. They take items
of attention (`items`), linear layers (`products`) or whole layers (`phases`).

Results are bitwise independent of other rows and of the number of threads. A tree node's result
equals plain decoding of its path: each query has a copy of the last blocks of keys, with the rows
of its mask after the prefix, parents first.
"""

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError
from torch import Tensor

from specextend.attention.compiled import blocks, items, phases, products, tiles
from specextend.attention.compiled.blocks import HEADER
from specextend.attention.compiled.products import BLOCK
from specextend.attention.plan import AttentionPlan, KeySpan

ROWS, MOST_ROWS = (192, 768) if tiles.HAS_TILES else (96, 96)
"""Rows of an attention item, usually and at most; larger items lay out keys less often."""
ITEMS_PER_WORKER = 4
"""Items per worker that balance threads without dividing keys."""
ELEMENTS = {torch.float32: blocks.FP32, torch.bfloat16: items.BF16}


def can_make(kernel: Callable[..., Any], *element: object) -> bool:
    """Compile a kernel or load it from disk; return False if numba cannot."""
    try:
        kernel(*element)
    except (NumbaError, OSError, RuntimeError):
        return False
    return True


def serves(head_dim: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel takes such heads."""
    return dtype in ELEMENTS and head_dim % (16 if dtype == torch.float32 else 32) == 0


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend on the CPU with q [B, T, H, D] to the span's rows of k, v [K, S, D].

    The first call of a process loads the kernel from numba's cache, or compiles it for some
    seconds.

    Returns:
        out [B, T, H, D] in q's dtype and lse [B, T, H] fp32; 0 and -inf for queries without keys.
    """
    assert q.dtype == k.dtype == v.dtype
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    call = np.zeros(1, items.RECORD)
    kept = _describe(call, q, k, v, out, span, scale)
    _fill(call, lse=lse)
    _run_on_all(items.kernel(ELEMENTS[q.dtype]), call.ctypes.data)
    del kept
    return out, lse


def _describe(
    calls: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, span: KeySpan, scale: float
) -> list[Tensor]:
    """Fill the attention records of layers, which share memory; return the tensors to keep alive.

    Rows of all key heads are divided and, for want of items, the keys of the longest sequence.
    """
    num_sequences, num_queries, num_heads, head_dim = q.shape
    assert q.stride(3) == k.stride(2) == 1
    assert (q.stride(2), k.stride()) == (head_dim, v.stride())
    token = q.stride(0) if num_queries == 1 else q.stride(1)
    assert num_sequences == 1 or q.stride(0) == num_queries * token
    threads = num_workers()
    group = num_heads // len(k)
    longest = max(span.lengths)
    own_share = num_sequences * len(k) * num_queries * group // (ITEMS_PER_WORKER * threads)
    rows = min(max(ROWS, own_share // ROWS * ROWS), MOST_ROWS, num_queries * group)
    num_groups = num_sequences * len(k) * -(-num_queries * group // rows)
    num_splits = max(1, -(-longest // items.SPLIT))
    num_parts = 1 if threads == 1 or num_groups >= ITEMS_PER_WORKER * threads else num_splits
    own = items.divide(head_dim, items.padded_rows(rows), 0).end
    parts = num_parts * items.padded_rows(rows) * (HEADER + 4 * head_dim) if num_parts > 1 else 0
    workspace = torch.empty(threads * own + num_groups * parts, dtype=torch.uint8)
    counters = torch.zeros(len(calls), 2 + num_groups, dtype=torch.int64)
    places = span.places(q.device)
    size = q.element_size()
    _fill(
        calls, q=q, k=k, v=v, out=out, places=places, workspace=workspace,
        q_token=token * size, head=k.stride(0) * size, row=k.stride(1) * size, causal=span.causal,
        window=span.window or 0,
        num_sequences=num_sequences, num_queries=num_queries, num_key_heads=len(k), group=group,
        head_dim=head_dim, rows=rows, num_parts=num_parts, scale=scale,
        parts=workspace.data_ptr() + threads * own,
        counters=counters.data_ptr() + np.arange(len(calls)) * 8 * (2 + num_groups),
    )  # fmt: skip
    kept = [workspace, counters, places]
    if span.mask is not None:
        kept.append(span.mask.contiguous())
        _fill(calls, mask=kept[-1], mask_width=span.mask.shape[2])
    return kept


def _fill(record: Any, **values: Any) -> None:
    for name, value in values.items():
        record[name] = value.data_ptr() if isinstance(value, Tensor) else value


def product_of(weight: Tensor, scales: Tensor, bias: Tensor) -> Any:
    """Make a record of `products` from a laid out weight, and scales and bias [O] in fp32.

    The caller keeps the tensors alive.
    """
    product = np.zeros(1, products.RECORD)[0]
    _fill(product, weight=weight, scales=scales, bias=bias, is_int8=weight.dtype == torch.int8)
    _fill(product, num_blocks=len(weight), num_units=weight[0].nbytes // (4 * BLOCK))
    return product


def _rounded_rows(num_rows: int, *calls: Any) -> Tensor:
    """Return memory for rounded rows, shared by products; empty without int8."""
    most = max(int((call["num_units"] * call["is_int8"]).max()) for call in calls)
    return torch.empty(4 * num_rows * most, dtype=torch.uint8)


def empty_rows(x: Tensor, num_rows: int, width: int) -> Tensor:
    """Return uninitialised rows [num_rows, width] in whole tiles."""
    return x.new_empty(-(-num_rows // tiles.ROWS) * tiles.ROWS, width)[:num_rows]


def _places(record: Any, group: str, *names: str) -> Any:
    """Return the indices of fields among the 64-bit numbers of a record."""
    fields, start = record.fields[group][:2]
    return np.array([start + fields.fields[name][1] for name in names]) // 8


class Linear:
    """The call of a product, which is copied for each use.

    It is copied as numbers: numpy copies records by field, which takes as long as a small product.
    """

    _CALL = phases.LAYER.itemsize
    _OF_PRODUCT = _places(phases.LAYER, "down_proj", "x", "out", "rounded")
    _OF_CALL = _CALL // 8 + _places(
        phases.RECORD, "own", "layers", "num_rows", "counters", "workspace", "num_shares"
    )

    def __init__(self, product: Any):
        layer = np.zeros(1, phases.LAYER)
        layer["down_proj"] = product
        call = np.zeros(1, phases.RECORD)
        _fill(call["own"], first=phases.ROUND_GATED, end=phases.NORM, num_layers=1)
        self._numbers = np.concatenate([layer.view(np.int64), call.view(np.int64)])
        self._width = int(product["num_blocks"]) * BLOCK
        self._rounded_bytes = 4 * int(product["num_units"] * product["is_int8"])

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., I] in bf16 by the weight; return [..., O]."""
        num_rows = x.numel() // x.shape[-1]
        given = x.contiguous()
        if tiles.HAS_TILES and num_rows % tiles.ROWS:
            given = empty_rows(x, num_rows, x.shape[-1]).copy_(given.view(num_rows, -1))
        out = torch.empty(*x.shape[:-1], self._width, dtype=x.dtype)
        rounded = torch.empty(num_rows * self._rounded_bytes, dtype=torch.uint8)
        counters, workspace, num_shares = working_memory(num_rows)
        numbers = self._numbers.copy()
        address: int = numbers.ctypes.data
        numbers[self._OF_PRODUCT] = [each.data_ptr() for each in (given, out, rounded)]
        memory = counters.data_ptr(), workspace.data_ptr()
        numbers[self._OF_CALL] = address, num_rows, *memory, num_shares
        _run_on_all(phases.kernel(), address + self._CALL)
        return out


def _run_phases(call: Any, layers: Any, first: int, end: int) -> None:
    own = call[0]["own"]
    num_levels = int(own["num_levels"])
    counters, workspace, num_shares = working_memory(int(own["num_rows"]), len(layers), num_levels)
    _fill(own, first=first, end=end, layers=layers.ctypes.data, num_layers=len(layers))
    _fill(own, workspace=workspace, counters=counters, num_shares=num_shares)
    _run_on_all(phases.kernel(), call.ctypes.data)


def working_memory(
    num_rows: int, num_layers: int = 1, num_levels: int = 0
) -> tuple[Tensor, Tensor, int]:
    """Return counters, workers' memory, and shares of a phase's items."""
    num_phases = phases.NUM_KINDS + (num_layers - 1) * phases.NUM_OF_LAYER
    num_counters = 1 + 2 * num_phases * (1 + num_levels)
    counters = torch.zeros(num_counters, phases.LINE // 8, dtype=torch.int64)
    threads = num_workers()
    workspace = torch.empty(threads, products.WORKER_BYTES, dtype=torch.uint8)
    # few rows fit in the caches of all cores
    return counters, workspace, min(threads, 8) if num_rows > products.ROWS else 1


class Decoder:
    """The layers of a model, by address."""

    def __init__(self, layers: Sequence[Any], scale: float):
        self._kept = layers
        self._scale = scale
        calls = np.zeros(len(layers), phases.LAYER)
        for layer, call in zip(layers, calls, strict=True):
            own = call["own"]
            of_input = layer.input_norm
            _fill(
                own, input_norm=of_input.weight, eps=of_input.eps, post_norm=layer.post_norm.weight
            )
            if (norms := layer.head_norms) is not None:
                _fill(own, query_norm=norms.query, key_norm=norms.key)
            for name in phases.OF_LAYER:
                call[name] = getattr(layer, name).product
        calls["gate_up"]["is_gated"] = 1
        is_int8 = bool(calls["gate_up"]["is_int8"].all())
        self.instructions = f"{tiles.OF_BYTES}, int8" if is_int8 else tiles.INSTRUCTIONS
        self._calls = calls
        self._widths = [int(calls[name]["num_blocks"][0]) * BLOCK for name in ("qkv", "gate_up")]

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        stored: Tensor,
        kept: Collection[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers, and write new rows to the cache. Tensors are contiguous and bf16.

        Args:
            x: Inputs [R, C].
            cos: Cosines [R, D].
            sin: Sines [R, D].
            plan: Plan with a single span.
            stored: Cache [L, 2, K, S, D].
            kept: Layers whose outputs are returned.

        Returns:
            The output [R, C], or [B, C] for `plan.ends_only`, and outputs of the kept layers.
        """
        call = np.zeros(1, phases.RECORD)
        own = call[0]["own"]
        rows = plan.new_rows(x.device).contiguous()
        positions = torch.arange(len(x))
        out = torch.empty_like(x)
        _fill(own, cos=cos, sin=sin, positions=positions, cache_rows=rows, num_rows=len(x))
        last = len(self._calls) - 1
        outputs = [torch.empty_like(x) if index in kept else out for index in range(last + 1)]
        end = phases.ATTEND if plan.ends_only else phases.NORM
        phases_of_all = phases.INPUT_NORM, end + last * phases.NUM_OF_LAYER
        keep = plan.keep_layers | {last}
        plan.queries |= self.launch(call, phases_of_all, x, outputs, plan.spans[0], stored, keep)
        if plan.ends_only:
            x = [x, *outputs][last].unflatten(0, (-1, plan.num_new))[:, -1].clone()
            queries = plan.queries[last][:, -1:].contiguous()
            span = KeySpan(plan.starts, plan.lengths)
            own["num_rows"] = len(x)
            rest = phases.ATTEND, phases.NORM
            self.launch(call, rest, x, [x], span, stored[last:], (), queries)
            outputs[last] = x
        return outputs[last], [outputs[index] for index in kept]

    def launch(
        self,
        call: Any,
        kinds: tuple[int, int],
        x: Tensor,
        outputs: Sequence[Tensor],
        span: KeySpan,
        stored: Tensor,
        keep: Collection[int] = (),
        queries: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Run phases of a call for the last layers; return queries [B, T, H, D] by layer.

        Args:
            kinds: First kind of phase, and the phase after the last.
            x: Inputs [R, C].
            outputs: Output of each layer.
            span: Rows to attend to.
            stored: Cache of the layers.
            keep: Layers whose queries are returned.
            queries: Queries of a layer that begins with attention.
        """
        calls = self._calls[-len(outputs) :].copy()
        num_keys, _, head_dim = stored.shape[2:]
        group = self._widths[0] // head_dim // (num_keys - int(call[0]["own"]["num_copied"])) - 2
        make = partial(empty_rows, x, len(x))
        normed, middle = make(x.shape[1]), make(x.shape[1])
        qkv = make(self._widths[0])
        gated = make(self._widths[1] // 2)
        mixed = make(num_keys * group * head_dim)
        mixed = mixed.view(len(span.starts), -1, num_keys * group, head_dim)
        turned = [torch.empty_like(mixed) if queries is None else queries] * len(calls)
        for index in keep:
            turned[index] = torch.empty_like(mixed)
        needed = _describe(
            calls["attention"], mixed, stored[0, 0], stored[0, 1], mixed, span, self._scale
        )
        calls["attention"]["q"] = [each.data_ptr() for each in turned]
        for name in ("k", "v"):
            calls["attention"][name] += (
                np.arange(len(calls)) * stored.stride(0) * stored.element_size()
            )
        of_layers = [calls[name] for name in phases.OF_LAYER]
        rounded = _rounded_rows(len(x), *of_layers)
        for each in of_layers:
            _fill(each, rounded=rounded)
        results = [each.data_ptr() for each in outputs]
        _fill(calls["qkv"], x=normed, out=qkv)
        _fill(calls["o_proj"], x=mixed, residual=[x.data_ptr(), *results[:-1]], out=middle)
        _fill(calls["gate_up"], x=normed, out=gated)
        _fill(calls["down_proj"], x=gated, residual=middle, out=results)
        _run_phases(call, calls, *kinds)
        del needed, rounded
        return {index: turned[index] for index in keep}


class Head:
    """An EAGLE head in our format, by address."""

    def __init__(
        self,
        layer: Decoder,
        linears: Mapping[str, Any],
        norms: Mapping[str, Tensor],
        embedding: Tensor,
        vocabulary: Tensor,
        angles: Tensor,
        eps: float,
        num_copied: int,
    ):
        """Take the head's layer and the tensors around it.

        Args:
            layer: Its only layer.
            linears: Compiled products "fuse" [2C], "lm_head", and "copy" [4C] for copy heads.
            norms: Weights [C] by fields of `phases.Call`.
            embedding: Embedding of the target.
            vocabulary: Token ids that the head proposes.
            angles: Cosines and sines [2, positions, D]; the first half of sines is negative.
            num_copied: Copy heads.
        """
        self._kept = linears, norms, embedding, angles
        self._layer = layer
        self._vocabulary = vocabulary
        self._call = np.zeros(1, phases.RECORD)
        [record] = self._call
        for name, linear in linears.items():
            record[name] = linear.product
        own = record["own"]
        _fill(own, num_copied=num_copied, num_read=4 if num_copied else 1, eps=eps, **norms)
        _fill(own, embedding=embedding, vocabulary=vocabulary, cos=angles[0], sin=angles[1])

    def grow(
        self,
        texts: Tensor,
        features: Tensor,
        sequences: Tensor,
        stored: Tensor,
        num_nodes: int,
        num_levels: int,
        least_gain: float,
    ) -> tuple[Tensor, Tensor]:
        """Read decided tokens, roots last, and grow trees as `decoding.tree.grow_trees`.

        Args:
            texts: Last tokens [B, 3 + T].
            features: Features [B, T, C] before each of the last T tokens.
            sequences: First cache row, visible rows afterwards, and decided tokens, as [B, 3].
            stored: Cache [1, 2, K, S, D] to write.
            num_nodes: Most nodes of a tree.
            num_levels: Most levels.
            least_gain: Expected tokens of a further level.

        Returns:
            All nodes, as token ids, parents and depths [3, B, P], and log_probs [B, P].
        """
        batch, width, size = features.shape
        most_rows = num_nodes * (num_levels - 1)
        num_best = min(num_nodes, len(self._vocabulary))
        most_pooled = 1 + num_levels * num_nodes
        most = max(num_nodes, width)
        num_rows = batch * most
        pool = _roots(texts[:, -1], width, most_pooled)
        log_probs = torch.zeros(batch, most_pooled)
        call = self._call.copy()
        [record] = call
        own = record["own"]
        make = partial(empty_rows, stored, num_rows)
        copied = make(int(record["copy"]["num_blocks"]) * BLOCK)
        logits = make(int(record["lm_head"]["num_blocks"]) * BLOCK)
        x, hidden = make(size), make(size)
        embedded = make(size * int(own["num_read"]))
        joined = make(2 * size)
        kept = {
            "sequences": sequences, "texts": texts, "sources": features, "pool": pool,
            "log_probs": log_probs, "copied": copied, **_scratch(num_rows, num_best),
        }  # fmt: skip
        _fill(
            own, num_nodes=num_nodes, num_levels=num_levels, least_gain=least_gain,
            num_best=num_best, most_pooled=most_pooled, num_pooled=1, num_rows=batch * width,
            num_sequences=batch, num_decided=width, **kept
        )  # fmt: skip
        _fill(record["fuse"], x=joined, out=x)
        _fill(record["copy"], x=embedded, out=copied)
        _fill(record["lm_head"], x=hidden, out=logits)
        mask = torch.empty(batch, most, max(most_rows, width), dtype=torch.bool)
        starts, visible = sequences[:, :2].T.tolist()
        span = KeySpan(starts, [length + most_rows for length in visible], mask)
        kinds = phases.EMBED, phases.NUM_KINDS
        self._layer.launch(call, kinds, x, [hidden], span, stored)
        count = int(own["num_pooled"])
        return pool[:, :count, : phases.PLACE].permute(2, 0, 1).contiguous(), log_probs[:, :count]


def _scratch(num_rows: int, num_best: int) -> dict[str, Tensor]:
    """Return memory for a growing tree's rows, by field of the record."""
    whole = partial(torch.zeros, num_rows, dtype=torch.int64)
    return {
        "tree_rows": whole(8),
        "cache_rows": whole(),
        "positions": whole(),
        "best": torch.empty(num_rows, num_best),
        "best_tokens": whole(num_best),
    }


def _roots(token_ids: Tensor, width: int, most_pooled: int) -> Tensor:
    """Return pools [B, P, 6] with only roots [B]."""
    batch = len(token_ids)
    pool = torch.zeros(batch, most_pooled, 6, dtype=torch.int64)
    pool[:, 0, phases.TOKEN] = token_ids
    pool[:, 0, phases.PARENT] = -1
    pool[:, 0, phases.ROW] = torch.arange(1, batch + 1) * width - 1
    return pool


@cache
def _thread_pool() -> Any:
    """Return `GOMP_parallel` of torch's OpenMP library, or None to use a single thread.

    A second pool slows torch down, because idle threads spin for milliseconds.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None


def num_workers() -> int:
    return torch.get_num_threads() if _thread_pool() else 1


def _run_on_all(entry: Any, address: int) -> None:
    record = ctypes.c_void_p(address)
    if (threads := num_workers()) == 1:
        entry.ctypes(record)
    else:
        _thread_pool()(ctypes.c_void_p(entry.address), record, threads, 0)

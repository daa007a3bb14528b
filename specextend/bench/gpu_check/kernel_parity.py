"""Stage `kernels`: the largest error of each attention backend, and of the kernels of a layer, against plain torch.

Shapes: `B` sequences, `T` queries, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Literal

import torch
from torch import Tensor

from specextend.attention.plan import Attend, KeySpan
from specextend.attention.tree_reference import attend_tree_reference, pack_mask
from specextend.bench.gpu_check.layer_parity import check_layers
from specextend.bench.gpu_check.shapes import require_backend
from specextend.bench.gpu_check.stage import Row, Setting, attempt
from specextend.decoding.tree import tree_mask

BACKENDS = ("sdpa", "triton", "flash")
DTYPES = (torch.bfloat16, torch.float16)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error of an output, absolute plus relative."""
LSE_TOLERANCE = 2e-3
"""The same of the LSE, which kernels keep in fp32."""

Kind = Literal["plain", "causal", "tree"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The shape of one kernel call."""

    kind: Kind
    heads: tuple[int, int]
    """H and K."""
    head_dim: int
    num_queries: int
    prefixes: tuple[int, ...]
    """[B] rows before the queries' own."""


CALLS = (
    AttentionCall("plain", (32, 32), 128, 1, (16000,)),
    AttentionCall("plain", (32, 8), 128, 1, (1, 16000, 65, 4096)),
    AttentionCall("plain", (9, 3), 64, 1, (63, 64, 65, 127, 128, 300, 1000, 5000)),
    AttentionCall("causal", (32, 8), 128, 128, (0, 1000)),
    AttentionCall("causal", (14, 2), 64, 17, (2000, 0, 64)),
    AttentionCall("tree", (32, 32), 128, 51, (16000,)),
    AttentionCall("tree", (32, 32), 128, 51, (1000, 2, 8000, 64)),
    AttentionCall("tree", (32, 8), 128, 51, (16000, 0, 63, 65, 4096, 1, 700, 127)),
    AttentionCall("tree", (32, 8), 128, 17, (30000,)),
    AttentionCall("tree", (32, 8), 128, 128, (500, 0)),
    AttentionCall("tree", (8, 1), 128, 51, (3000,)),
    AttentionCall("tree", (12, 12), 64, 51, (1000, 1024, 900, 64)),
    AttentionCall("tree", (9, 3), 64, 16, (8192,)),
    AttentionCall("tree", (14, 2), 64, 128, (0, 5000)),
    AttentionCall("tree", (8, 2), 64, 2, (100,)),
)
"""Every head size, every ratio of heads in use, sizes around a block of 64 keys, and empty prefixes."""
_SHORT = 300
"""Longest prefix of the tiny shapes."""


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each backend, dtype and call that it takes itself, then those of a layer's kernels."""
    device = torch.device(setting.device)
    for name, dtype, call in product(BACKENDS, DTYPES, CALLS):
        if name == "flash" and call.kind == "tree":
            continue
        if setting.shapes == "tiny":
            call = replace(call, prefixes=tuple(min(prefix, _SHORT) for prefix in call.prefixes))
        cell: Row = {"backend": name, "dtype": str(dtype).removeprefix("torch."), **asdict(call)}
        yield from attempt(setting, cell, partial(_compare, name, call, dtype, device))
    yield from check_layers(setting)


def _compare(backend: str, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    yield compare_call(require_backend(backend, device), call, dtype, device)


def compare_call(attend: Attend, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> Row:
    """Run a call on a kernel and in plain torch, and return the largest errors of output and LSE."""
    q, k, v, starts, lengths, mask = _tensors(call, dtype, device)
    span = KeySpan(starts, lengths, mask=mask if call.kind == "tree" else None, causal=call.kind == "causal")
    scale = call.head_dim**-0.5
    first_rows, row_counts = (torch.tensor(each, device=device) for each in (starts, lengths))
    found = attend(q, k, v, span, scale)
    num_masked = 0 if call.kind == "plain" else call.num_queries
    expected = attend_tree_reference(q, k, v, first_rows, row_counts, pack_mask(mask), num_masked, scale)
    row: Row = {}
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        error = float((a.float() - b.float()).abs().max())
        tolerance = TOLERANCES[dtype] if name == "out" else LSE_TOLERANCE
        row[f"{name}_error"] = error
        if not torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance):
            row["wrong"] = f"{name} has an error of {error:g} in {dtype}, {call}"
    return row


def _tensors(
    call: AttentionCall, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int], Tensor]:
    """Make queries [B, T, H, D], keys and values [K, R, D], the regions, and a mask [B, T, T] of random trees."""
    generator = torch.Generator(device).manual_seed(call.num_queries + sum(call.prefixes))
    lengths = [prefix + call.num_queries for prefix in call.prefixes]
    starts = [5, *(5 + end for end in accumulate(lengths))]
    batch, (num_heads, num_key_heads) = len(lengths), call.heads
    shapes = [(batch, call.num_queries, num_heads, call.head_dim), *[(num_key_heads, starts[-1], call.head_dim)] * 2]
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
    if call.kind == "causal":
        mask = torch.ones(call.num_queries, call.num_queries, dtype=torch.bool, device=device).tril()
        return q, k, v, starts[:-1], lengths, mask.expand(batch, -1, -1)
    nodes = torch.arange(call.num_queries, device=device)
    drawn = torch.rand(batch, call.num_queries, generator=generator, device=device)
    parents = (drawn * nodes).long() - (nodes == 0).long()
    return q, k, v, starts[:-1], lengths, tree_mask(parents, call.num_queries)

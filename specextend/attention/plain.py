"""The specification of a backend, in plain torch: slow, obviously right, on any device; and what a
layer's kernels are.

`attend_reference` computes everything in fp32 and rounds once, to the dtype of the inputs.

Shapes: `B` sequences, `T` queries, `S` keys, `M` masked rows, `R` cache rows, or rows of a layer
(the new tokens of all sequences), `C` hidden size, `I` intermediate size, `H` query heads, `K` key
heads, `D` head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specextend.attention.plan import KeySpan, additive

MAX_QUERIES = 128
"""Queries of a sequence in a call of a step's kernel, at most."""
MAX_MASKED = 512
"""Rows that a mask of a step's kernel covers, at most: a draft sees all earlier levels of its
tree.
"""


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend in plain torch, computed in fp32.

    softcap: Limit of a score, which a hyperbolic tangent approaches; None: scores have no limit.
    """
    results = [_attend_slowly(q[b], k, v, span, b, scale, softcap) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _attend_slowly(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, _ = q.shape
    rows = slice(span.starts[b], span.starts[b] + span.lengths[b])
    group = num_heads // k.shape[0]
    keys = k[:, rows].float().repeat_interleave(group, dim=0)
    values = v[:, rows].float().repeat_interleave(group, dim=0)
    scores = torch.einsum("thd,hsd->hts", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if span.causal:
        own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
        scores += additive(own, keys.shape[1], scores.dtype)
    elif (bias := span.bias(b, scores)) is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,hsd->thd", (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0), values)
    return out.to(q.dtype), lse.T


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask [B, T, M] bool into bits [B, T, M / 64] int64, rounded up.

    Bit i % 64 of word i // 64 says whether row i is visible; bits from M on are 0.
    """
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[2] % 64)).unflatten(2, (-1, 64))
    return (padded.long() << torch.arange(64, device=mask.device)).sum(-1)


def masked_rows(span: KeySpan, q: Tensor) -> tuple[Tensor, int]:
    """Return who of the queries q [B, T, H, D] sees the span's last M rows, as bits [B, T, M / 64],
    and M.

    Made once per forward. A span without mask has no such rows.
    """
    batch, num_queries = q.shape[:2]
    if "visible" not in span.made:
        mask = span.mask
        if mask is None:
            own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
            mask = own.expand(batch, -1, -1)
        span.made["visible"] = pack_mask(mask.to(q.device))
    if span.causal:
        return span.made["visible"], num_queries
    return span.made["visible"], 0 if span.mask is None else span.mask.shape[2]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys before RoPE, as Qwen3 has them."""

    query: Tensor
    """[D]"""
    key: Tensor
    """[D]"""
    eps: float


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The functions of a layer between its matrix products, each one kernel on a GPU, and the
    products.

    `torch_kernels.TORCH` says what they compute.
    """

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    """(x [R, C], delta [R, C] or None, weight [C], eps) -> x + delta, and its RMSNorm, both [R,
    C].
    """
    rotate_heads: Callable[
        [Tensor, Tensor, Tensor, HeadNorms | None, Tensor, Tensor, Tensor], Tensor
    ]
    """(qkv [R, H + 2K, D], cos [R, D], sin, norms, keys [K, S, D], values, rows [R]) -> queries [R,
    H, D] after RoPE.

    Keys after RoPE and values are written to the `rows` of `keys` and `values`. The first half of
    the sines is negative; `norms`, if there are any, come before RoPE. D is even.
    """
    gate: Callable[[Tensor], Tensor]
    """gate_up [R, 2I], whose first half is the gate -> SwiGLU [R, I]."""
    multiply: Callable[[nn.Module, Tensor], Tensor]
    """(linear layer, x [R, in]) -> [R, out]. A layer in fp8 rounds x to it under a scale for each
    row.
    """

"""The specification of attention in plain torch, and the definition of a correct kernel.

A result may differ by a few roundings from fp32. It is compared in pieces of 64 elements, relative
to their lengths: after 16,000 keys results are small, and so is the effect of a lost key. A
log-sum-exp (LSE), always summed in fp32, may hardly differ.

More shapes: `P` compared queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specextend.attention.plan import Attend, KeySpan, additive, causal_mask

MAX_QUERIES = 128
"""Most queries of a sequence in a step's kernel."""
LEAST_ROWS = 32
"""Rows of an int8 product; cuBLAS takes no fewer than 17."""
MAX_MASKED = 512
"""Most rows that the mask of a step's kernel covers; a draft sees all earlier levels of its
tree.
"""
_PIECE = 64
_SUMS = 5e-5
"""Difference caused by another order of summation in fp32."""
_LONG = 1024
_LSE = 2e-4
_LONG_LSE = 5e-5
"""Largest error of an LSE, and of an LSE of `_LONG` keys, where errors cancel; torch's kernels show
3e-5 and 9e-6 in any dtype.
"""
_TINIEST = 1e-30
_MOST_COMPARED = 128
"""Largest P; the scores of a whole prompt chunk would take gigabytes."""


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend in plain torch: computed in fp32, rounded once to the dtype of the inputs.

    Args:
        softcap: Limit that scores approach by a hyperbolic tangent.
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
        seen = causal_mask(num_queries, keys.shape[1], q.device, span.window)
        scores += additive(seen, keys.shape[1], scores.dtype)
    elif (bias := span.bias(b, scores)) is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,hsd->thd", (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0), values)
    return out.to(q.dtype), lse.T


def what_differs(name: str, found: Tensor, exact: Tensor, roundings: int = 2) -> str:
    """Compare a result [..., N] with the exact result in fp32; return an error message, if any.

    Each piece may differ by `roundings`.
    """
    size = _PIECE if exact.shape[-1] % _PIECE == 0 else exact.shape[-1]
    expected = exact.unflatten(-1, (-1, size))
    errors = (found.float().unflatten(-1, (-1, size)) - expected).norm(dim=-1)
    worst = float((errors / expected.norm(dim=-1).clamp_min(_TINIEST)).max())
    allowed = roundings * max(torch.finfo(found.dtype).eps, _SUMS)
    return _unless(worst <= allowed, name, worst, allowed)


def _unless(is_right: bool, name: str, error: float, allowed: float) -> str:
    return "" if is_right else f"{name} differs by {error:.2g} ({allowed:.2g} is allowed)"


def what_is_wrong(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
) -> str:
    """Attend twice, since a run may disturb the next; return an error message, if any."""
    num_queries = q.shape[1]
    compared = torch.linspace(0, num_queries - 1, min(num_queries, _MOST_COMPARED)).long().unique()
    compared = compared.to(q.device)
    mask = span.mask
    if span.causal:
        num_keys = num_queries if span.window is None else max(span.lengths)
        own = causal_mask(num_queries, num_keys, q.device, span.window)
        mask = own.expand(len(q), -1, -1)
    seen = KeySpan(span.starts, span.lengths, None if mask is None else mask[:, compared])
    exact, exact_lse = attend_reference(q[:, compared].float(), k, v, seen, scale)
    for _ in range(2):
        # each time a new span: a kernel keeps what it makes of one
        fresh = replace(span, made={})
        out, lse = attend(q, k, v, fresh, scale)
        if wrong := what_differs("out", out[:, compared], exact):
            return wrong
        for b, length in enumerate(span.lengths):
            allowed = _LSE if length < _LONG else _LONG_LSE
            error = float((lse[b, compared] - exact_lse[b]).abs().max())
            if wrong := _unless(error <= allowed, "lse", error, allowed):
                return wrong
    return ""


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a bool mask [B, T, M] into bits [B, T, M / 64] int64, rounded up.

    Bit i % 64 of word i // 64 is 1 if row i is visible. Bits from M on are 0.
    """
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[2] % 64)).unflatten(2, (-1, 64))
    return (padded.long() << torch.arange(64, device=mask.device)).sum(-1)


def masked_rows(span: KeySpan, q: Tensor) -> tuple[Tensor, int]:
    """Return the bits [B, T, M / 64] of the last M rows that each query sees, and M.

    The bits are made once per forward. M is 0 for a span without a mask.
    """
    batch, num_queries = q.shape[:2]
    if "visible" not in span.made:
        mask = span.mask
        if mask is None:
            mask = causal_mask(num_queries, num_queries, q.device).expand(batch, -1, -1)
        span.made["visible"] = pack_mask(mask.to(q.device))
    if span.causal:
        return span.made["visible"], num_queries
    return span.made["visible"], 0 if span.mask is None else span.mask.shape[2]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms [D] of queries and keys before RoPE, as in Qwen3."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The products of a layer and the functions between them, each a single kernel on a GPU.

    `torch_kernels.TORCH` is their specification.
    """

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    """(x [R, C], delta [R, C] or None, weight [C], eps) -> x + delta and its RMSNorm, both [R,
    C].
    """
    rotate_heads: Callable[
        [Tensor, Tensor, Tensor, HeadNorms | None, Tensor, Tensor, Tensor], Tensor
    ]
    """(qkv [R, H + 2K, D], cos [R, D], sin, norms, keys [K, S, D], values, rows [R]) -> queries [R,
    H, D].

    RoPE turns queries and keys. Keys and values are written to `rows` of the cache. The first half
    of the sines is negative.
    """
    gate: Callable[[Tensor], Tensor]
    """gate_up [R, 2I], gate first -> SwiGLU [R, I]."""
    multiply: Callable[[nn.Module, Tensor], Tensor]
    """(linear layer, x [R, in]) -> [R, out]. Layers in fp8 round x with a scale per row."""

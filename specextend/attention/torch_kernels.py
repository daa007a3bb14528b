"""Kernels of torch and flash-attn: attention on CPUs and GPUs, and the functions of a layer.

flash-attn (version 2 or 3) is imported only if chosen; it takes neither tree masks nor fp32. Keys
are never copied: a sequence is a slice of the cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from specextend.attention.plain import HeadNorms, LayerKernels
from specextend.attention.plan import Attend, KeySpan, additive, causal_mask, merge_states

_Kernel = Callable[[Tensor, Tensor, Tensor, KeySpan, int, float], tuple[Tensor, Tensor]]
"""(q [1, T, H, D], k [1, K, S, D], v, span, b, scale), for sequence b of the span."""

_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
PLANNED = 512
"""Multiple of the queries and keys in a call of cuDNN, which plans anew for each size."""


def _each(kernel: _Kernel, *, takes_prefix: bool = False) -> Attend:
    """Turn a kernel for one sequence into a backend.

    Unless `takes_prefix`, the prefix of a causal call gets a call of its own.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
    ) -> tuple[Tensor, Tensor]:
        before = [length - q.shape[1] for length in span.lengths]
        if span.causal and span.window is None and any(before) and not takes_prefix:
            own = [start + length for start, length in zip(span.starts, before, strict=True)]
            prefix = attend(q, k, v, KeySpan(span.starts, before), scale)
            chunk = attend(q, k, v, KeySpan(own, [q.shape[1]] * len(own), causal=True), scale)
            return merge_states(*prefix, *chunk), torch.logaddexp(prefix[1], chunk[1])
        results = []
        for b, (start, length) in enumerate(zip(span.starts, span.lengths, strict=True)):
            key, value = (x[:, start : start + length].unsqueeze(0) for x in (k, v))
            query = q[b : b + 1]
            if length:
                results.append(kernel(query, key, value, span, b, scale))
            else:
                nothing = torch.full(query.shape[:3], float("-inf"), device=q.device)
                results.append((torch.zeros_like(query), nothing))
        out, lse = results[0] if len(results) == 1 else map(torch.cat, zip(*results, strict=True))
        return out, lse

    attend.__name__ = kernel.__name__  # step costs are kept for each
    return attend


def _by_head(
    q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float
) -> tuple[Tensor, Tensor]:
    bias = span.bias(b, q)  # the kernel wants the query's dtype
    if span.window is not None:
        num_keys = key.shape[2]
        seen = causal_mask(q.shape[1], num_keys, q.device, span.window)
        bias = additive(seen, num_keys, q.dtype)
    mask = None if bias is None else bias[None, None]
    causal = span.causal and mask is None
    out, lse = _cpu_flash(q.transpose(1, 2), key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _on_cuda(
    q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to masked rows separately, because the flash kernel takes no mask."""
    bias = span.bias(b, q, tail=True)
    if bias is None:
        return _attend_unmasked(q, key, value, scale, causal=span.causal)
    before = key.shape[2] - bias.shape[1]
    tail = _attend_efficiently(
        q, key[:, :, before:], value[:, :, before:], bias, scale, causal=False
    )
    if before == 0:
        return tail
    prefix = _attend_unmasked(q, key[:, :, :before], value[:, :, :before], scale, causal=False)
    return merge_states(*prefix, *tail), torch.logaddexp(prefix[1], tail[1])


def _attend_unmasked(
    q: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend by flash, which takes grouped heads, with q [1, T, H, D] to [1, K, S, D]."""
    # flash takes neither fp32 nor wide heads
    if q.dtype == torch.float32 or q.shape[-1] > 256 or q.shape[-1] % 8:
        return _attend_efficiently(q, key, value, None, scale, causal=causal)
    out, lse, *_ = _flash_cuda(q.transpose(1, 2), key, value, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _attend_efficiently(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend by the memory-efficient kernel: it takes a bias [T, S], but copies keys for each
    head.
    """
    num_queries, num_heads = q.shape[1:3]
    key, value = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (key, value))
    if bias is not None:  # in rows of a multiple of 16 elements
        aligned = pad(bias, (0, -bias.shape[1] % 16))[:, : bias.shape[1]]
        bias = aligned.expand(1, num_heads, -1, -1)
    out, lse, *_ = _efficient_cuda(
        q.transpose(1, 2), key, value, bias, True, 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse[..., :num_queries].transpose(1, 2)


def _by_cudnn(
    q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN for sizes that recur, such as whole chunks, else as `_on_cuda`."""
    _, num_queries, _, head_dim = q.shape
    is_served = q.dtype != torch.float32 and head_dim in (64, 128)
    if not is_served or num_queries % PLANNED or key.shape[2] % PLANNED:
        return _on_cuda(q, key, value, span, b, scale)
    out, lse, *_ = _cudnn(q.transpose(1, 2), key, value, None, True, 0.0, span.causal, scale=scale)
    return out.transpose(1, 2), lse.view(out.shape[:3]).transpose(1, 2)


attend_by_head = _each(_by_head)
attend_cuda = _each(_on_cuda)
"""Attend by torch's flash kernels on a GPU, without copying the prefix."""
attend_cudnn = _each(_by_cudnn)
"""Attend by cuDNN, for prompt chunks, which have no mask."""


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add delta, if any, and normalise; see `LayerKernels`."""
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight.shape, weight, eps)


def rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
) -> Tensor:
    """Apply RoPE, and write keys and values to the cache; see `LayerKernels`."""
    turned, value = qkv.tensor_split([-len(keys)], 1)
    if norms is not None:
        query, key = turned.tensor_split([-len(keys)], 1)
        parts = (query, norms.query), (key, norms.key)
        turned = torch.cat(
            [rms_norm(heads, weight.shape, weight, norms.eps) for heads, weight in parts], 1
        )
    swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned = torch.addcmul(turned * cos.unsqueeze(1), swapped, sin.unsqueeze(1))
    query, key = turned.tensor_split([-len(keys)], 1)
    keys.index_copy_(1, rows, key.transpose(0, 1))
    values.index_copy_(1, rows, value.transpose(0, 1))
    return query


def gate(gate_up: Tensor) -> Tensor:
    """Compute SwiGLU; see `LayerKernels`."""
    gated, up = gate_up.chunk(2, -1)
    return silu(gated).mul_(up)


def multiply(linear: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear layer; see `LayerKernels`."""
    product: Tensor = linear(x)
    return product


TORCH = LayerKernels(add_norm, rotate_heads, gate, multiply)


FlashKernel = Callable[..., Any]
"""`flash_attn_with_kvcache` of either version: q [B, T, H, D], keys and values [B, S, K, D].

With `return_softmax_lse` its first results are out [B, T, H, D] and lse [B, H, T].
"""


def find_flash_attn() -> FlashKernel | None:
    """Import flash-attn's kernel, preferring version 3, if there is one."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return None
    kernel: FlashKernel = flash_attn_with_kvcache
    return kernel


def attend_with(kernel: FlashKernel, otherwise: Attend) -> Attend:
    """Make a backend of flash-attn's kernel; `otherwise` attends to calls that it does not take."""

    def one(
        q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = kernel(
            q,
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scale,
            causal=span.causal,
            return_softmax_lse=True,
        )
        return out, lse.transpose(1, 2)

    each = _each(one, takes_prefix=True)

    def flash(
        q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
    ) -> tuple[Tensor, Tensor]:
        takes = span.mask is None and q.dtype != torch.float32
        return (each if takes else otherwise)(q, k, v, span, scale)

    return flash

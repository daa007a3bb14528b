"""The CPU's attention kernels that torch has: its flash kernel, and two matrix products around a softmax.

Which one is fastest depends on the processor, the type, the number of queries and of keys; `measured.py` finds out.

Shapes: `T` queries, `S` keys, `H` query heads, `K` key heads, `G` = H / K heads of a group, `D` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specextend.attention.hybrid import attend_chunk, has_prefix
from specextend.attention.plan import Attend, KeySpan

_Kernel = Callable[[Tensor, Tensor, Tensor, KeySpan, int, float], tuple[Tensor, Tensor]]
"""(q [1, T, H, D], k [1, K, S, D], v, span, b, scale), for sequence b of the span alone."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _each(kernel: _Kernel, *, takes_prefix: bool = False) -> Attend:
    """Make a kernel for one sequence into a backend, which calls it for each sequence that has keys.

    `takes_prefix` says that the kernel takes causal spans that begin before the queries' own rows.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        if not takes_prefix and has_prefix(span, q.shape[1]):
            return attend_chunk(attend, q, k, v, span, scale)
        results = []
        for b, (start, length) in enumerate(zip(span.starts, span.lengths, strict=True)):
            key, value = (x[:, start : start + length].unsqueeze(0) for x in (k, v))
            query = q[b : b + 1]
            results.append(kernel(query, key, value, span, b, scale) if length else nothing(query))
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    return attend


def nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of attending with q [B, T, H, D] to no key."""
    return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=q.device)


def _by_head(q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    bias = span.bias(b, q.dtype, q.device)  # the kernel wants the query's dtype
    mask = None if bias is None else bias[None, None]
    out, lse = _flash(q.transpose(1, 2), key, value, 0.0, span.causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _by_matmul(q: Tensor, key: Tensor, value: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by a product, a softmax in fp32 and a product; scores and probabilities are rounded to q's dtype."""
    _, num_queries, num_heads, head_dim = q.shape
    num_groups, num_keys = key.shape[1:3]
    group = num_heads // num_groups
    rows = q[0].unflatten(1, (num_groups, group)).permute(1, 2, 0, 3).reshape(num_groups, -1, head_dim)
    scores = q.new_empty(num_groups, group * num_queries, num_keys)
    for head in range(num_groups):  # a product of all heads at once would copy the keys
        torch.addmm(scores[head], rows[head], key[0, head].t(), beta=0, alpha=scale, out=scores[head])
    if (tail := span.tail_bias(b, num_queries, q.dtype, q.device)) is not None:
        scores.unflatten(1, (group, num_queries))[..., num_keys - tail.shape[1] :].add_(tail)
    weights = scores.softmax(-1)
    out = torch.bmm(weights, value[0]).view(num_heads, num_queries, head_dim).transpose(0, 1).unsqueeze(0)
    if not span.needs_lse:
        return out, q.new_empty(0)
    return out, scores.float().logsumexp(-1).view(num_heads, num_queries).T.unsqueeze(0)


attend_by_head = _each(_by_head)
attend_matmul = _each(_by_matmul, takes_prefix=True)

CPU_KERNELS: Mapping[str, Attend] = {"sdpa": attend_by_head, "matmul": attend_matmul}
"""The kernels by their names in `attention.backend`."""

"""The definition of a correct kernel, for any device: plain torch in fp32, up to a few roundings.

Results are compared in pieces of 64 elements, relative to their lengths: after 16,000 keys results
are small, and so is the effect of a lost key. A log-sum-exp (LSE), always summed in fp32, may
hardly differ.

More shapes: `P` compared queries.
"""

import torch
from torch import Tensor

from specextend.attention.plain import attend_reference
from specextend.attention.plan import Attend, KeySpan

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
        own = torch.arange(num_queries, device=q.device)
        mask = (own <= own[:, None]).expand(len(q), -1, -1)
    seen = KeySpan(span.starts, span.lengths, None if mask is None else mask[:, compared])
    exact, exact_lse = attend_reference(q[:, compared].float(), k, v, seen, scale)
    for _ in range(2):
        # each time a new span: a kernel keeps what it makes of one
        fresh = KeySpan(span.starts, span.lengths, span.mask, span.causal)
        out, lse = attend(q, k, v, fresh, scale)
        if wrong := what_differs("out", out[:, compared], exact):
            return wrong
        for b, length in enumerate(span.lengths):
            allowed = _LSE if length < _LONG else _LONG_LSE
            error = float((lse[b, compared] - exact_lse[b]).abs().max())
            if wrong := _unless(error <= allowed, "lse", error, allowed):
                return wrong
    return ""

"""Merging attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over two disjoint key sets, from each one's result. out [..., D], lse [...] fp32.

    lse is -inf where a set is empty, whose out must then be finite; one of the two is never empty.
    """
    weight_a = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    return torch.lerp(out_b.float(), out_a.float(), weight_a).to(out_a.dtype)

"""Hybrid tree attention: spans, their merge, and its equality with one dense masked call."""

from __future__ import annotations

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plan import AttentionPlan, KeySpan, attend_plan, merge_states
from specextend.attention.reference import attend_reference
from tests.attention.calls import random_trees
from tests.covering import covering

SCALE = 0.25
BACKENDS = {name: load_backend(name, torch.device("cpu")) for name in ("reference", "sdpa", "compiled")}


def cache_rows(lengths: list[int], num_queries: int, heads: tuple[int, int]):
    """starts, q [B, T, H, D], k and v [K, R, D]"""
    generator = torch.Generator().manual_seed(sum(lengths) + num_queries)
    starts = [4 + sum(lengths[:b]) + 2 * b for b in range(len(lengths))]
    num_rows = starts[-1] + lengths[-1] + 1
    q = torch.randn(len(lengths), num_queries, heads[0], 32, generator=generator)
    k, v = (torch.randn(heads[1], num_rows, 32, generator=generator) for _ in range(2))
    return starts, q, k, v


@pytest.mark.parametrize(
    ("heads", "prefixes", "num_nodes", "backend"),
    covering([(4, 4), (9, 3), (8, 1)], [[0], [1], [300], [0, 5, 300]], [1, 2, 17, 51], [*BACKENDS]),
)
def test_hybrid_equals_dense(heads, prefixes, num_nodes, backend):
    """The two ways to verify a tree are one function: 1e-5 apart in fp32, whatever the prefix, an empty one too."""
    lengths = [prefix + num_nodes for prefix in prefixes]
    starts, q, k, v = cache_rows(lengths, num_nodes, heads)
    mask = random_trees(len(prefixes), num_nodes)
    outs = [
        attend_plan(BACKENDS[backend], q, k, v, AttentionPlan(starts, lengths, num_nodes, mask, tree), SCALE)
        for tree in ("dense", "hybrid")
    ]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [13, 13, 14], [39, 1]])
def test_prefill_in_chunks_equals_prefill_at_once(chunks, backend):
    """Unmasked prefix and causal own block, merged: no mask of the prompt's length squared ever exists."""
    starts, q, k, v = cache_rows([40], 40, (6, 2))
    whole, _ = attend_reference(q, k, v, KeySpan(starts, [40], causal=True), SCALE)
    done = 0
    for chunk in chunks:
        plan = AttentionPlan(starts, [done + chunk], chunk)
        assert all(span.mask is None for span in plan.spans)
        out = attend_plan(BACKENDS[backend], q[:, done : done + chunk], k, v, plan, SCALE)
        torch.testing.assert_close(out, whole[:, done : done + chunk], atol=1e-5, rtol=1e-5)
        done += chunk


def test_merging_is_attention_over_the_union():
    """Both ways round, and with weights that differ by hundreds in the exponent."""
    _, q, k, v = cache_rows([30], 3, (4, 2))
    k[:, 4:14] *= 40
    whole, _ = attend_reference(q, k, v, KeySpan([4], [30]), SCALE)
    parts = [attend_reference(q, k, v, KeySpan([4 + first], [n]), SCALE) for first, n in ((0, 10), (10, 20))]
    for a, b in (parts, parts[::-1]):
        torch.testing.assert_close(merge_states(*a, *b), whole, atol=1e-5, rtol=1e-5)

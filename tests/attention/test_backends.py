"""Every backend against the plain-torch reference, and the reference against the definition of attention."""

import math
import sys

import pytest
import torch
from numba.core.errors import NumbaError

from specextend.attention import backends
from specextend.attention.backends import load_backend
from specextend.attention.compiled import calls as compiled
from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan, merge_states
from tests.attention.calls import assert_is_the_reference, assert_near, random_mask, regions, tensors
from tests.covering import covering

HEAD_DIM = 32
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")
AUTO = load_backend("auto", CPU)


def slow_attention(q, k, v, span, scale):
    """The definition, a query and a head at a time, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    group = q.shape[2] // k.shape[0]
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        rows = [span.starts[b] + s for s in range(span.lengths[b]) if sees(span, b, t, s, q.shape[1])]
        if not rows:
            continue
        scores = k[h // group, rows].double() @ q[b, t, h].double() * scale
        lse[b, t, h] = scores.logsumexp(0)
        out[b, t, h] = (scores - lse[b, t, h]).exp() @ v[h // group, rows].double()
    return out.to(q.dtype), lse.float()


def sees(span, b, t, s, num_queries):
    from_end = span.lengths[b] - s
    if span.causal:
        return num_queries - t <= from_end
    if span.mask is None or from_end > span.mask.shape[2]:
        return True
    return bool(span.mask[b, t, span.mask.shape[2] - from_end])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_the_reference_is_attention_by_its_definition(heads, causal):
    """Everything else is measured against it, so it is measured against a loop over queries, heads and keys."""
    lengths = [7, 12]
    starts, num_rows = regions(lengths)
    q, k, v = tensors(2, 5, heads, num_rows, HEAD_DIM, torch.float32)
    span = KeySpan(starts, lengths, mask=None if causal else random_mask(2, 5, 6), causal=causal)
    assert_near(attend_reference(q, k, v, span, SCALE), slow_attention(q, k, v, span, SCALE), 1e-5)


@pytest.mark.parametrize(
    "heads, num_queries, prefixes, dtype_and_error",
    covering(
        [(2, 2), (4, 2), (9, 3), (8, 1)],
        [1, 16, 17, 51],
        [[0], [1], [700], [0, 31, 700], [255, 256, 257]],
        [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ),
)
def test_torchs_kernel_equals_the_reference(heads, num_queries, prefixes, dtype_and_error):
    """Over prefixes that all queries see, some empty; with the masked rows of a tree behind; and in a causal block.

    That is a prefill chunk over itself: torch's kernel aligns `is_causal` at the top left, which is right only here.
    """
    how = num_queries, heads, HEAD_DIM, *dtype_and_error
    sdpa = load_backend("sdpa", CPU)
    assert_is_the_reference(sdpa, prefixes, *how)
    assert_is_the_reference(sdpa, [prefix + num_queries for prefix in prefixes], *how, num_masked=num_queries)
    assert_is_the_reference(sdpa, [num_queries] * 3, *how, causal=True)


def test_merging_is_attention_over_the_union():
    """Both ways round, and with weights that differ by hundreds in the exponent."""
    q, k, v = tensors(1, 3, (4, 2), 35, HEAD_DIM, torch.float32)
    k[:, 4:14] *= 40
    whole, _ = attend_reference(q, k, v, KeySpan([4], [30]), SCALE)
    parts = [attend_reference(q, k, v, KeySpan([4 + first], [n]), SCALE) for first, n in ((0, 10), (10, 20))]
    for a, b in (parts, parts[::-1]):
        assert_near(merge_states(*a, *b), whole, 1e-5)


def fail_to_compile(element):
    raise NumbaError("no such instruction")


def answer_the_question(q, k, v, span, scale):
    return q, q[..., 0].float()


@pytest.mark.parametrize("failure", ["numba cannot", "no numba", "wrong"])
def test_where_the_compiled_kernel_fails_torch_attends(failure, monkeypatch):
    """It is made for the machine at hand, so it must prove itself there; a run starts without it."""
    backends.compiled_is_right.cache_clear()
    backends.compiled.cache_clear()
    if failure == "numba cannot":
        monkeypatch.setattr(compiled.items, "kernel", fail_to_compile)
    elif failure == "wrong":
        monkeypatch.setattr(compiled, "attend_compiled", answer_the_question)
    else:
        monkeypatch.setitem(sys.modules, "specextend.attention.compiled.calls", None)
        with pytest.raises(ValueError, match=r"^attention\.backend compiled needs the cpu extra: pip install .*$"):
            load_backend("compiled", torch.device("cpu"))
    q, k, v = tensors(1, 3, (4, 2), 40, HEAD_DIM, torch.float32)
    found, expected = (kernel(q, k, v, KeySpan([0], [40]), SCALE) for kernel in (AUTO, load_backend("sdpa", CPU)))
    backends.compiled_is_right.cache_clear()
    backends.compiled.cache_clear()
    assert all(map(torch.equal, found, expected))


def test_the_compiled_kernel_is_refused_on_a_gpu():
    """With the names that can be set there."""
    message = r"^attention\.backend compiled runs on a CPU only; choose auto, .*flash or triton$"
    with pytest.raises(ValueError, match=message):
        load_backend("compiled", torch.device("cuda"))

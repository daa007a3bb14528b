"""Every backend against the plain-torch reference, and the reference against the definition of attention."""

import sys

import pytest
import torch
from numba.core.errors import NumbaError
from torch.nn.functional import scaled_dot_product_attention

from specextend.attention import backends
from specextend.attention.backends import load_backend
from specextend.attention.compiled import calls as compiled
from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan
from tests.attention.calls import assert_is_the_reference, assert_near, random_mask, regions, tensors
from tests.covering import covering

HEAD_DIM = 32
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")
AUTO = load_backend("auto", CPU)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_the_reference_is_torchs_attention_to_what_a_query_sees(heads, causal):
    """Everything else is measured against it; that its LSE is right shows where parts are merged."""
    starts, num_rows = regions([7, 12])
    q, k, v = tensors(2, 5, heads, num_rows, HEAD_DIM, torch.float32)
    own = torch.ones(2, 5, 5).tril().bool() if causal else random_mask(2, 5, 6)
    found, _ = attend_reference(q, k, v, KeySpan(starts, [7, 12], None if causal else own, causal), SCALE)
    for b, length in enumerate([7, 12]):
        sees = torch.ones(5, length).bool()
        sees[:, -own.shape[2] :] = own[b]
        keys, values = (each[:, starts[b] : starts[b] + length] for each in (k, v))
        whole = scaled_dot_product_attention(q[b].transpose(0, 1), keys, values, sees, scale=SCALE, enable_gqa=True)
        assert_near(found[b], whole.transpose(0, 1), 1e-5)


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
    q, k, v = tensors(1, 3, (4, 2), 40, HEAD_DIM, torch.float32)
    found, expected = (kernel(q, k, v, KeySpan([0], [40]), SCALE) for kernel in (AUTO, load_backend("sdpa", CPU)))
    backends.compiled_is_right.cache_clear()
    backends.compiled.cache_clear()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "backend, device, missing, message",
    [
        ("compiled", "cuda", None, r"runs on a CPU only; choose auto, .*flash or triton"),
        ("compiled", "cpu", "compiled.calls", r"needs the cpu extra: pip install .*"),
        ("triton", "cpu", None, "runs on a GPU only; choose auto"),
        ("triton", "cuda", "triton_kernels", "needs the package triton: pip install triton"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_in_one_line(backend, device, missing, message, monkeypatch):
    """Before a model is loaded, with the names that can be set there or what to install."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    if missing:
        monkeypatch.setitem(sys.modules, f"specextend.attention.{missing}", None)
    backends.compiled.cache_clear()
    with pytest.raises(ValueError, match=rf"^attention\.backend {backend} {message}$"):
        load_backend(backend, torch.device(device))
    backends.compiled.cache_clear()

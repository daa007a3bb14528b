"""A kernel is right if its results are those of fp32 but for a rounding, after any number of keys."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specextend.attention.backends import load_backend
from specextend.attention.plain import attend_reference
from specextend.attention.torch_kernels import TORCH, attend_by_head, gate
from specextend.proof.child import (
    Call,
    make_requests,
    prompt_calls,
    step_calls,
    wrong_attention,
    wrong_layer,
    wrong_steps,
)
from specextend.proof.prover import LONGEST, Kernels, LayerShape
from tests.proof import faulty
from tests.proof.conftest import SUBJECT
from tests.recorded_graph import record

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SHAPE = LayerShape(num_heads=4, num_key_heads=2, head_dim=64, hidden_size=192, intermediate_size=320)
STEPS = [*step_calls(8, 4)]
PROMPTS = [*prompt_calls(70)]
LONG = (LONGEST,)
PLAIN, CAUSAL = Call("plain", 1, LONG), Call("causal", 20, LONG)
TREES = [Call("tree", 24, LONG), Call("tree", 24, LONG, 186)]
"""The second has words of masks before its own."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [attend_by_head, load_backend("compiled", CPU)])
def test_kernels_of_a_cpu_are_right(kernel, dtype):
    """In a cache whose other rows are NaN, so that reading one of those would show."""
    assert not wrong_attention(kernel, STEPS + PROMPTS, SHAPE, dtype)


@pytest.mark.parametrize(
    "kernel, call",
    [*((faulty.a_key_too_few, call) for call in (PLAIN, TREES[0], CAUSAL)), (faulty.a_wrong_word, TREES[1])],
    ids=lambda each: str(getattr(each, "__name__", each)),
)
def test_a_fault_after_sixteen_thousand_keys_is_found(kernel, call):
    """In bfloat16 a lost split was less than the roundings that were allowed: results are small there."""
    heads = replace(SHAPE, num_heads=16, num_key_heads=4)
    assert not wrong_attention(attend_by_head, [call], heads, torch.bfloat16)
    assert "differs" in wrong_attention(kernel, [call], heads, torch.bfloat16)


@pytest.mark.parametrize("name", ["not_a_number", "a_little_wrong", "right_alone", "a_wrong_word"])
def test_the_calls_of_a_proof_show_each_fault(name):
    """Among them are steps, trees, levels of trees and what a draft reads, in a batch and alone."""
    assert "differs" in wrong_attention(getattr(faulty, name), step_calls(30, 8), SHAPE, torch.bfloat16)


def test_a_kernel_that_is_right_once_is_wrong():
    """What it leaves behind may change its next result."""
    calls = []

    def kernel(*call):
        out, lse = attend_reference(*call)
        calls.append(call)
        return out / len(calls), lse

    assert wrong_attention(kernel, [Call("plain", 1, (70,))], SHAPE, torch.float32)


def lost_element(x):
    """A kernel that leaves out the last element of each row."""
    out = gate(x)
    out[:, -1] = 0
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_a_wrong_kernel_of_a_layer_is_named(has_norms, dtype):
    """Those of torch are right. One element of thousands is less than the roundings of a row."""
    shape = replace(SHAPE, has_norms=has_norms, intermediate_size=14336)
    check = partial(wrong_layer, num_rows=33, shape=shape, dtype=dtype)
    assert not check(TORCH)
    assert "the gate differs by" in check(replace(TORCH, gate=lambda gate_up: gate(gate_up) * 1.1))
    assert "the gate differs by" in check(replace(TORCH, gate=lost_element))


@pytest.mark.parametrize("scale_of", ["row", "tensor"])
def test_a_wrong_rounding_to_fp8_is_found(scale_of):
    """One scale for all rows makes a document's text depend on its neighbours'."""

    def multiply(linear, x):
        each = x.float().abs().amax(1, keepdim=True) if scale_of == "row" else x.float().abs().max() * 4
        rounded = (x.float() / each * 448).to(torch.float8_e4m3fn).float() * each / 448
        weight = linear.weight
        return (rounded @ (weight.qdata.float() * weight.scale).T).bfloat16()

    kernels = replace(TORCH, multiply=multiply)
    wrong = wrong_layer(kernels, 33, SHAPE, torch.bfloat16, scheme="fp8")
    assert wrong == "" if scale_of == "row" else "the product in fp8 differs" in wrong


def test_a_wrong_product_of_integers_is_found():
    """A scale that is lost in a row that is not the longest changes it by no more than its neighbours' scales."""
    kernels = replace(TORCH, multiply=lambda linear, x: linear(x) * torch.linspace(0.9, 1, len(x)).unsqueeze(1))
    assert not wrong_layer(TORCH, 33, SHAPE, torch.bfloat16, scheme="int8")
    assert "the product in int8 differs" in wrong_layer(kernels, 33, SHAPE, torch.bfloat16, scheme="int8")


def stale(name, function):
    """Capture a function whose replays read the inputs of the capture."""
    own = (each.clone() if isinstance(each, torch.Tensor) else each for each in function.args)
    return record(name, partial(function.func, *own))


RIGHT = Kernels(steps="tests.recorded_graph:attend_on_device")
OTHER_ROWS = Kernels(steps="tests.proof.faulty:reads_other_rows")


@pytest.mark.parametrize(
    "kernels, capture, says",
    [
        pytest.param(RIGHT, record, "", id="right"),
        pytest.param(RIGHT, stale, "of a tiny pair differ", id="stale inputs"),
        pytest.param(OTHER_ROWS, record, "of its trees are those of eager steps", id="other rows"),
    ],
)
@torch.inference_mode()
def test_captured_steps_are_held_to_tokens_and_trees(kernels, capture, says):
    """Where a draft reads other rows, every token is right, nobody accepts a draft, and plain steps would be faster."""
    wrong = wrong_steps(SUBJECT, kernels, capture, make_requests(200)[:6])
    assert says in wrong if says else wrong == ""


def test_steps_that_cannot_be_captured_prove_nothing():
    """They would run eagerly, and be called right."""

    def failing(name, function):
        raise RuntimeError("operation not permitted")

    with torch.inference_mode(), pytest.raises(RuntimeError, match="steps cannot be captured"):
        wrong_steps(SUBJECT, RIGHT, failing, make_requests(70)[:2])

"""How many operators a layer is: on a GPU each costs the host 7 to 10 us, and a graph that replays it 2 us."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.layer_reference import REFERENCE, LayerKernels
from specextend.attention.plan import AttentionPlan
from specextend.decoding.model import CachedModel
from tests.step_trace import StepTrace, Tracer
from tests.tiny_models import FAMILIES


def trace_forward(family: str, num_layers: int, *, own_kernels: bool, is_prompt: bool = False) -> StepTrace:
    """A verification of seven nodes for two sequences, or seven tokens of a prompt, on a device that is no CPU."""
    tracer = Tracer()

    def counted(kernel, num_kernels: int = 1):
        def call(*args):
            tracer.steps[-1].operators[kernel.__name__] += num_kernels
            return tracer.leaving_out(kernel)(*args)

        return call

    def attend(q, k, v, span, scale):
        return torch.empty_like(q), None

    twins = (REFERENCE.add_norm, REFERENCE.rotate_heads, REFERENCE.gate)
    kernels = LayerKernels(*map(counted, twins)) if own_kernels else None
    config = FAMILIES[family].config(
        hidden_size=64, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION)
    target = CachedModel(model.requires_grad_(False), counted(attend, 2), 512, kernels)
    mask, nodes = torch.ones(2, 7, 7, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.int64, device="meta")
    plan = AttentionPlan([0, 256], [107, 57], 7, mask, tree="dense", on_device=(nodes[:, :1], nodes))
    if is_prompt:
        plan, nodes = AttentionPlan([256], [57], 7), nodes[:1]
    with tracer:
        target.forward(nodes, nodes, plan)
    return tracer.steps[-1]


@pytest.mark.parametrize(
    ("family", "own_kernels", "ceiling"),
    [("llama", False, 41), ("qwen3", False, 57), ("llama", True, 11), ("qwen2-tied", True, 11), ("qwen3", True, 11)],
)
def test_a_layer_has_few_operators(family, own_kernels, ceiling):
    """The stock layer, and one with kernels of ours: two of attention, five products, two norms, RoPE, gate and sum."""
    fewer, more = (trace_forward(family, number, own_kernels=own_kernels).operators for number in (1, 2))
    assert (more - fewer).total() <= ceiling, more - fewer
    assert more.total() - fewer.total() == (more - fewer).total()


@pytest.mark.parametrize("own_kernels", [False, True])
def test_a_prompts_rows_are_uploaded_once_for_all_layers(own_kernels):
    """For each upload the host waits until the GPU has done all that it was asked before."""
    uploads = [trace_forward("llama", number, own_kernels=own_kernels, is_prompt=True).num_uploads for number in (1, 3)]
    assert uploads[0] == uploads[1]

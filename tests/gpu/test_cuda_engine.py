"""The whole engine on CUDA with a tiny pair in fp32; it needs neither a configuration nor files."""

import sys
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import torch

from specextend.core import SamplingParams
from specextend.decoding.device import GPU, CudaCapture, Graphs
from specextend.drafters.causal import CausalDrafter
from specextend.proof import tiny_pair
from specextend.proof.child import make_requests
from specextend.proof.subject import Kernels, Subject
from specextend.proof.tiny_pair import TinyPair

pytestmark = pytest.mark.gpu

CHUNK = GPU.prefill_chunk
"""What an engine reads at once: a draft that is made for less refuses it."""
MODEL = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
SUBJECT = Subject(
    device="cuda",
    dtype="float32",
    model=MODEL | {"num_hidden_layers": 4, "intermediate_size": 192, "vocab_size": 500, "head_dim": 64},
    num_nodes=8,
    depth=4,
    batch=16,
    longest=400,
    num_rows=16384,
    chunk=CHUNK,
)
REFERENCE = Kernels(prompts="reference", steps="reference")


@cache
def pair():
    """A pair, and what plain decoding in plain torch says to greedy requests and to others."""
    made = TinyPair(SUBJECT)
    with torch.inference_mode():
        plain = [made.decode(REFERENCE, requests(warmth), 1, speculates=False) for warmth in (0.0, 0.7)]
    return made, dict(zip((0.0, 0.7), map(token_ids, plain), strict=True))


def token_ids(completions):
    return {name: done.token_ids for name, done in completions.items()}


class NotingDrafter(CausalDrafter):
    """Keeps the nodes of the trees that it proposes."""

    trees: ClassVar = []

    def propose(self, slots, num_nodes=None):
        proposed = super().propose(slots, num_nodes)
        self.trees.extend([node[:3] for node in nodes] for nodes in proposed.nodes())
        return proposed


def decode(kernels, temperature, batch, graphs):
    """The tokens and the trees of all requests."""
    NotingDrafter.trees.clear()
    found = pair()[0].decode(kernels, requests(temperature), batch, graphs)
    return token_ids(found), [*NotingDrafter.trees]


def requests(temperature):
    """More texts than a batch."""
    return [
        replace(each, sampling=SamplingParams(temperature=temperature, seed=number))
        for number, each in enumerate(make_requests(CHUNK, 16))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(
    "kernels",
    [
        REFERENCE,
        Kernels(),
        Kernels(steps="triton"),
        Kernels(steps="triton", layers="triton", graphs=True),
        Kernels(prompts="flash", steps="triton", graphs=True),
        Kernels(prompts="cudnn", steps="triton", graphs=True),
        Kernels(prompts="triton", steps="triton", layers="triton", graphs=True),
    ],
    ids=lambda each: f"{each.prompts}-{each.steps}-{each.layers}{'-graphs' * each.graphs}",
)
@torch.inference_mode()
def test_tokens_are_those_of_plain_decoding_and_captured_trees_those_of_eager_steps(
    kernels, batch, temperature, monkeypatch
):
    """Lossless on the GPU, and a draft that reads the wrong rows in a replay shows in its trees alone."""
    try:
        kernels.attend(torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(tiny_pair, "CausalDrafter", NotingDrafter)
    graphs = Graphs(CudaCapture() if kernels.graphs else None, 1)
    tokens, trees = decode(kernels, temperature, batch, graphs)
    assert tokens == pair()[1][temperature]
    if kernels.graphs:
        assert graphs.enabled
        assert trees == decode(kernels, temperature, batch, Graphs(CudaCapture(), sys.maxsize))[1]

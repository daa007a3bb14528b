"""The whole engine on CUDA with a tiny pair in fp32; it needs neither a configuration nor files."""

import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

from specextend.core import SamplingParams
from specextend.decoding.device import GPU, CudaCapture, Graphs
from specextend.proof.child import TinyPair, Trees, make_requests
from specextend.proof.prover import Kernels
from tests.proof.conftest import SUBJECT as SUBJECT_ON_CPU

pytestmark = pytest.mark.gpu

CHUNK = GPU.prefill_chunk
"""What an engine reads at once: a draft that is made for less refuses it."""
SUBJECT = replace(SUBJECT_ON_CPU, device="cuda", chunk=CHUNK)
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


def decode(kernels, temperature, batch, graphs):
    """The tokens and the trees of all requests."""
    trees = Trees()
    return token_ids(pair()[0].decode(kernels, requests(temperature), batch, graphs, trees=trees)), trees


def requests(temperature):
    """More texts than a batch."""
    return [
        replace(each, request_id=str(number), sampling=SamplingParams(temperature=temperature, seed=number))
        for number, each in enumerate(make_requests(CHUNK + 70) * 2)
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
def test_tokens_are_those_of_plain_decoding_and_captured_trees_those_of_eager_steps(kernels, batch, temperature):
    """Lossless on the GPU, and a draft that reads the wrong rows in a replay shows in its trees alone."""
    try:
        kernels.attend(torch.device("cuda"))
    except ValueError as error:
        pytest.skip(str(error))
    graphs = Graphs(CudaCapture() if kernels.graphs else None, 1)
    tokens, trees = decode(kernels, temperature, batch, graphs)
    assert tokens == pair()[1][temperature]
    if kernels.graphs:
        assert graphs.enabled
        assert trees == decode(kernels, temperature, batch, Graphs(CudaCapture(), sys.maxsize))[1]

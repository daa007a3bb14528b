"""An engine on a GPU that is not there: every tensor of a step is on it, and the host waits where it must."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.gpu_pairs import TINY, EngineParts, Pair
from specextend.data.answers import schema_of
from specextend.decoding.device import Graphs
from specextend.decoding.engine import Engine
from specextend.drafters.ngram import NgramDrafter
from specextend.models.causal_lm import load_tokenizer
from specextend.proof.prover import Kernels
from specextend.proof.tiny_pair import TinyPair
from tests.gpu.test_cuda_engine import SUBJECT
from tests.recorded_graph import attend_on_device
from tests.reference_outputs import tokens_of
from tests.test_captured_steps import run_again
from tests.tiny_models import EOS_TOKEN_ID, random_prompt, request
from tests.virtual_gpu import virtual_gpu

ON_DEVICE = f"{attend_on_device.__module__}:{attend_on_device.__name__}"
PROMPT = {"prefill.read", "device.synchronise", "plan.new_rows", "engine._prefill"}
"""Where a prompt waits: for tokens and rows of each chunk, and for its first token; a kernel of steps reads places."""
RETRIEVAL = {"engine._retrieve"}
STEP = {"verification.verify"}
LEVELS = {"tree._live", "tree.grow_trees"}
"""Where a tree that is not captured waits in each level: for the nodes worth expanding, and for the end."""


REQUESTS = [
    request(str(length), random_prompt(length, vocab_size=TinyPair.vocabulary), num_new)
    for length, num_new in ((150, 12), (63, 5), (17, 9), (90, 7))
]


@pytest.fixture(scope="module")
def expected():
    """What plain decoding on the host says."""
    reference = Kernels(prompts="reference", steps="reference")
    with torch.inference_mode():
        done = TinyPair(replace(SUBJECT, device="cpu")).decode(reference, REQUESTS, 1, speculates=False)
    return tokens_of(done.values())


EAGER = Kernels(), Graphs(), PROMPT | RETRIEVAL | STEP | LEVELS
CAPTURED = Kernels(steps=ON_DEVICE), Graphs(run_again, 1), PROMPT | {"plan.places"} | RETRIEVAL | STEP


@pytest.mark.parametrize(
    "kernels, graphs, places, batch",
    [
        pytest.param(*EAGER, 3, id="eager"),
        pytest.param(*CAPTURED, 1, id="with the shapes of graphs"),
        pytest.param(*CAPTURED, 3, id="those in a batch", marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_the_host_waits_for_what_a_step_decided_and_for_retrievals(kernels, graphs, places, batch, expected):
    """Whatever else waits lets the GPU idle: an upload did that does not wait for its turn, in each retrieval.

    A tensor that was forgotten on the host would fail here, too.
    """
    with virtual_gpu() as waits:
        pair = TinyPair(SUBJECT)
        waits.clear()
        found = pair.decode(kernels, REQUESTS, batch, graphs)
    assert tokens_of(found.values()) == expected
    assert waits.keys() == places
    stats = [each.stats for each in found.values()]
    num_steps = sum(each.num_spec_steps + each.num_plain_steps for each in stats)
    assert waits["verification.verify"] <= num_steps
    if batch == 1:
        assert waits["verification.verify"] == num_steps
    assert waits["engine._prefill"] <= 2 * len(REQUESTS)
    num_retrievals = sum(each.num_retrievals for each in stats)
    assert 0 < waits["engine._retrieve"] <= num_retrievals, "once for all that are due"
    if batch == 1:
        assert waits["engine._retrieve"] == num_retrievals


SAMPLED = [
    request(str(n), random_prompt(n, vocab_size=TinyPair.vocabulary), 9, seed=n, **how)
    for n, how in ((90, {}), (63, {"temperature": 0.8, "top_p": 0.7}), (30, {"temperature": 0.5, "top_k": 20}))
]


def decode_with_a_head(device, waits, requests, *, speculates, merges=False, tokenizer=None):
    """What an EAGLE-3 head of random weights decodes for requests that sample, with n-grams if it `merges`."""
    parts = EngineParts(Pair(TINY[-1], device, torch.float32), "sdpa", 2, 128)
    if merges:
        parts.drafter = NgramDrafter(parts.shape.tree, device, parts.drafter)
    engine = parts.engine(speculates=speculates)
    if tokenizer is not None:
        options = {"tree": parts.shape.tree, "tree_attention": parts.tree_attention, "cache": parts.shape.cache}
        sizes = {"eos_token_ids": frozenset({EOS_TOKEN_ID}), "max_tokens": 128, "max_batch_size": 2}
        engine = Engine(tokenizer, parts.target, parts.drafter if speculates else None, **sizes, **options)
    engine.decode_share = 0.0
    waits.clear()
    return tokens_of(engine.generate(requests))


@pytest.mark.parametrize("merges", [False, True])
@torch.inference_mode()
def test_a_head_ngrams_and_sampled_requests_wait_nowhere_else(merges):
    """Only a small LM and greedy requests had been on it."""
    expected = decode_with_a_head(torch.device("cpu"), Counter(), SAMPLED, speculates=False)
    with virtual_gpu() as waits:
        found = decode_with_a_head(torch.device("cuda"), waits, SAMPLED, speculates=True, merges=merges)
    assert found == expected
    of_ngrams = {"tree.nodes", "ngram.prefill"} if merges else set()
    assert waits.keys() - {"sampling._choose_likely"} <= PROMPT | RETRIEVAL | STEP | LEVELS | of_ngrams


@torch.inference_mode()
def test_a_batch_that_samples_waits_once_a_step_for_what_it_sorts():
    """Each sequence waited for sorts of its own, sixteen times a step at batch 16."""
    alike = [replace(each, sampling=replace(SAMPLED[1].sampling, seed=b)) for b, each in enumerate(SAMPLED)]
    with virtual_gpu() as waits:
        decode_with_a_head(torch.device("cuda"), waits, alike, speculates=True)
    assert waits["sampling._choose_likely"] == waits["verification.verify"] + len(alike)


@torch.inference_mode()
def test_masks_of_a_schema_reach_the_gpu_and_no_other_step_waits_for_them(spelling_pair):
    """Under a grammar the host reads what is likely, once a sequence; nodes that it masks wait for their own choice."""
    tokenizer = load_tokenizer(str(spelling_pair.target))
    schema = schema_of({"kind": "audit | budget", "pages": "integer?"})
    asked = [replace(SAMPLED[0], schema=schema, max_new_tokens=24), SAMPLED[1]]
    decode = partial(decode_with_a_head, requests=asked, tokenizer=tokenizer)
    expected = decode(torch.device("cpu"), Counter(), speculates=False)
    with virtual_gpu() as waits:
        found = decode(torch.device("cuda"), waits, speculates=True)
    assert found == expected
    of_grammars = {"tree.nodes", "verification._choose", "sequence.settle", "sequence.choose", "grammar.mask"}
    assert waits.keys() - {"sampling._choose_likely"} <= PROMPT | RETRIEVAL | STEP | LEVELS | of_grammars
    assert 0 < waits["sequence.settle"] <= waits["verification.verify"] + 1

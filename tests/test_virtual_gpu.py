"""An engine on a GPU that is not there: every tensor of a step is on it, and the host waits where it must."""

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
from specextend.proof.child import TinyPair
from specextend.proof.prover import Kernels
from tests.gpu.test_cuda_engine import SUBJECT
from tests.recorded_graph import attend_on_device
from tests.reference_outputs import tokens_of
from tests.test_captured_steps import run_again
from tests.tiny_models import EOS_TOKEN_ID, random_prompt, request
from tests.virtual_gpu import virtual_gpu

ON_DEVICE = f"{attend_on_device.__module__}:{attend_on_device.__name__}"
PROMPT_WAITS = 9
"""Most waits of a prompt: for tokens and rows of its chunks, and for the first token of its output."""


def asks(length, num_new, **sampling):
    return request(str(length), random_prompt(length, vocab_size=TinyPair.vocabulary), num_new, **sampling)


REQUESTS = [asks(150, 12), asks(63, 5), asks(17, 9), asks(90, 7)]


@pytest.fixture(scope="module")
def expected():
    """What plain decoding on the host says."""
    reference = Kernels(prompts="reference", steps="reference")
    with torch.inference_mode():
        done = TinyPair(replace(SUBJECT, device="cpu")).decode(reference, REQUESTS, 1, speculates=False)
    return tokens_of(done.values())


EAGER = Kernels(), Graphs()
CAPTURED = Kernels(steps=ON_DEVICE), Graphs(run_again, 1)


@pytest.mark.parametrize(
    "kernels, graphs, batch",
    [
        pytest.param(*EAGER, 3, id="eager"),
        pytest.param(*CAPTURED, 1, id="with the shapes of graphs"),
        pytest.param(*CAPTURED, 3, id="those in a batch", marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_the_host_waits_once_a_step_and_once_a_retrieval(kernels, graphs, batch, expected):
    """Whatever else waits lets the GPU idle: an upload did that does not wait for its turn, in each retrieval.

    A tensor that was forgotten on the host would fail here, too.
    """
    with virtual_gpu() as waits:
        pair = TinyPair(SUBJECT)
        waits.clear()
        found = pair.decode(kernels, REQUESTS, batch, graphs)
    assert tokens_of(found.values()) == expected
    stats = [each.stats for each in found.values()]
    num_steps = sum(each.num_spec_steps + each.num_plain_steps for each in stats)
    num_retrievals = sum(each.num_retrievals for each in stats)
    assert 0 < waits["verification.verify"] <= num_steps
    assert 0 < waits["engine._retrieve"] <= num_retrievals
    if graphs.enabled:
        # a replay reads on the device what a kernel asks of its span
        waiting = sum(count for place, count in waits.items() if place != "plan.places")
        assert waiting <= num_steps + num_retrievals + PROMPT_WAITS * len(REQUESTS)


NUCLEUS = {"temperature": 0.8, "top_p": 0.7}
SAMPLED = [asks(90, 9), asks(63, 9, seed=63, **NUCLEUS), asks(30, 9, seed=30, temperature=0.5, top_k=20)]
ALIKE = [asks(90 - seed, 9, seed=seed, **NUCLEUS) for seed in range(3)]
SCHEMA = schema_of({"kind": "audit | budget", "pages": "integer?"})


def decode_with_a_head(tokenizer, merges, requests, device, waits=None):
    """What an EAGLE-3 head of random weights decodes, with n-grams if it `merges`; on the host without a draft."""
    parts = EngineParts(Pair(TINY[-1], torch.device(device), torch.float32), "sdpa", 2, 128)
    if merges:
        parts.drafter = NgramDrafter(parts.shape.tree, torch.device(device), parts.drafter)
    engine = Engine(
        tokenizer,
        parts.target,
        parts.drafter if device == "cuda" else None,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        max_tokens=128,
        max_batch_size=2,
        tree=parts.shape.tree,
        tree_attention=parts.tree_attention,
        cache=parts.shape.cache,
    )
    engine.decode_share = 0.0
    if waits:
        waits.clear()
    return tokens_of(engine.generate(requests))


@pytest.mark.parametrize(
    "merges, requests",
    [
        pytest.param(False, SAMPLED, id="sampled"),
        pytest.param(True, SAMPLED, id="with n-grams"),
        pytest.param(False, ALIKE, id="alike"),
        pytest.param(False, [replace(SAMPLED[0], schema=SCHEMA, max_new_tokens=24), SAMPLED[1]], id="with a schema"),
    ],
)
@torch.inference_mode()
def test_a_head_ngrams_samples_and_masks_are_on_the_gpu(merges, requests, spelling_pair):
    """Only a small LM and greedy requests had been on it.

    Sequences of a batch waited for sorts of their own, sixteen times a step at batch 16.
    """
    decode = partial(decode_with_a_head, load_tokenizer(spelling_pair.target), merges, requests)
    expected = decode("cpu")
    with virtual_gpu() as waits:
        found = decode("cuda", waits)
    assert found == expected
    assert waits["sampling._choose_likely"] <= waits["verification.verify"] + len(requests)
    assert waits["sequence.settle"] <= waits["verification.verify"] + 1

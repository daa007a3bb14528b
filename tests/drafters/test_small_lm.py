"""The model draft: prefill in pieces is full attention with a mask, and rows come and go cleanly."""

import pytest
import torch

from specextend.attention.plain import attend_reference
from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.small_lm import ModelNetwork
from specextend.models import load_causal_lm
from tests.covering import covering
from tests.tiny_models import EOS_TOKEN_ID, NUM_CUT, VOCABULARY, load_reference, random_prompt

OPTIONS = TreeOptions(nodes=4, depth=2, threshold=0)
NAMES = ["llama", "mistral-yarn", "qwen3-tied-linear", "llama-tied-llama3"]


@pytest.fixture(scope="module", params=NAMES)
def pair(request, pairs):
    return pairs(request.param)


def network_of(pair, window, max_chunk=512, attend=attend_by_head):
    model = load_causal_lm(pair.target, "float32", "cpu")
    return ModelNetwork(CachedModel(model, attend, 2048), 2048, window, max_chunk)


def prefilled(network, prompt, chunk):
    drafter = CausalDrafter(network, OPTIONS, "hybrid", None, num_slots=1)
    prefill(drafter, prompt, chunk)
    return drafter


def prefill(drafter, prompt, chunk):
    assert drafter.admit(0, len(prompt), 16)
    for tokens in torch.tensor(prompt).split(chunk):
        drafter.prefill(0, tokens, torch.zeros(len(tokens), 48))


def run_in_pieces(pair, prompt, window, chunk):
    """Keys and values [L, n, K, D] of one forward under a mask, by transformers with its own cache.

    A token sees its piece of a chunk, up to itself, and a window before the piece.
    """
    model = load_reference(pair)
    position = torch.arange(len(prompt))
    begin = position // chunk * chunk + position % chunk // window * window
    hidden = (position[None] > position[:, None]) | (position[None] <= begin[:, None] - window)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    cache = model(torch.tensor([prompt]), attention_mask=mask[None, None], use_cache=True).past_key_values
    keys, values = ([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers] for name in ("keys", "values"))
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize(
    "family, window_and_chunk, attend",
    covering(NAMES, [(16, 64), (16, 40), (16, 7), (1, 5), (31, 30), (500, 64)], [attend_reference, attend_by_head]),
)
@torch.inference_mode()
def test_prefill_in_pieces_needs_no_mask(family, window_and_chunk, attend, pairs):
    """Whatever the chunks: only window - 1 old rows are kept. A band took a mask of 4096 x 4607 numbers."""
    pair, prompt, (window, chunk) = pairs(family), random_prompt(130), window_and_chunk
    spans = []

    def attending(q, k, v, span, scale):
        spans.append(span)
        return attend(q, k, v, span, scale)

    network = network_of(pair, window, 64, attending)
    drafter = prefilled(network, prompt, chunk)
    assert all(span.mask is None for span in spans)
    assert network.cache.of[0].length == len(prompt)
    drafter.select(0, torch.arange(len(prompt)))  # slots are the original positions
    assert_visible(network.cache, *run_in_pieces(pair, prompt, window, chunk))


def assert_visible(cache, expected_keys, expected_values):
    """What slot 0 sees: keys and values [L, n, K, D]."""
    rows = slice(cache.of[0].working.start, cache.of[0].working.start + cache.of[0].visible)
    torch.testing.assert_close(cache.working.keys[:, :, rows].transpose(1, 2), expected_keys, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(cache.working.values[:, :, rows].transpose(1, 2), expected_values, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("draft, num_rows", [("cut", VOCABULARY - NUM_CUT), ("bad", VOCABULARY + 8)])
@torch.inference_mode()
def test_a_draft_with_other_rows_proposes_what_both_have_and_reads_the_rest_as_the_end_of_a_text(draft, num_rows, pair):
    """A token that only one side knows must neither crash nor be proposed: the target could not even embed it."""
    model = CachedModel(load_causal_lm(pair.drafts[draft], "float32", "cpu"), attend_by_head, 1024)
    network = ModelNetwork(model, 1024, 512, 512, min(num_rows, VOCABULARY), EOS_TOKEN_ID)
    drafter = CausalDrafter(network, TreeOptions(nodes=40, depth=3, threshold=0), "hybrid", None, num_slots=1)
    text = random_prompt(60)
    known = [token_id if token_id < num_rows else EOS_TOKEN_ID for token_id in text]
    assert (text != known) == (draft == "cut")
    found = drafted(drafter, text)
    token_ids = found[41:]
    assert found == drafted(drafter, known)
    assert max(token_ids) < min(num_rows, VOCABULARY)


def drafted(drafter, prompt):
    """Draft for one prompt, from admission to release; return its tree."""
    prefill(drafter, prompt, 64)
    drafter.select(0, torch.arange(len(prompt)))
    drafter.absorb([0], Decided.pad([[5]], [torch.zeros(1, 48)]))
    [tree] = drafter.propose([0])
    drafter.release(0)
    return [*tree.log_probs.tolist(), *tree.token_ids.tolist()]

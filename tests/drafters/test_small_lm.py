"""A small LM as the draft: it reads what it is to see, and when the choice changes only what is new."""

import pytest
import torch

from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.small_lm import ModelNetwork
from specextend.models.causal_lm import load_causal_lm
from tests.tiny_models import EOS_TOKEN_ID, NUM_CUT, VOCABULARY, load_reference, random_prompt

OPTIONS = TreeOptions(nodes=4, depth=2, threshold=0)
NAMES = ["llama", "mistral-yarn", "qwen3-tied-linear", "llama-tied-llama3"]
CHUNK = 8
PROMPT = random_prompt(130)
FIRST = torch.cat([torch.arange(8), torch.arange(24, 40), torch.arange(96, 130)])
"""Chunks 0, 3 and 4, and the last ones from chunk 12 on."""


@pytest.fixture(scope="module", params=NAMES)
def pair(request, pairs):
    return pairs(request.param)


def drafter_of(path, num_slots=1, options=OPTIONS, **vocabulary):
    model = CachedModel(load_causal_lm(path, "float32", "cpu"), attend_by_head, 2048)
    return CausalDrafter(ModelNetwork(model, CHUNK, 64, **vocabulary), options, "hybrid", None, num_slots)


def begin(drafter, slot, prompt, positions):
    """Give a slot a prompt in chunks, and let it see some positions; return how many tokens were read."""
    assert drafter.admit(slot, len(prompt), 32)
    for tokens in torch.tensor(prompt).split(50):
        drafter.prefill(slot, tokens, torch.zeros(len(tokens), 0))
    drafter.select(slot, positions)
    return drafter.read_selected([slot])


def visible(drafter, slot=0):
    """Keys and values [2, L, K, S, D] of the rows that a slot sees."""
    cache = drafter.network.cache
    start = cache.of[slot].working.start
    return cache.working.stored.transpose(0, 1)[:, :, :, start : start + cache.of[slot].visible]


def read_by_transformers(pair, token_ids):
    """The same of a text that transformers reads with its own cache."""
    cache = load_reference(pair)(torch.tensor([token_ids]), use_cache=True).past_key_values
    return torch.stack(
        [torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values")]
    )


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_draft_reads_what_it_sees_as_a_text_of_its_own(pair):
    """It used to read the whole prompt, a third of the target's time, only to hide most of it."""
    drafter = drafter_of(pair.target)
    assert begin(drafter, 0, PROMPT, FIRST) == len(FIRST)
    assert_close(visible(drafter), read_by_transformers(pair, [PROMPT[i] for i in FIRST.tolist()]))


@torch.inference_mode()
def test_a_new_choice_costs_what_is_new(pair):
    """New chunks take the rows of those that left; what lies beside them keeps its keys.

    Keys and values of the first layer follow from a row's token and place alone, so they show which token is where.
    """
    drafter = drafter_of(pair.target, num_slots=2)
    for slot in (0, 1):
        begin(drafter, slot, PROMPT, FIRST)
        drafter.absorb([slot], Decided.pad([[5, 6]], [torch.zeros(2, 0)]))
    before = visible(drafter).clone()
    seven_for_three = torch.cat([FIRST[:8], torch.arange(32, 40), torch.arange(56, 64), torch.arange(96, 132)])
    for slot in (0, 1):
        drafter.select(slot, seven_for_three)
    assert drafter.read_selected([0, 1]) == 2 * CHUNK  # both slots in one forward
    text = [*PROMPT, 5, 6]
    rows = [*range(8), *range(56, 64), *range(32, 40), *range(96, 132)]
    assert_close(visible(drafter)[:, 0], read_by_transformers(pair, [text[i] for i in rows])[:, 0])
    assert_close(visible(drafter, 1), visible(drafter))
    kept = [row for row, position in enumerate(rows) if not 56 <= position < 64]
    assert_close(visible(drafter)[..., kept, :], before[..., kept, :])
    assert not torch.allclose(visible(drafter), before)


@torch.inference_mode()
def test_a_choice_of_which_most_is_new_is_read_as_a_whole(pair):
    """Rows that were read beside other chunks get stale."""
    drafter = drafter_of(pair.target)
    begin(drafter, 0, PROMPT, FIRST)
    others = torch.cat([torch.arange(40, 96), torch.arange(120, 130)])
    drafter.select(0, others)
    assert drafter.read_selected([0]) == len(others)
    assert drafter.read_selected([0]) == 0
    assert_close(visible(drafter), read_by_transformers(pair, [PROMPT[i] for i in others.tolist()]))


@pytest.mark.parametrize("draft, num_rows", [("cut", VOCABULARY - NUM_CUT), ("bad", VOCABULARY + 8)])
@torch.inference_mode()
def test_a_draft_with_other_rows_proposes_what_both_have_and_reads_the_rest_as_the_end_of_a_text(draft, num_rows, pair):
    """A token that only one side knows must neither crash nor be proposed: the target could not even embed it."""
    vocabulary = {"num_shared": min(num_rows, VOCABULARY), "other_id": EOS_TOKEN_ID}
    drafter = drafter_of(pair.drafts[draft], options=TreeOptions(nodes=40, depth=3, threshold=0), **vocabulary)
    text = random_prompt(60)
    known = [token_id if token_id < num_rows else EOS_TOKEN_ID for token_id in text]
    assert (text != known) == (draft == "cut")
    found = drafted(drafter, text)
    token_ids = found[41:]
    assert found == drafted(drafter, known)
    assert max(token_ids) < min(num_rows, VOCABULARY)


def drafted(drafter, prompt):
    """Draft for one prompt, from admission to release; return its tree."""
    begin(drafter, 0, prompt, torch.arange(len(prompt)))
    drafter.absorb([0], Decided.pad([[5]], [torch.zeros(1, 0)]))
    [tree] = drafter.propose([0])
    drafter.release(0)
    return [*tree.log_probs.tolist(), *tree.token_ids.tolist()]

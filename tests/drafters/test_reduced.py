"""A standalone LM that knows a part of the target's tokens: it drafts as its own model does, and is checked by file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specextend.attention.torch_kernels import attend_by_head
from specextend.decoding.decoding_options import DraftOptions, TreeOptions
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import Decided
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.small_lm import FILE, ModelNetwork, read_reduced
from specextend.model_files import ModelError
from specextend.models import TargetOptions, load_causal_lm
from specextend.pairing import check_pair
from tests.tiny_models import FAMILIES, VOCABULARY, random_prompt, write_pair, write_small


@pytest.fixture
def small(tmp_path) -> Path:
    """The draft's folder, for a test to spoil."""
    return Path(write_small(tmp_path / "small", VOCABULARY))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetOptions:
    return TargetOptions(model=write_pair(tmp_path_factory.mktemp("pair"), FAMILIES["llama"]).target)


def draft_of(folder: Path) -> DraftOptions:
    return DraftOptions(kind="model", model=str(folder))


def refusal(target: TargetOptions, folder: Path) -> str:
    """What a user reads; it must be one line."""
    with pytest.raises(ModelError) as refused:
        check_pair(target, draft_of(folder))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def edit(folder: Path, **values) -> None:
    """Set keys of config.json; None removes one."""
    merged = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def own_log_probs(folder: Path, token_ids: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The draft's tokens [R] and their log probabilities [R] after a text, by transformers alone."""
    known = load_file(folder / FILE)["draft_token_ids"].tolist()
    rows = [known.index(token_id) if token_id in known else len(known) for token_id in token_ids]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return torch.tensor(known), model(torch.tensor([rows])).logits[0, -1, :-1].float().log_softmax(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.06)])
@torch.inference_mode()
def test_it_drafts_what_its_own_model_says_in_the_targets_ids(small, dtype, tolerance):
    """Half of the prompt's tokens are strangers to it; the row that stands for them is read and never proposed.

    In bfloat16 its layers are packed, the LM head too, which shares its weight with the embedding.
    """
    model = CachedModel(load_causal_lm(str(small), None, dtype, "cpu"), attend_by_head, 1024)
    network = ModelNetwork(model, 1024, 512, 512, read_reduced(small))
    drafter = CausalDrafter(network, TreeOptions(nodes=12, depth=2, threshold=0), "hybrid", None, num_slots=1)
    prompt = random_prompt(50)
    assert drafter.admit(0, len(prompt), 16)
    drafter.prefill(0, torch.tensor(prompt), torch.zeros(50, 48))
    drafter.select(0, torch.arange(50))
    drafter.absorb([0], Decided.pad([[5]], [torch.zeros(1, 48)]))
    [tree] = drafter.propose([0])
    for parent in (0, 1):
        path = [] if parent == 0 else [int(tree.token_ids[parent])]
        known, log_probs = own_log_probs(small, [*prompt, 5, *path], getattr(torch, dtype))
        children = tree.parents == parent
        assert parent == 1 or int(children.sum()) > 2
        found = tree.log_probs[children] - tree.log_probs[parent]
        expected = torch.stack([log_probs[known == token_id][0] for token_id in tree.token_ids[children]])
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_vocab_size": 130}, "does not fit target"),
        ({"tokens_sha256": "0" * 64}, "it was trained for another tokenizer"),
    ],
)
def test_a_draft_of_another_target_or_shape_is_refused(target, small, values, message):
    """Before a weight is read, by the size of the vocabulary that it was made for."""
    edit(small, **values)
    assert message in refusal(target, small)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"draft_token_ids": torch.arange(59)}, "vocab_size is 61; draft_vocabulary.safetensors lists 59 tokens"),
        ({"token_ids": torch.arange(60)}, "must hold one tensor, draft_token_ids, a list of int64"),
    ],
    ids=["count", "name"],
)
def test_a_wrong_list_of_tokens_is_refused(target, small, tensors, message):
    """Any of these would run, and propose tokens that it does not mean."""
    save_file(tensors, small / FILE)
    assert message in refusal(target, small)

"""Drafts that do not fit their target are refused by name, before any weight is read."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file
from torch import zeros

from specextend.drafters.draft_options import DraftOptions
from specextend.drafters.eagle_config import EagleConfig
from specextend.model_files import ModelError
from specextend.models import TargetOptions, load_tokenizer, tokens_sha256
from specextend.pairing import check_pair, pair_hashes


@pytest.fixture
def write_eagle(tmp_path):
    """An EAGLE head's folder for the tiny target; keywords change its shape."""

    def write(**values):
        shape = {
            "target": "tiny",
            "vocab_size": 64,
            "hidden_size": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rope_theta": 10000.0,
            "layer_norm_eps": 1e-6,
            "head_norm_eps": 1e-6,
            "dtype": "float32",
        }
        config = EagleConfig(**(shape | values))
        folder = tmp_path / "eagle"
        folder.mkdir(exist_ok=True)
        config.save(folder)
        save_file({name: zeros(info.shape) for name, info in config.tensors().items()}, folder / "model.safetensors")
        return DraftOptions(kind="eagle", model=str(folder))

    return write


def target_of(folder) -> TargetOptions:
    return TargetOptions(model=str(folder))


def refusal(target, draft) -> str:
    with pytest.raises(ModelError) as refused:
        check_pair(target_of(target), draft)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def model_draft(folder) -> DraftOptions:
    return DraftOptions(kind="model", model=str(folder))


def test_a_draft_without_a_model_fits_every_target_and_has_no_hash(write_model):
    """N-grams speak the target's tokens whatever they are, and nothing of them lies in a file."""
    target = target_of(write_model("target"))
    for draft in (DraftOptions(kind="ngram"), DraftOptions(kind="self", ngram=True)):
        assert check_pair(target, draft) == check_pair(target, None)
        assert set(pair_hashes(target, draft)) == {"target", "tokenizer"}


@pytest.mark.parametrize("num_rows", [48, 80])
def test_a_draft_of_the_same_tokens_fits_whatever_the_rows_of_either(write_model, num_rows):
    """Qwen2.5 7B and 0.5B differ in padding rows only; a target with a few control tokens more is as common."""
    target, draft = write_model("target"), write_model("draft", vocab_size=num_rows)
    assert check_pair(target_of(target), model_draft(draft)).vocab_size == 64
    assert check_pair(target_of(draft), model_draft(target)).vocab_size == num_rows


def test_a_token_that_one_model_lacks_is_no_contradiction(write_model):
    """Where both use an id they must mean the same by it; elsewhere the draft is wrong at worst."""
    target, draft = write_model("target"), write_model("draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert check_pair(target_of(target), model_draft(draft)).vocab_size == 64


def test_another_token_under_the_same_id_is_refused(write_model):
    """Everything would run, and no guess would ever be right: the slowest way to find out."""
    target, draft = write_model("target"), write_model("draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "does not fit target" in refusal(target, model_draft(draft))
    assert "is 'B', the target's is 'A'" in refusal(target, model_draft(draft))


def test_other_special_tokens_are_refused(write_model, edit_json):
    """The draft would guess on past the end of an answer."""
    target, draft = write_model("target"), write_model("draft")
    edit_json(draft / "tokenizer_config.json", eos_token="<s>")
    assert refusal(target, model_draft(draft)).endswith("eos_token_id is 1, the target's is 2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        ({"vocab_size": 65}, "vocab_size is 65, the target's is 64"),
    ],
)
def test_a_head_of_another_target_is_refused(write_model, write_eagle, values, message):
    """It shares the target's embedding and hidden states, so their sizes must be its own."""
    assert refusal(write_model(), write_eagle(**values)).endswith(message)


def test_a_head_for_another_tokenizer_of_the_same_size_is_refused(write_model, write_eagle):
    """It has no tokenizer of its own to compare; unnoticed, no guess of it would ever be right."""
    target = write_model()
    known = tokens_sha256(load_tokenizer(str(target)))
    assert check_pair(target_of(target), write_eagle(tokens_sha256=known)).num_layers == 2
    assert refusal(target, write_eagle(tokens_sha256="0" * 64)).endswith("it was trained for another tokenizer")


def test_hashes_change_with_each_part_of_the_pair_alone(write_model, write_eagle):
    """The fingerprint tells a user which part of a run is another one."""
    target, eagle = write_model("target"), write_eagle()
    other = model_draft(write_model("draft", num_hidden_layers=1))
    alone, with_head, with_model = (pair_hashes(target_of(target), draft) for draft in (None, eagle, other))
    assert set(alone) == {"target", "tokenizer"}
    assert set(with_head) == set(with_model) == {"target", "tokenizer", "draft"}
    assert alone.items() <= with_head.items()
    assert alone.items() <= with_model.items()
    assert with_head["draft"] != with_model["draft"]

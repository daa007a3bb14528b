"""Drafts that do not fit their target are refused by name, before any weight is read."""

import json

import pytest

from specextend.decoding.decoding_options import DraftOptions
from specextend.models.causal_lm import TargetOptions
from specextend.models.model_files import ModelError
from specextend.models.pairing import check_pair, pair_hashes
from tests.models.conftest import edit_json
from tests.refused import refused


def target_of(folder):
    return TargetOptions(model=str(folder))


def refusal(target, draft):
    return refused(check_pair, target_of(target), draft, kind=ModelError)


def model_draft(folder):
    return DraftOptions(kind="model", model=str(folder))


def test_a_draft_without_a_model_fits_every_target_and_has_no_hash(write_model):
    """N-grams speak the target's tokens whatever they are, and nothing of them lies in a file."""
    target = target_of(write_model("target"))
    draft = DraftOptions(kind="ngram")
    assert check_pair(target, draft) == check_pair(target, None)
    assert set(pair_hashes(target, draft)) == {"target", "tokenizer"}


@pytest.mark.parametrize("num_rows", [48, 80])
def test_a_draft_of_the_same_tokens_fits_whatever_the_rows_of_either(write_model, num_rows):
    """Qwen2.5 7B and 0.5B differ in padding rows only; a target with a few control tokens more is as common."""
    target = write_model("target")
    draft = write_model("draft", vocab_size=num_rows)
    assert check_pair(target_of(target), model_draft(draft)).vocab_size == 64
    if num_rows == 80:
        assert check_pair(target_of(draft), model_draft(target)).vocab_size == num_rows


def test_another_token_under_the_same_id_is_refused(write_model):
    """Everything would run, and no guess would ever be right: the slowest way to find out."""
    target = write_model("target")
    draft = write_model("draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "does not fit target" in refusal(target, model_draft(draft))
    assert "is 'B', the target's is 'A'" in refusal(target, model_draft(draft))


def test_other_special_tokens_are_refused(write_model):
    """The draft would guess on past the end of an answer."""
    target = write_model("target")
    draft = write_model("draft")
    edit_json(draft / "tokenizer_config.json", eos_token="<s>")
    assert refusal(target, model_draft(draft)).endswith("eos_token_id is 1, the target's is 2")

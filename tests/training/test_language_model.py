"""The small standalone LM: rows of a reduced vocabulary, one for all else, and the file that says so."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specextend.drafters.small_lm import ReducedVocabulary, read_reduced
from specextend.training.language_model import (
    new_language_model,
    recorded_windows,
    save_language_model,
    text_windows,
)
from tests.training.conftest import OPTIONS, made_up_recording

VOCABULARY = torch.tensor([1, 4, 5, 9, 30])
ROWS = ReducedVocabulary(VOCABULARY, 40, 5).rows()
EMBEDDING = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))


def test_the_model_is_saved_as_its_reader_expects(tmp_path):
    """The LM head is the embedding, the vocabulary lies beside it, and the reader maps tokens to the same rows."""
    torch.manual_seed(0)
    model = new_language_model(OPTIONS, VOCABULARY, EMBEDDING, "tiny").to(torch.bfloat16)
    save_language_model(model, VOCABULARY, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    reduced = read_reduced(tmp_path)
    assert reduced is not None
    assert torch.equal(reduced.rows(), ROWS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (loaded.dtype, loaded.config.max_position_embeddings) == (torch.bfloat16, 1024)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_tokens_outside_the_vocabulary_share_a_row():
    """The model reads them as one and the same, and proposes none of them."""
    assert ROWS[VOCABULARY].tolist() == [0, 1, 2, 3, 4]
    assert ROWS[[0, 2, 39]].tolist() == [5, 5, 5]
    windows = text_windows(torch.tensor([1, 2, 4, 5, 9, 30, 7]), ROWS, 3)
    assert [window.tolist() for window in windows] == [[0, 5, 1], [2, 3, 4]]


def test_windows_end_in_an_answer_and_are_never_longer_than_the_model_reads():
    """More positions than it will have at run time, or fewer tokens of the answer, would be learned in vain."""
    recording = made_up_recording(40, 48)
    for size in (5, 8, 16, 64):
        windows = recorded_windows(recording, ROWS, size, 0)
        for window, answer in zip(windows, recording.answers, strict=True):
            kept = min(size, len(answer.token_ids))
            assert len(window.rows) == len(window.hidden) == min(size, 24 + kept)
            assert torch.equal(window.rows[-kept:], ROWS[answer.token_ids[:kept]])
            assert torch.equal(window.hidden[-kept:], answer.hidden[:kept])

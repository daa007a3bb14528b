"""What drafts learn from."""

from dataclasses import replace

import pytest
import torch

from specextend.attention.plain import attend_reference
from specextend.data.prompts import PromptOptions, Prompts
from specextend.decoding.model import CachedModel
from specextend.models.causal_lm import load_causal_lm
from specextend.training.recording import Answer, PromptMaker, Text, record
from tests.training.conftest import OPTIONS, byte_tokenizer, document


def maker(options=OPTIONS, limit=2048):
    tokenizer = byte_tokenizer()
    return PromptMaker(tokenizer, Prompts(tokenizer, PromptOptions(), limit), options, 8)


def text_of(words):
    return Text(torch.tensor(byte_tokenizer().encode(words), dtype=torch.int32))


def test_a_document_that_fits_is_answered_whole_at_first():
    """The draft learns what the run will ask: prompts of whole documents; of the others and again, of pieces."""
    tokenizer = byte_tokenizer()
    short = document(0)[:250]
    long = document(1)
    assert short in tokenizer.decode(maker().prompt(text_of(short), 0, whole=True))
    assert short not in tokenizer.decode(maker().prompt(text_of(short), 0, whole=False))
    assert len(long) > OPTIONS.max_tokens
    assert long not in tokenizer.decode(maker().prompt(text_of(long), 0, whole=True))


def test_pieces_leave_room_in_the_context():
    """A prompt that is cut in its middle has lost what its answer is about."""
    shorter = maker(replace(OPTIONS, max_tokens=2000), limit=900)
    texts = [text_of(document(number, 400)) for number in range(20)]
    lengths = [len(shorter.prompt(text, number, whole=False)) for number, text in enumerate(texts)]
    assert max(lengths) > 300
    assert max(lengths) <= 900 - 8
    with pytest.raises(ValueError, match=r"room for pieces of \d+ tokens, fewer than min_tokens \(192\)"):
        maker(limit=150)


@torch.inference_mode()
def test_states_are_those_of_prompt_and_answer_read_at_once(workshop):
    """A draft learns from the states that it will see: those behind the whole prompt, each at its own token."""
    model, other = (load_causal_lm(workshop.target, "float32", "cpu") for _ in range(2))
    answer = Answer([*range(1, 40)], [5, 6, 7, 8])
    vocabulary = torch.tensor([5, 9, 30])
    recording = record(CachedModel(other, attend_reference, 256), vocabulary, answer)
    assert recording.token_ids.tolist() == answer.prompt_token_ids + answer.output_token_ids
    assert recording.token_ids[recording.is_answer].tolist() == answer.output_token_ids
    whole = model.model(recording.token_ids[None]).last_hidden_state[0]
    torch.testing.assert_close(recording.hidden, whole)
    torch.testing.assert_close(recording.shares, model.lm_head(whole).softmax(-1)[:, vocabulary].sum(-1))

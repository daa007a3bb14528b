"""What drafts learn from."""

import torch

from specextend.attention.plain import attend_reference
from specextend.decoding.model import CachedModel
from specextend.models.causal_lm import load_causal_lm
from specextend.training.recording import Answer, record


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

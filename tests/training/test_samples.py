"""What drafts learn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specextend.data.prompts import PromptOptions, Prompts
from specextend.models import load_causal_lm
from specextend.training.recording import LEADS, Recorder, Sample, SampleMaker
from specextend.training.task import TrainOptions
from tests.training.conftest import OPTIONS, byte_tokenizer, document


def maker(options: TrainOptions = OPTIONS, limit: int = 2048) -> SampleMaker:
    tokenizer = byte_tokenizer()
    return SampleMaker(tokenizer, Prompts(tokenizer, PromptOptions(), limit), options)


def test_a_seed_and_a_number_decide_a_sample():
    """A training that goes on after an interruption must make the samples that it had made before."""
    assert maker().make(document(0), 3) == maker().make(document(0), 3)
    assert maker().make(document(0), 3) != maker().make(document(0), 4)
    assert maker().make(document(0), 3) != maker(replace(OPTIONS, seed=1)).make(document(0), 3)


@pytest.mark.parametrize("number", range(3))
def test_quotes_stand_in_the_document_and_facts_in_the_prompt(number):
    """An answer that nothing can be copied to teaches a draft not to copy."""
    tokenizer, text = byte_tokenizer(), document(number)
    sample = maker().make(text, number)
    prompt = tokenizer.decode(sample.prompt_token_ids)
    *quotes, facts = (tokenizer.decode(answer) for answer in sample.answers)
    assert len(quotes) == 4
    for quote in quotes:
        lead = next(lead for lead in LEADS if quote.startswith(lead))
        assert quote.endswith('"')
        assert quote.removeprefix(lead)[:-1] in text
    sentences = [f"{sentence.removesuffix('.')}." for sentence in facts.split(". ")]
    assert len(sentences) == 3
    assert all(sentence in prompt for sentence in sentences)


def test_pieces_leave_room_in_the_context():
    """A prompt that is cut in its middle has lost what its answers repeat."""
    shorter = maker(replace(OPTIONS, max_tokens=2000), limit=900)
    lengths = [len(shorter.make(document(n, 400), n).prompt_token_ids) for n in range(20)]
    assert max(lengths) > 300
    assert max(lengths) <= 900 - 192
    with pytest.raises(ValueError, match=r"room for pieces of \d+ tokens, fewer than min_tokens \(192\)"):
        maker(limit=500)


@torch.inference_mode()
def test_states_are_those_of_prompt_and_answer_read_at_once(workshop):
    """Answers share what the target has read of the prompt; none may see another."""
    model = load_causal_lm(workshop.target, None, "float32", "cpu")
    sample = Sample([*range(1, 40)], [[5, 6, 7, 8], [9, 5]])
    recording = Recorder(model, frozenset(), 6).record(sample, 0)
    prompt = recording.prompt.token_ids
    assert [len(answer.token_ids) for answer in recording.answers] == [4, 2, 6, 6, 6]
    for answer in recording.answers:
        whole = model.model(torch.cat([prompt, answer.token_ids])[None]).last_hidden_state[0]
        torch.testing.assert_close(torch.cat([recording.prompt.hidden, answer.hidden]), whole)
    greedy = recording.answers[2]
    states = torch.cat([recording.prompt.hidden[-1:], greedy.hidden[:-1]])
    assert torch.equal(model.lm_head(states).argmax(-1), greedy.token_ids)

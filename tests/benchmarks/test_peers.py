"""Peers, run for real on tiny random models: the same tokens as ours, and honest clocks."""

from dataclasses import replace

import pytest
import torch

from benchmarks.peers import LlamaCpp, Transformers, write_gguf
from tests.tiny_models import EOS_TOKEN_ID, FAMILIES, random_prompt, tiny_model

SERVED = {
    "mistral-yarn": FAMILIES["mistral-yarn"],
    "qwen3": FAMILIES["qwen3"],
    "qwen2-tied": replace(FAMILIES["qwen2-tied"], head_dim=12),  # llama.cpp has no Qwen2 with other heads than 48 / 4
}
NEAR_TIE = 0.02
"""Difference of two logits that rounding may reverse: attention of these models is sharp."""


@pytest.fixture(autouse=True)
def _one_thread(restored_threads):
    """Tiny models are slower on many threads, and llama.cpp takes as many as torch has."""
    torch.set_num_threads(1)


def llama_cpp(model, folder, drafts=None):
    path = folder / "tiny.gguf"
    write_gguf(model, [EOS_TOKEN_ID], path)
    return LlamaCpp(path, 1024, "F32", drafts)


@pytest.mark.parametrize("name", SERVED)
def test_llama_cpp_decodes_the_same_model(name, tmp_path):
    """A wrong layout of heads or wrong angles would still decode, fast, some nonsense."""
    model = tiny_model(SERVED[name], seed=0)
    prompt = random_prompt(300)
    ours = Transformers(model, [EOS_TOKEN_ID]).decode(prompt, 24).token_ids
    theirs = llama_cpp(model, tmp_path).decode(prompt, 24).token_ids
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            logits = model(torch.tensor([prompt + ours[:index]])).logits[0, -1]
            assert logits[a] - logits[b] < NEAR_TIE, f"token {index}"
            return
    assert theirs == ours


def test_the_first_token_is_in_no_decoding_time(tmp_path):
    """llama.cpp counts it among `predicted_n`, its time to the prompt. A second run reads the prompt again."""
    peer = llama_cpp(tiny_model(FAMILIES["llama"], seed=0), tmp_path)
    prompt = random_prompt(300)
    one = peer.decode(prompt, 1)
    many = peer.decode(prompt, 33)
    assert one.decode_s <= 1e-5 < one.total_s
    assert len(many.token_ids) == 33
    assert many.num_steps == 32
    assert many.num_first_tokens == 1
    assert 0 < many.decode_s < many.total_s

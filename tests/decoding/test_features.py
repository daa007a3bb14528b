"""Features of the target for a draft: outputs of its layers at the tokens before those that are drafted."""

import pytest
import torch

from tests.prophet import Prophet
from tests.tiny_models import (
    engine_with,
    load_reference,
    random_prompt,
    request,
    tiny_config,
    tiny_engine,
    write_family,
)


@pytest.mark.parametrize("family, layers", [("llama", ()), ("llama", (0, 1)), ("qwen3_moe", (0,))])
def test_the_engine_hands_over_the_features_before_each_token(family, layers, pairs, tmp_path):
    """Of prompts of several chunks and of accepted paths; wrong ones would cost acceptance and show nowhere else."""
    pair = pairs(family) if family == "llama" else write_family(tmp_path, family, head_dim=16)
    prompt = random_prompt(600)
    asked = request("a", prompt, 32)
    [plain] = tiny_engine(pair, "ngram", decoding__mode="autoregressive").generate([asked])
    prophet = Prophet({600: plain.token_ids}, layers)
    [found] = engine_with(tiny_config(pair, "ngram"), lambda _: prophet).generate([asked])
    assert found.token_ids == plain.token_ids
    assert found.stats.num_accepted_tokens > 10
    with torch.inference_mode():
        text = torch.tensor([prompt + found.token_ids])
        states = load_reference(pair)(text, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[layer + 1] for layer in layers] or [states[-1]], -1)[0]
    given = torch.cat(prophet.features)
    of_prompt, of_output = given[:600], given[600:]
    torch.testing.assert_close(of_prompt, expected[:600], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(of_output, expected[599 : 599 + len(of_output)], atol=2e-4, rtol=1e-4)

"""Which sides a configuration has, and what each of them runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specextend import RunConfig
from specextend.bench.sides import LOOKUP, SIDES, TransformersSide, default_sides, describe_sides, in_mode, with_draft
from specextend.drafters.draft_options import DraftOptions
from tests.tiny_models import FAMILIES, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return RunConfig.load("configs/tiny-random.yaml")


def with_ngrams(config: RunConfig, ngram: bool) -> RunConfig:
    return config.model_copy(update={"draft": replace(config.draft, ngram=ngram)})


def test_a_side_that_is_specextend_under_another_name_is_not_measured_twice(config):
    """The configured draft is measured as `specextend`; minutes of the same again would tell nothing."""
    assert set(SIDES) - set(default_sides(with_ngrams(config, False))) == {"draft"}
    assert set(SIDES) - set(default_sides(with_ngrams(config, True))) == {"merged"}


def test_a_configuration_without_a_model_to_draft_with_has_fewer_sides(config):
    """N-grams need no model, and plain decoding no draft."""
    ngram = config.model_copy(update={"draft": DraftOptions(kind="ngram")})
    assert set(SIDES) - set(default_sides(ngram)) == {"draft", "ngram", "merged"}
    none = config.model_copy(update={"draft": None})
    assert default_sides(none) == ("autoregressive", "ngram", "transformers", "transformers-lookup", "llama.cpp")


def test_drafts_differ_in_nothing_but_the_draft(config):
    """Or a ratio of two sides would compare two things at once."""
    merged, alone = with_draft(config, "merged"), with_draft(with_ngrams(config, True), "draft")
    assert merged.draft == replace(config.draft, ngram=True)
    assert alone.draft == replace(config.draft, ngram=False)
    assert merged.model_copy(update={"draft": None}) == alone.model_copy(update={"draft": None})
    assert with_draft(config, "ngram").draft == DraftOptions(kind="ngram")


def test_a_side_that_cannot_be_says_what_to_set(config):
    """Before anything is loaded."""
    without = config.model_copy(update={"draft": None})
    with pytest.raises(ValueError, match=r"draft\.kind"):
        in_mode(without, "tree")
    with pytest.raises(ValueError, match=r"merged needs; set draft\.model"):
        with_draft(without, "merged")
    assert in_mode(without, "autoregressive").decoding.max_batch_size == 1


def test_what_each_side_runs_stands_in_the_figures(config):
    """A reader must not have to guess the settings of what we compare with."""
    described = describe_sides(config, ["autoregressive", "tree", "merged", "transformers", "transformers-lookup"])
    assert described == {
        "autoregressive": {"mode": "autoregressive", "draft": None},
        "tree": {"mode": "tree", "draft": "draft"},
        "merged": {"mode": "specextend", "draft": "merged"},
        "transformers": {"generate": {}},
        "transformers-lookup": {"generate": {**LOOKUP}},
    }


@pytest.fixture
def bigram_model() -> Any:
    """Attention adds nothing, so that the next token depends on the last one alone and texts run in circles."""
    model = tiny_model(FAMILIES["llama"], seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


def test_prompt_lookup_takes_fewer_steps_for_the_same_tokens(bigram_model):
    """It must really run: on a text that repeats itself its guesses come true, and its tokens are counted by step."""
    prompt = [5, 6, 7, 8]
    plain = TransformersSide(bigram_model, ()).run(prompt, 60)
    lookup = TransformersSide(bigram_model, (), LOOKUP).run(prompt, 60)
    assert lookup.token_ids == plain.token_ids
    assert (plain.num_steps, plain.tokens_per_step) == (59, 1.0)
    assert lookup.num_steps < 59
    assert 0 < lookup.decode_s < lookup.total_s


def test_tokens_of_the_pass_over_the_prompt_are_told_apart(bigram_model):
    """Where the prompt ends in a repetition, prompt lookup has several tokens before decoding begins."""
    text = [5, *TransformersSide(bigram_model, ()).run([5], 60).token_ids]
    lookup = TransformersSide(bigram_model, (), LOOKUP).run(text, 30)
    assert lookup.num_first_tokens == 1 + LOOKUP["prompt_lookup_num_tokens"]
    assert lookup.num_decoded_tokens == 30 - lookup.num_first_tokens
    assert TransformersSide(bigram_model, ()).run(text, 30).num_first_tokens == 1

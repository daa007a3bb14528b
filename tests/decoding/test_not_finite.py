"""Weights with NaN or infinity: a document becomes an error, never a text; a draft with them costs time alone."""

import json
import shutil
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specextend.core import Choice
from tests.covering import covering
from tests.models.conftest import edit_tensors
from tests.reference_outputs import tokens_of
from tests.tiny_models import FAMILIES, random_prompt, request, spelling_tokenizer, tiny_engine, write_pair

NEW = 24
POISON = 90
"""A token that only one of the prompts holds."""
TEXT = [token_id for token_id in random_prompt(310) if token_id != POISON][:300]
LENGTHS = (300, 40, 90)
DRAFTS = ("good", "eagle3", "merged-good", "ngram")
SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


def decode(engine, *requests):
    """Return the completions' tokens by request, and the requests that ended for logits that are not finite."""
    broken = set()

    def note(name, error):
        assert type(error).__name__ == "NonFiniteLogits", error
        broken.add(name)

    return tokens_of(engine.generate(requests, note)), broken


@pytest.mark.parametrize("draft, nodes, sampling", covering(DRAFTS, (8, "auto"), [*SAMPLINGS]))
def test_a_document_that_meets_nan_is_an_error_and_its_neighbours_do_not_know(pair, draft, nodes, sampling):
    """They said `!!!!` or nothing, with exit 0. One bad row of the embedding meets some documents only: others go on.

    The error comes where plain decoding meets it: behind the poisoned token of an output, not where a draft proposes
    it, and an output that ends there is whole. A neighbour takes no rows of the prompt that failed over.
    """
    engine = tiny_engine(pair, draft, tree__nodes=nodes, decoding__max_batch_size=3)
    requests = [request(str(length), TEXT[:length], NEW, **SAMPLINGS[sampling]) for length in LENGTHS]
    healthy, broken = decode(engine, *requests)
    assert not broken
    engine.target.model.get_input_embeddings().weight[POISON] = nan
    found, broken = decode(engine, replace(requests[0], request_id="poisoned", prompt_token_ids=[*TEXT[:280], POISON]))
    assert found == {}
    assert broken == {"poisoned"}
    whole = {name: token_ids for name, token_ids in healthy.items() if POISON not in token_ids[:-1]}
    assert decode(engine, *requests) == (whole, set(healthy) - set(whole))
    assert whole


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
LEVEL = Choice("level", ("low", "high"), ('{"level": "low"}', '{"level": "high"}'))
KINDS = {
    "greedy": {},
    "schema": {"schema": SCHEMA},
    "choices": {"choices": (LEVEL,)},
    "leads": {"drafts": False, "keeps_leads": True},
}


@pytest.mark.parametrize("name, value", [("norm", nan), ("norm", inf), ("lm_head", nan), ("lm_head", -inf)])
def test_a_broken_target_answers_nothing(tmp_path, name, value):
    """Also where a grammar leaves the broken token out, or where the values of a choice are scored."""
    pair = write_pair(tmp_path, FAMILIES["llama"], vocab_size=320, tokenizer=spelling_tokenizer)
    key = f"{'' if name == 'lm_head' else 'model.'}{name}.weight"
    weight = load_file(Path(pair.target, "model.safetensors"))[key]
    weight.view(-1)[:48] = value  # of token 0, or all
    edit_tensors(pair.target, {key: weight})
    engine = tiny_engine(pair, "good", decoding__max_batch_size=4)
    requests = [replace(request(kind, TEXT[:40], NEW), **given) for kind, given in KINDS.items()]
    assert decode(engine, *requests) == ({}, set(KINDS))
    with pytest.raises(ValueError, match="the target's logits are NaN or infinite behind 0 output tokens"):
        list(engine.generate(requests[:1]))


@pytest.mark.parametrize("draft, nodes", covering(["good", "eagle", "merged-good"], [8, "auto"], strength=1))
def test_a_broken_draft_changes_no_text(pair, tmp_path, draft, nodes):
    """NaN sorts before every number: a tree without its root gave other tokens, and one in a mean never leaves it."""
    folder = Path(pair.drafts[draft.removeprefix("merged-")])
    broken = shutil.copytree(folder, tmp_path / "draft")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    edit_tensors(broken, {name: torch.full_like(weights[name], nan)})
    changes = {"tree__nodes": nodes, "decoding__max_batch_size": 3, "cache__refresh_every": 1}
    engine = tiny_engine(replace(pair, drafts={draft.removeprefix("merged-"): str(broken)}), draft, **changes)
    plain = tiny_engine(pair, decoding__mode="autoregressive")
    for options in SAMPLINGS.values():
        requests = [request(str(length), TEXT[:length], 2 * NEW, **options) for length in LENGTHS]
        assert decode(engine, *requests) == decode(plain, *requests)

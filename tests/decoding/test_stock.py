"""Models on transformers' own layers: windows, layers of several shapes, features, experts, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from specextend.attention.plain import attend_reference
from specextend.attention.plan import AttentionPlan, KeySpan, attend_plan
from specextend.core import Choice
from specextend.decoding.layers import compiled_kernel
from specextend.decoding.model import CachedModel, count_work, layers_of
from specextend.decoding.tree import tree_mask
from specextend.models.causal_lm import read_facts
from specextend.models.loading import memory_bytes
from specextend.proof.family import differences, small_model
from tests.tiny_models import engine_with, random_prompt, request, tiny_config, tiny_engine, write_family

PARENTS = torch.tensor([[-1, 0, 0, 0, 1, 2, 4]])


def small(family, **values):
    """A small random model of a family, with heads of 16 unless `values` say otherwise."""
    config = AutoConfig.for_model(family, **({"head_dim": 16} | values))
    return small_model(config.get_text_config().to_dict())


def seen_by_distance(positions, rows, mask, window):
    """[T, S] the rows of earlier positions, but for those that are `window` or more away."""
    visible = torch.cat([torch.ones(len(mask), len(rows) - mask.shape[1], dtype=torch.bool), mask], 1)
    return visible & (positions[:, None] - rows < window)


@given(
    window=st.integers(1, 40),
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=3),
    kind=st.sampled_from(["prompt", "masked prompt", "dense", "hybrid", "plain"]),
)
def test_a_window_holds_the_positions_that_are_near(window, lengths, kind):
    """In prompts, trees and plain steps of a batch; rows outside hold NaN, so that whoever reads one shows it."""
    torch.manual_seed(0)
    if kind in ("dense", "hybrid"):
        [mask] = tree_mask(PARENTS, 3)
    else:
        num_new = 1 if kind == "plain" else 7
        mask = torch.ones(num_new, num_new).tril().bool()
    num_new = len(mask)
    depths = mask.sum(-1) - 1
    starts = [100 * b for b in range(len(lengths))]
    given_mask = mask.expand(len(lengths), -1, -1) if kind in ("dense", "hybrid") else None
    tree = "hybrid" if kind == "hybrid" else "dense"
    plan = AttentionPlan(starts, lengths, num_new, mask=given_mask, tree=tree)
    q = torch.randn(len(lengths), num_new, 4, 16)
    keys, values = torch.randn(2, 2, 300, 16)
    expected = []
    for b, length in enumerate(lengths):
        rows = torch.cat([torch.arange(length - num_new), length - num_new + depths])
        seen = seen_by_distance(rows[-num_new:], rows, mask, window)
        span = KeySpan([starts[b]], [length], seen[None])
        expected.append(attend_reference(q[b : b + 1], keys, values, span, 0.25)[0])
        far = starts[b] + max(0, length - num_new - window + 1)
        values[:, starts[b] : far] = torch.nan
    if kind == "masked prompt":  # as on a GPU
        plan.spans = plan.spans_within(window)
    found = attend_plan(attend_reference, q, keys, values, plan, 0.25, None if kind == "masked prompt" else window)
    torch.testing.assert_close(found, torch.cat(expected))


LONG = random_prompt(3000)
"""It fills the rows of the prompt that is being read."""
CHOICES = (Choice("one", ("t5 t6", "t5 t9 t11", "t7"), ("t5 t6", "t5 t9 t11", "t7")),)


def texts_about(document):
    """Requests on one document and a short text: with log probabilities, sampled, and of choices."""
    last = random_prompt(30)
    yield replace(request("greedy", document, 24), keeps_log_probs=True)
    yield replace(request("same", [*document[:-20], *last], 24), keeps_log_probs=True)
    yield replace(request("choices", [*document[:-3], *last], 24), choices=CHOICES)
    yield replace(request("short", last, 24, temperature=0.7), keeps_log_probs=True)
    yield replace(request("again", last * 20, 24), keeps_log_probs=True)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_layers_with_a_window_keep_the_last_rows_of_a_text(family, tmp_path):
    """And give every bit that they give with all rows; a prompt about the same document is not read again."""
    pair = write_family(tmp_path, family, head_dim=16)
    sizes = {"decoding__max_batch_size": 3, "decoding__max_new_tokens": 24}
    outputs, rows = [], []
    for whole in ({"input__options_column": "own"}, {}):  # rows that may ask for any length
        engine = tiny_engine(pair, "merged-good", **sizes, **whole)
        done = {each.request_id: each for each in engine.generate(texts_about(LONG))}
        assert [done[name].stats.num_cached_tokens for name in ("same", "choices")] == [2980, 2980]
        outputs.append({name: (each.token_ids, each.log_probs, each.scored) for name, each in done.items()})
        rows.append({part.shape[3] for part in engine.target.cache.parts})
    assert outputs[0] == outputs[1]
    assert min(rows[1]) < 4500
    assert max(rows[1]) > max(rows[0]), "the same memory holds more documents"


def test_memory_of_windows_is_forecast_and_longer_outputs_are_refused(tmp_path):
    """What is planned is what the cache takes; no request may ask for more than its rows hold."""
    pair = write_family(tmp_path, "gemma3_text", head_dim=16)
    config = tiny_config(pair, "ngram", decoding__max_batch_size=3, decoding__max_new_tokens=24)
    engine = engine_with(config)
    held = sum(part.nbytes for part in engine.target.cache.parts)
    assert memory_bytes(config, read_facts(pair.target))["target_cache"] == held
    with pytest.raises(ValueError, match="max_new_tokens is 25, and layers with a window have room for 24; raise"):
        list(engine.generate([request("long", LONG, 25)]))


def test_a_step_reads_the_experts_that_a_token_passes():
    """All of them are in memory; two of four are read."""
    model = small("qwen3_moe")
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    embedding = model.get_input_embeddings().weight.numel()
    work = count_work(model, layers_of(model), torch.float32)
    assert work.weight_bytes == 4 * (model.num_parameters() - embedding - experts // 2)


@pytest.mark.parametrize(
    "family, why",
    [
        ("gemma3_text", ""),
        ("gpt_oss", ""),
        ("doge", "its attention has attention_mask, which is not served"),
        ("gptj", "its layers do not call transformers' attention interface"),
    ],
)
def test_what_our_attention_does_not_compute_is_found(family, why):
    """A mask of the family's own is; windows and sinks are those of the stock model, in any tree."""
    config = AutoConfig.for_model(family, head_dim=16).get_text_config()
    found = differences(json.dumps(config.to_dict()))
    wrong = found if isinstance(found, str) else found.wrong
    assert why in wrong if why else not wrong


def test_linear_layers_in_bf16_are_those_of_our_compiled_products():
    """A model's own forward calls them like any other, the head included."""
    model = small("gemma3_text").bfloat16()
    ids = torch.randint(3, 250, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        stock = model.float()(input_ids=ids, use_cache=False).logits
        cached = CachedModel(model.bfloat16(), attend_reference, 256)
        found = cached.logits(cached.forward(ids, torch.arange(30)[None], AttentionPlan([0], [30], 30)))
    assert cached.linears == ("compiled" if compiled_kernel() else "torch")
    assert (found - stock).abs().mean() < 0.05 * stock.std()

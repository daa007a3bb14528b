"""Configurations for pairs that fit one card or a laptop, held to the published sizes of their models.

The figures are those of each model's `config.json` on the Hugging Face Hub, as of November 2026. No weight is needed:
memory follows from the shapes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from specextend.attention.plan import AttentionPlan, KeySpan
from specextend.attention.torch_kernels import attend_cuda
from specextend.config import RunConfig
from specextend.decoding.device import traits_of
from specextend.decoding.model import CachedModel
from specextend.models.causal_lm import DTYPES, read_facts
from specextend.models.loading import (
    GIB,
    longest_request,
    memory_bytes,
    rows_per_sequence,
    target_rows,
    with_batch_size,
)
from tests.alive import Live

CONFIGS = Path(__file__).parent.parent / "configs"
GUIDE = (Path(__file__).parent.parent / "docs" / "choosing-a-pair.md").read_text(encoding="utf-8")
PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_models.yaml").read_text())["models"]


def published(folder, model):
    """The name of a folder that holds nothing but the published config of a model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model]))
    return str(folder)


def assert_says_what_a_token_takes(file, config, facts):
    """The comments of a configuration hold the size of a token's keys and values, and the context."""
    text = file.read_text(encoding="utf-8")
    assert f"{facts.kv_bytes_per_token(config.target.dtype) // 1024} KiB per token" in text
    assert f"context {facts.context_length:,}" in text


@pytest.mark.parametrize(
    "name, room_gib, mean_tokens",
    [
        ("qwen2.5-1.5b-cpu", 12, None),
        ("qwen2.5-7b-24gb", 22, 8_000),
        ("llama3.2-3b-24gb", 22, 8_000),
        ("gemma3-27b-a100", 79, 8_000),
        ("qwen3.5-27b-mtp-a100", 79, 8_000),
    ],
)
def test_a_pair_fits_the_machine_it_is_named_for(name, room_gib, mean_tokens, tmp_path):
    """Weights, both caches and a full batch of the longest prompts; the comments in the file say the same figures.

    An A10 and an L4 have 22.5 GiB, of which a forward pass and its libraries take some. The mean is that of the
    documents which the comment on the cache names.
    """
    file = CONFIGS / f"{name}.yaml"
    hub = RunConfig.load(file)
    target = published(tmp_path / "target", hub.target.model)
    models = [f"target.model={target}"]
    if hub.draft.model:
        models.append(f"draft.model={published(tmp_path / 'draft', hub.draft.model)}")
    config = RunConfig.load(file, models)
    facts = read_facts(config.target.model)
    assert_says_what_a_token_takes(file, config, facts)
    longest = longest_request(config, facts)
    mean = mean_tokens or longest
    config = with_batch_size(config, facts, room_gib * GIB, (mean, longest))
    sizes = {name: size / GIB for name, size in memory_bytes(config, facts).items()}
    assert sum(sizes.values()) < room_gib
    if another := re.search(r"another ([\d.]+) GiB", file.read_text(encoding="utf-8")):
        assert sizes["draft_caches"] == pytest.approx(float(another.group(1)), abs=0.06)
    held = [f"{sizes[name]:.1f}" for name in ("target_weights", "target_cache", "draft_weights", "draft_caches")]
    assert f" | {' | '.join(held)} | {sum(sizes.values()):.1f} | " in GUIDE, "docs/choosing-a-pair.md has other figures"
    assert config.decoding.batch_size * mean <= target_rows(config, facts)
    assert rows_per_sequence(config, longest) <= target_rows(config, facts)


@pytest.mark.parametrize("name", ["deepseek-r1-8b-eagle3-a100", "vicuna-7b-eagle-a100", "qwen3-30b-a3b-eagle3-a100"])
def test_a_pair_of_the_paper_has_the_published_context_and_fits_its_card(name, tmp_path):
    """Without its weights or the Hub; a head has one layer as wide as the target's."""
    file = CONFIGS / f"{name}.yaml"
    target = published(tmp_path, RunConfig.load(file).target.model)
    config = RunConfig.load(file, [f"target.model={target}", "decoding.mode=autoregressive", "draft=null"])
    facts = read_facts(target)
    assert_says_what_a_token_takes(file, config, facts)
    config = with_batch_size(config, facts, 79 * GIB)
    assert config.decoding.batch_size > 1
    assert sum(memory_bytes(config, facts).values()) < 70 * GIB, "the rest is for the head"


GPU_CONFIGS = [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if RunConfig.load(path).job.device == "cuda"]


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_the_kernel_of_steps_takes_every_call_of_a_shipped_configuration(name):
    """What it does not take runs eagerly: five of six drafts did, because their last levels see up to 450 rows. A kind
    that is named would exclude the faster one.
    """
    config = RunConfig.load(CONFIGS / f"{name}.yaml")
    assert config.attention.backend == config.attention.tree == "auto"
    kernel = pytest.importorskip("specextend.attention.triton_kernels", exc_type=ImportError)
    tree = config.tree
    num_drafts = tree.most_drafts
    drafts = [(each.most_drafts, each.depth) for each in tree.captured]
    assert len(drafts) == 3
    assert drafts[0] == (num_drafts, tree.depth)
    calls = [(nodes, level * nodes) for nodes, depth in drafts for level in range(1, depth)]
    calls += [(1, None), (1 + num_drafts, 1 + num_drafts), (1 + config.num_tree_levels, None)]
    for num_queries, num_masked in calls:
        q = torch.empty(2, num_queries, 8, 64, device="meta", dtype=torch.bfloat16)
        mask = None if num_masked is None else q.new_empty(2, num_queries, num_masked, dtype=torch.bool)
        span = KeySpan([0, 2560], [1000, 2000], mask, causal=mask is None and num_queries > 1)
        assert kernel.serves(q, span), f"{num_queries} queries that see {num_masked} rows under a mask"


@pytest.mark.parametrize("name", [name for name in GPU_CONFIGS if not name.startswith("longchat")])
@torch.inference_mode()
def test_forwards_of_a_shipped_configuration_take_no_more_than_planned(name, tmp_path):
    """A chunk behind the longest prompt, and a step of the largest batch, in full shapes on a device without memory.

    Layers take turns in the same memory, so two stand for all. LongChat has Vicuna's shapes.
    """
    file = CONFIGS / f"{name}.yaml"
    target = published(tmp_path / "target", RunConfig.load(file).target.model)
    config = RunConfig.load(file, [f"target.model={target}", "decoding.mode=autoregressive"])
    facts = read_facts(target)
    longest = longest_request(config, facts)
    room = 22 if name.endswith("24gb") else 79
    config = with_batch_size(config, facts, room * GIB, (min(8_000, longest), longest))
    shapes = AutoConfig.from_pretrained(target)
    text = shapes.get_text_config()
    text.update({"num_hidden_layers": 2})
    if kinds := getattr(text, "layer_types", None):
        text.update({"layer_types": [kinds[0], kinds[-1]]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes, dtype=DTYPES[config.target.dtype])
    cached = CachedModel(model.requires_grad_(False), attend_cuda, target_rows(config, facts))
    chunk = traits_of(torch.device("cuda")).prefill_chunk
    batch = config.decoding.batch_size
    num_new = 1 + config.tree.most_drafts
    mask = torch.ones(batch, num_new, num_new, dtype=torch.bool, device="meta")
    lengths = [longest] + [(target_rows(config, facts) - longest) // max(1, batch - 1)] * (batch - 1)
    held = 0
    for plan in (AttentionPlan([0], [longest], chunk), AttentionPlan([*range(batch)], lengths, num_new, mask)):
        nodes = torch.zeros(len(plan.starts), plan.num_new, dtype=torch.int64, device="meta")
        for start, length in zip(plan.starts, plan.lengths, strict=True):
            cached.assume_read([start], length - plan.num_new)
        with Live() as live:
            hidden = cached.forward(nodes, nodes, plan)
            if plan.mask is not None:
                logits = cached.logits(hidden)
                probabilities = logits.float()
        held += live.most
    assert logits.shape == probabilities.shape == (batch, num_new, facts.vocab_size)
    planned = memory_bytes(config, facts)["activations"]
    assert planned / 4 < held < planned

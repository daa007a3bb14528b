"""Write `docs/families.md`: the result of a start's check for each family of transformers.

python -m scripts.families_page > docs/families.md
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specextend.core import first_line
from specextend.decoding.layers import FUSED
from specextend.proof.family import Differences, differences

HEAD = """\
# Families: which models run

A model is served by what it computes, not by its name. Llama, Mistral, Qwen2 and Qwen3 without
windows run on [layers of our own](architecture.md#one-decoding-step), which are the fastest. Any
other causal LM of transformers runs on its own layers, with our attention and cache, if it passes a
check.

`check`, `plan` and every start make a small model of its `config.json` with random weights. In
float32 this model must give the logits of transformers' own, in a prompt of two chunks, in plain
decoding, in two trees and in a batch of two. If it does not, it is refused in one line that says
what differs.

Sliding windows, softcaps, sinks, experts, and keys and values of several sizes are served. Layers
with a window read and keep only the last tokens of a document, so a long document takes little of
their cache. If rows of the input may set `max_new_tokens` (`input.options_column`), they keep all.

The price: a softcap is computed in plain torch, and layers of such a model are neither captured nor
fused. Values are kept as wide as keys. `target.quantize` takes fused layers only.

On a Xeon with AMX, SmolLM2's weights on transformers' layers decoded 1.8 (1K) and 2.2 times (4K) as
fast as `generate`, and with drafts 1.8 and 2.1 times as fast as without (medians, n = 8;
[log](dev/log.md)). On its fused layers a token takes less than half of that time.

Hybrids, which have layers with a recurrent state beside attention (Qwen3.5, Qwen3-Next, LFM2,
Granite 4 H, OLMo Hybrid, Kimi Linear, Falcon H1, Nemotron H, Bamba), verify chains: of each tree of
drafts its likeliest path. A recurrent layer keeps its inputs until they are decided, and its state
before them.

In bfloat16 the output of a hybrid can part from plain decoding where two tokens nearly tie. A
hybrid cannot be a draft, and it leaves `choices` empty for closed fields beside written ones.

Nemotron H: transformers 5.23 raises the time steps of prompts to `time_step_min`, but leaves the
time steps of decoded tokens ([#48989](https://github.com/huggingface/transformers/pull/48989)).
Here both are as in NVIDIA's code, without limits. A `config.json` whose `time_step_limit` changes
time steps is refused.

Attention in chunks (Llama 4) and RoPE that depends on the length of the text (`dynamic`,
`longrope`) are refused. So are MiniMax-01, which takes only its own cache class, and Jamba, whose
layers (Mamba 1) read several tokens only from an empty state. Layers of DBRX and JetMoE choose
experts by values, and the search for attention has no values.

The tables show what the check found for each family's default configuration. They come from
`python -m scripts.families_page`, and a slow test compares some of them. `deepseek_v2`, `dots1` and
`lfm2_moe` have options as published models have, since their defaults make no model, and
`granite_swa` a smaller scale of its scores. Your model may have other options than its family's
default: `specextend check` says what is true for it.
"""

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "granite_swa": {"attention_multiplier": 0.0078125},
    "lfm2_moe": {
        "num_hidden_layers": 24,
        "layer_types": ["conv", "conv"]
        + ["full_attention", "conv", "conv", "conv"] * 4
        + ["full_attention", "conv", "conv"] * 2,
    },
}
"""Options as published models have, for families whose defaults make no model or huge scores."""

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_RUNS = ("| ours |", "| its own |")


def page() -> str:
    """Return the page as Markdown."""
    warnings.simplefilter("ignore")
    rows = {name: row(name) for name in FAMILIES}
    run = [each for each in rows.values() if each.endswith(_RUNS)]
    lines = [
        HEAD,
        f"## Those that run, with transformers {transformers.__version__}",
        "",
        "| family | layers |",
        "|---|---|",
        *run,
        "",
        "## Those that do not",
        "",
        "| family | why |",
        "|---|---|",
        *(each for each in rows.values() if each not in run),
    ]
    return "\n".join(lines) + "\n"


def row(family: str) -> str:
    """Check a family and return its table row."""
    layers = "ours" if family in FUSED else "its own"
    return f"| `{family}` | {_verdict(family) or layers} |"


def _verdict(family: str) -> str:
    try:
        config = AutoConfig.for_model(family, **PUBLISHED.get(family, {}))
        values = config.get_text_config().to_dict()
        found = differences(json.dumps(values, default=str))
    except Exception as error:  # noqa: BLE001  a config may raise anything
        found = first_line(error)
    if not isinstance(found, Differences):
        return f"does not run: {first_line(ValueError(found))}".replace("|", "\\|")[:160]
    if not found.decodes:
        return "differs from the stock model in plain decoding"
    return "trees differ from the stock model" if found.wrong else ""


if __name__ == "__main__":
    sys.stdout.write(page())

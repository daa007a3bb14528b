"""The check of models on transformers' layers: a small random model must give the stock model's
logits.

Plain decoding and trees are compared, so there is no list of families. Begin with `check_family`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.attention.torch_kernels import attend_by_head
from specextend.core import Values, first_line
from specextend.decoding.model import CachedModel
from specextend.decoding.stock import honor_time_steps
from specextend.models.causal_lm import config_values
from specextend.models.model_files import ModelError

WINDOW = 12
"""Tokens of a window or chunk of attention, shorter than the texts."""
_VOCABULARY = 256
_HEADS = 4
_MOST = (
    (r"vocab_size(_per_layer_input)?", _VOCABULARY),
    (r"num_.*key_value_heads|n_head_kv", 2),
    (r".*intermediate_size|ffn_dim|n_inner|(expert_)?ffn_hidden_size", 128),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|top_k_experts|moe_k|moe_topk", 2),
    (r"(n|num_expert|topk)_group|first_k_dense_replace", 1),
    (r"sliding_window|attention_chunk_size", WINDOW),
    (r"(mamba_)?chunk_size|mamba_d_state|ssm_state_size", 16),
    (r"linear_num_(key_|value_)?heads", 2),
    (r"mamba_num_heads|n_groups", 8),
    (r"(bos|eos)_token_id", 2),
    (r"pad_token_id", 0),
)
"""Limits of config values in a small model."""
_ROPES_BY_LENGTH = ("dynamic", "longrope")
_PROMPTS = (40, 29)
_READ_FIRST = 17
_PARENTS = (-1, -1, 0, 0, 1, 2, 4)
"""Parent of each tree node; -1: the last token of the text."""
_COMMITTED = (5, 6)
"""Last node committed by each sequence."""
_CHAIN = (-1, 0, 1, 2, 3, 4, 5)
_COMMITTED_OF_CHAIN = (2, 6)
_TOLERANCE = 1e-3
"""Allowed difference of a logit, relative to their spread."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The largest differences of logits from the stock model's."""

    plain: float
    trees: float
    allowed: float

    @property
    def wrong(self) -> str:
        """An error message, or an empty text."""
        for name, found in (("logits", self.plain), ("trees", self.trees)):
            if not (isfinite(found) and found <= self.allowed):
                return f"{name} differ from the stock model by {found:.2g} in a logit"
        return ""

    @property
    def decodes(self) -> bool:
        """Return True if plain decoding is right."""
        return self.plain <= self.allowed


def check_family(model: str, *, with_trees: bool) -> None:
    """Check a model by a small model of its config, perhaps with trees of drafts.

    Raises:
        ModelError: A logit differs.
    """
    found = differences(json.dumps(config_values(model)))
    if isinstance(found, str):
        raise ModelError(f"{model} does not run with our attention and cache: {found}")
    if not found.decodes or (found.wrong and with_trees):
        way_out = "; decoding.mode: autoregressive works" if found.decodes else ""
        raise ModelError(
            f"{model}: {found.wrong}, by a small model of its config with random weights{way_out}"
        )


@cache
def differences(config: str) -> Differences | str:
    """Compare a small model of a config with the stock model, once per process.

    Args:
        config: Values of a `config.json`, or of its `text_config`.

    Returns:
        The differences, or the reason why it cannot run.
    """
    try:
        stock = small_model(json.loads(config))
        return _compare(stock)
    except Exception as error:  # noqa: BLE001  a family may raise anything
        return first_line(error) or type(error).__name__


def small_model(values: Values) -> Any:
    """Make a small causal LM of a config, with random weights for sharp attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    kind, small = config.model_type, shrunk(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **small), attn_implementation="eager", dtype=torch.float32
    )
    honor_time_steps(model)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            weight.data = noise * 1.5 * weight.shape[-1] ** -0.5
        else:
            weight.data += noise * 0.1
    return model.eval().requires_grad_(False)


def shrunk(config: Any) -> Values:
    """Shrink the values of a config, and keep two layers of each kind.

    Head sizes stay, because other values must fit them.
    """
    values: Values = config.to_dict()
    for name in ("model_type", "architectures", "quantization_config", "dtype"):
        values.pop(name, None)
    names = {name: config.attribute_map.get(name, name) for name in _NAMES}
    num_layers = config.num_hidden_layers
    num_heads = values[names["num_attention_heads"]]
    head_dim = values.get("head_dim") or config.hidden_size // num_heads
    by_layer = {
        name: each
        for name, each in values.items()
        if isinstance(each, list) and len(each) == num_layers
    }
    kept = _kept_layers(by_layer, num_layers)
    values |= {name: [each[layer] for layer in kept] for name, each in by_layer.items()}
    if of_some := values.get("per_layer_config"):
        own = {int(layer): each for layer, each in of_some.items()}
        values["per_layer_config"] = {
            number: own[layer] for number, layer in enumerate(kept) if layer in own
        }
    for name, value in values.items():
        values[name] = _at_most(name, value)
    of_keys = config.attribute_map.get("num_key_value_heads", "num_key_value_heads")
    if of_keys in values and getattr(config, "num_key_value_heads", None) in (None, num_heads):
        values[of_keys] = _HEADS
    if "head_dim" in values:
        values["head_dim"] = head_dim
    if names["num_hidden_layers"] in values:
        values[names["num_hidden_layers"]] = len(kept)
    values[names["num_attention_heads"]] = _HEADS
    values[names["hidden_size"]] = _HEADS * head_dim
    if {"mamba_expand", "mamba_n_heads"} <= values.keys():
        width = values["mamba_expand"] * _HEADS * head_dim
        values |= {"mamba_n_heads": 2, "mamba_d_head": width // 2}
        if values.get("mamba_d_ssm"):
            values["mamba_d_ssm"] = width
    if values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = len(kept) // 2
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") in _ROPES_BY_LENGTH:
        values["max_position_embeddings"] = rope["original_max_position_embeddings"] = WINDOW
    return values


_NAMES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def _kept_layers(by_layer: Mapping[str, list[Any]], num_layers: int) -> list[int]:
    """Return the first and last layer of each kind, ascending."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for layer in range(num_layers):
        kind = repr([each[layer] for each in by_layer.values()])
        first.setdefault(kind, layer)
        last[kind] = layer
    return sorted({*first.values(), *last.values()})


def _at_most(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_at_most(name, each) for each in value]
    most = next((most for pattern, most in _MOST if re.fullmatch(pattern, name)), None)
    return value if most is None or type(value) is not int else min(value, most)


@torch.inference_mode()
def _compare(stock: Any) -> Differences:
    run = _Run(stock)
    plain = [*run.prompts()]
    trees = [*run.trees("hybrid"), *run.trees("dense")]
    spread = float(torch.stack([exact.std() for _, exact in plain]).max())
    worst_plain, worst_tree = (
        max(float((found - exact).abs().max()) for found, exact in each) for each in (plain, trees)
    )
    return Differences(worst_plain, worst_tree, _TOLERANCE * max(1.0, spread))


class _Run:
    """Two sequences in our cache, and the stock model."""

    def __init__(self, stock: Any):
        self._stock = stock
        self._cached = CachedModel(deepcopy(stock), attend_by_head, 512)
        self._num_tokens: int = stock.config.vocab_size
        self._generator = torch.Generator().manual_seed(2)
        self._starts = [0, 256]
        self._texts = [self._draw(length) for length in _PROMPTS]

    def prompts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Read the prompts; yield our and the stock model's logits [T, V]."""
        for start, text in zip(self._starts, self._texts, strict=True):
            ends = [0, _READ_FIRST, len(text) - 1, len(text)]
            found = []
            for first, end in pairwise(ends):
                is_last = end == len(text)
                plan = AttentionPlan([start], [end], end - first, decided=not is_last)
                ids, positions = text[None, first:end], torch.arange(first, end)[None]
                found.append(self._cached.logits(self._cached.forward(ids, positions, plan))[0])
            yield torch.cat(found), self._exact(text)

    def trees(self, kind: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Read a tree after each text, commit a path, yield its logits."""
        paths: list[list[int]] = []
        is_chain = self._cached.is_recurrent
        parents = _CHAIN if is_chain else _PARENTS
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        leaves = [path for path in paths if path[-1] not in parents]
        seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
        for node, path in enumerate(paths):
            seen[node, path] = True
        depths = torch.tensor([len(path) - 1 for path in paths])
        nodes = torch.stack([self._draw(len(paths)) for _ in self._texts])
        lengths = torch.tensor([len(text) for text in self._texts])
        plan = AttentionPlan(
            self._starts,
            (lengths + len(paths)).tolist(),
            len(paths),
            mask=seen.expand(len(nodes), -1, -1),
            tree=kind,
        )
        hidden = self._cached.forward(nodes, lengths[:, None] + depths, plan)
        logits = self._cached.logits(hidden)
        for b, text in enumerate(self._texts):
            for path in leaves:
                exact = self._exact(torch.cat([text, nodes[b, path]]))
                yield logits[b, path], exact[len(text) :]
        ends = _COMMITTED_OF_CHAIN if is_chain else _COMMITTED
        committed = [paths[node] for node in ends]
        if not is_chain:  # a chain's nodes are already in place
            self._cached.cache.commit(plan.new_rows(nodes.device), torch.tensor(committed))
        self._texts = [
            torch.cat([text, nodes[b, committed[b]]]) for b, text in enumerate(self._texts)
        ]

    def _draw(self, count: int) -> Tensor:
        return torch.randint(3, self._num_tokens, (count,), generator=self._generator)

    def _exact(self, text: Tensor) -> Tensor:
        logits: Tensor = self._stock(input_ids=text[None], use_cache=False).logits[0]
        return logits

"""Published EAGLE heads: detection and check of their formats without loading weights, and one set of tensor names.

| format | detected by | names of the layer's tensors |
|---|---|---|
| EAGLE-1/2 | `fc` and one decoder layer, whose q, k and v take C | `layers.0.` |
| EAGLE-3 | the same with a `hidden_norm`, whose q, k and v take 2C | `midlayer.` or `layers.0.` |
| speculators | `speculators_model_type` in config.json | `transformer.` (eagle), `layers.0.` (eagle3) |

Sources: the layouts of SafeAILab's checkpoints, of vLLM's and SGLang's readers, and of the `speculators` library. A
head may hold an embedding and an LM head of its own; if it lacks one, the target's is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specextend.core import counted
from specextend.drafters import eagle_config
from specextend.model_files import (
    INDEX,
    TensorInfo,
    convert_pickles,
    indexed_names,
    pickled_files,
    read_json,
    read_safetensors_header,
)

KNOWN = "specextend-eagle (our own), EAGLE-1/2 and EAGLE-3 (SafeAILab), speculators (eagle, eagle3)"
_LAYERS = ("midlayer.", "layers.0.", "transformer.")
_RENAMED = {"fusion_fc.": "fc.", "embedding_layernorm.": "embedding_norm.", "pre_lm_head_layernorm.": "norm."}
_LEFT_OVER = ("rotary_emb.inv_freq", "mask", "verifier_lm_head.weight", "verifier_norm.weight")
_LLAMA: dict[str, Any] = {  # what transformers leaves out of a config that it writes
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "partial_rotary_factor")
_MAPS = ("d2t", "t2d")
"""Tensors that are not weights."""
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedHead:
    """A head of one Llama decoder layer in a published format: its shape, and where its tensors are."""

    folder: Path
    format: str
    fused: bool
    """EAGLE-3: the head reads several of the target's layers, not its last hidden state."""
    vocab_size: int
    """Rows of the target's embedding."""
    target_hidden_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: dict[str, Any]
    """The RoPE keys of a Llama config."""
    draft_vocab_size: int
    """Rows of the head's own LM head."""
    layers: tuple[int, ...] | None
    """Target layers whose outputs the head reads, counted from 0; None: the usual three."""
    norm_before_residual: bool
    """EAGLE-3: the residual is the fused hidden state after its norm, not before it."""
    norm_before_fc: bool
    """EAGLE-3: one norm is applied to the concatenated hidden states of the target before they are fused."""
    layer_norms: bool
    """EAGLE-1 of `speculators`: norms of the embedding, before the layer, and before the LM head."""
    fusion_bias: bool
    """EAGLE-1 of `speculators`: `fc` must have a bias."""
    sources: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Our name of a tensor -> file, and name in it."""

    @property
    def num_layers_read(self) -> int:
        """Return the number of layers of the target whose outputs the head takes."""
        return (3 if self.layers is None else len(self.layers)) if self.fused else 1

    def hidden_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the target layers whose outputs the head takes; none if it takes the last hidden state.

        Raises ValueError for a target without such layers.
        """
        if not self.fused:
            return ()
        usual = (1, num_target_layers // 2 - 1, num_target_layers - 4)  # what enters layers 2, n / 2 and n - 3
        layers = usual if self.layers is None else self.layers
        if sorted({*layers} & {*range(num_target_layers)}) != list(layers):
            raise ValueError(
                f"the head takes the outputs of layers {', '.join(map(str, layers))}, counted from 0; "
                f"the target has {counted(num_target_layers, 'layer')}"
            )
        return layers

    @property
    def num_features(self) -> int:
        """Return the number of features that the head reads at one position of the target."""
        num_layers = 1 if not self.fused else 3 if self.layers is None else len(self.layers)
        return num_layers * self.target_hidden_size

    def required(self) -> dict[str, tuple[int, ...]]:
        """List the required tensors by our names."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        width = 2 * hidden if self.fused else hidden
        shapes = {
            "layer.self_attn.q_proj.weight": (queries, width),
            "layer.self_attn.k_proj.weight": (keys, width),
            "layer.self_attn.v_proj.weight": (keys, width),
            "layer.self_attn.o_proj.weight": (hidden, queries),
            "layer.mlp.gate_proj.weight": (mlp, hidden),
            "layer.mlp.up_proj.weight": (mlp, hidden),
            "layer.mlp.down_proj.weight": (hidden, mlp),
            "layer.post_attention_layernorm.weight": (hidden,),
            "fc.weight": (hidden, self.num_features if self.fused else 2 * hidden),
        }
        return shapes | (self._fused_only() if self.fused else self._plain_only())

    def optional(self) -> dict[str, tuple[int, ...]]:
        """List the optional tensors by our names."""
        biased = [name for name, shape in self.required().items() if name.endswith("_proj.weight")]
        shapes = self.required()
        return {
            "embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "lm_head.weight": (self.vocab_size, self.hidden_size),
            "fc.bias": (self.hidden_size,),
            "layer.self_attn.q_norm.weight": (self.head_dim,),
            "layer.self_attn.k_norm.weight": (self.head_dim,),
            **{f"{name.removesuffix('weight')}bias": shapes[name][:1] for name in biased},
            **({"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)} if self.fused else {}),
        }

    def _fused_only(self) -> dict[str, tuple[int, ...]]:
        norms = ("layer.input_layernorm.weight", "layer.hidden_norm.weight", "norm.weight")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (self.hidden_size,))
        shapes["lm_head.weight"] = (self.draft_vocab_size, self.hidden_size)
        if self.draft_vocab_size != self.vocab_size:
            shapes["d2t"] = (self.draft_vocab_size,)
        if self.hidden_size != self.target_hidden_size:
            shapes["embed_tokens.weight"] = (self.vocab_size, self.hidden_size)
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.num_features,)
        return shapes

    def _plain_only(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"fc.bias": (self.hidden_size,)} if self.fusion_bias else {}
        if self.layer_norms:
            norms = ("embedding_norm.weight", "layer.input_layernorm.weight", "norm.weight")
            shapes |= dict.fromkeys(norms, (self.hidden_size,))
        return shapes


def is_ours(folder: str | Path) -> bool:
    """Return True if a head's folder claims our own format. Raises ValueError without a readable config.json."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"EAGLE draft {folder} has no config.json")
    return "format" in read_json(file)


def read_head(folder: str | Path) -> PublishedHead:
    """Describe a published head by its files, without loading a tensor.

    Raises ValueError in one line for an unknown format, pickled, missing or truncated files, an unsupported config, and
    tensors that the config does not describe.
    """
    folder = Path(folder)
    files = weight_files(folder)
    raw = read_json(folder / "config.json")
    found: dict[str, tuple[Path, str, TensorInfo]] = {}
    for file in files:
        for name, info in read_safetensors_header(file).items():
            if name.endswith(_LEFT_OVER):
                continue
            if (known := _own_name(name)) in found:
                raise ValueError(f"EAGLE draft {folder} has {name} twice, also as {found[known][1]}")
            found[known] = (file, name, info)
    try:
        head = _describe(folder, raw, set(found), {known: (file, name) for known, (file, name, _) in found.items()})
    except ValueError as error:
        raise ValueError(f"EAGLE draft {folder}, config.json: {error}") from None
    _check_tensors(head, {known: info for known, (_, _, info) in found.items()})
    return head


def read_tensors(head: PublishedHead, names: Iterable[str], device: str = "cpu") -> dict[str, Tensor]:
    """Load some of a head's tensors, by our names, as they are in the files."""
    tensors = {}
    for name in names:
        file, spelled = head.sources[name]
        with safe_open(file, framework="pt", device=device) as opened:
            tensors[name] = opened.get_tensor(spelled)
    return tensors


def read_weights(head: PublishedHead, device: str = "cpu") -> dict[str, Tensor]:
    """Load all of a head's weights, by our names, as they are in the files."""
    return read_tensors(head, [name for name in head.sources if name not in _MAPS], device)


def read_vocabulary(head: PublishedHead) -> Tensor | None:
    """Return the target's token id [V] int64 of each row of the head's own LM head; None if the ids are the same.

    `d2t` holds differences: row i is token i + d2t[i]. Raises ValueError if an id is not one of the target's or appears
    twice.
    """
    if "d2t" not in head.sources:
        return None
    differences = read_tensors(head, ["d2t"])["d2t"].long()
    token_ids = torch.arange(len(differences)) + differences
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= head.vocab_size or len(token_ids.unique()) < len(token_ids):
        raise ValueError(
            f"EAGLE draft {head.folder} ({head.format}): d2t must lead to {len(token_ids)} different token ids below "
            f"{head.vocab_size}; it leads to {len(token_ids.unique())}, from {token_ids.min()} to {token_ids.max()}"
        )
    return token_ids


def weight_files(folder: Path) -> list[Path]:
    """List a head's safetensors files: one, or those that its index names. Raises ValueError if one is missing."""
    if names := indexed_names(folder):
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if (folder / eagle_config.WEIGHTS_FILE) in files:
            files = [folder / eagle_config.WEIGHTS_FILE]
    if not files and (pickled := pickled_files(folder)):
        why = convert_pickles(pickled, folder / eagle_config.WEIGHTS_FILE)
        raise ValueError(f"EAGLE draft {folder} has only a pickle ({pickled[0].name}), {why}")
    if len(files) > 1 and not names:
        raise ValueError(f"EAGLE draft {folder} has several weight files and no {INDEX}; add it, or leave one file")
    if missing := [file for file in files or [folder / eagle_config.WEIGHTS_FILE] if not file.is_file()]:
        raise ValueError(f"EAGLE draft {folder} has no {missing[0].name}")
    return files


def _own_name(name: str) -> str:
    """Translate a name to ours: `model.midlayer.mlp.up_proj.weight` becomes `layer.mlp.up_proj.weight`."""
    name = name.removeprefix("model.")
    for prefix, renamed in (dict.fromkeys(_LAYERS, "layer.") | _RENAMED).items():
        if name.startswith(prefix):
            return renamed + name.removeprefix(prefix)
    return name


def _describe(
    folder: Path, raw: dict[str, Any], names: set[str], sources: dict[str, tuple[Path, str]]
) -> PublishedHead:
    name, fused = _detect(raw, names)
    layer = _section(raw, "transformer_layer_config") if name.startswith("speculators") else raw
    if layer.get("model_type", "llama") not in _MODEL_TYPES:
        raise ValueError(f"the layer is of type {layer['model_type']!r}; supported are {', '.join(_MODEL_TYPES)}")
    for key, supported in (("hidden_act", "silu"), ("num_hidden_layers", 1)):
        if layer.get(key, supported) != supported:
            raise ValueError(f"{key} is {layer[key]!r}; only {supported!r} is supported")
    vocab_size, hidden_size = _size(layer, "vocab_size"), _size(layer, "hidden_size")
    num_heads = _size(layer, "num_attention_heads")
    qwen3 = layer.get("model_type") == "qwen3"
    return PublishedHead(
        folder=folder,
        format=name,
        fused=fused,
        vocab_size=vocab_size,
        target_hidden_size=_size(raw, "target_hidden_size", hidden_size) if fused else hidden_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_size(layer, "num_key_value_heads", num_heads),
        head_dim=_size(layer, "head_dim", 128 if qwen3 else max(1, hidden_size // num_heads)),
        intermediate_size=_size(layer, "intermediate_size"),
        norm_eps=_norm_eps(layer),
        rope={key: layer[key] for key in _ROPE if layer.get(key) is not None},
        draft_vocab_size=_size(raw, "draft_vocab_size", vocab_size) if fused else vocab_size,
        layers=_layers(raw) if fused else None,
        norm_before_residual=_flag(raw, "norm_before_residual"),
        norm_before_fc=_flag(raw, "norm_before_fc"),
        layer_norms=_flag(raw, "layernorms"),
        fusion_bias=_flag(raw, "fusion_bias"),
        sources=sources,
    )


def _detect(raw: dict[str, Any], names: set[str]) -> tuple[str, bool]:
    """Detect the format; return its name, and True if it fuses several of the target's layers."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind not in ("eagle", "eagle3"):
            raise ValueError(f"speculators_model_type is {kind!r}; known formats are {KNOWN}")
        return f"speculators {kind}", kind == "eagle3"
    if "layer.hidden_norm.weight" in names:
        return "EAGLE-3", True
    if {"fc.weight", "layer.self_attn.q_proj.weight"} <= names:
        return "EAGLE-1/2", False
    whole = "embed_tokens.weight" in names and any(name.startswith("layers.1.") for name in names)
    hint = "; this looks like a whole model: draft.kind model" if whole else ""
    raise ValueError(f"the folder is in no known format; known are {KNOWN}{hint}")


def _layers(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the target layers whose outputs config.json names.

    The key counts differently in its two places, as the programs that read it do. At the top level (vLLM,
    `speculators`) j stands for the input of layer j, which is the output of layer j - 1. Inside `eagle_config` (SGLang)
    it stands for the output of layer j.
    """
    nested = _section(raw, "eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    ids, shift = (raw[key], 1) if raw.get(key) else (nested.get(key), 0)
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ValueError(f"{key} must be a list of layer numbers, got {ids!r}")
    return tuple(each - shift for each in ids)


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    section = values.get(key) or {}
    if not isinstance(section, dict):
        raise ValueError(f"{key} must be an object, got {section!r}")
    return section


def _size(values: dict[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = _LLAMA[key] if default is None else default
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a positive int, got {value!r}")
    return value


def _norm_eps(values: dict[str, Any]) -> float:
    value = values.get("rms_norm_eps", _LLAMA["rms_norm_eps"])
    if type(value) not in (int, float) or value <= 0:
        raise ValueError(f"rms_norm_eps must be a positive float, got {value!r}")
    return float(value)


def _flag(values: dict[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if value not in (True, False, None):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return bool(value)


def _check_tensors(head: PublishedHead, found: dict[str, TensorInfo]) -> None:
    required = head.required()
    shapes = head.optional() | required
    spelled = {known: name for known, (_, name) in head.sources.items()}
    where = f"EAGLE draft {head.folder} ({head.format})"
    if missing := sorted(set(required) - set(found)):
        raise ValueError(f"{where} lacks {missing[0].replace('layer.', _layer_prefix(spelled), 1)}")
    if unknown := sorted(set(found) - set(shapes)):
        raise ValueError(f"{where} has the unknown tensor {spelled[unknown[0]]}")
    for name, info in sorted(found.items()):
        if info.shape != shapes[name]:
            raise ValueError(f"{where}: {spelled[name]} is {list(info.shape)}, config.json says {list(shapes[name])}")
        supported = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}.get(name, FLOATS)
        if info.dtype not in supported:
            raise ValueError(f"{where}: {spelled[name]} is {info.dtype}; supported are {', '.join(supported)}")


def _layer_prefix(spelled: dict[str, str]) -> str:
    """Return the prefix of this checkpoint's names for the tensors of its layer."""
    known = next((known for known in spelled if known.startswith("layer.")), "layer.")
    return spelled.get(known, known).removesuffix(known.removeprefix("layer."))

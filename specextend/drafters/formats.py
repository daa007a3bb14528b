"""Formats of EAGLE heads: detection, checks, and the same shape and names for all.

| format | detected by | names of the layer's tensors |
|---|---|---|
| ours | `format` in config.json | `layer.` (`EagleConfig.shapes`) |
| EAGLE-1/2 | `fc` and a decoder layer with q, k and v of C | `layers.0.` |
| EAGLE-3 | the same with a `hidden_norm` and q, k and v of 2C | `midlayer.` or `layers.0.` |
| speculators | `speculators_model_type` in config.json | `transformer.`; EAGLE-3: `layers.0.` |

Sources: SafeAILab's checkpoints, the readers of vLLM and SGLang, and the `speculators` library. An
embedding or LM head that a head lacks is the target's.
"""

import math
import shlex
from pathlib import Path
from typing import Literal, Self, TypeVar

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from safetensors import safe_open
from torch import Tensor

from specextend.core import Values
from specextend.drafters.eagle_network import HeadShape
from specextend.models.model_files import (
    VOCABULARY,
    ModelError,
    TensorInfo,
    check_tensors,
    copy_weights,
    find_folder,
    new_folder,
    read_json,
    read_safetensors_header,
    weight_files,
)

WEIGHTS_FILE = "model.safetensors"
KNOWN = "specextend-eagle (our own), EAGLE-1/2 and EAGLE-3 (SafeAILab), speculators (eagle, eagle3)"
_OURS = {"en.": "embedding_norm.", "hn.": "feature_norm."}
_RENAMED = _OURS | {
    "midlayer.": "layer.",
    "layers.0.": "layer.",
    "transformer.": "layer.",
    "fusion_fc.": "fc.",
    "embedding_layernorm.": "embedding_norm.",
    "pre_lm_head_layernorm.": "norm.",
}
_LEFT_OVER = ("rotary_emb.inv_freq", "mask", "verifier_lm_head.weight", "verifier_norm.weight")
_MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8"), VOCABULARY: ("I64",)}
"""Types of integer tensors."""
_ROPE = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "partial_rotary_factor",
)
_FIXED: Values = {
    **dict.fromkeys(("use_aux_hidden_state", "use_last_layernorm"), True),
    "use_input_layernorm_in_first_layer": True,
    **dict.fromkeys(("logit_scale", "logits_scaling", "parallel_draft_step"), 1),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), 1),
}
"""Values of keys that other heads use otherwise."""
_HARMLESS = (
    *("architectures", "auto_map", "_name_or_path", "name_or_path", "dtype", "torch_dtype"),
    *("transformers_version", "speculators_version", "speculators_config", "model_max_length"),
    *("transformer_layer_architecture", "has_no_defaults_at_init", "embed_requires_grad"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("use_cache", "initializer_range", "tie_word_embeddings", "attention_dropout", "rope_type"),
    *("attention_bias", "mlp_bias", "bias", "qkv_bias", "pretraining_tp", "use_qk_norm"),
    *("use_sliding_window", "max_window_layers"),
    *("next_layer_regular", "ttt_steps", "ttt_length", "target_model_type", "mask_token_id"),
    *("chunk_size_feed_forward", "is_decoder", "return_dict", "torchscript", "id2label"),
    *("label2id", "problem_type", "tokenizer_class", "max_length", "num_beams"),
    *("num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p"),
    *("length_penalty", "repetition_penalty", "do_sample", "_attn_implementation"),
)
"""Keys without effect, or explained by others."""

_WINDOWED = "sliding_attention"
Config = TypeVar("Config", bound=BaseModel)


class EagleConfig(BaseModel):
    """The `config.json` of a head in our format; embedding and LM head are the target's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["specextend-eagle"] = "specextend-eagle"
    version: Literal[1] = 1
    kind: Literal["eagle"] = "eagle"
    target: str
    """Name of the target at training, not checked."""
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    rope_theta: PositiveFloat
    layer_norm_eps: PositiveFloat
    head_norm_eps: PositiveFloat
    """Epsilon of the two input norms (`en`, `hn`) and the output norm (`norm`)."""
    dtype: Literal["bfloat16", "float16", "float32"]
    draft_vocab_size: PositiveInt | None = None
    copy_heads: PositiveInt | None = None
    """KV heads that match tokens around a position, each with its query heads."""
    tokens_sha256: str | None = None

    @model_validator(mode="after")
    def _heads_are_groups(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        return self

    def head(self, folder: Path, sources: dict[str, TensorInfo]) -> HeadShape:
        """Return the shape of a head in a folder."""
        same = (
            "vocab_size",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        )
        return HeadShape(
            folder=folder,
            format=self.format,
            fused=False,
            is_ours=True,
            norm_output=True,
            target_hidden_size=self.hidden_size,
            layer_eps=self.layer_norm_eps,
            head_eps=self.head_norm_eps,
            rope={"rope_theta": self.rope_theta},
            draft_vocab_size=self.draft_vocab_size or self.vocab_size,
            copy_heads=self.copy_heads or 0,
            tokens_sha256=self.tokens_sha256,
            sources=sources,
            **{name: getattr(self, name) for name in same},
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its name in the file."""
        names = {ours: name for name, ours in _OURS.items()}
        required = self.head(Path(), {}).required()
        return {_renamed(name, names): shape for name, shape in required.items()}

    def save(self, folder: Path) -> None:
        """Write `config.json`."""
        (folder / "config.json").write_text(
            self.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8"
        )


class _Published(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)


class LayerConfig(_Published):
    """Keys of a published head's layer, with transformers' unwritten defaults."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    hidden_act: Literal["silu"] = "silu"
    num_hidden_layers: Literal[1] = 1
    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    layer_types: list[str] = []
    sliding_window: int | None = None

    @property
    def window(self) -> int | None:
        """Window of the layer; None: it attends to all tokens."""
        return (self.sliding_window or None) if _WINDOWED in self.layer_types else None


class TakenLayers(_Published):
    """The key `eagle_config`, with ids mostly of outputs (`HeadShape.explain_layers`)."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_before_fc: bool = False


class PublishedConfig(_Published):
    """Keys of a published head beside its layer's."""

    speculators_model_type: Literal["eagle", "eagle3"] | None = None
    transformer_layer_config: Values | None = None
    target_hidden_size: PositiveInt | None = None
    draft_vocab_size: PositiveInt | None = None
    norm_before_residual: bool | None = None
    """None: True in files of `speculators`, False in others, as in vLLM."""
    norm_before_fc: bool | None = None
    """None: as in `eagle_config`."""
    fc_norm: bool = False
    norm_output: bool = False
    layernorms: bool = False
    fusion_bias: bool = False
    eagle_config: TakenLayers = TakenLayers()
    eagle_aux_hidden_state_layer_ids: list[int] = []
    """Ids of layers, mostly of inputs (`HeadShape.explain_layers`)."""


def read_head(model: str | Path) -> HeadShape:
    """Describe a head in a folder or on the Hub, without its weights.

    Raises:
        ModelError: Format, files, config or tensors are not served.
    """
    folder = find_folder(str(model), weights=True)
    if not (folder / "config.json").is_file():
        raise ModelError(f"EAGLE draft {model} has no config.json")
    if not any(folder.glob("*.safetensors")):
        command = f"specextend prepare draft {shlex.quote(str(model))} --output FOLDER"
        raise ModelError(
            f"EAGLE draft {model} must have weights as safetensors; convert a pickle with: "
            f"{command}"
        )
    raw = read_json(folder / "config.json")
    found = _find_tensors(folder)
    head = (
        _parse_config(EagleConfig, raw, folder).head(folder, found)
        if "format" in raw
        else _describe(folder, raw, found)
    )
    where = f"EAGLE draft {folder} ({head.format})"
    check_tensors(where, found, head.required(), head.optional(), _MAPS)
    return head


def convert_head(model: str, folder: Path) -> str:
    """Write a published head to a new folder as safetensors; return its format.

    Raises:
        ModelError: The head is refused; there is no folder then.
    """
    with new_folder(folder) as whole:
        copy_weights(model, whole)
        try:
            return read_head(whole).format
        except ModelError as error:
            raise ModelError(str(error).replace(str(whole), model)) from None


def _parse_config(kind: type[Config], raw: Values, folder: Path) -> Config:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        got = "" if found["type"] in ("missing", "value_error") else f", got {found['input']!r}"
        raise ModelError(
            f"EAGLE draft {folder}, config.json: {where}: {found['msg']}{got}"
        ) from None


def read_weights(head: HeadShape, device: str = "cpu") -> dict[str, Tensor]:
    """Load a head's weights by our names, in the files' types."""
    return {name: _read_tensor(head, name, device) for name in head.sources if name not in _MAPS}


def _read_tensor(head: HeadShape, name: str, device: str = "cpu") -> Tensor:
    source = head.sources[name]
    with safe_open(source.file, framework="pt", device=device) as opened:
        tensor: Tensor = opened.get_tensor(source.name)
    return tensor


def read_vocabulary(head: HeadShape) -> Tensor | None:
    """Return the target's token id [V] of each proposed token; None if the ids are equal.

    `draft_token_ids` lists them; by `d2t` row i is token i + d2t[i].

    Raises:
        ModelError: An id is not the target's, or appears twice.
    """
    if VOCABULARY in head.sources:
        listed = _read_tensor(head, VOCABULARY)
        if not torch.equal(listed, _different(listed, head)):
            raise ModelError(
                f"{head.sources[VOCABULARY].file}: {VOCABULARY} must be ascending ids from 0 to "
                f"{head.vocab_size - 1}"
            )
        return listed
    if "d2t" not in head.sources:
        return None
    differences = _read_tensor(head, "d2t").long()
    token_ids = torch.arange(len(differences)) + differences
    if not torch.equal(token_ids.sort().values, _different(token_ids, head)):
        raise ModelError(
            f"EAGLE draft {head.folder} ({head.format}): d2t must lead to {len(token_ids)} "
            f"different token ids below {head.vocab_size}; it leads to {len(token_ids.unique())}, "
            f"from {token_ids.min()} to {token_ids.max()}"
        )
    return token_ids


def _different(token_ids: Tensor, head: HeadShape) -> Tensor:
    return token_ids.clamp(0, head.vocab_size - 1).unique()


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for file in weight_files(folder, f"EAGLE draft {folder}"):
        for name, info in read_safetensors_header(file).items():
            if name.endswith(_LEFT_OVER):
                continue
            known = _renamed(name.removeprefix("model."), _RENAMED)
            if known in found:
                raise ModelError(
                    f"EAGLE draft {folder} has {name} twice, also as {found[known].name}"
                )
            found[known] = info
    return found


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    """Replace the first matching prefix, such as `midlayer.` by `layer.`."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def _describe(folder: Path, raw: Values, sources: dict[str, TensorInfo]) -> HeadShape:
    raw = {key: value for key, value in raw.items() if value is not None}
    config = _parse_config(PublishedConfig, raw, folder)
    name, fused = _detect(config, folder, set(sources))
    layer = _parse_config(LayerConfig, config.transformer_layer_config or raw, folder)
    before_fc = config.norm_before_fc
    rope = (layer.model_extra or {}).items()
    entered = config.eagle_aux_hidden_state_layer_ids
    qwen3_size = 128 if layer.model_type == "qwen3" else None
    head = HeadShape(
        folder=folder,
        format=name,
        fused=fused,
        vocab_size=layer.vocab_size,
        target_hidden_size=(config.target_hidden_size if fused else None) or layer.hidden_size,
        hidden_size=layer.hidden_size,
        num_heads=layer.num_attention_heads,
        num_kv_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=layer.head_dim
        or qwen3_size
        or max(1, layer.hidden_size // layer.num_attention_heads),
        intermediate_size=layer.intermediate_size,
        layer_eps=layer.rms_norm_eps,
        head_eps=layer.rms_norm_eps,
        rope={key: value for key, value in rope if key in _ROPE and value is not None},
        draft_vocab_size=(config.draft_vocab_size if fused else None) or layer.vocab_size,
        layer_ids=tuple(entered or config.eagle_config.eagle_aux_hidden_state_layer_ids or ()),
        reading="inputs" if entered else "outputs",
        window=layer.window,
        norm_before_residual=config.speculators_model_type is not None
        if config.norm_before_residual is None
        else config.norm_before_residual,
        norm_before_fc=config.eagle_config.norm_before_fc if before_fc is None else before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        layer_norms=config.layernorms,
        fusion_bias=config.fusion_bias,
        sources=sources,
    )
    _check_keys(config, layer, head, folder)
    return head


def _check_keys(config: PublishedConfig, layer: LayerConfig, head: HeadShape, folder: Path) -> None:
    """Raise ModelError for a key that may change the arithmetic and is not served.

    None, False, 0 and empty values ask nothing, except in `_FIXED`.
    """
    levels = (config.model_extra, layer.model_extra, config.eagle_config.model_extra)
    extra: Values = {key: value for level in levels for key, value in (level or {}).items()}
    known = {*PublishedConfig.model_fields, *LayerConfig.model_fields, *_ROPE, *_HARMLESS}
    odd = {
        key: value
        for key, value in extra.items()
        if (value != _FIXED[key] if key in _FIXED else value and key not in known)
    }
    types = {*layer.layer_types}
    if len(types) > 1 or types - {"full_attention", _WINDOWED}:
        odd["layer_types"] = layer.layer_types
    # without types, formats differ in whether a window counts
    window = layer.sliding_window or extra.get("sliding_window")
    is_unclear = not types and window and extra.get("use_sliding_window", True)
    if is_unclear and window < extra.get("max_position_embeddings", math.inf):
        odd["sliding_window"] = f"{window} without layer_types"
    if _WINDOWED in types and not layer.window:
        odd["layer_types"] = f"{_WINDOWED} without sliding_window"
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(head, key) and not head.fused:
            odd[key] = True
    if head.fc_norm and head.norm_before_fc:
        odd["fc_norm"] = "True beside norm_before_fc"
    for key, value in odd.items():
        raise ModelError(
            f"EAGLE draft {folder}, config.json: {key} is {value!r}, which may change what the "
            "head computes, and is not served"
        )


def _detect(config: PublishedConfig, folder: Path, names: set[str]) -> tuple[str, bool]:
    if (kind := config.speculators_model_type) is not None:
        return f"speculators {kind}", kind == "eagle3"
    if "layer.hidden_norm.weight" in names:
        return "EAGLE-3", True
    if {"fc.weight", "layer.self_attn.q_proj.weight"} <= names:
        return "EAGLE-1/2", False
    whole = "embed_tokens.weight" in names and any(name.startswith("layers.1.") for name in names)
    hint = "; this looks like a whole model: draft.kind model" if whole else ""
    raise ModelError(f"EAGLE draft {folder} is in no known format; known are {KNOWN}{hint}")

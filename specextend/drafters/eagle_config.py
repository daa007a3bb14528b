"""Our format of an EAGLE head: a folder with `config.json` and `model.safetensors`, checked without loading weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from specextend.model_files import TensorInfo, read_json, read_safetensors_header

FORMAT = "specextend-eagle"
VERSION = 1
WEIGHTS_FILE = "model.safetensors"
VOCABULARY = "draft_token_ids"
"""Tensor of a reduced vocabulary: the token ids that the head can propose."""
_HEADER = {"format": FORMAT, "version": VERSION, "kind": "eagle"}
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """The shape of a head of one Llama decoder layer; embedding and LM head are the target's."""

    target: str
    """Name of the model that the head was distilled for; for people to read, not checked."""
    vocab_size: int
    """Rows of the target's embedding."""
    hidden_size: int
    """Hidden size of the target."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    layer_norm_eps: float
    """Epsilon of the two RMS norms inside the layer."""
    head_norm_eps: float
    """Epsilon of the two input norms (`en`, `hn`) and the output norm (`norm`)."""
    dtype: str
    """Type of the tensors in the file: bfloat16, float16 or float32."""
    draft_vocab_size: int | None = None
    """Token ids that the head can propose, which the tensor `draft_token_ids` lists; None: the whole vocabulary."""
    copy_heads: int | None = None
    """Number of KV heads, besides `num_kv_heads`, that match the tokens around a position. Each has its group of query
    heads."""
    tokens_sha256: str | None = None
    """`models.tokens_sha256` of the target's tokenizer; None: not known, and not checked."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")

    def tensors(self) -> dict[str, TensorInfo]:
        """List every tensor of the file by name."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        copied = (self.copy_heads or 0) * self.head_dim
        group = self.num_heads // self.num_kv_heads
        shapes = {
            **dict.fromkeys(("en.weight", "hn.weight", "norm.weight"), (hidden,)),
            "fc.weight": (hidden, 2 * hidden),
            "layer.input_layernorm.weight": (hidden,),
            "layer.post_attention_layernorm.weight": (hidden,),
            "layer.self_attn.q_proj.weight": (queries, hidden),
            "layer.self_attn.k_proj.weight": (keys, hidden),
            "layer.self_attn.v_proj.weight": (keys, hidden),
            "layer.self_attn.o_proj.weight": (hidden, queries + copied * group),
            "layer.mlp.gate_proj.weight": (mlp, hidden),
            "layer.mlp.up_proj.weight": (mlp, hidden),
            "layer.mlp.down_proj.weight": (hidden, mlp),
        }
        if copied:
            shapes["copy.q_proj.weight"] = (copied * group, 3 * hidden)
            shapes["copy.k_proj.weight"] = (copied, 3 * hidden)
            shapes["copy.v_proj.weight"] = (copied, hidden)
        tensors = {name: TensorInfo(_DTYPES[self.dtype], shape) for name, shape in shapes.items()}
        if self.draft_vocab_size is not None:
            tensors[VOCABULARY] = TensorInfo("I64", (self.draft_vocab_size,))
        return tensors

    def save(self, folder: Path) -> None:
        """Write `config.json`."""
        values = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        text = json.dumps(_HEADER | values, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load_eagle_config(folder: str | Path) -> EagleConfig:
    """Read a head's config and check the file of weights against it, without loading a weight.

    Raises ValueError in one line for a missing file, an unknown or missing key, a file of weights that is cut short or
    holds other tensors than the config describes, and a reduced vocabulary with tokens that the target lacks.
    """
    folder = Path(folder)
    for name in ("config.json", WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"EAGLE draft {folder} has no {name}")
    try:
        config = _parse(read_json(folder / "config.json"))
    except ValueError as error:
        raise ValueError(f"EAGLE draft {folder}, config.json: {error}") from None
    _check_tensors(folder / WEIGHTS_FILE, config)
    if config.draft_vocab_size is not None:
        read_token_ids(folder / WEIGHTS_FILE, config.vocab_size)
    return config


def read_token_ids(file: Path, vocab_size: int) -> Tensor:
    """Read the tensor `draft_token_ids` [R]. Raises ValueError unless it is ascending ids below `vocab_size`."""
    with safe_open(file, framework="pt") as opened:
        token_ids: Tensor = opened.get_tensor(VOCABULARY)
    if (
        not len(token_ids)
        or int(token_ids[0]) < 0
        or int(token_ids[-1]) >= vocab_size
        or bool((token_ids.diff() < 1).any())
    ):
        raise ValueError(f"{file}: {VOCABULARY} must be ascending ids from 0 to {vocab_size - 1}")
    return token_ids


def _parse(raw: dict[str, Any]) -> EagleConfig:
    for key, expected in _HEADER.items():
        if raw.get(key) != expected:
            raise ValueError(f"{key} must be {expected!r}, got {raw.get(key)!r}")
    values = {key: value for key, value in raw.items() if key not in _HEADER}
    fields = dataclasses.fields(EagleConfig)
    known = {field.name for field in fields}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(needed - set(values)):
        raise ValueError(f"missing key {', '.join(missing)}")
    return EagleConfig(**values)


def _check_type(name: str, value: object, expected: str) -> None:
    expected, _, optional = expected.partition(" | ")
    if value is None and optional:
        return
    if expected == "str":
        valid = isinstance(value, str)
    else:
        number = int if expected == "int" else (int, float)
        valid = isinstance(value, number) and not isinstance(value, bool) and value > 0
    if not valid:
        raise ValueError(
            f"{name} must be {'a string' if expected == 'str' else f'a positive {expected}'}, got {value!r}"
        )


def _check_tensors(file: Path, config: EagleConfig) -> None:
    found, expected = read_safetensors_header(file), config.tensors()
    if names := sorted(set(expected) ^ set(found)):
        lack = [name for name in names if name in expected]
        raise ValueError(f"{file} {'lacks' if lack else 'has the unknown tensor'} {(lack or names)[0]}")
    for name, info in expected.items():
        if found[name] != info:
            raise ValueError(
                f"{file}: {name} is {found[name].dtype} {list(found[name].shape)}, "
                f"config.json says {info.dtype} {list(info.shape)}"
            )

"""Our format of an EAGLE head: a folder with `config.json` and `model.safetensors`, checked without loading weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError, model_validator

from specextend.model_files import VOCABULARY, TensorInfo, read_json, read_safetensors_header, read_token_ids

WEIGHTS_FILE = "model.safetensors"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Config = TypeVar("Config", bound=BaseModel)


class EagleConfig(BaseModel):
    """The shape of a head of one Llama decoder layer; embedding and LM head are the target's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["specextend-eagle"] = "specextend-eagle"
    version: Literal[1] = 1
    kind: Literal["eagle"] = "eagle"
    target: str
    """Name of the model that the head was distilled for; for people to read, not checked."""
    vocab_size: PositiveInt
    """Rows of the target's embedding."""
    hidden_size: PositiveInt
    """Hidden size of the target."""
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    rope_theta: PositiveFloat
    layer_norm_eps: PositiveFloat
    """Epsilon of the two RMS norms inside the layer."""
    head_norm_eps: PositiveFloat
    """Epsilon of the two input norms (`en`, `hn`) and the output norm (`norm`)."""
    dtype: Literal["bfloat16", "float16", "float32"]
    """Type of the tensors in the file."""
    draft_vocab_size: PositiveInt | None = None
    """Token ids that the head can propose, which the tensor `draft_token_ids` lists; None: the whole vocabulary."""
    copy_heads: PositiveInt | None = None
    """Number of KV heads, besides `num_kv_heads`, that match the tokens around a position. Each has its group of query
    heads."""
    tokens_sha256: str | None = None
    """`models.tokens_sha256` of the target's tokenizer; None: not known, and not checked."""

    @model_validator(mode="after")
    def _heads_are_groups(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        return self

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
        (folder / "config.json").write_text(self.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


def load_eagle_config(folder: str | Path) -> EagleConfig:
    """Read a head's config and check the file of weights against it, without loading a weight.

    Raises ValueError in one line for a missing file, an unknown or missing key, a file of weights that is cut short or
    holds other tensors than the config describes, and a reduced vocabulary with tokens that the target lacks.
    """
    folder = Path(folder)
    for name in ("config.json", WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"EAGLE draft {folder} has no {name}")
    config = parse_config(EagleConfig, read_json(folder / "config.json"), folder)
    _check_tensors(folder / WEIGHTS_FILE, config)
    if config.draft_vocab_size is not None:
        read_token_ids(folder / WEIGHTS_FILE, config.vocab_size)
    return config


def parse_config(kind: type[Config], raw: dict[str, Any], folder: Path) -> Config:
    """Make a config of what a head's `config.json` holds. Raises ValueError in one line."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        got = "" if found["type"] in ("missing", "value_error") else f", got {found['input']!r}"
        raise ValueError(f"EAGLE draft {folder}, config.json: {where}: {found['msg']}{got}") from None


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

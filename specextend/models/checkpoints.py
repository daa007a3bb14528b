"""Weights of a checkpoint: unpacked, with an adapter, and without its MTP layer.

`read_packing` reads a config, `read_weights` lists unpacked tensors, `merge_adapter` adds a LoRA
adapter, `open_weights` makes the tensors. Arithmetic is in float32; the loader rounds once.

`split_mtp` separates a draft inside the checkpoint (multi-token prediction, MTP). Its layer joins
the embedding of a token with the target's hidden state before it, runs a decoder layer of the
target's class, and uses the target's LM head. Families name its tensors differently:

| | Qwen3.5, Qwen3-Next | GLM-4.x, DeepSeek-V3 with N layers |
|---|---|---|
| decoder layer | `mtp.layers.0.` | `model.layers.N.` |
| join of embedding and state, in this order | `mtp.fc` | `eh_proj` |
| norms of embedding and state | `mtp.pre_fc_norm_embedding`, `..._hidden` | `enorm`, `hnorm` |
| norm of the output | `mtp.norm` | `shared_head.norm` |

The state is the target's after its final norm, or the layer's output after its norm.
"""

import math
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from specextend.core import Values, first_line
from specextend.folders import on_this_machine
from specextend.models.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FLOATS,
    ModelError,
    TensorInfo,
    read_json,
    read_safetensors_header,
)

SERVED = "fp8, compressed-tensors, mxfp4, awq, gptq"
_CT_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
"""Formats with numbers, scales and offsets."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_RUNTIME = tuple(f".{name}_scale" for name in ("input", "output", "q", "k", "v"))
"""Tensors that only round inputs or caches."""
_OF_PLAIN_LORA = (
    *("peft_type", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("auto_mapping", "peft_version", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "r", "lora_alpha", "use_rslora", "lora_dropout", "bias"),
    *("init_lora_weights", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
)
"""Known keys of an adapter's config; others must be unset."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Initial values that leave the model's weights alone."""
_TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
} | dict.fromkeys(FLOATS, torch.float32)


class Packing(NamedTuple):
    """Facts of a `quantization_config` that tensors do not tell."""

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows and columns with a common scale, of all kinds of layers."""
    zero_offset: int = 0
    """Difference between an offset and its stored number."""


class _Layout(NamedTuple):
    """Tensors of a weight, by the ends of names."""

    key: str
    weight: str
    dtypes: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    unpack: Callable[[Packing, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint once unpacked."""

    info: TensorInfo
    """Name, shape, and a float dtype."""
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Packed tensors by the ends of names."""
    unpack: Callable[[Mapping[str, Tensor]], Tensor] | None = None


_ROTATION = re.compile("rotation|hadamard|transform")


def read_packing(raw: Values, model: str) -> Packing | None:
    """Read the packing of a model's weights, if any.

    Raises:
        ModelError: Weights cannot be unpacked exactly.
    """
    values = raw.get("quantization_config") or raw.get("compression_config")
    if not values:
        return None
    method = str(values.get("quant_method", "unknown"))
    # no tensor tells how to rotate inputs
    rotated = [key for key, value in values.items() if value and _ROTATION.search(key)]
    if rotated:
        method += f": {', '.join(rotated)}"
    if method == "mxfp4":
        return Packing(method)
    if method == "fp8":
        block = values.get("weight_block_size")
        return Packing(method, ((block[0], block[1]),) if block else ())
    if method == "gptq" and values.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2"):
        return Packing(method, zero_offset=int(values.get("checkpoint_format") != "gptq_v2"))
    if method == "awq" and (str(values.get("version")).lower(), values.get("bits")) == ("gemm", 4):
        return Packing(method, ((1, int(values["group_size"])),))
    if method == "compressed-tensors":
        groups = list((values.get("config_groups") or {}).values())
        formats = {values.get("format"), *(each.get("format") for each in groups)} - {None}
        others = formats - {*_CT_FORMATS, "mixed-precision"}
        if (values.get("sparsity_config") or {}).get("format", "dense") != "dense":
            others.add("sparsity_config")
        if not others:
            return Packing(method, _blocks_of([each.get("weights") or {} for each in groups]))
        method += f": {', '.join(sorted(others))}"
    elif method in ("gptq", "awq"):
        named = values.get("checkpoint_format") or values.get("version")
        method += f": {named}, {values.get('bits')} bits"
    raise ModelError(
        f"{model} has quantized weights ({method}), which cannot be unpacked exactly; served are "
        f"{SERVED}; or take its checkpoint in 16 bits with target.quantize: int8, fp8 or int4"
    )


def _blocks_of(groups: list[Values]) -> tuple[tuple[int, int], ...]:
    blocks = [tuple(each["block_structure"]) for each in groups if each.get("block_structure")]
    sizes = [(1, each["group_size"]) for each in groups if (each.get("group_size") or 0) > 0]
    return tuple(dict.fromkeys([*blocks, *sizes]))


def read_weights(
    found: Mapping[str, TensorInfo], packing: Packing | None, model: str
) -> dict[str, Weight]:
    """List the unpacked tensors of a checkpoint. Raises ModelError."""
    if packing is None:
        return {name: Weight(info) for name, info in found.items()}
    weights: dict[str, Weight] = {}
    parts_of_weights = set[str]()
    for layout in _LAYOUTS[packing.method]:
        for name, info in found.items():
            if name.endswith(layout.key) and info.dtype in layout.dtypes:
                weight = _assemble(name.removesuffix(layout.key), found, layout, packing, model)
                weights[weight.info.name] = weight
                parts_of_weights |= {part.name for part in weight.parts.values()}
    for name, info in found.items():
        if name in weights and name not in parts_of_weights:
            raise ModelError(f"{model} has the tensor {name} in two forms; leave it in one")
        if name not in parts_of_weights and not name.endswith(_RUNTIME):
            weights[name] = Weight(info)
    return weights


def _assemble(
    stem: str, found: Mapping[str, TensorInfo], layout: _Layout, packing: Packing, model: str
) -> Weight:
    for choice in layout.required:
        if not any(stem + end in found for end in choice.split("|")):
            missing = stem + choice.partition("|")[0]
            raise ModelError(f"{model} lacks the tensor {missing}, the scales of packed weights")
    ends = [layout.key, *layout.optional]
    ends += [end for choice in layout.required for end in choice.split("|")]
    parts = {end: found[stem + end] for end in ends if stem + end in found}
    shape = None
    try:
        if (told := parts.get(".weight_shape")) is not None:
            with safe_open(told.file, framework="pt") as file:
                shape = tuple(file.get_tensor(told.name).tolist())
        kinds = tuple((end, part.dtype, part.shape) for end, part in parts.items())
        made = _shape_of(layout, packing, kinds, shape)
    except (ValueError, RuntimeError, LookupError) as error:
        raise ModelError(
            f"{model}: the tensors of {stem}{layout.weight} do not fit each other "
            f"({first_line(error)}); fetch the checkpoint again"
        ) from None
    info = TensorInfo(parts[layout.key].file, stem + layout.weight, "F32", made)
    return Weight(info, parts, partial(layout.unpack, packing))


@cache
def _shape_of(
    layout: _Layout,
    packing: Packing,
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...],
    shape: tuple[int, ...] | None,
) -> tuple[int, ...]:
    parts = {
        end: torch.empty(size, dtype=_TORCH_DTYPES[dtype], device="meta")
        for end, dtype, size in kinds
    }
    if shape is not None:
        parts[".weight_shape"] = torch.tensor(shape)
    return tuple(layout.unpack(packing, parts).shape)


def merge_adapter(weights: Mapping[str, Weight], adapter: str, model: str) -> dict[str, Weight]:
    """Add a LoRA adapter to weights: W + alpha / r * B A, once opened.

    Raises:
        ModelError: The adapter is not plain LoRA, or belongs to another model.
    """
    folder = adapter_folder(adapter)
    rank, scale = _read_lora(folder, adapter)
    found = read_safetensors_header(folder / ADAPTER_WEIGHTS)
    if not found:
        raise ModelError(f"{adapter} has no tensors in {ADAPTER_WEIGHTS}")
    merged = dict(weights)
    for name in found:
        stem = name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        first, second = (found.get(f"{stem}.lora_{end}.weight") for end in "AB")
        known = f"{stem.removeprefix('base_model.model.')}.weight"
        known = known if known in weights else known.removeprefix("model.")
        if first is None or second is None or known not in weights:
            raise ModelError(f"{adapter} has the tensor {name}, which fits no weight of {model}")
        plain = weights[known]
        if (*first.shape, *second.shape) != (rank, plain.info.shape[-1], plain.info.shape[0], rank):
            raise ModelError(
                f"{adapter}: {stem} is {list(second.shape)} x {list(first.shape)} of rank {rank}, "
                f"in {model} {list(plain.info.shape)}"
            )
        parts = {"": plain.info} if plain.unpack is None else plain.parts
        merged[known] = Weight(
            plain.info._replace(dtype="F32"),
            {**parts, ".lora_A": first, ".lora_B": second},
            partial(_with_adapter, scale, plain.unpack),
        )
    return merged


def _read_lora(folder: Path, adapter: str) -> tuple[int, float]:
    config = read_json(folder / ADAPTER_CONFIG)
    others = {key for key, value in config.items() if value and key not in _OF_PLAIN_LORA}
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        others.add("peft_type" if config.get("peft_type") != "LORA" else "bias")
    if config.get("init_lora_weights", True) not in _STARTS:
        others.add("init_lora_weights")
    if others:
        key = min(others)
        raise ModelError(
            f"{adapter} is no plain LoRA adapter ({key}: {config.get(key)}); merge it into its "
            "model with PEFT, and name the folder of that as target.model"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelError(f"{folder / ADAPTER_CONFIG} must have numbers r and lora_alpha")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _with_adapter(
    scale: float,
    unpack: Callable[[Mapping[str, Tensor]], Tensor] | None,
    parts: Mapping[str, Tensor],
) -> Tensor:
    weight = parts[""].float() if unpack is None else unpack(parts)
    return weight.add(parts[".lora_B"].float() @ parts[".lora_A"].float(), alpha=scale)


def adapter_folder(adapter: str) -> Path:
    """Return an adapter's folder. Raises ModelError."""
    folder = Path(on_this_machine(adapter))
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(f"target.adapter: {adapter} has no {name} on {platform.node()}")
    return folder


MTP_JOINING = ("join", "embedding_norm", "hidden_norm")
"""Modules before the decoder layer."""
_MTP_LAYER = "model.layers.0."
_MTP_NORM = "model.norm.weight"


class _MtpNames(NamedTuple):
    prefix: str
    layer: str
    join: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    copies: tuple[str, ...] = ()
    """Copies of the target's embedding and LM head, which are not used."""


def _mtp_names(num_layers: int) -> tuple[_MtpNames, ...]:
    last = f"model.layers.{num_layers}."
    return (
        _MtpNames(
            "mtp.",
            "mtp.layers.0.",
            "mtp.fc.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.norm.weight",
        ),
        _MtpNames(
            last,
            last,
            f"{last}eh_proj.weight",
            f"{last}enorm.weight",
            f"{last}hnorm.weight",
            f"{last}shared_head.norm.weight",
            (f"{last}embed_tokens.weight", f"{last}shared_head.head.weight"),
        ),
    )


def split_mtp(
    weights: Mapping[str, Weight], num_layers: int
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Split weights into the target's and those of its MTP layer, which may be missing.

    The latter has MTP_JOINING and a model of one layer; names of no known layer stay as they are.
    """
    for names in _mtp_names(num_layers):
        if names.join in weights:
            own = {name: each for name, each in weights.items() if name.startswith(names.prefix)}
            rest = {name: each for name, each in weights.items() if name not in own}
            return rest, {
                _renamed(name, names): each
                for name, each in own.items()
                if name not in names.copies
            }
    return dict(weights), {}


def _renamed(name: str, names: _MtpNames) -> str:
    ours = {getattr(names, each): f"{each}.weight" for each in MTP_JOINING} | {
        names.norm: _MTP_NORM
    }
    if name in ours:
        return ours[name]
    return name.replace(names.layer, _MTP_LAYER, 1) if name.startswith(names.layer) else name


def check_mtp_names(found: Mapping[str, Weight], model: str) -> None:
    """Check the names of a split MTP layer. Raises ModelError."""
    if not found:
        raise ModelError(
            f"{model} has no layer for draft.kind mtp (mtp.fc.weight or eh_proj.weight); take "
            "another draft"
        )
    required = {_MTP_NORM, *(f"{name}.weight" for name in MTP_JOINING)}
    if missing := required - found.keys():
        raise ModelError(f"{model} lacks {min(missing)} of its MTP layer; fetch it again")
    if odd := [n for n in found if n not in required and not n.startswith(_MTP_LAYER)]:
        raise ModelError(
            f"{model} has the tensor {min(odd)}, which no known MTP layer has; take another draft"
        )


def open_weights(weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Return tensors by name. `tensor[...]` reads and unpacks."""
    infos = [each for weight in weights.values() for each in (weight.info, *weight.parts.values())]
    # never closed by hand: transformers reads in threads, even after an error
    opened = {file: safe_open(file, framework="pt") for file in {info.file for info in infos}}
    return {
        name: _Unpacked(weight, opened)
        if weight.unpack
        else opened[weight.info.file].get_slice(weight.info.name)
        for name, weight in weights.items()
    }


@dataclass(frozen=True)
class _Unpacked:
    """A weight that is unpacked when it is indexed, like a slice."""

    weight: Weight
    opened: Mapping[Path, Any]

    def __getitem__(self, _: Any) -> Tensor:
        assert self.weight.unpack is not None
        parts = {
            end: self.opened[part.file].get_tensor(part.name)
            for end, part in self.weight.parts.items()
        }
        try:
            return self.weight.unpack(parts).contiguous()
        except ValueError as error:
            raise ModelError(
                f"{self.weight.info.name} in {self.weight.info.file}: {error}"
            ) from None


# Formats: W[out, in] = (numbers - offsets) * scales


def _scaled(
    numbers: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    blocks: tuple[tuple[int, int], ...] = (),
    columns: Tensor | None = None,
) -> Tensor:
    """Multiply numbers [out, in] with scales [R, G] in float32.

    Args:
        offsets: [R, G], if any.
        columns: Group of each column [in], by default by `blocks`.
    """
    if not scales.is_floating_point():
        raise ValueError(f"scales of type {scales.dtype}")
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    rows = _places(len(numbers), len(scales), {height for height, _ in blocks})
    if offsets is not None and offsets.numel() != scales.numel():
        raise ValueError(f"{list(offsets.shape)} offsets for {list(scales.shape)} scales")
    factors = scales.float()[rows]
    subtracted = None if offsets is None else offsets.float().reshape(scales.shape)[rows]
    weight = numbers.float()
    grouped = weight
    if columns is None:
        num_groups = scales.shape[1]
        columns = _places(numbers.shape[1], num_groups, {width for _, width in blocks})
        # whole groups need not be repeated
        if int(columns.count_nonzero()) * num_groups == (num_groups - 1) * len(columns):
            grouped = weight.unflatten(1, (num_groups, -1))
            columns = torch.arange(num_groups).unsqueeze(1)
    if subtracted is not None:
        grouped.sub_(subtracted[:, columns])
    grouped.mul_(factors[:, columns])
    return weight


def _places(size: int, num_scales: int, blocks: set[int]) -> Tensor:
    if num_scales == 1:
        return torch.zeros(size, dtype=torch.long)
    fitting = (
        {1}
        if num_scales == size
        else {block for block in blocks if block > 0 and math.ceil(size / block) == num_scales}
    )
    if len(fitting) != 1:
        raise ValueError(f"{num_scales} scales for {size}, in blocks of {sorted(blocks)}")
    return torch.arange(size) // fitting.pop()


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Return the fields of integers [..., n], lowest bits first, as uint8 [..., n * fields]."""
    raw = packed.contiguous().view(torch.uint8).unsqueeze(-1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)
    return (raw >> shifts & (1 << bits) - 1).flatten(-2)


def _plain_numbers(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    scales = parts[".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"]
    offsets = parts.get(".weight_zero_point")
    return _scaled(parts[".weight"], scales, offsets, packing.blocks)


def _pack_quantized(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    packed = parts[".weight_packed"]
    height, width = parts[".weight_shape"].tolist()
    bits = [bits for bits in (4, 8) if math.ceil(width * bits / 32) == packed.shape[1]]
    if len(bits) != 1 or height != len(packed):
        raise ValueError(f"{list(packed.shape)} integers for {height} x {width} of 4 or 8 bits")
    offsets = torch.full_like(parts[".weight_scale"], 1 << bits[0] - 1, dtype=torch.float32)
    zeros = parts.get(".weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int8:  # in files before 2025-05
        offsets = offsets + zeros
    elif zeros is not None and zeros.dtype == torch.int32:
        offsets = _fields(zeros.T, bits[0])[:, :height].T
    elif zeros is not None:
        raise ValueError(f"zero points of type {zeros.dtype}")
    groups = parts.get(".weight_g_idx")
    if groups is not None and not groups.is_meta and groups.min() < 0:
        groups = None
    numbers = _fields(packed, bits[0])[:, :width]
    return _scaled(numbers, parts[".weight_scale"], offsets, packing.blocks, groups)


def _awq(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    numbers, offsets = (
        _fields(parts[end], 4).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2).T
        for end in (".qweight", ".qzeros")
    )
    return _scaled(numbers, parts[".scales"].T, offsets, packing.blocks)


def _gptq(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    packed, groups = parts[".qweight"], parts[".g_idx"]
    bits = 32 * len(packed) // len(groups)
    if bits not in (2, 4, 8) or bits * len(groups) != 32 * len(packed):
        raise ValueError(f"{list(packed.shape)} integers for {len(groups)} inputs of 2 to 8 bits")
    offsets = _fields(parts[".qzeros"], bits).T
    if packing.zero_offset and not offsets.is_meta and (offsets == (1 << bits) - 1).any():
        raise ValueError("an offset of 0, which format gptq cannot store; take gptq_v2")
    offsets = offsets + packing.zero_offset
    return _scaled(_fields(packed.T, bits), parts[".scales"].T, offsets, columns=groups)


def _mxfp4(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    """Unpack experts [E, out, in / 32, 16] to [E, in, out]."""
    blocks = parts["_blocks"]
    values = torch.tensor((*_MXFP4, *(-value for value in _MXFP4)), device=blocks.device)
    scales = parts["_scales"].view(torch.float8_e8m0fnu).float()
    weights = torch.empty(
        len(blocks),
        32 * blocks.shape[2],
        blocks.shape[1],
        dtype=torch.bfloat16,
        device=blocks.device,
    )
    for expert, packed, factors in zip(weights, blocks, scales, strict=True):
        # two bits of fraction times a power of two: exact in bfloat16
        numbers = values[_fields(packed, 4).int()].mul_(factors.unsqueeze(-1))
        expert.copy_(numbers.flatten(-2).T)
    return weights


_FLOAT8 = _Layout(
    ".weight",
    ".weight",
    ("F8_E4M3", "F8_E5M2"),
    (".weight_scale_inv|.weight_scale",),
    (),
    _plain_numbers,
)
_LAYOUTS = {
    "fp8": (_FLOAT8,),
    "compressed-tensors": (
        _FLOAT8._replace(
            dtypes=("F8_E4M3", "F8_E5M2", "I8"),
            required=(".weight_scale",),
            optional=(".weight_zero_point",),
        ),
        _Layout(
            ".weight_packed",
            ".weight",
            ("I32",),
            (".weight_scale", ".weight_shape"),
            (".weight_zero_point", ".weight_g_idx"),
            _pack_quantized,
        ),
    ),
    "mxfp4": (_Layout("_blocks", "", ("U8",), ("_scales",), (), _mxfp4),),
    "awq": (_Layout(".qweight", ".weight", ("I32",), (".qzeros", ".scales"), (), _awq),),
    "gptq": (
        _Layout(".qweight", ".weight", ("I32",), (".qzeros", ".scales", ".g_idx"), (), _gptq),
    ),
}

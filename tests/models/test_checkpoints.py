"""Packed checkpoints: each is written here by the formula of its format, in numpy, and compared weight by weight."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specextend.models.causal_lm import TargetOptions, target_bytes
from specextend.models.checkpoints import open_weights, read_packing, read_weights
from specextend.models.model_files import read_folder
from tests.models.conftest import asked, check, edit_json, edit_tensors, load, refusal

SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
"""No multiples of 128: 192 columns are two blocks, of which one is half."""
GROUP = 64


def draw_float8(rng, shape):
    """Codes of random finite numbers, and the numbers."""
    codes = rng.integers(0, 256, shape)
    codes[(codes & 127) == 127] = 0
    stored = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    return stored, stored.double().numpy()


def spread(scales, shape, block):
    """The scale of each weight, by the definition."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def pack(fields, bits):
    """Fields [rows, columns] in int32 along the columns, the first in the lowest bits."""
    each = 32 // bits
    padded = np.pad(fields, ((0, 0), (0, -fields.shape[1] % each))).astype(np.uint64)
    words = sum(padded[:, i::each] << np.uint64(i * bits) for i in range(each))
    return tensor(words.astype(np.uint32).view(np.int32))


def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def random_scales(rng, *shape):
    return rng.uniform(0.001, 0.02, shape).astype(np.float32)


def blocks_of_float8(name, block):
    def write(rng, shape):
        codes, numbers = draw_float8(rng, shape)
        height, width = (n if b < 0 else b for n, b in zip(shape, block, strict=True))
        scales = random_scales(rng, -(-shape[0] // height), -(-shape[1] // width))
        stored = tensor(scales if block != (-1, -1) else scales.reshape(()))
        parts = {"weight": codes, name: stored, "input_scale": torch.ones(1)}
        return parts, numbers * spread(scales, shape, (height, width))

    return write


def int8_channels(rng, shape):
    numbers, scales = rng.integers(-128, 128, shape), random_scales(rng, shape[0], 1)
    return {"weight": tensor(numbers.astype(np.int8)), "weight_scale": tensor(scales)}, numbers * scales


def grouped(bits, group, store, *, has_order=False):
    """Draw numbers and offsets in groups of inputs, which `store` names in its layout."""

    def write(rng, shape):
        groups = np.arange(shape[1]) // (group if group > 0 else shape[1])
        if has_order:
            groups = rng.permutation(groups)
        numbers = rng.integers(0, 1 << bits, shape)
        scales = random_scales(rng, shape[0], groups.max() + 1)
        offsets = rng.integers(1, 1 << bits, scales.shape)
        parts, offsets = store(bits, numbers, scales, offsets)
        if has_order:
            parts["weight_g_idx" if "weight_packed" in parts else "g_idx"] = tensor(groups.astype(np.int32))
        return parts, (numbers - offsets[:, groups]) * scales[:, groups]

    return write


def transposed(packed):
    return tensor(packed.numpy().T)


def pack_quantized(offsets_as):
    """compressed-tensors: no offsets but the middle, packed ones, or those of older releases."""

    def store(bits, numbers, scales, offsets):
        shape = torch.tensor(numbers.shape)
        parts = {"weight_packed": pack(numbers, bits), "weight_scale": tensor(scales), "weight_shape": shape}
        middle = 1 << bits - 1
        if offsets_as == "packed":
            parts["weight_zero_point"] = transposed(pack(offsets.T, bits))
        elif offsets_as == "older":
            parts["weight_zero_point"] = tensor((offsets - middle).astype(np.int8))
        return parts, offsets if offsets_as else np.full(scales.shape, middle)

    return store


def awq(bits, numbers, scales, offsets):
    def packed(fields):
        order = np.arange(fields.shape[1]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        return pack(fields[:, order], bits)

    return {"qweight": packed(numbers.T), "qzeros": packed(offsets.T), "scales": tensor(scales.T)}, offsets


def gptq(less):
    """GPTQ, whose first version stores offsets less one."""

    def store(bits, numbers, scales, offsets):
        zeros = pack((offsets - less).T, bits)
        return {"qweight": transposed(pack(numbers, bits)), "qzeros": zeros, "scales": tensor(scales.T)}, offsets

    return store


def compressed(kind, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
PACKED = compressed("pack-quantized", group_size=GROUP)
FORMATS = {
    "fp8, one scale": (FP8, blocks_of_float8("weight_scale", (-1, -1))),
    "fp8, blocks": (FP8 | BLOCKS, blocks_of_float8("weight_scale_inv", (128, 128))),
    "compressed fp8, one scale": (compressed("float-quantized"), blocks_of_float8("weight_scale", (-1, -1))),
    "compressed fp8, channels": (compressed("float-quantized"), blocks_of_float8("weight_scale", (1, -1))),
    "compressed fp8, blocks": (
        compressed("float-quantized", block_structure=[128, 128]),
        blocks_of_float8("weight_scale", (128, 128)),
    ),
    "compressed int8, channels": (compressed("int-quantized"), int8_channels),
    "packed int4": (PACKED, grouped(4, GROUP, pack_quantized(None))),
    "packed int4, half a group at the end": (
        compressed("pack-quantized", group_size=128),
        grouped(4, 128, pack_quantized(None)),
    ),
    "packed int4, offsets": (PACKED, grouped(4, GROUP, pack_quantized("packed"))),
    "packed int4, older offsets": (PACKED, grouped(4, GROUP, pack_quantized("older"))),
    "packed int4, order": (PACKED, grouped(4, GROUP, pack_quantized("packed"), has_order=True)),
    "packed int8, channels": (compressed("pack-quantized"), grouped(8, -1, pack_quantized(None))),
    "awq": (AWQ, grouped(4, GROUP, awq)),
    "gptq": (GPTQ, grouped(4, GROUP, gptq(1), has_order=True)),
    "gptq of 8 bits": (GPTQ | {"bits": 8}, grouped(8, GROUP, gptq(1), has_order=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, grouped(4, GROUP, gptq(0), has_order=True)),
}


@pytest.fixture
def write_packed(write_model):
    """Packs the layers of a tiny Llama; returns its folder, and what each weight is in float32."""

    def write(name, **values):
        folder = write_model(name.replace(" ", ""), **(SHAPE | values))
        config, write_weight = FORMATS[name]
        rng = np.random.default_rng(0)
        expected, stored = {}, {}
        for key, plain in load_file(folder / "model.safetensors").items():
            stored[key] = expected[key] = plain
            if "_proj" in key:
                stem = stored.popitem()[0].removesuffix("weight")
                parts, weight = write_weight(rng, tuple(plain.shape))
                stored |= {stem + end: part for end, part in parts.items()}
                expected[key] = tensor(weight.astype(np.float32))
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        edit_json(folder / "config.json", quantization_config=config)
        return folder, expected

    return write


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_what_its_format_says(write_packed, name, dtype):
    """Computed in float32 and rounded once, whatever is a multiple of what; the config forgets that it was packed."""
    folder, expected = write_packed(name)
    assert check(folder).hidden_size == 192
    model = load(folder, dtype)
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, expected[key].to(weight.dtype)), key
    assert weight.dtype == getattr(torch, dtype)
    assert not hasattr(model.config, "quantization_config")
    assert target_bytes(TargetOptions(model=str(folder), dtype=dtype), torch.device("cpu")) == sum(
        each.numel() * each.itemsize for each in model.parameters()
    )


def test_experts_in_mxfp4_are_unpacked_as_transformers_holds_them(tmp_path):
    """Two numbers a byte, the first in its low half, and a power of two for 32 of them; inputs come before outputs."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (3, 8, 2, 16)), rng.integers(0, 255, (3, 8, 2))
    stem = "model.layers.0.mlp.experts.down_proj"
    parts = {f"{stem}_blocks": tensor(blocks.astype(np.uint8)), f"{stem}_scales": tensor(scales.astype(np.uint8))}
    save_file(parts | {f"{stem}_bias": torch.ones(3, 8)}, tmp_path / "model.safetensors")
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.stack([blocks & 15, blocks >> 4], -1).reshape(3, 8, 2, 32)
    signed = values[numbers & 7] * np.where(numbers & 8, -1, 1)
    expected = (signed * 2.0 ** (scales[..., None] - 127)).reshape(3, 8, 64).transpose(0, 2, 1)
    packing = read_packing({"quantization_config": {"quant_method": "mxfp4"}}, "m")
    weights = read_weights(read_folder(tmp_path, "m"), packing, "m")
    opened = open_weights(weights)
    assert opened.keys() == {stem, f"{stem}_bias"}
    assert torch.equal(opened[stem][...], tensor(expected.astype(np.float32)))
    assert weights[stem].info.shape == (3, 64, 8)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("fp8, blocks", {"weight_scale_inv": None}, "lacks the tensor model.layers.0.mlp.down_proj.weight_scale_inv"),
        ("awq", {"qzeros": None}, "lacks the tensor model.layers.0.mlp.down_proj.qzeros"),
        ("fp8, blocks", {"weight_scale_inv": torch.ones(2, 7)}, "7 scales for 320, in blocks of [128]"),
        ("awq", {"qzeros": torch.ones(5, 23).int()}, "[192, 5] scales"),
        ("gptq", {"g_idx": torch.ones(300).int()}, "([40, 192] integers for 300 inputs of 2 to 8"),
        ("packed int4", {"weight_shape": torch.tensor([192, 64])}, "192 x 64 of 4 or 8 bits"),
        ("packed int4", {"weight": torch.ones(192, 320)}, "tensor model.layers.0.mlp.down_proj.weight in two forms"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_one_line_at_the_start(
    write_packed, monkeypatch, name, changes, message
):
    """An interrupted download: a worker would find it minutes later, or decode with other weights."""
    folder, _ = write_packed(name)
    edit_tensors(folder, {f"model.layers.0.mlp.down_proj.{end}": part for end, part in changes.items()})
    assert message in refusal(folder)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere:1")  # would fail if it were asked
    assert message in asked(folder, "check").exits(2).stderr.splitlines()[-1]


def test_an_offset_that_format_gptq_cannot_store_is_refused(write_packed):
    """Readers disagree on it: 0 in one, 16 in another, and the next column's changed in a third."""
    folder, _ = write_packed("gptq")
    edit_tensors(folder, {"model.layers.0.mlp.down_proj.qzeros": torch.full((5, 24), -1, dtype=torch.int32)})
    assert "an offset of 0, which format gptq cannot store" in refusal(folder, read=load)


@pytest.mark.parametrize(
    "named, values",
    {
        "(bitsandbytes)": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "(modelopt)": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "(unknown)": {"bits": 4},
        "(compressed-tensors: nvfp4-pack-quantized)": compressed("nvfp4-pack-quantized"),
        "(compressed-tensors: transform_config)": compressed("float-quantized") | {"transform_config": {"u": 1}},
        "(compressed-tensors: sparsity_config)": compressed("pack-quantized")
        | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "(awq: gemv, 4 bits)": AWQ | {"version": "gemv"},
        "(gptq: marlin, 4 bits)": GPTQ | {"checkpoint_format": "marlin"},
        "(gptq: rotation)": GPTQ | {"rotation": "hadamard"},
    }.items(),
)
def test_what_cannot_be_unpacked_exactly_is_refused_by_name(write_model, values, named):
    """Transformers passes over ModelOpt's with a warning, and decodes with numbers that lack their scales."""
    folder = write_model()
    edit_json(folder / "config.json", quantization_config=values)
    line = refusal(folder)
    assert f"has quantized weights {named}, which cannot be unpacked exactly" in line

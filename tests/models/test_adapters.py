"""LoRA adapters: merged exactly, or refused; never passed over."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from specextend.config import RunConfig
from specextend.models.causal_lm import TargetOptions
from specextend.models.pairing import check_pair, pair_hashes
from tests.models.conftest import check, edit_json, edit_tensors, load, refusal
from tests.models.test_checkpoints import write_packed  # noqa: F401

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "somewhere/else",
    "r": 4,
    "lora_alpha": 6,
    "use_rslora": False,
    "lora_dropout": 0.1,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "use_dora": False,
}


def eighths(*shape):
    """Numbers of few bits: sums of their products are exact in float32, in any order."""
    return torch.randint(-8, 9, shape) / 8


def write_adapter(folder, shapes, **values):
    """Writes an adapter beside what is in a folder; returns A and B of each product."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    config = CONFIG | values
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {name: (eighths(config["r"], i), eighths(o, config["r"])) for name, (o, i) in shapes.items()}
    parts = {
        f"base_model.model.{name}.lora_{end}.weight": each
        for name, pair in factors.items()
        for end, each in zip("AB", pair, strict=True)
    }
    save_file(parts, folder / "adapter_model.safetensors")
    return factors


SHAPES = {Q_PROJ: (32, 32), DOWN_PROJ: (32, 48)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_is_merged_in_float32_and_rounded_once(write_model, tmp_path, use_rslora, dtype):
    """W + alpha / r * B A: what PEFT's own merge rounds three times in bfloat16."""
    folder = write_model()
    factors = write_adapter(tmp_path / "adapter", SHAPES, use_rslora=use_rslora)
    scale = 6 / (math.sqrt(4) if use_rslora else 4)
    expected = load(folder).state_dict()
    for name, (first, second) in factors.items():
        expected[f"{name}.weight"] = expected[f"{name}.weight"] + scale * (second @ first)
    merged = load(folder, dtype, tmp_path / "adapter").state_dict()
    for name, weight in merged.items():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name


def test_an_adapter_on_a_packed_model_is_merged_with_what_its_format_says(write_packed, tmp_path):  # noqa: F811
    """QLoRA's base in 4 bits: unpacked, merged, and rounded once after both."""
    folder, expected = write_packed("packed int4")
    [(first, second)] = write_adapter(tmp_path / "adapter", {Q_PROJ: (192, 192)}).values()
    merged = load(folder, "bfloat16", tmp_path / "adapter").state_dict()
    weight = expected[f"{Q_PROJ}.weight"] + 1.5 * (second @ first)
    assert torch.equal(merged[f"{Q_PROJ}.weight"], weight.bfloat16())


def test_an_adapter_that_lies_in_the_folder_of_a_model_must_be_named(write_model):
    """It was passed over, and the texts were those of the model without."""
    folder = write_model()
    write_adapter(folder, SHAPES)
    for read in (check, load):
        said = refusal(folder, read=read)
        assert "has a LoRA adapter (adapter_config.json): set target.adapter to its folder" in said
    check_pair(TargetOptions(model=str(folder), adapter=str(folder)), None)
    (folder / "config.json").unlink()
    assert "is an adapter: name it as target.adapter" in refusal(folder)


def test_a_run_with_another_adapter_is_another_run(write_model, tmp_path):
    """Which lies elsewhere tomorrow, or holds another training."""
    target = TargetOptions(model=str(write_model()), adapter=f"{tmp_path}/adapter")
    factors = write_adapter(tmp_path / "adapter", SHAPES)
    moved = TargetOptions(model=target.model, adapter=f"{tmp_path}/moved")
    write_adapter(tmp_path / "moved", SHAPES)
    hashes = pair_hashes(target, None)
    assert hashes == pair_hashes(moved, None)
    assert hashes.keys() == {"target", "tokenizer", "adapter"}
    assert factors.keys() == SHAPES.keys()
    edit_json(tmp_path / "moved" / "adapter_config.json", lora_alpha=7)
    assert pair_hashes(moved, None)["adapter"] != hashes["adapter"]


def test_the_folder_of_an_adapter_is_relative_to_the_file_that_names_it(tmp_path):
    """As any path in a configuration."""
    file = tmp_path / "run.yaml"
    sections = {"input": {"path": "in"}, "output": {"path": "out"}, "target": {"model": "a/b", "adapter": "mine/lora"}}
    file.write_text(json.dumps(sections | {"decoding": {"mode": "autoregressive"}}))
    assert RunConfig.load(file).target.adapter == f"{tmp_path}/mine/lora"


@pytest.mark.parametrize(
    "message, values",
    {
        "no plain LoRA adapter (use_dora: True); merge it into its model with PEFT": {"use_dora": True},
        "(modules_to_save: ['lm_head'])": {"modules_to_save": ["lm_head"]},
        "(rank_pattern: {'q_proj': 8})": {"rank_pattern": {"q_proj": 8}},
        "(bias: all)": {"bias": "all"},
        "(peft_type: IA3)": {"peft_type": "IA3"},
        "(init_lora_weights: pissa)": {"init_lora_weights": "pissa"},
        "(invented_tomorrow: 1)": {"invented_tomorrow": 1},
        "must have numbers r and lora_alpha": {"lora_alpha": None},
    }.items(),
)
def test_what_is_no_plain_lora_is_refused(write_model, tmp_path, values, message):
    """An unknown key may change what is added."""
    write_adapter(tmp_path / "adapter", SHAPES, **values)
    assert message in refusal(write_model(), tmp_path / "adapter")


NAME = f"base_model.model.{Q_PROJ}.lora_A.weight"


@pytest.mark.parametrize(
    "message, tensors",
    {
        f"the tensor base_model.model.{Q_PROJ}.lora_B.weight, which fits no weight of": {NAME: None},
        "q_proj is [32, 4] x [4, 48] of rank 4, in": {NAME: eighths(4, 48)},
        "lora_magnitude_vector, which fits no": {"base_model.model.lm_head.lora_magnitude_vector": eighths(4)},
        "layers.7.mlp.up_proj.lora_A": {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": eighths(4, 4)},
    }.items(),
)
def test_an_adapter_of_another_model_is_refused_before_ray_starts(write_model, tmp_path, tensors, message):
    """By the headers of its file."""
    folder = tmp_path / "adapter"
    write_adapter(folder, SHAPES)
    edit_tensors(folder, tensors, file="adapter_model.safetensors")
    assert message in refusal(write_model(), folder)


def test_a_folder_without_an_adapter_is_refused(write_model, tmp_path):
    """A path that only one machine has."""
    assert "has no adapter_config.json on" in refusal(write_model(), tmp_path / "none")

"""Which models are served, what is said of the others, and what is read from their files."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from specextend.model_files import ModelError, identify
from specextend.models import TargetOptions, check_model, load_target, read_facts

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def load(folder, dtype="float32"):
    return load_target(TargetOptions(model=str(folder), dtype=dtype, device="cpu"))


def refusal(folder, read=read_facts) -> str:
    """What a user reads; it must be one line."""
    with pytest.raises(ModelError) as refused:
        read(str(folder))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 1024),
        (YARN, 1024),
        (YARN | {"original_max_position_embeddings": 64}, 256),
    ],
    ids=["linear", "yarn before scaling", "yarn after scaling"],
)
def test_context_length_counts_rope_scaling_in(write_model, rope, expected):
    """Vicuna 16k says 4,096 and a factor of 4; taken at its word it would drop three quarters of a document."""
    assert read_facts(str(write_model(rope_parameters=rope))).context_length == expected


def test_eos_comes_from_the_generation_config_and_may_be_a_list(write_model, edit_json):
    """Llama 3 instruct ends a turn with an id that config.json does not name; without it the output never ends."""
    folder = write_model()
    assert read_facts(str(folder)).eos_token_ids == (2,)
    edit_json(folder / "generation_config.json", eos_token_id=[2, 7])
    assert read_facts(str(folder)).eos_token_ids == (2, 7)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    assert read_facts(str(folder)).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "is of type 'gpt2'; served are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "has the activation 'gelu'; served is silu"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantized weights (gptq), which are not served; take its checkpoint in 16 bits with target.quantize: int8",
        ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantized weights (compressed-tensors)"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE type 'dynamic'; served are default, linear, llama3, yarn",
        ),
    ],
    ids=["architecture", "activation", "gptq", "compressed-tensors", "rope"],
)
def test_what_is_not_served_is_refused_by_name(write_model, edit_json, values, message):
    """Attention would run on many such models and be wrong on some; a dynamic RoPE changes the keys that are cached."""
    folder = write_model()
    edit_json(folder / "config.json", **values)
    assert message in refusal(folder)


def test_sliding_layers_are_refused(write_model):
    """Qwen2 and Qwen3 switch the window on by layer; Mistral's, as long as the context, is felt by no token."""
    values = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert "layers of type sliding_attention" in refusal(write_model(model_type="qwen2", **values))
    assert read_facts(str(write_model(model_type="mistral", sliding_window=256))).context_length == 256


@pytest.mark.parametrize(
    "change", [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw + b"\0"], ids=["empty", "one less", "one more"]
)
def test_weights_that_are_not_whole_are_refused(write_model, change):
    """An interrupted download has a whole header."""
    folder = write_model()
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert "model.safetensors is not a whole safetensors file" in refusal(folder, check_model)


def test_hashes_know_what_is_in_the_files_and_not_where_they_lie(write_model, edit_json):
    """A run must resume after its models moved, and must not resume with others."""
    first, moved = write_model("first"), write_model("moved")
    assert identify(str(first)) == identify(str(moved))
    edit_json(moved / "config.json", rms_norm_eps=1e-3)
    changed = identify(str(moved))
    assert changed["weights"] != identify(str(first))["weights"]
    assert changed["tokenizer"] == identify(str(first))["tokenizer"]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.json", "num_key_value_heads", "0"),
        ("config.json", "hidden_act", '"nonsense"'),
        ("config.json", "transformers_weights", '"weights.bin"'),
        ("config.json", "other", DEEP),
        ("generation_config.json", "eos_token_id", '"x"'),
    ],
    ids=lambda value: value[:20],
)
def test_a_broken_config_is_refused_in_one_line(write_model, name, key, value):
    """Folders come from anywhere; a traceback says nothing to whoever is to mend the file."""
    file = write_model() / name
    file.write_text(f"{file.read_text().rstrip().removesuffix('}')}, {json.dumps(key)}: {value}}}")
    assert str(file.parent) in refusal(file.parent, check_model)


def write_index(folder, name) -> None:
    """Let an index say that all tensors are in the file `name`."""
    tensors = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))


@pytest.mark.parametrize("name", ["weights.bin", "../model.safetensors", 1])
def test_an_index_that_leads_elsewhere_is_refused(write_model, name):
    """Transformers loads what the index names: neither checked nor hashed, it could be swapped between two starts."""
    folder = write_model()
    write_index(folder, name)
    assert "weights must be safetensors files in the same folder" in refusal(folder, check_model)
    assert "weights must be safetensors files in the same folder" in refusal(folder, identify)


def test_an_index_is_part_of_the_hash_and_its_files_must_be_there(write_model):
    """Which of two files a tensor is taken from decides what the model says."""
    folder = write_model()
    plain = identify(str(folder))["weights"]
    write_index(folder, "model.safetensors")
    assert identify(str(folder))["weights"] != plain
    write_index(folder, "model-00001-of-00001.safetensors")
    assert "has no model-00001-of-00001.safetensors, which its" in refusal(folder, check_model)

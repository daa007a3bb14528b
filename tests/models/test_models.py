"""Which models are served, what is said of the others, and what is read from their files."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specextend.models.causal_lm import TargetOptions, read_facts, target_device
from specextend.models.model_files import ModelError, identify
from specextend.models.pairing import check_pair
from tests.models.conftest import asked, check, edit_json, edit_tensors, load, refusal
from tests.refused import refused

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def check_target(model):
    check_pair(TargetOptions(model=model), None)


@pytest.mark.parametrize(
    "rope, expected",
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 1024),
        (YARN, 1024),
        (YARN | {"original_max_position_embeddings": 64}, 256),
    ],
)
def test_context_length_counts_rope_scaling_in(write_model, rope, expected):
    """Vicuna 16k says 4,096 and a factor of 4; taken at its word it would drop three quarters of a document."""
    assert read_facts(str(write_model(rope_parameters=rope))).context_length == expected


TEMPLATE = "{% for each in messages %}{{ each.role }} {{ each.content }} <s>\n{% endfor %}"
ENDS = {"config.json": (3,), "generation_config.json": (4, 99), "tokenizer": (2,), "chat template": (1,)}


def test_outputs_end_where_config_generation_config_tokenizer_or_template_say(write_model):
    """Instruct models end a turn with a token that config.json does not name: an output went on and invented dialogue.

    `check` says what was found where. A key that is not there is no end, though transformers assumes token 2 there.
    """
    folder = write_model()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    edit_json(folder / "config.json", eos_token_id=3)
    edit_json(folder / "generation_config.json", eos_token_id=[4, 99])
    facts = check_pair(TargetOptions(model=str(folder)), None)
    assert facts.ends == ENDS
    assert facts.eos_token_ids == (3, 4, 2, 1)
    said = '3 ! (config.json), 4 " (generation_config.json), 99 None (generation_config.json), 2 </s> (tokenizer)'
    shown = " ".join(asked(folder, "check").exits(0).stdout.split())
    assert f"ends of sequence: {said}, 1 <s> (chat template) " in shown
    edit_json(folder / "config.json", eos_token_id=None)
    assert read_facts(str(folder)).ends == {"generation_config.json": (4, 99)}


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0].content }}", "Answer!", ""])
def test_a_template_that_writes_no_token_behind_an_answer_names_no_end(write_model, template):
    """What follows an answer may be text, which is no end; nor does each template take an answer."""
    folder = write_model()
    (folder / "chat_template.jinja").write_text(template)
    assert "chat template" not in check_pair(TargetOptions(model=str(folder)), None).ends


def test_ends_that_the_model_cannot_write_are_refused(write_model):
    """Each output would run to its limit."""
    folder = write_model()
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=64)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert "ends its outputs with tokens that it lacks" in refusal(folder, read=check_target)


@pytest.mark.parametrize("command", ["check", "plan --input examples/demo --output out"])
def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(write_model, command):
    """It fits, `check` said, and each row failed with an IndexError."""
    said = asked(write_model(vocab_size=63), *command.split()).exits(2).stderr
    assert "has an embedding for 63 tokens, and a tokenizer with token 63 ('!\"')" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "message, values",
    {
        "is of type 'nobodys', which transformers": {"model_type": "nobodys"},
        "quantized weights (hqq), which cannot be unpacked exactly; served are fp8, compressed-tensors, mxfp4": {
            "compression_config": {"quant_method": "hqq"}
        },
        "3,000,000 layers (num_hidden_layers), of which 1,000 are served": {"num_hidden_layers": 3_000_000},
        "names code to fetch (_attn_implementation: someone/code)": {"_attn_implementation": "someone/code"},
    }.items(),
)
def test_what_is_not_served_is_refused_by_name(write_model, values, message):
    """What nobody can load, and what would fetch code."""
    folder = write_model()
    edit_json(folder / "config.json", **values)
    assert message in refusal(folder)


def test_windows_are_read_by_layer(write_model):
    """Qwen2 switches the window on by layer; Mistral's, as long as the context, is felt by no token."""
    values = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    windowed = read_facts(str(write_model("windowed", model_type="qwen2", **values)))
    assert (windowed.is_fused, [layer.window for layer in windowed.layers]) == (False, [None, 64])
    whole = read_facts(str(write_model("whole", model_type="mistral", sliding_window=256)))
    assert (whole.is_fused, whole.context_length) == (True, 256)


@pytest.mark.parametrize("change", [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw + b"\0"])
def test_weights_that_are_not_whole_are_refused(write_model, change):
    """An interrupted download has a whole header."""
    folder = write_model()
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    assert "model.safetensors is not a whole safetensors file" in refusal(folder)


def test_a_pipe_in_the_place_of_weights_is_refused(write_model):
    """To open one waits for ever for somebody who writes to it."""
    file = write_model() / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    assert f"{file} is no file" in refusal(file.parent)


def test_hashes_know_what_is_in_the_files_and_not_where_they_lie(write_model):
    """A run must resume after its models moved, and must not resume with others."""
    first = write_model("first")
    moved = write_model("moved")
    assert identify(str(first)) == identify(str(moved))
    edit_json(moved / "config.json", rms_norm_eps=1e-3)
    changed = identify(str(moved))
    assert changed["weights"] != identify(str(first))["weights"]
    assert changed["tokenizer"] == identify(str(first))["tokenizer"]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "name, key, value",
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
    assert str(file.parent) in refusal(file.parent)


def write_index(folder, name):
    """Let an index say that all tensors are in the file `name`."""
    tensors = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": tensors}))


@pytest.mark.parametrize("name", ["weights.bin", "../model.safetensors", 1])
def test_an_index_that_leads_elsewhere_is_refused(write_model, name):
    """Transformers loads what the index names: neither checked nor hashed, it could be swapped between two starts."""
    folder = write_model()
    write_index(folder, name)
    for read in (check, identify):
        assert "weights must be safetensors files in the same folder" in refusal(folder, read=read)


def test_an_index_is_part_of_the_hash_and_its_files_must_be_there(write_model):
    """Which of two files a tensor is taken from decides what the model says."""
    folder = write_model()
    plain = identify(str(folder))["weights"]
    write_index(folder, "model.safetensors")
    assert identify(str(folder))["weights"] != plain
    write_index(folder, "model-00001-of-00001.safetensors")
    assert "has no model-00001-of-00001.safetensors, which its" in refusal(folder)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "message, tensors",
    {
        "self_attn.q_proj.bias, which config.json does not describe": {
            "model.layers.0.self_attn.q_proj.bias": torch.ones(32)
        },
        "has the tensor model.layers.2.mlp": {
            "model.layers.2.mlp.up_proj.weight": torch.ones(48, 32),
            "z": torch.ones(1),
        },
        "has the tensor norm.weight": {"norm.weight": torch.ones(32)},
        "lacks the tensor model.norm.weight": {NORM: None},
        "model.norm.weight is I8; served are BF16, F16, F32, F64": {NORM: torch.ones(32, dtype=torch.int8)},
    }.items(),
)
def test_weights_that_config_json_does_not_describe_are_refused_by_name(write_model, tensors, message):
    """A bias that is dropped, or a layer too many, is another model, which answers like a bad one."""
    folder = write_model()
    edit_tensors(folder, tensors)
    assert message in refusal(folder)


def holds(folder, tensors):
    """Return True if a checkpoint is checked and loaded as these."""
    check(folder)
    return all(torch.equal(tensors[name], tensor) for name, tensor in load(folder).state_dict().items())


@pytest.mark.parametrize("is_bare", [False, True])
def test_what_follows_from_the_config_may_be_there_or_not(write_model, is_bare):
    """RoPE buffers of old checkpoints, the LM head of tied models, and names without the decoder's prefix."""
    folder = write_model(tie_word_embeddings=True)
    whole = load(folder).state_dict()
    left = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": whole["lm_head.weight"]}
    edit_tensors(folder, left, (lambda name: name.removeprefix("model.")) if is_bare else str)
    assert holds(folder, whole)
    edit_tensors(folder, {"lm_head.weight": whole["lm_head.weight"] + 1})
    assert "has an LM head of its own" in refusal(folder, read=load)


def test_what_was_checked_is_what_is_loaded(write_model):
    """Shards without an index passed the check, and five workers in a row could not load them.

    The index decides, as it does in vLLM, also beside a file that transformers would take; a lone file has any name.
    """
    folder = write_model()
    file = "model.safetensors"
    whole = load(folder).state_dict()
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / file).unlink()
    index = folder / f"{file}.index.json"
    written = index.read_bytes()
    index.unlink()
    assert "has several weight files and no model.safetensors.index.json" in refusal(folder)
    index.write_bytes(written)
    save_file({name: tensor + 1 for name, tensor in whole.items()}, folder / file, {"format": "pt"})
    assert holds(folder, whole)
    first, second, *_ = sorted(folder.glob("model-*"))
    save_file(load_file(second) | load_file(first), second, {"format": "pt"})
    assert "in two files; leave it in one" in refusal(folder)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(whole, folder / "anything.safetensors", {"format": "pt"})
    assert holds(folder, whole)


def test_a_gpu_whose_attention_takes_no_16_bits_is_refused_before_weights_are_loaded(monkeypatch):
    """A T4 or V100 failed in the first prompt, in words of torch that name no setting."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    said = refused(target_device, TargetOptions(model="m", dtype="float16"), "cuda", kind=ModelError)
    assert "capability 7.5" in said
    assert "set target.dtype float32" in said
    assert target_device(TargetOptions(model="m", dtype="float32"), "cuda").type == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert target_device(TargetOptions(model="m", dtype="bfloat16"), "cuda").type == "cuda"


def test_a_family_that_would_differ_is_refused_before_anything_starts(write_model):
    """Its attention in chunks is told by no keyword: it would write nonsense, fluently."""
    folder = write_model(model_type="llama4_text", head_dim=8, num_local_experts=2, intermediate_size_mlp=16)
    line = asked(folder, "check").exits(2).stderr.splitlines()[-1]
    assert f"{folder}: logits differ from the stock model by " in line
    assert "autoregressive works" not in line


def test_weights_of_fused_layers_alone_are_quantized(write_model):
    """Transformers' own layers would keep theirs in 16 bits, without a word."""
    folder = write_model(model_type="gemma2", head_dim=8)
    said = refused(check_pair, TargetOptions(model=str(folder), quantize="int8"), None, kind=ModelError)
    assert "runs on transformers' own layers, which target.quantize does not take" in said


def test_experts_of_a_checkpoint_are_joined_and_a_missing_one_is_named(write_model):
    """Transformers joins them in one tensor, so a header has other names than the model."""
    folder = write_model(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert not check(folder).is_fused
    load(folder)
    edit_tensors(folder, {"model.layers.1.mlp.experts.3.up_proj.weight": None})
    assert "has weights that do not make a Qwen3MoeForCausalLM" in refusal(folder, read=load)

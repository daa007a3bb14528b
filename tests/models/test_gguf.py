"""GGUF files: unpacked once, to a folder that holds the same model."""

import os
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from benchmarks.peers import add_shape, gguf_tensors
from specextend.models.causal_lm import load_tokenizer, rope_frequencies
from tests.job.conftest import specextend
from tests.models.conftest import check, load, refusal


def write_gguf(path, model, tokenizer, add=lambda writer: None, leave_out=""):
    """The model as one GGUF file in float32, with what `add` adds."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    add_shape(writer, config)
    writer.add_rope_freq_base(10000.0)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number < 3 else 1 for _, number in vocabulary])
    writer.add_token_merges(['! "'])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in gguf_tensors(model):
        if name != leave_out:
            writer.add_tensor(name, weight.contiguous().numpy())
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def write(write_model, tmp_path):
    """Write a random model with large heads as a folder and as a GGUF file; return both."""

    def write(**changes):
        folder = write_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
        model = load(folder)
        write_gguf(tmp_path / "tiny.gguf", model, load_tokenizer(str(folder)), **changes)
        return folder, tmp_path / "tiny.gguf"

    return write


@pytest.fixture
def folder_and_file(write):
    return write()


def unpack(file, folder):
    return specextend(f"prepare model {file} --output {folder} --dtype float32")


def test_an_unpacked_gguf_file_is_the_model_it_was_made_from(folder_and_file, tmp_path):
    """Facts and logits: the engine sees a folder like any other."""
    folder, file = folder_and_file
    unpack(file, tmp_path / "made" / "unpacked").exits(0)
    made = tmp_path / "made" / "unpacked"
    assert replace(check(made), name="") == replace(check(folder), name="")
    token_ids = torch.tensor([[1, 5, 9, 20, 3]])
    torch.testing.assert_close(load(made)(token_ids).logits, load(folder)(token_ids).logits)
    assert load_tokenizer(str(made)).eos_token_id == 2
    assert os.listdir(tmp_path / "made") == ["unpacked"]


def test_a_gguf_file_as_a_target_is_refused_with_the_command_that_works(folder_and_file, tmp_path, monkeypatch):
    """Unpacking takes minutes for a large model: once, not in each worker of each start."""
    _, file = folder_and_file
    said, _, command = refusal(file).partition("specextend ")
    assert "must be unpacked once" in said
    monkeypatch.chdir(tmp_path)
    specextend(command).exits(0)
    assert check("./FOLDER").num_layers == 2


@pytest.mark.parametrize("kept", [200, -100])
def test_a_gguf_file_cut_short_is_refused_in_one_line_and_leaves_nothing(folder_and_file, tmp_path, kept):
    """An interrupted download, wherever it stopped."""
    _, file = folder_and_file
    file.write_bytes(file.read_bytes()[:kept])
    assert "tiny.gguf" in unpack(file, tmp_path / "made" / "unpacked").line()
    assert os.listdir(tmp_path / "made") == []


def test_a_folder_that_holds_something_is_left_alone(folder_and_file):
    folder, file = folder_and_file
    assert "holds something already" in unpack(file, folder).line()
    assert check(folder).num_layers == 2


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BIAS = np.ones(128, np.float32)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


def divided(**changes):
    """Adds the tensor by which llama.cpp divides the frequencies of a Llama 3 with large heads."""
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3 | changes
    plain, slower = (rope_frequencies({"rope_parameters": each}, 64, "tiny")[0] for each in (DEFAULT, scaled))
    return lambda writer: writer.add_tensor("rope_freqs.weight", (plain / slower).numpy())


def scaled(kind, also=lambda writer: None):
    """Adds the keys of a scaling by four."""

    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        also(writer)

    return add


@pytest.fixture
def convert(write, tmp_path):
    """Write a file, and unpack it."""
    return lambda **changes: unpack(write(**changes)[1], tmp_path / "made")


def test_digits_are_parted_as_the_file_says(convert, tmp_path):
    """SmolLM's tokenizer parts them before all else; blanks before a number were other tokens than its own."""
    convert(add=lambda writer: writer.add_tokenizer_pre("smollm")).exits(0)
    backend = load_tokenizer(f"{tmp_path}/made").backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a  12")][-3:] == ["ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    "add, rope",
    [
        (scaled("linear"), {"rope_type": "linear", "factor": 4.0}),
        (scaled("none"), {}),
        (
            scaled("yarn", lambda writer: writer.add_rope_scaling_orig_ctx_len(64)),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (divided(), {"rope_type": "llama3", **LLAMA3}),
    ],
)
def test_the_scaling_of_a_rope_is_carried_over(convert, tmp_path, add, rope):
    """It became `default`: short prompts were right, and long documents were read worse and worse."""
    convert(add=add).exits(0)
    made = load(tmp_path / "made")
    assert made.config.rope_parameters == DEFAULT | rope


@pytest.mark.parametrize(
    "said, changes",
    {
        "RoPE type 'longrope'": {"add": scaled("longrope")},
        "rope.scaling.attn_factor": {"add": scaled("yarn", lambda writer: writer.add_rope_scaling_attn_factors(9.0))},
        "(rope.scale_linear)": {"add": lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0)},
        "(rope_freqs.weight)": {"add": divided(low_freq_factor=2.0)},
        "blk.0.attn_q.bias is missing or has": {"add": lambda writer: writer.add_tensor("blk.0.attn_q.bias", BIAS)},
        "attention.sliding_window 64, which is not carried": {"add": lambda writer: writer.add_sliding_window(64)},
        "splits text as viking, which is not carried": {"add": lambda writer: writer.add_tokenizer_pre("viking")},
        "blk.1.ffn_up.weight is missing or has no place": {"leave_out": "blk.1.ffn_up.weight"},
    }.items(),
)
def test_what_a_gguf_file_holds_and_no_folder_says_is_refused(convert, tmp_path, changes, said):
    """Biases were dropped and missing weights drawn at random; windows, scales and splits were passed over."""
    line = convert(**changes).exits(2).stderr.splitlines()[-1]
    assert said in line
    assert "tiny.gguf" in line
    assert not (tmp_path / "made").exists()

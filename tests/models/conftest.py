"""Tiny random checkpoints, written as a user would have them: with `save_pretrained`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from specextend.models.causal_lm import check_model, load_causal_lm
from specextend.models.model_files import ModelError
from tests.job.conftest import sets, specextend
from tests.refused import refused

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def byte_tokenizer():
    """A tokenizer of 64 tokens: 60 characters, one merge and three special tokens."""
    first, second, *others = sorted(pre_tokenizers.ByteLevel.alphabet())[: SHAPE["vocab_size"] - 4]
    tokens = ["<unk>", "<s>", "</s>", first, second, *others, first + second]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(first, second)], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture
def write_model(tmp_path):
    """Writes a checkpoint and returns its folder; keywords go into its config."""

    def write(name="target", model_type="llama", **values):
        torch.manual_seed(0)
        sliding = {"sliding_window": None} if model_type == "mistral" else {}
        config = CONFIG_MAPPING[model_type](**(SHAPE | sliding | values))
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


def load(folder, dtype="float32", *adapter):
    return load_causal_lm(str(folder), dtype, "cpu", *map(str, adapter))


def check(*folders):
    """Check a model, and an adapter."""
    return check_model(*map(str, folders))


def refusal(*folders, read=check):
    """What a user reads; it must be one line."""
    return refused(read, *map(str, folders), kind=ModelError)


def asked(folder, *command):
    """What a command says of a target without a draft."""
    settings = sets("decoding.mode=autoregressive", "target.dtype=float32", f"target.model={folder}")
    return specextend(*command, "--config", "tiny-random", *settings)


def edit_json(path, **values):
    """Change keys of a JSON file; a value of None removes the key."""
    merged = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


def edit_tensors(folder, changes, rename=str, file="model.safetensors"):
    """Change tensors of a checkpoint, of which None removes one, and all names by `rename`."""
    path = Path(folder, file)
    merged = {rename(name): tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}
    save_file(merged, path, {"format": "pt"})

"""GGUF files: the same model as in a folder, from one file."""

from __future__ import annotations

import gguf
import pytest
import torch

from specextend.checkpoint import ModelError
from specextend.model_files import weight_hashes
from specextend.models import TargetOptions, check_model, load_target, load_tokenizer, read_facts

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, num_heads):
    """GGUF keeps each head's rotated halves interleaved."""
    rows = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, rows, -1).transpose(1, 2).reshape(weight.shape)


def tensors_of(model):
    """A transformers Llama's weights under GGUF's names."""
    config, state = model.config, model.state_dict()
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output.weight", state["lm_head.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            yield f"blk.{layer}.{ours}.weight", interleaved(weight, heads[ours]) if ours in heads else weight


def write_gguf(path, model, tokenizer):
    """The model as one GGUF file in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number < 3 else 1 for _, number in vocabulary])
    writer.add_token_merges(['! "'])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in tensors_of(model):
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder_and_file(write_model, tmp_path):
    """The same random model as a folder and as a GGUF file."""
    folder, file = write_model(), tmp_path / "tiny.gguf"
    model = load_target(TargetOptions(model=str(folder), dtype="float32", device="cpu"), "sdpa")
    write_gguf(file, model, load_tokenizer(str(folder)))
    return folder, file


def test_a_gguf_file_is_the_model_it_was_made_from(folder_and_file):
    """Transformers may keep GGUF weights packed; the engine needs plain tensors that give the same logits."""
    token_ids = torch.tensor([[1, 5, 9, 20, 3]])
    models = [
        load_target(TargetOptions(model=str(path), dtype="float32", device="cpu"), "sdpa") for path in folder_and_file
    ]
    torch.testing.assert_close(models[1](token_ids).logits, models[0](token_ids).logits)


def test_a_gguf_model_saves_as_a_plain_folder(folder_and_file, tmp_path):
    """What `make models` does; marks of quantization left on the model make saving fail."""
    _, file = folder_and_file
    model = load_target(TargetOptions(model=str(file), dtype="bfloat16", device="cpu"), "sdpa")
    model.save_pretrained(tmp_path / "saved")
    saved = load_target(TargetOptions(model=str(tmp_path / "saved"), device="cpu"), "sdpa")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))


def test_facts_tokenizer_and_hashes_come_from_the_one_file(folder_and_file):
    """A GGUF has no folder of its own, so nothing beside it may be asked."""
    folder, file = folder_and_file
    facts, expected = check_model(str(file)), read_facts(str(folder))
    assert (facts.context_length, facts.vocab_size, facts.eos_token_ids) == (256, 64, (2,))
    assert facts.kv_bytes_per_token("float16") == expected.kv_bytes_per_token("float16")
    assert load_tokenizer(str(file)).eos_token_id == 2
    assert len(set(weight_hashes(str(file)).values())) == 1


@pytest.mark.parametrize("kept", [4, 200, -100])
def test_a_gguf_file_cut_short_is_refused_in_one_line(folder_and_file, kept):
    """An interrupted download, wherever it stopped."""
    _, file = folder_and_file
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"tiny\.gguf") as refused:
        check_model(str(file))
    assert "\n" not in str(refused.value)

"""GGUF files: the same model as in a folder, from one file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch

from specextend.checkpoint import ModelError
from specextend.file_hashes import cache_folder, file_sha256
from specextend.gguf_cache import keep
from specextend.model_files import weight_hashes
from specextend.models import TargetOptions, check_model, load_target, load_tokenizer, read_facts
from tests.models.conftest import SHAPE

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


def write_gguf(path, model, tokenizer, architecture="llama", *, merges=True):
    """The model as one GGUF file in float32. Its vocabulary has merges, as GPT-2's, or scores, as SentencePiece's."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
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
    writer.add_tokenizer_model("gpt2" if merges else "llama")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if number < 3 else 1 for _, number in vocabulary])
    if merges:
        writer.add_token_merges(['! "'])
    else:
        writer.add_token_scores([-float(number) for _, number in vocabulary])
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


TEXTS = ["!! #$%", "e\u0301te\u0301 e", "<s> $ </s>", ""]
"""Among them an accent written as a character of its own: only some tokenizers would join it with its letter."""


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """An empty cache folder of the user; afterwards there is what has been kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specextend"


@pytest.fixture
def without_cache(monkeypatch):
    """A machine that can keep nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "relative")
    assert cache_folder() is None


def what_is_read(file):
    """All that comes from a GGUF's config and tokenizer."""
    tokenizer = load_tokenizer(str(file))
    return {
        "facts": check_model(str(file)),
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "backend": json.loads(tokenizer.backend_tokenizer.to_str()),
        "special": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
    }


def entry(kept, part):
    [folder] = kept.glob(f"gguf-{part}-*")
    return folder


def mark(folder, name, old, new):
    """Change a file of an entry and its hash: who reads the change has read the entry, not the GGUF."""
    path = folder / name
    path.write_text(path.read_text().replace(old, new))
    hashes = json.loads((folder / "hashes.json").read_text())
    (folder / "hashes.json").write_text(json.dumps(hashes | {name: file_sha256(path)}))


@pytest.mark.parametrize(
    ("architecture", "merges"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", True)]
)
def test_what_is_kept_of_a_gguf_file_is_what_its_conversion_gives(architecture, merges, write_model, tmp_path, kept):
    """Summaries of a first run and of a second one must not differ. AutoTokenizer would make them: it gives a Qwen2
    tokenizer that is read from a folder a normalizer, which the same one converted from a GGUF does not have.
    """
    folder, file = write_model(), tmp_path / "tiny.gguf"
    model = load_target(TargetOptions(model=str(folder), dtype="float32", device="cpu"), "sdpa")
    write_gguf(file, model, load_tokenizer(str(folder)), architecture, merges=merges)
    converted, again = what_is_read(file), what_is_read(file)
    assert entry(kept, "tokenizer").is_dir()
    assert again == converted
    assert converted["facts"].vocab_size == SHAPE["vocab_size"]


def test_a_gguf_file_is_converted_once_however_often_and_wherever_it_lies(folder_and_file, kept, tmp_path):
    """A vocabulary of 150,000 tokens takes eight seconds each time, and a run asked a dozen times."""
    _, file = folder_and_file
    what_is_read(file)
    mark(entry(kept, "config"), "config.json", '"max_position_embeddings": 256', '"max_position_embeddings": 128')
    mark(entry(kept, "tokenizer"), "tokenizer_config.json", '"eos_token": "</s>"', '"eos_token": "<s>"')
    copy = shutil.copy(file, tmp_path / "copy.gguf")
    for path in (file, copy):
        assert check_model(str(path)).context_length == 128
        assert load_tokenizer(str(path)).eos_token == "<s>"


def test_a_gguf_file_that_was_found_whole_is_not_examined_again(folder_and_file, kept):
    """Its headers hold the vocabulary, so that reading them takes as long as converting it. Shown by a false entry."""
    _, file = folder_and_file
    weight_hashes(str(file))
    assert entry(kept, "headers").is_dir()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short"):
        weight_hashes(str(file))
    assert keep(file, "headers", lambda folder: None)
    assert weight_hashes(str(file))


def test_unpacked_weights_are_kept_for_the_next_start(folder_and_file, kept):
    """Ten seconds for a small model, minutes for a large one, in each worker. Shown by an entry of other weights."""
    folder, file = folder_and_file
    options = TargetOptions(model=str(file), dtype="bfloat16", device="cpu")
    weights = load_target(options, "sdpa").lm_head.weight
    unpacked = entry(kept, "bfloat16")
    assert torch.equal(load_target(options, "sdpa").lm_head.weight, weights)
    other = load_target(TargetOptions(model=str(folder), dtype="bfloat16", device="cpu"), "sdpa")
    other.lm_head.weight.zero_()
    other.save_pretrained(unpacked)
    hashes = {path.name: file_sha256(path) for path in unpacked.iterdir() if path.name != "hashes.json"}
    (unpacked / "hashes.json").write_text(json.dumps(hashes))
    assert not load_target(options, "sdpa").lm_head.weight.any()


def test_a_disk_that_is_nearly_full_keeps_no_weights(folder_and_file, kept):
    """A cache must never be what stops another program."""
    _, file = folder_and_file
    assert not keep(file, "float32", lambda folder: None, num_bytes=shutil.disk_usage(kept.parent.parent).free)
    assert keep(file, "float32", lambda folder: None, num_bytes=1)


def test_another_file_in_the_same_place_is_converted_again(folder_and_file, kept):
    """A model that was fetched again under its old name."""
    _, file = folder_and_file
    what_is_read(file)
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"abcd")
    what_is_read(file)
    assert len(list(kept.glob("gguf-tokenizer-*"))) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "added", "no hashes", "a file"])
@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_a_damaged_entry_is_made_anew(part, damage, folder_and_file, kept):
    """A cache may be damaged or half deleted at any time."""
    _, file = folder_and_file
    converted = what_is_read(file)
    folder = entry(kept, part)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    victim = next(path for path in folder.iterdir() if path.name != "hashes.json")
    match damage:
        case "cut":
            victim.write_bytes(victim.read_bytes()[:10])
        case "gone":
            victim.unlink()
        case "added":
            (folder / "added_tokens.json").write_text("{}")
        case "no hashes":
            (folder / "hashes.json").write_text("[1")
        case "a file":
            shutil.rmtree(folder)
            folder.touch()
    assert what_is_read(file) == converted
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(kept.glob("*.tmp")), "what was damaged is gone, and no temporary folder is left"


def test_without_a_cache_folder_a_gguf_file_is_read_all_the_same(folder_and_file, without_cache):
    """Containers have no home."""
    _, file = folder_and_file
    assert what_is_read(file) == what_is_read(file)


def test_a_cache_folder_that_cannot_be_written_is_no_error(folder_and_file, kept):
    """Or a home that is read-only: a file stands where the folder would be."""
    _, file = folder_and_file
    kept.parent.mkdir()
    kept.touch()
    assert what_is_read(file) == what_is_read(file)
    assert Path(kept).read_bytes() == b""


def test_an_entry_that_another_process_has_just_written_stays(folder_and_file, kept):
    """Workers of a node start together, and each finds nothing kept."""
    _, file = folder_and_file
    what_is_read(file)
    folder = entry(kept, "config")
    inode = folder.stat().st_ino
    assert keep(file, "config", lambda own: (own / "config.json").write_text("{}"))
    assert folder.stat().st_ino == inode
    assert check_model(str(file)).context_length == 256

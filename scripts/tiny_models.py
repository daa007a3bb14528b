"""A random target with 0.2 million weights and two drafts, to run the job in seconds.

The text is noise. Embeddings outweigh the layers, so the next token depends mostly on the last one,
also visible to the drafts. Sharp attention makes a quarter of the tokens depend on distant ones.
The small model agrees with the target's first choice two times in three, the head two in five, so
right and wrong guesses both occur.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specextend.drafters.formats import WEIGHTS_FILE, EagleConfig

CONTEXT_LENGTH = 8192
EMBEDDING_STD = 1.5
QUERY_SCALE = 3.0
HIDDEN_SIZE = 64
VOCABULARY = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_models(folder: Path, corpus: Path) -> None:
    """Write `target`, `draft-model` and `draft-eagle`. The tokenizer is trained on a Parquet
    file.
    """
    torch.manual_seed(0)
    tokenizer = train_tokenizer(corpus)
    target = random_llama()
    for name, model in (("target", target), ("draft-model", perturbed(target, 0.1))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_eagle(folder / "draft-eagle")


def train_tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with about two characters per token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        pq.read_table(corpus, columns=["text"])["text"].to_pylist(), trainer
    )
    unknown, begin, end = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=end
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def random_llama() -> LlamaForCausalLM:
    """Make a model of four layers with grouped heads and an untied LM head, in float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= QUERY_SCALE
    return model


def perturbed(model: LlamaForCausalLM, noise: float) -> LlamaForCausalLM:
    """Return a copy with normal noise, in units of the weights' standard deviation."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in copy.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * noise)
    return copy


def write_eagle(folder: Path) -> None:
    """Write a head that returns its input embedding: right if the target's layers add little."""
    config = EagleConfig(
        target="tiny-random",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rope_theta=10000.0,
        layer_norm_eps=1e-6,
        head_norm_eps=1e-6,
        dtype="float32",
    )
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.05
        for name, shape in config.shapes().items()
    }
    weights["fc.weight"][:, : config.hidden_size] += torch.eye(config.hidden_size)
    folder.mkdir()
    config.save(folder)
    save_file(weights, folder / WEIGHTS_FILE)

"""A small standalone LM with the target's tokens: a stock Llama, learned from text and from the target's choices.

It proposes a reduced vocabulary; row R of its embedding stands for every other token. It sees at most `positions`
tokens while it learns, so a full cache of a longer document is outside its experience.

Shapes: `B` windows, `T` tokens, `C` the target's hidden size, `R` draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaConfig, LlamaForCausalLM

from specextend.drafters.eagle_config import VOCABULARY, WEIGHTS_FILE
from specextend.drafters.reduced import FILE
from specextend.training.recording import Recording

HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelOptions:
    """The shape of the model."""

    hidden_size: int = 384
    num_layers: int = 2
    intermediate_size: int = 1024
    num_kv_heads: int = 2
    positions: int = 1024
    """Tokens of a window, at most; what the model is trained on and its `max_position_embeddings`."""

    def __post_init__(self) -> None:
        if min(self.hidden_size, self.num_layers, self.intermediate_size, self.num_kv_heads, self.positions) < 1:
            raise ValueError("the sizes of a standalone LM must be 1 or more")
        if self.hidden_size % (HEAD_DIM * self.num_kv_heads):
            raise ValueError(f"hidden_size must be a multiple of {HEAD_DIM} x num_kv_heads, got {self.hidden_size}")


def new_language_model(options: LanguageModelOptions, vocabulary: Tensor, embedding: Tensor, target: str) -> Any:
    """A model whose embedding begins as the main directions of the target's: embedding [tokens, C], vocabulary [R]."""
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 1,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // HEAD_DIM,
        num_key_value_heads=options.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=options.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config.update({"target": target, "target_vocab_size": len(embedding)})
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    rows = embedding[vocabulary].float()
    directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[: options.hidden_size]
    projected = (rows - rows.mean(0)) @ directions.T
    with torch.no_grad():
        model.model.embed_tokens.weight[:-1, : projected.shape[1]] = projected * (0.05 / projected.std())
    return model


def row_of_token(vocabulary: Tensor, vocab_size: int) -> Tensor:
    """[tokens] int64: the model's row of each of the target's tokens."""
    rows = torch.full((vocab_size,), len(vocabulary))
    rows[vocabulary] = torch.arange(len(vocabulary))
    return rows


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [T] of the model, and the target's last hidden states [T, C] where it has read them."""

    rows: Tensor
    hidden: Tensor | None = None


def text_windows(token_ids: Sequence[int], rows: Tensor, size: int) -> list[Window]:
    """A text in windows of `size` tokens, what is left over dropped."""
    every = rows[torch.tensor(token_ids, dtype=torch.int64)]
    return [Window(window) for window in every.split(size) if len(window) == size]


def recorded_windows(recording: Recording, rows: Tensor, size: int, seed: int) -> list[Window]:
    """One window an answer: as much of it as fits, behind a piece of the prompt from anywhere or its end."""
    random = Random(seed)
    prompt, windows = recording.prompt, []
    for answer in recording.answers:
        room = max(0, size - len(answer.token_ids))
        most = max(0, len(prompt.token_ids) - room)
        first = random.choice((most, random.randrange(most + 1)))
        before = slice(first, first + room)
        token_ids = torch.cat([prompt.token_ids[before], answer.token_ids[:size]])
        windows.append(Window(rows[token_ids], torch.cat([prompt.last_hidden[before], answer.last_hidden[:size]])))
    return windows


def text_loss(model: Any, windows: Sequence[Window]) -> Tensor:
    """Cross-entropy of the next row, over windows of one length."""
    rows = torch.stack([window.rows for window in windows]).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(rows[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def distillation_loss(model: Any, window: Window, lm_head: Tensor) -> Tensor:
    """Soft cross-entropy against the target's distribution over the draft's tokens; lm_head [R, C]."""
    assert window.hidden is not None
    logits = _logits(model, window)
    wanted = linear(window.hidden.to(lm_head), lm_head).float().softmax(-1)
    return (logits.logsumexp(-1) - (wanted * logits).sum(-1)).mean()


def right_choices(model: Any, window: Window, lm_head: Tensor, vocabulary: Tensor) -> Tensor:
    """[T] bool: where model and target have the same first choice; lm_head [tokens, C], vocabulary [R]."""
    assert window.hidden is not None
    wanted = linear(window.hidden.to(lm_head), lm_head).argmax(-1)
    return vocabulary.to(wanted.device)[_logits(model, window).argmax(-1)] == wanted


def _logits(model: Any, window: Window) -> Tensor:
    """[T, R] fp32, without the row of all other tokens."""
    with torch.autocast(model.device.type, torch.bfloat16):
        return model(window.rows[None].to(model.device)).logits[0, :, :-1].float()


def save_language_model(model: Any, vocabulary: Tensor, folder: Path) -> None:
    """A folder that `draft.kind: model` reads, in bfloat16."""
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / WEIGHTS_FILE, {"format": "pt"})
    save_file({VOCABULARY: vocabulary.contiguous()}, folder / FILE)
    model.config.architectures, model.config.dtype = [type(model).__name__], "bfloat16"
    model.config.save_pretrained(folder)

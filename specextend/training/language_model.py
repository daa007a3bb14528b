"""Training of a small standalone LM, a stock Llama: first on the text alone, then on the target's choices.

It proposes a reduced vocabulary of the target's tokens; row R of its embedding stands for all other tokens. In training
it never sees more than POSITIONS tokens, so a full cache of a longer document is unknown to it.

Shapes: `B` windows, `T` tokens, `C` the target's hidden size, `R` draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaConfig, LlamaForCausalLM

from specextend.decoding.device import multiplies_bf16
from specextend.drafters.formats import WEIGHTS_FILE
from specextend.drafters.small_lm import FILE, ReducedVocabulary
from specextend.model_files import VOCABULARY
from specextend.models import load_causal_lm
from specextend.training.recording import Recording
from specextend.training.task import HEAD_DIM, NUM_KV_HEADS, TRAINING, Task, TrainOptions, fit

POSITIONS = 1024
"""Most tokens of a window: what the model is trained on, and its `max_position_embeddings`."""
WIDER = 8 / 3
"""Size of the MLP in hidden sizes."""


def new_language_model(options: TrainOptions, vocabulary: Tensor, embedding: Tensor, target: str) -> Any:
    """Make a model whose embedding starts as the principal components of the target's `embedding` [tokens, C]."""
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 1,
        hidden_size=options.hidden_size,
        intermediate_size=round(options.hidden_size * WIDER),
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // HEAD_DIM,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
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


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Rows [T] of the model, and the target's last hidden states [T, C] at them."""

    rows: Tensor
    hidden: Tensor


def text_windows(token_ids: Tensor, rows: Tensor, size: int) -> list[Tensor]:
    """Cut a text [T] into windows of `size` rows and drop the remainder."""
    return [window for window in rows[token_ids].split(size) if len(window) == size]


def recorded_windows(recording: Recording, rows: Tensor, size: int, seed: int) -> list[TokenWindow]:
    """Make one window for each answer: the prompt's end or a random piece of it, then as much of the answer as fits."""
    random = Random(seed)
    prompt, windows = recording.prompt, []
    for answer in recording.answers:
        room = max(0, size - len(answer.token_ids))
        most = max(0, len(prompt.token_ids) - room)
        first = random.choice((most, random.randrange(most + 1)))
        before = slice(first, first + room)
        token_ids = torch.cat([prompt.token_ids[before], answer.token_ids[:size]])
        windows.append(TokenWindow(rows[token_ids], torch.cat([prompt.hidden[before], answer.hidden[:size]])))
    return windows


def text_loss(model: Any, windows: Sequence[Tensor]) -> Tensor:
    """Compute the cross-entropy of the next row, over windows of equal length."""
    rows = torch.stack(list(windows)).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=multiplies_bf16(model.device)):
        logits = model(rows[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def distillation_loss(model: Any, window: TokenWindow, lm_head: Tensor) -> Tensor:
    """Compute the soft cross-entropy against the target over the draft's tokens; lm_head [R, C]."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=multiplies_bf16(model.device)):
        logits = model(window.rows[None].to(model.device)).logits[0, :, :-1].float()  # without the row of all others
    wanted = linear(window.hidden.to(lm_head), lm_head).float().softmax(-1)
    return (logits.logsumexp(-1) - (wanted * logits).sum(-1)).mean()


def save_language_model(model: Any, vocabulary: Tensor, folder: Path) -> None:
    """Write a folder that `draft.kind: model` reads, in bfloat16."""
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / WEIGHTS_FILE, {"format": "pt"})
    save_file({VOCABULARY: vocabulary.contiguous()}, folder / FILE)
    model.config.architectures, model.config.dtype = [type(model).__name__], "bfloat16"
    model.config.save_pretrained(folder)


TEXT_BATCH = 2
"""Number of windows in a step on text."""
TEXT_RATE = 2e-3
"""Learning rate on text."""


def train_language_model(task: Task) -> None:
    """Train a model and write it."""
    target, options, vocabulary = task.target, task.options, task.vocabulary
    rows = ReducedVocabulary(vocabulary, len(target.embedding), len(vocabulary)).rows()
    torch.manual_seed(options.seed)
    if task.start is None:
        model = new_language_model(options, vocabulary, target.embedding.cpu(), target.name)
        model.config.update({"tokens_sha256": target.tokens_sha256})
        model.to(target.device)
        _read_text(task, model, rows)
    else:
        model = load_causal_lm(str(task.start), None, "float32", str(target.device)).requires_grad_(True)
    lm_head = target.lm_head[vocabulary]

    def loss(path: Path, generator: torch.Generator) -> Tensor:
        windows = recorded_windows(Recording.load(path), rows, POSITIONS, generator.initial_seed())
        return torch.stack([distillation_loss(model, window, lm_head) for window in windows]).mean()

    fit(model, loss, task.learned, task.folder / TRAINING, task.show, options)
    save_language_model(model, vocabulary, task.folder)


def _read_text(task: Task, model: Any, rows: Tensor) -> None:
    """Train on the text alone."""
    windows = [window for text in task.texts for window in text_windows(text, rows, POSITIONS)]
    batches = [windows[i : i + TEXT_BATCH] for i in range(0, len(windows), TEXT_BATCH)]
    if batches:
        folder = task.folder / TRAINING / "text"
        folder.mkdir(exist_ok=True)
        options = replace(task.options, passes=1, learning_rate=TEXT_RATE)
        fit(model, lambda batch, _: text_loss(model, batch), batches, folder, task.show, options)

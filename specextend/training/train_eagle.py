"""Training a head in our own format, with copy heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.drafters.eagle_config import VOCABULARY, WEIGHTS_FILE, EagleConfig, load_eagle_config
from specextend.training.eagle import EagleHead, add_copy_heads, new_weights
from specextend.training.task import Target, Task
from specextend.training.train_head import fit_head, judge_head


def train_eagle(task: Task) -> dict[str, Any]:
    """Train, write and judge a head."""
    config, weights = _first_head(task)
    head = EagleHead(config, weights, task.target.embedding, task.target.lm_head).to(task.target.device)
    fit_head(task, head)
    dtype = getattr(torch, config.dtype)
    tensors = {name: weight.to(dtype).cpu().contiguous() for name, weight in head.tensors.values().items()}
    vocabulary = {} if config.draft_vocab_size is None else {VOCABULARY: weights[VOCABULARY]}
    save_file({**tensors, **vocabulary}, task.output / WEIGHTS_FILE)
    config.save(task.output)
    return judge_head(task, head)


def _first_head(task: Task) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Shape and tensors that training begins with."""
    options, target = task.options, task.target
    if options.start_from is not None:
        config = load_eagle_config(options.start_from)
        weights = load_file(f"{options.start_from}/{WEIGHTS_FILE}")
    else:
        assert task.vocabulary is not None
        config = _new_config(target, len(task.vocabulary))
        weights = new_weights(config, target.final_norm, options.sample.seed) | {VOCABULARY: task.vocabulary}
    if options.copy_heads and config.copy_heads is None:
        config = replace(config, copy_heads=options.copy_heads)
        weights = add_copy_heads(weights, config, target.embedding.cpu(), options.sample.seed)
    return replace(config, tokens_sha256=target.tokens_sha256), weights


def _new_config(target: Target, draft_vocab_size: int) -> EagleConfig:
    """One layer of the target's own shape."""
    return EagleConfig(
        target=target.name,
        vocab_size=len(target.embedding),
        hidden_size=target.config.hidden_size,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=target.config.intermediate_size,
        rope_theta=float(target.config.rope_parameters["rope_theta"]),
        layer_norm_eps=float(target.config.rms_norm_eps),
        head_norm_eps=1e-6,
        dtype="bfloat16",
        draft_vocab_size=draft_vocab_size,
    )

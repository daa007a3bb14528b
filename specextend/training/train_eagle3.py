"""Training a head in the published EAGLE-3 layout."""

from __future__ import annotations

from typing import Any

from specextend.drafters.formats import PublishedHead
from specextend.training.eagle3 import FusedHead, fused_layers, save_fused
from specextend.training.eagle3_start import ROPE_THETA, new_weights, read_text
from specextend.training.recording import Recording
from specextend.training.task import Target, Task
from specextend.training.train_head import fit_head, judge_head

START_FROM = 16
"""Recordings whose prompts the first weights are made of."""


def train_eagle3(task: Task) -> dict[str, Any]:
    """Train, write and judge a head."""
    target, vocabulary = task.target, task.vocabulary
    assert vocabulary is not None
    shape = _shape(task, len(vocabulary))
    text = read_text(Recording.load(path).prompt for path in task.learned[:START_FROM])
    embedding, rows = target.embedding.cpu(), target.lm_head.cpu()[vocabulary]
    weights = new_weights(shape, text, embedding, rows, target.final_norm.cpu(), task.options.sample.seed)
    head = FusedHead(shape, weights, vocabulary, target.embedding, target.lm_head).to(target.device)
    fit_head(task, head)
    save_fused(head, target.name, target.config.max_position_embeddings, task.output)
    return judge_head(task, head)


def _shape(task: Task, draft_vocab_size: int) -> PublishedHead:
    """One layer of the target's shape, but that every query head has keys and values of its own.

    All that the output learns of a token comes through the values.
    """
    target: Target = task.target
    return PublishedHead(
        folder=task.output,
        format="EAGLE-3",
        fused=True,
        vocab_size=len(target.embedding),
        target_hidden_size=target.config.hidden_size,
        hidden_size=target.config.hidden_size,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_attention_heads,
        head_dim=target.head_dim,
        intermediate_size=target.config.intermediate_size,
        norm_eps=float(target.config.rms_norm_eps),
        rope={"rope_theta": ROPE_THETA},
        draft_vocab_size=draft_vocab_size,
        layers=fused_layers(target.config.num_hidden_layers),
        norm_before_residual=False,
        norm_before_fc=False,
        layer_norms=False,
        fusion_bias=False,
    )

"""Training of a head in the published EAGLE-3 layout: it reads three of the target's layers and has its own LM head.

The formula is that of `drafters/eagle_network.py`.

Shapes: `n` slots, `C` hidden size, `K` key heads, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specextend.drafters.draft_cache import rotate
from specextend.drafters.eagle_config import WEIGHTS_FILE
from specextend.drafters.formats import PublishedHead
from specextend.models import rope_frequencies
from specextend.training.head_training import HeadTensors, evaluate_head, fit_head
from specextend.training.slots import SlotInputs
from specextend.training.task import Task


class FusedHead(nn.Module):
    """A trainable head in fp32; the embedding is the target's and stays frozen."""

    def __init__(
        self,
        shape: PublishedHead,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor,
        embedding: Tensor,
        lm_head: Tensor,
    ) -> None:
        """Take all weights that the shape requires except `d2t`, and the target's embedding and lm_head [tokens, C]."""
        super().__init__()
        self.shape = shape
        self.embedding: Tensor
        self.target_rows: Tensor
        self.vocabulary: Tensor
        self._inv_freq: Tensor
        self.tensors = HeadTensors(weights, shape.head_dim, shape.norm_eps, shape.norm_eps)
        self.register_buffer("vocabulary", vocabulary.to(lm_head.device), persistent=False)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("target_rows", lm_head[vocabulary], persistent=False)
        inv_freq, factor = rope_frequencies(shape.rope, shape.head_dim, "the head")
        assert factor == 1
        self.register_buffer("_inv_freq", inv_freq, persistent=False)

    def keys_values(self, places: SlotInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values [n, K, D] from the target's features [n, 3C] or the head's own output [n, C]."""
        inputs = self._inputs(places, self._fused(hidden))
        keys = rotate(self.tensors.heads("layer.self_attn.k_proj", inputs), places.positions, self._inv_freq)
        return keys, self.tensors.heads("layer.self_attn.v_proj", inputs)

    def layer(self, places: SlotInputs, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Compute the output [n, C] of slots that see keys and values [m, K, D] where `visible` [n, m] is true."""
        fused = self._fused(hidden)
        query = self.tensors.heads("layer.self_attn.q_proj", self._inputs(places, fused))
        return self.tensors.finish(fused, rotate(query, places.positions, self._inv_freq), keys, values, visible)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, V] from outputs [n, C]."""
        return self.tensors.linear("lm_head", self.tensors.norm("norm", hidden))

    def _fused(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.shape[-1] == self.shape.hidden_size else self.tensors.linear("fc", hidden)

    def _inputs(self, places: SlotInputs, fused: Tensor) -> Tensor:
        """Join normed embeddings and features [n, 2C], the input of queries, keys and values."""
        embedded = self.tensors.norm("layer.input_layernorm", self.embedding[places.token_ids])
        return torch.cat([embedded, self.tensors.norm("layer.hidden_norm", fused)], -1)


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """Choose the three layers of the target whose outputs the head reads.

    They are those of published heads; a target of few layers gives its first, middle and last. Raises ValueError for a
    target of one or two layers.
    """
    if num_layers < 3:
        raise ValueError(
            f"kind eagle3 reads the outputs of three layers; the target has only {num_layers}, so choose another kind"
        )
    usual = (1, num_layers // 2 - 1, num_layers - 4)
    return usual if num_layers > 6 else (0, num_layers // 2, num_layers - 1)


def new_fused_weights(shape: PublishedHead, lm_rows: Tensor, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Initialise every trained tensor so that the head first passes on the output of the highest of its three layers.

    `lm_rows` [V, C] and `final_norm` [C] are the target's.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size, generator=generator)
        for name, size in shape.required().items()
        if name != "d2t"
    }
    weights["fc.weight"][:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    return {**weights, "lm_head.weight": lm_rows.float().cpu(), "norm.weight": final_norm.float().cpu()}


def save_fused(head: FusedHead, target: str, context_length: int, folder: Path) -> None:
    """Write the head in the layout of SafeAILab's EAGLE-3 checkpoints, in bfloat16.

    config.json names the layers in both ways that readers know: by the layer they enter (vLLM) and as outputs (SGLang).
    """
    shape = head.shape
    assert shape.layers is not None
    tensors = {_published(name): value.to(torch.bfloat16).cpu() for name, value in head.tensors.values().items()}
    vocabulary = head.vocabulary.cpu()
    has = torch.zeros(shape.vocab_size, dtype=torch.bool)
    has[vocabulary] = True
    maps = {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": has}
    save_file(
        {name: tensor.contiguous() for name, tensor in {**tensors, **maps}.items()},
        folder / WEIGHTS_FILE,
        {"format": "pt"},
    )
    config = _config(shape, shape.layers) | {"max_position_embeddings": context_length, "target": target}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(shape: PublishedHead, layers: tuple[int, ...]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        **shape.rope,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def _published(name: str) -> str:
    """Rename `layer.mlp.up_proj.weight` to `midlayer.mlp.up_proj.weight`."""
    return f"mid{name}" if name.startswith("layer.") else name


def train_eagle3(task: Task) -> dict[str, Any]:
    """Train a head, write it and return its figures."""
    target, vocabulary = task.target, task.vocabulary
    assert vocabulary is not None
    shape = _shape(task, len(vocabulary))
    weights = new_fused_weights(shape, target.lm_head[vocabulary], target.final_norm, task.options.sample.seed)
    head = FusedHead(shape, weights, vocabulary, target.embedding, target.lm_head).to(target.device)
    fit_head(task, head)
    save_fused(head, target.name, target.config.max_position_embeddings, task.output)
    return evaluate_head(task, head)


def _shape(task: Task, draft_vocab_size: int) -> PublishedHead:
    """Describe a head of one layer in the target's shape, in which every query head has its own keys and values.

    The token's embedding reaches the output only through the values, so they need the room.
    """
    target = task.target
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
        rope={"rope_theta": float(target.config.rope_parameters["rope_theta"])},
        draft_vocab_size=draft_vocab_size,
        layers=fused_layers(target.config.num_hidden_layers),
        norm_before_residual=False,
        norm_before_fc=False,
        layer_norms=False,
        fusion_bias=False,
    )

"""A head in the published EAGLE-3 layout as a trainable module: three of the target's layers in, an LM head of its own.

The formula is that of `drafters/published.py`.

Shapes: `n` slots, `C` hidden size, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specextend.decoding.draft_cache import rotate
from specextend.drafters.eagle_config import WEIGHTS_FILE
from specextend.drafters.formats import PublishedHead
from specextend.models import rope_frequencies
from specextend.training.chain import Tensors
from specextend.training.slots import Places


class FusedHead(nn.Module):
    """The head in fp32, for training; the embedding is the target's and stays as it is."""

    def __init__(
        self,
        shape: PublishedHead,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor,
        embedding: Tensor,
        lm_head: Tensor,
    ) -> None:
        """`weights`: all that the shape requires but `d2t`. `vocabulary` [V] ids; embedding, lm_head [tokens, C]."""
        super().__init__()
        self.shape = shape
        self.embedding: Tensor
        self.target_rows: Tensor
        self.vocabulary: Tensor
        self._inv_freq: Tensor
        self.tensors = Tensors(weights, shape.head_dim, shape.norm_eps, shape.norm_eps)
        self.register_buffer("vocabulary", vocabulary.to(lm_head.device), persistent=False)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("target_rows", lm_head[vocabulary], persistent=False)
        inv_freq, factor = rope_frequencies(shape.rope, shape.head_dim, "the head")
        assert factor == 1
        self.register_buffer("_inv_freq", inv_freq, persistent=False)

    def keys_values(self, places: Places, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n, K, D] each of hidden [n, 3C] of the target or [n, C] of the head's own."""
        inputs = self._inputs(places, self._fused(hidden))
        keys = rotate(self.tensors.heads("layer.self_attn.k_proj", inputs), places.positions, self._inv_freq)
        return keys, self.tensors.heads("layer.self_attn.v_proj", inputs)

    def layer(self, places: Places, hidden: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """[n, C] of slots that see keys and values [m, K, D] as `visible` [n, m] says."""
        fused = self._fused(hidden)
        query = self.tensors.heads("layer.self_attn.q_proj", self._inputs(places, fused))
        return self.tensors.finish(fused, rotate(query, places.positions, self._inv_freq), keys, values, visible)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] of outputs [n, C]."""
        return self.tensors.linear("lm_head", self.tensors.norm("norm", hidden))

    def _fused(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.shape[-1] == self.shape.hidden_size else self.tensors.linear("fc", hidden)

    def _inputs(self, places: Places, fused: Tensor) -> Tensor:
        """[n, 2C]: what queries, keys and values are made of."""
        embedded = self.tensors.norm("layer.input_layernorm", self.embedding[places.token_ids])
        return torch.cat([embedded, self.tensors.norm("layer.hidden_norm", fused)], -1)


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs go in: those that published heads take, or some of a target of few layers.

    Raises ValueError for a target of one or two layers.
    """
    if num_layers < 3:
        raise ValueError(f"kind eagle3 joins the outputs of three layers; the target has {num_layers}")
    usual = (1, num_layers // 2 - 1, num_layers - 4)
    return usual if num_layers > 6 else (0, num_layers // 2, num_layers - 1)


def save_fused(head: FusedHead, target: str, context_length: int, folder: Path) -> None:
    """Write the head as SafeAILab's EAGLE-3 checkpoints are, in bfloat16.

    The layers are named in both ways that readers know: by what enters layer j (vLLM), and as outputs (SGLang).
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
    """`layer.mlp.up_proj.weight` as `midlayer.mlp.up_proj.weight`."""
    return f"mid{name}" if name.startswith("layer.") else name

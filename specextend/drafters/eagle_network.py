"""EAGLE heads in plain torch, in all formats of `formats.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu

from specextend.attention.plan import AttentionPlan, attend_plan
from specextend.core import Values, counted
from specextend.decoding.cache import DraftCache, KVCache, rotate
from specextend.decoding.layers import PRODUCTS, are_compiled, joined_in_one_call, linear, pack
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import HISTORY
from specextend.models.model_files import VOCABULARY, TensorInfo

COPY_READS = {"q_proj": (0, 3), "k_proj": (1, 4), "v_proj": (0, 1)}
"""Slice of tokens i + 1, i, i - 1, i - 2 in a projection of the copy heads."""
_JOINED = {
    "fuse": ["fc"],
    "qkv": [f"layer.self_attn.{name}" for name in COPY_READS],
    "o_proj": ["layer.self_attn.o_proj"],
    "gate_up": ["layer.mlp.gate_proj", "layer.mlp.up_proj"],
    "down_proj": ["layer.mlp.down_proj"],
}
"""Products, and the projections of one input that each joins."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """A head in any format: shape, and places of tensors."""

    folder: Path
    format: str
    fused: bool
    """EAGLE-3: reads several layers of the target."""
    vocab_size: int
    target_hidden_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layer_eps: float
    head_eps: float
    rope: Values
    draft_vocab_size: int
    layer_ids: tuple[int, ...] = ()
    """EAGLE-3: numbers of these layers in `config.json`; may be empty."""
    reading: str = "inputs"
    """Default meaning of `layer_ids`: `outputs` or `inputs` of layers."""
    window: int | None = None
    """Most visible tokens, itself included; None: all."""
    norm_before_residual: bool = False
    """EAGLE-3: the residual is the fused state after its norm."""
    norm_before_fc: bool = False
    """EAGLE-3: the joined states have a norm before `fc`."""
    fc_norm: bool = False
    """EAGLE-3.1: each state has a norm before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1 and ours: the next level reads the normed output."""
    layer_norms: bool = False
    """EAGLE-1 of `speculators`: norms of the embedding, before the layer and the LM head."""
    fusion_bias: bool = False
    """EAGLE-1 of `speculators`: `fc` has a bias."""
    is_ours: bool = False
    copy_heads: int = 0
    tokens_sha256: str | None = None
    """Hash of the target's tokenizer; None: unknown, and not checked."""
    sources: dict[str, TensorInfo] = field(default_factory=dict)
    """Tensors of the files, by our names."""

    @property
    def num_layers_read(self) -> int:
        """Number of target layers read."""
        return len(self.layer_ids or range(3)) if self.fused else 1

    def hidden_layers(
        self, num_target_layers: int, chosen: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return the target layers that the head reads; none for the last hidden state.

        Args:
            chosen: `draft.feature_layers`.

        Raises:
            ValueError: The target has no such layers, or `chosen` has another number of them.
        """
        num_layers = self.num_layers_read if self.fused else 0
        layers = self.explain_layers(num_target_layers, chosen)[0] if num_layers else chosen
        wanted = sorted({*layers} & {*range(num_target_layers)})
        if wanted != list(layers) or len(layers) != num_layers:
            raise ValueError(
                f"the head takes the outputs of layers {', '.join(map(str, layers))}, counted from "
                f"0; the target has {counted(num_target_layers, 'layer')}, of which it takes "
                f"{num_layers}"
            )
        return layers

    def explain_layers(
        self, num_target_layers: int, chosen: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
        """Return these layers for an EAGLE-3 head, why, and the layers of another reading.

        Only a guess has another reading.
        """
        # the inputs of layers 2, n / 2 and n - 3
        usual = (1, num_target_layers // 2 - 1, num_target_layers - 4)
        ids = self.layer_ids
        left = tuple(each - 1 for each in ids)
        other = left if self.reading == "outputs" else ids
        if chosen:
            return chosen, "draft.feature_layers names them", ()
        if not ids:
            return usual, "its config.json names none, and these are usual", ()
        # the first true line decides
        readings = (
            (self.format.startswith("speculators"), "inputs", "as speculators does"),
            (num_target_layers in ids, "inputs", f"{num_target_layers} is no output"),
            (ids == usual, "outputs", "these are usual"),
            (left == usual, "inputs", "these are usual"),
            (True, self.reading, f"a guess; the other is draft.feature_layers {[*other]}"),
        )
        number, reading, why = next((n, *each[1:]) for n, each in enumerate(readings) if each[0])
        named = ", ".join(map(str, ids))
        said = f"its ids {named} number layers by their {reading} ({why})"
        layers = ids if reading == "outputs" else left
        return layers, said, other if number == len(readings) - 1 else ()

    @property
    def num_features(self) -> int:
        """Features at a position of the target."""
        return self.num_layers_read * self.target_hidden_size

    def required(self) -> dict[str, tuple[int, ...]]:
        """Required tensors by our names."""
        hidden = self.hidden_size
        has_norms = self.is_ours or self.fused or self.layer_norms
        is_narrow = hidden != self.target_hidden_size
        wanted = {
            "embedding_norm.weight": (self.is_ours or self.layer_norms, (hidden,)),
            "feature_norm.weight": (self.is_ours, (hidden,)),
            "norm.weight": (has_norms, (hidden,)),
            "layer.input_layernorm.weight": (has_norms, (hidden,)),
            "layer.hidden_norm.weight": (self.fused, (hidden,)),
            "input_norm.weight": (self.norm_before_fc, (self.num_features,)),
            "fc.bias": (self.fusion_bias, (hidden,)),
            "lm_head.weight": (self.fused, (self.draft_vocab_size, hidden)),
            "embed_tokens.weight": (self.fused and is_narrow, (self.vocab_size, hidden)),
        }
        shapes = {name: shape for name, (is_wanted, shape) in wanted.items() if is_wanted}
        for number in range(self.num_layers_read if self.fc_norm else 0):
            shapes[f"fc_norm.{number}.weight"] = (self.target_hidden_size,)
        shapes |= self._products()
        if self.draft_vocab_size != self.vocab_size:
            shapes["d2t" if self.fused else VOCABULARY] = (self.draft_vocab_size,)
        return shapes

    def _products(self) -> dict[str, tuple[int, ...]]:
        """Return shapes of the matrices, and of the norm between attention and MLP."""
        hidden = self.hidden_size
        mlp = self.intermediate_size
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        width = 2 * hidden if self.fused else hidden
        copied = self.copy_heads * self.head_dim
        group = self.num_heads // self.num_kv_heads
        shapes = {
            "layer.self_attn.q_proj.weight": (queries, width),
            "layer.self_attn.k_proj.weight": (keys, width),
            "layer.self_attn.v_proj.weight": (keys, width),
            "layer.self_attn.o_proj.weight": (hidden, queries + copied * group),
            "layer.mlp.gate_proj.weight": (mlp, hidden),
            "layer.mlp.up_proj.weight": (mlp, hidden),
            "layer.mlp.down_proj.weight": (hidden, mlp),
            "layer.post_attention_layernorm.weight": (hidden,),
            "fc.weight": (hidden, self.num_features if self.fused else 2 * hidden),
        }
        if copied:
            shapes["copy.q_proj.weight"] = (copied * group, 3 * hidden)
            shapes["copy.k_proj.weight"] = (copied, 3 * hidden)
            shapes["copy.v_proj.weight"] = (copied, hidden)
        return shapes

    def optional(self) -> dict[str, tuple[int, ...]]:
        """Optional tensors by our names."""
        vocabulary = (self.draft_vocab_size,)
        if self.is_ours:
            return {VOCABULARY: vocabulary}
        products = self._products()
        biased = [name for name in products if name.endswith("_proj.weight")]
        return {
            "embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "lm_head.weight": (self.vocab_size, self.hidden_size),
            "fc.bias": (self.hidden_size,),
            "layer.self_attn.q_norm.weight": (self.head_dim,),
            "layer.self_attn.k_norm.weight": (self.head_dim,),
            **{f"{name.removesuffix('weight')}bias": products[name][:1] for name in biased},
            **({"d2t": vocabulary, "t2d": (self.vocab_size,)} if self.fused else {}),
        }


class EagleNetwork:
    """A head, with the target's embedding and LM head unless it has others.

    For position i, with e the embedding of token i + 1:

        ours        x = fc(concat(rmsnorm(e), rmsnorm(h)))
                    h: the target's last hidden state at i, after its final norm
                    h' = rmsnorm(x + attention(rmsnorm(x)) + mlp), logits by the target's LM head
        EAGLE-1/2   x = fc(concat(e, h))
                    h' = x + attention(x) + mlp, logits by the target's LM head
        EAGLE-3     x = fc(concat(outputs of three target layers at i))
                    h' = x + attention(concat(rmsnorm(e), rmsnorm(x))) + mlp
                    logits = lm_head(rmsnorm(h'))
        EAGLE-3.1   fc_norm: rmsnorm of each output before fc; norm_output: h' = rmsnorm(h') at last

    h' gives token i + 2, and replaces h or x on the next level (arXiv 2401.15077, 2503.01840).
    Norms and biases count where the checkpoint has them.

    Copy heads, in our format, find earlier occurrences of the last tokens and return the token
    after them. They read tokens without RoPE, with normalised e of i + 1, i, i - 1 and i - 2:

        query = copy.q_proj(concat(e[i + 1], e[i], e[i - 1]))
        key   = copy.k_proj(concat(e[i], e[i - 1], e[i - 2]))
        value = copy.v_proj(e[i + 1])
    """

    def __init__(
        self,
        head: HeadShape,
        weights: Mapping[str, Tensor],
        vocabulary: Tensor | None,
        target: CachedModel,
        lm_head: Tensor,
        num_rows: tuple[int, int],
        rope: tuple[Tensor, float],
        hidden_layers: tuple[int, ...] = (),
    ):
        """Take the head and the target.

        Args:
            weights: Weights by our names, of any dtype.
            vocabulary: Token ids [V] that the head proposes; None: all.
            lm_head: Weight [V, C] of the target's LM head.
            num_rows: Rows of the full and the working cache.
            rope: inv_freq [D / 2], and a factor on sine and cosine.
        """
        self._head = head
        self._attend = target.attend
        self.hidden_size = head.hidden_size
        self.hidden_layers: tuple[int, ...] | None = hidden_layers
        self.reads_history = head.copy_heads > 0
        device = target.device
        dtype = target.dtype
        self.vocabulary = None if vocabulary is None else vocabulary.to(device, torch.int64)
        weights = {name: weight.to(device, dtype) for name, weight in weights.items()}
        self._take_weights(weights, target, lm_head)
        self._inv_freq = rope[0].to(device)
        self._scale = head.head_dim**-0.5 * rope[1] ** 2
        num_full, num_working = num_rows
        shape = head.num_kv_heads + head.copy_heads, head.head_dim
        working = KVCache([shape], num_working, dtype, device)
        inv_freq = torch.stack(
            [self._inv_freq] * head.num_kv_heads + [self._inv_freq * 0] * head.copy_heads
        )
        self.cache = DraftCache(
            working, num_full, inv_freq if self.reads_history else self._inv_freq
        )
        self.at_once = (
            self._in_one_call(target) if head.is_ours and target.runs_in_one_call else None
        )
        """Runs the head in one call, if the target's layers run in one."""

    def _take_weights(
        self, weights: dict[str, Tensor], target: CachedModel, lm_head: Tensor
    ) -> None:
        self._embedding = _own_or(
            weights.get("embed_tokens.weight"), target.model.get_input_embeddings().weight
        )
        rows = None if self.vocabulary is None else lm_head[self.vocabulary]
        own_head = _own_or(weights.get("lm_head.weight", rows), lm_head)
        self._norms = {
            name.removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.endswith("norm.weight") or name.startswith("fc_norm.")
        }
        products = {name: _join(weights, joined) for name, joined in _JOINED.items()}
        if self.reads_history:
            products |= {name: linear(weights[f"copy.{name}.weight"]) for name in COPY_READS}
            products["copy"] = linear(_joined_copies(weights))
        if own_head is not lm_head:
            products["lm_head"] = linear(own_head)
        self._linears = nn.ModuleDict(products)
        pack(self._linears)
        self._lm_head = self._linears["lm_head"] if own_head is not lm_head else target.logits

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Store keys and values of all positions with a known next token."""
        text, hidden = self.cache.pair(slot, text, hidden)
        if len(hidden):
            # look up and normalise each token once
            each = self._embedded(text, None)
            embedded = torch.cat(
                [
                    each[HISTORY - i : len(each) - i]
                    for i in range(1 + HISTORY * self.reads_history)
                ],
                -1,
            )
            _, inputs = self._inputs(embedded, hidden)
            turning, values = self._project(inputs)
            projected = {"k_proj": turning[..., self._head.num_heads :, :], "v_proj": values}
            keys, values = self._with_copies(projected, embedded)
            self.cache.store(slot, keys.unsqueeze(0), values.unsqueeze(0))

    def read(self, slots: Sequence[int]) -> int:
        """Return 0: `prefill` reads all of a prompt."""
        return 0

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run the head, see `DraftNetwork.forward`."""
        embedded = self._embedded(token_ids, history)
        residual, inputs = self._inputs(embedded, hidden)
        turning, values = self._project(inputs)
        query, keys = rotate(turning, positions, self._inv_freq).tensor_split(
            [self._head.num_heads], -2
        )
        query, keys, values = self._with_copies(
            {"q_proj": query, "k_proj": keys, "v_proj": values}, embedded
        )
        stored = self.cache.working.keys[0], self.cache.working.values[0]
        rows = plan.new_rows(keys.device).flatten()
        for held, new in zip(stored, (keys, values), strict=True):
            held.index_copy_(1, rows, new.flatten(0, 1).transpose(0, 1))
        mixed = attend_plan(self._attend, query, *stored, plan, self._scale, self._head.window)
        residual = residual + self._linears["o_proj"](mixed.flatten(2))
        normed = self._norm("layer.post_attention_layernorm", residual)
        gate, up = self._linears["gate_up"](normed).chunk(2, -1)
        output = residual + self._linears["down_proj"](silu(gate).mul_(up))
        return self._norm("norm", output) if self._head.norm_output else output

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self._lm_head(hidden if self._head.norm_output else self._norm("norm", hidden))

    def _embedded(self, token_ids: Tensor, history: Tensor | None) -> Tensor:
        """Embed token_ids as [..., C], or with three earlier tokens as [..., 4C]."""
        if history is None:
            return self._norm("embedding_norm", self._embedding[token_ids])
        tokens = torch.cat([token_ids.unsqueeze(-1), history], -1)
        return self._norm("embedding_norm", self._embedding[tokens]).flatten(-2)

    def _inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        own = embedded[..., : self._head.hidden_size]
        if not self._head.fused:
            before = self._norm("feature_norm", hidden)
            fused = self._linears["fuse"](torch.cat([own, before], -1))
            return fused, self._norm("layer.input_layernorm", fused)
        if hidden.shape[-1] != self._head.hidden_size:
            if self._head.fc_norm:
                parts = enumerate(hidden.split(self._head.target_hidden_size, -1))
                hidden = torch.cat([self._norm(f"fc_norm.{n}", part) for n, part in parts], -1)
            hidden = self._linears["fuse"](self._norm("input_norm", hidden))
        normed = self._norm("layer.hidden_norm", hidden)
        inputs = torch.cat([self._norm("layer.input_layernorm", own), normed], -1)
        return normed if self._head.norm_before_residual else hidden, inputs

    def _in_one_call(self, target: CachedModel) -> Any:
        eps = self._head.layer_eps
        own = self._linears
        found = {name: own[name] for name in ("fuse", "lm_head", "copy") if name in own}
        linears = {"lm_head": target.model.lm_head} | found
        norms = [
            SimpleNamespace(weight=self._norms[f"layer.{name}_layernorm"], eps=eps)
            for name in ("input", "post_attention")
        ]
        layer = SimpleNamespace(
            head_dim=self._head.head_dim,
            head_norms=None,
            input_norm=norms[0],
            post_norm=norms[1],
            **{name: own[name] for name in PRODUCTS},
        )
        joined = joined_in_one_call([layer], self._scale)
        if joined is None or not are_compiled(linears.values()):
            return None
        from specextend.attention.compiled.calls import Head

        angles = torch.arange(self.cache.working.stored.shape[3])[:, None].float() * self._inv_freq
        both = torch.stack([angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)])
        return Head(
            joined,
            linears,
            {name: self._norms[name] for name in ("embedding_norm", "feature_norm", "norm")},
            self._embedding.detach(),
            torch.arange(self._head.vocab_size) if self.vocabulary is None else self.vocabulary,
            both.to(target.dtype),
            eps=self._head.head_eps,
            num_copied=self._head.copy_heads,
        )

    def _project(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [..., H + K, D], and values [..., K, D]."""
        head = self._head
        projected = self._linears["qkv"](inputs).unflatten(-1, (-1, head.head_dim))
        turning, values = projected.tensor_split([head.num_heads + head.num_kv_heads], -2)
        if "layer.self_attn.k_norm" in self._norms:
            query, keys = turning.tensor_split([head.num_heads], -2)
            turning = torch.cat(
                [
                    self._norm(f"layer.self_attn.{n}_norm", x)
                    for n, x in (("q", query), ("k", keys))
                ],
                -2,
            )
        return turning, values

    def _with_copies(self, projected: Mapping[str, Tensor], embedded: Tensor) -> list[Tensor]:
        if not self.reads_history:
            return list(projected.values())
        tokens = embedded.unflatten(-1, (-1, self._head.hidden_size))
        joined = []
        for name, own in projected.items():
            read = tokens[..., slice(*COPY_READS[name]), :].flatten(-2)
            copies = self._linears[name](read).unflatten(-1, (-1, self._head.head_dim))
            joined.append(torch.cat([own, copies], -2))
        return joined

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if (weight := self._norms.get(name)) is None:
            return x
        eps = self._head.layer_eps if name.startswith("layer.") else self._head.head_eps
        return rms_norm(x, weight.shape, weight, eps)


def _own_or(own: Tensor | None, target: Tensor) -> Tensor:
    """Return the head's matrix, or the target's if equal, which saves memory."""
    return target if own is None or torch.equal(own, target) else own


def _join(weights: Mapping[str, Tensor], names: Sequence[str]) -> nn.Linear:
    each = {name: weights[f"{name}.weight"] for name in names}
    # a copy of a single weight would take memory beside a full cache
    weight = torch.cat([*each.values()]) if len(each) > 1 else each[names[0]]
    if not any(f"{name}.bias" in weights for name in names):
        return linear(weight)
    biases = [weights.get(f"{name}.bias", own.new_zeros(len(own))) for name, own in each.items()]
    return linear(weight, torch.cat(biases))


def _joined_copies(weights: Mapping[str, Tensor]) -> Tensor:
    """Join the projections of the copy heads to [out, 4C], with zeros for skipped tokens."""
    size = weights["copy.v_proj.weight"].shape[1]
    parts = ((weights[f"copy.{name}.weight"], reads) for name, reads in COPY_READS.items())
    return torch.cat(
        [pad(weight, (first * size, (4 - end) * size)) for weight, (first, end) in parts]
    )

"""Training of an EAGLE head in our format (`drafters/formats.py`), with copy heads.

A head reads a recording as slots: slot i holds the embedding of token i + 1 and the target's hidden
state at i. It predicts the target's hidden state at i + 1, and so token i + 2. In the loss, its
output replaces the target's hidden state in the next slot, as in drafting (arXiv 2503.01840,
"training-time test").

Shapes: `S` slots, `Q` queried slots, `n` some slots, `C` hidden size, `H` query heads, `K` key
heads, `D` head size, `V` draft vocabulary.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from specextend.data.storage import atomic_output, resolve
from specextend.decoding.cache import rotate
from specextend.decoding.device import multiplies_bf16
from specextend.decoding.model import head_size
from specextend.drafters.causal import HISTORY
from specextend.drafters.eagle_network import COPY_READS
from specextend.drafters.formats import WEIGHTS_FILE, EagleConfig
from specextend.models.causal_lm import TargetOptions, load_tokenizer, tokens_sha256
from specextend.models.model_files import VOCABULARY, read_json
from specextend.training.recording import Recording, Show, TrainOptions

TRAINING = "training"
CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_S = 120.0
WARM_UP = 0.03
"""Share of steps with a rising learning rate."""
STEP_WEIGHTS = (1.0, 0.8)
"""Loss weights of the first and second drafted token."""
PROMPT_SLOTS = 256
"""Slots that a step trains beside the answer's."""


# What it is trained from


class Task(NamedTuple):
    """A round's training: frozen weights of the target, and examples."""

    options: TrainOptions
    target: TargetOptions
    config: Any
    """The target's configuration in transformers."""
    vocabulary: Tensor
    """Token ids [V] int64 of the draft, ascending."""
    recordings: list[Path]
    start: Path | None
    """Draft to start from."""
    folder: Path
    show: Show
    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""


def frozen_weights(model: Any, lm_head: Tensor) -> list[Tensor]:
    """Copy embedding, LM head and last norm, in fp32 where bf16 products are slow."""
    dtype = lm_head.dtype if multiplies_bf16(lm_head.device) else torch.float32
    weights = model.get_input_embeddings().weight, lm_head, model.model.norm.weight
    return [weight.detach().to(dtype, copy=True) for weight in weights]


# The head


class EagleHead:
    """A trainable head in fp32, with frozen embedding and LM head."""

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor
    ):
        """Take the weights of the format; the embedding decides the device."""
        device = lm_head.device
        self.config = config
        self.weights = {
            name: weight.to(device, torch.float32, copy=True).requires_grad_()
            for name, weight in weights.items()
            if name != VOCABULARY
        }
        """Trained tensors by their names in the format."""
        self._embedding = embedding.float()
        self.target_rows = lm_head.detach()[weights[VOCABULARY].to(device)]
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        self._inv_freq = config.rope_theta**-exponents

    def keys_values(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Compute keys and values [n, K, D] of slots, copy heads last."""
        normed = self._norm("layer.input_layernorm", self._inputs(slots))
        return self._project("k_proj", normed, slots), self._project("v_proj", normed, slots)

    def layer(self, slots: Slots, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Compute outputs [n, C] of slots; `visible` [n, m] masks keys and values [m, K, D]."""
        residual = self._inputs(slots)
        normed = self._norm("layer.input_layernorm", residual)
        query = self._project("q_proj", normed, slots)
        q, k, v = (x.transpose(0, 1)[None].to(residual.dtype) for x in (query, keys, values))
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=visible[None, None], enable_gqa=True
        )
        residual = residual + self._linear(
            "layer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1)
        )
        normed = self._norm("layer.post_attention_layernorm", residual)
        gated = silu(self._linear("layer.mlp.gate_proj", normed)) * self._linear(
            "layer.mlp.up_proj", normed
        )
        return self._norm("norm", residual + self._linear("layer.mlp.down_proj", gated))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, V] from outputs [n, C]."""
        return linear(hidden, self.target_rows.to(hidden.dtype))

    def _inputs(self, slots: Slots) -> Tensor:
        return self._linear(
            "fc", torch.cat([self._embed(slots.token_ids), self._norm("hn", slots.hidden)], -1)
        )

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._norm("en", self._embedding[token_ids])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def _project(self, name: str, normed: Tensor, slots: Slots) -> Tensor:
        """Compute queries, keys or values [n, heads, D], copy heads last."""
        own = self._heads(f"layer.self_attn.{name}", normed)
        if name != "v_proj":
            own = rotate(own, slots.positions, self._inv_freq)
        if not self.config.copy_heads:
            return own
        tokens = torch.cat([slots.token_ids[:, None], slots.history], 1)
        read = self._embed(tokens[:, slice(*COPY_READS[name])]).flatten(-2)
        return torch.cat([own, self._heads(f"copy.{name}", read)], -2)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self.config.head_dim))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.layer_norm_eps if name.startswith("layer.") else self.config.head_norm_eps
        return rms_norm(x.float(), (x.shape[-1],), self.weights[f"{name}.weight"], eps)


def _with_copy_heads(
    weights: Mapping[str, Tensor], config: EagleConfig, task: Task
) -> dict[str, Tensor]:
    """Add copy heads that find earlier occurrences of the last tokens.

    Queries and keys share a random projection of the last three tokens, so they match where any of
    them are equal. The output projection starts at zero, so the output does not change yet.
    """
    assert config.copy_heads is not None
    generator = torch.Generator().manual_seed(task.options.seed)
    embedding = task.embedding.cpu()
    size = config.copy_heads * config.head_dim
    group = config.num_heads // config.num_kv_heads
    norm = (
        (rms_norm(embedding.float(), (embedding.shape[1],)) * weights["en.weight"].float())
        .square()
        .sum(1)
        .mean()
    )
    shape = (size, 3 * config.hidden_size)
    keys = torch.randn(shape, generator=generator) / (config.head_dim * norm) ** 0.5
    # An equal token scores about 8 after the scale of D**-0.5. Equal heads would learn the same.
    sharper = 8 * torch.linspace(0.5, 1.5, group + 2)[1:-1, None, None]
    queries = sharper * config.head_dim**0.5 * keys.view(config.copy_heads, 1, config.head_dim, -1)
    return {
        **weights,
        "copy.k_proj.weight": keys,
        "copy.q_proj.weight": queries.flatten(0, 2),
        "copy.v_proj.weight": torch.randn(size, config.hidden_size, generator=generator)
        / config.hidden_size**0.5,
        "layer.self_attn.o_proj.weight": pad(
            weights["layer.self_attn.o_proj.weight"].float(), (0, group * size)
        ),
    }


def new_weights(config: EagleConfig, task: Task) -> dict[str, Tensor]:
    """Initialise a head that passes on the target's hidden state; it has no vocabulary yet."""
    generator = torch.Generator().manual_seed(task.options.seed)
    shapes = config.model_copy(update={"draft_vocab_size": None, "copy_heads": None}).shapes()
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    weights["fc.weight"][:, config.hidden_size :] += torch.eye(config.hidden_size)
    weights["norm.weight"] = task.final_norm.float().cpu()
    return _with_copy_heads(weights, config, task) if config.copy_heads else weights


# Its examples


class Slots(NamedTuple):
    """The slots of a recording, which are an example."""

    token_ids: Tensor
    """[S] int64: token i + 1."""
    history: Tensor
    """[S, 3] int64: tokens i, i - 1, i - 2; the first token fills gaps."""
    positions: Tensor
    """[S] int64: i."""
    hidden: Tensor
    """[S, C]: the target's hidden state at i."""
    labels: Tensor
    """[S, C]: the target's hidden state at i + 1."""
    shares: Tensor
    """[S] fp32: the target's probability of the draft vocabulary at i + 1."""
    is_answer: Tensor
    """[S] bool: token i + 1 belongs to the answer."""


def lay_out(recording: Recording) -> Slots:
    """Lay out a recording as slots."""
    tokens = recording.token_ids
    hidden = recording.hidden
    # the tokens before each, nearest first
    text = torch.cat([tokens[:1].expand(HISTORY - 1), tokens[:-1]])
    history = text.unfold(0, HISTORY, 1).flip(1)
    rest = recording.shares[1:], recording.is_answer[1:]
    return Slots(tokens[1:], history, torch.arange(len(tokens) - 1), hidden[:-1], hidden[1:], *rest)


def chain(
    head: EagleHead, slots: Slots, asked: Tensor, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a head on the slots `asked` [Q], then on the following slots with its output as features.

    Yields outputs [Q, C] of each step and the slots [Q] of their labels. Beyond the last slot,
    outputs have no meaning.
    """
    keys, values = head.keys_values(slots)
    visible = slots.positions <= asked[:, None]
    hidden = slots.hidden[asked]
    own = torch.eye(len(asked), dtype=torch.bool, device=asked.device)
    for step in range(num_steps):
        at = (asked + step).clamp(max=len(slots.positions) - 1)
        drafted = Slots(*(each[at] for each in slots))._replace(hidden=hidden)
        # a drafted slot sees real slots up to its root's, and the drafted slots of its chain
        if step:
            keys, values = (
                torch.cat(both)
                for both in zip((keys, values), head.keys_values(drafted), strict=True)
            )
            visible = torch.cat([visible, own], 1)
        hidden = head.layer(drafted, keys, values, visible)
        yield hidden, at


def head_loss(head: EagleHead, example: Slots, generator: torch.Generator) -> Tensor:
    """Compute the soft cross-entropy to the target: a mean over slots, weighted over steps.

    The weight of a slot is the target's probability of the draft vocabulary.
    """
    rows = head.target_rows
    slots = Slots(*(each.to(rows.device) for each in example))
    asked = _asked(slots, generator)
    total = torch.zeros((), device=rows.device)
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=multiplies_bf16(rows.device)):
        for step, (hidden, at) in enumerate(chain(head, slots, asked, len(STEP_WEIGHTS))):
            weights = slots.shares[at] * (asked + step == at)
            wanted = linear(slots.labels[at].to(rows.dtype), rows).float().softmax(-1)
            logits = head.logits(hidden).float()
            losses = logits.logsumexp(-1) - (wanted * logits).sum(-1)
            total = total + STEP_WEIGHTS[step] * (losses * weights).sum() / weights.sum()
    return total


def _asked(slots: Slots, generator: torch.Generator) -> Tensor:
    num_prompt = int((~slots.is_answer).sum())
    some = torch.randperm(num_prompt, generator=generator)[:PROMPT_SLOTS].sort().values
    return torch.cat([some, torch.arange(num_prompt, len(slots.positions))]).to(
        slots.positions.device
    )


# The training


def train_eagle(task: Task) -> None:
    """Train a head and write it."""
    if task.start is None:
        config = _new_config(task)
        weights = new_weights(config, task) | {VOCABULARY: task.vocabulary}
    else:
        config = EagleConfig.model_validate(read_json(task.start / "config.json"))
        weights = load_file(task.start / WEIGHTS_FILE)
    head = EagleHead(config, weights, task.embedding, task.lm_head)
    _fit(head, task)
    dtype = getattr(torch, config.dtype)
    tensors = {name: x.detach().to(dtype).cpu().contiguous() for name, x in head.weights.items()}
    save_file({**tensors, VOCABULARY: task.vocabulary}, task.folder / WEIGHTS_FILE)
    config.save(task.folder)


def _new_config(task: Task) -> EagleConfig:
    shape = task.config
    return EagleConfig(
        target=Path(task.target.model).name,
        vocab_size=len(task.embedding),
        hidden_size=shape.hidden_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=head_size(shape),
        intermediate_size=shape.intermediate_size,
        rope_theta=float(shape.rope_parameters["rope_theta"]),
        layer_norm_eps=float(shape.rms_norm_eps),
        head_norm_eps=1e-6,
        dtype="bfloat16",
        draft_vocab_size=len(task.vocabulary),
        copy_heads=task.options.copy_heads or None,
        tokens_sha256=tokens_sha256(load_tokenizer(task.target.model)),
    )


def _fit(head: EagleHead, task: Task) -> None:
    options = task.options
    examples = task.recordings
    checkpoint = task.folder / TRAINING / CHECKPOINT
    weights = head.weights.values()
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, betas=(0.9, 0.95))
    random = Random(options.seed)
    order = [
        each for _ in range(options.num_epochs) for each in random.sample(examples, len(examples))
    ]
    num_steps = len(order)
    saved_at = time.monotonic()
    losses: deque[float] = deque(maxlen=max(1, len(examples) // 4))
    for step in range(_load(checkpoint, head, optimizer), num_steps):
        generator = torch.Generator().manual_seed(options.seed + step)
        loss = head_loss(head, lay_out(Recording.load(order[step])), generator)
        optimizer.param_groups[0]["lr"] = options.learning_rate * _rate(step, num_steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        task.show("training", step + 1, num_steps, f", loss {sum(losses) / len(losses):.4f}")
        if step + 1 == num_steps or time.monotonic() - saved_at > CHECKPOINT_S:
            tensors = {
                f"{kind}/{name}": tensor.detach()
                for name, weight in head.weights.items()
                for kind, tensor in ({"weight": weight} | optimizer.state[weight]).items()
            }
            with atomic_output(resolve(str(checkpoint))) as temporary:
                save_file(tensors, temporary)
            saved_at = time.monotonic()


def _rate(step: int, num_steps: int) -> float:
    """Return the rate relative to its peak; the cosine ends at a twentieth."""
    warm = max(1, round(WARM_UP * num_steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _load(path: Path, head: EagleHead, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    for key, tensor in load_file(path).items():
        kind, name = key.split("/")
        weight = head.weights[name]
        if kind == "weight":
            weight.data.copy_(tensor)
        else:
            optimizer.state[weight][kind] = tensor if kind == "step" else tensor.to(weight.device)
    return int(optimizer.state[weight]["step"])

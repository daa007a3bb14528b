"""What an EAGLE-3 head begins with: a linear guess of the next hidden state, and attention that can look tokens up.

The published layout has no copy heads, but its attention can be set up to find a token where it stood before. The
query reads the token itself, in the embedding's half of its input. A key is to tell the token that its slot's hidden
state stands on, and the one before it; a low layer's output still holds them, so `fc` writes a linear guess of both
into a few directions of its output that are hardly used. Every other head matches in this way; the rest begin at their
own slot and bring in its embedding, which no other way leads to the output. RoPE turns most dimensions so slowly that
distance does not matter to a match.

Shapes: `n` tokens of text, `C` hidden size, `D` head size, `M` dimensions of a match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from specextend.drafters.formats import PublishedHead
from specextend.training.recording import Span

ROPE_THETA = 1e10
SLOW = 1e-4
"""Radians a token below which a pair of dimensions is slow; with 32 pairs, 19 are."""
SHARE = 0.15
"""Energy of the guesses of tokens in fc's output, beside that of the hidden state."""
SHARPNESS = 16.0
"""Score of a token that matches."""
COPIED = 0.2
"""Weight of a copied embedding in the output."""
RIDGE = 3e-3
UNLIKE = 4
"""First tokens of a text, whose states are unlike all others."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the target made of some text."""

    token_ids: Tensor
    """[n, 3] int64: the token after each, it, and the one before"""
    features: Tensor
    """[n, 3C]"""
    following: Tensor
    """[n, C]: the last hidden state at the token after"""


def read_text(prompts: Iterable[Span]) -> Text:
    """The text of some prompts."""
    parts = [
        (
            torch.stack([prompt.token_ids[UNLIKE + k : len(prompt.token_ids) - 1 + k] for k in (1, 0, -1)], 1),
            prompt.hidden[UNLIKE:-1].float(),
            prompt.last_hidden[UNLIKE + 1 :].float(),
        )
        for prompt in prompts
    ]
    return Text(*(torch.cat(part) for part in zip(*parts, strict=True)))


def new_weights(
    shape: PublishedHead, text: Text, embedding: Tensor, lm_rows: Tensor, final_norm: Tensor, seed: int
) -> dict[str, Tensor]:
    """All trained tensors. embedding [tokens, C]; lm_rows [V, C] and final_norm [C] of the target."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else 0.02 * torch.randn(size, generator=generator)
        for name, size in shape.required().items()
        if name != "d2t"
    }
    weights |= {"lm_head.weight": lm_rows.float(), "norm.weight": final_norm.float()}
    tokens = rms_norm(embedding.float(), (embedding.shape[1],))
    slow = _slow_dimensions(shape.head_dim)
    match = _distinct(tokens, len(slow), generator)
    everything, values = _distinct(tokens, shape.head_dim, generator), _values(tokens, shape)
    num_own = (shape.num_kv_heads + 1) // 2
    guess = _guess(text, tokens[text.token_ids[:, 0]] @ values[:num_own].flatten(0, 1).T, final_norm.float())
    weights["fc.weight"], codes = _fusion(text, tokens @ match.T, guess[: text.features.shape[1]].T)
    turn = torch.linalg.qr(torch.randn(len(slow), len(slow), generator=generator)).Q
    own = guess[text.features.shape[1] :].unflatten(0, (num_own, -1))
    for head in range(shape.num_kv_heads):
        number, value = head // 2, values[head // 2]
        if head % 2 == 0:
            _set_head(weights, shape, head, *_own_slot(everything), value, own[number].T)
        else:
            copying = _copying(slow, shape.head_dim, match, codes, turn if head % 4 == 3 else None)
            _set_head(weights, shape, head, *copying, value, _read_by(final_norm.float(), value))
    return weights


def _slow_dimensions(head_dim: int) -> Tensor:
    """[M] of the dimensions of a head that RoPE hardly turns."""
    pairs = torch.arange(head_dim // 2)
    slow = pairs[ROPE_THETA ** -(pairs / len(pairs)) < SLOW]
    return torch.cat([slow, slow + len(pairs)])


def _distinct(tokens: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """[size, C]: a projection in which tokens [tokens, C] look as unlike as can be, of length 1 on average."""
    mean = tokens.mean(0)
    variances, basis = torch.linalg.eigh(torch.cov(tokens.T))
    whiten = basis * (variances + 0.1 * variances.mean()).rsqrt() @ basis.T
    random = torch.randn(size, tokens.shape[1], generator=generator) @ whiten
    random -= torch.outer(random @ mean, mean) / mean.dot(mean)
    return random / (tokens @ random.T).norm(dim=1).mean()


def _values(tokens: Tensor, shape: PublishedHead) -> Tensor:
    """[heads, D, C]: the directions in which tokens [tokens, C] differ most, the widest first, D to a head."""
    widest = torch.linalg.eigh(torch.cov(tokens.T)).eigenvectors.flip(1).T
    return torch.stack([widest.roll(-head * shape.head_dim, 0)[: shape.head_dim] for head in range(shape.num_kv_heads)])


def _guess(text: Text, embedded: Tensor, final_norm: Tensor) -> Tensor:
    """[3C + E, C]: the next hidden state before `final_norm` [C], of the features and of embedded [n, E] tokens."""
    scales = torch.where(final_norm.abs() < 1e-3, torch.inf, final_norm)
    return _regress(torch.cat([text.features, embedded], 1), text.following / scales)


def _fusion(text: Text, codes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of fc [C, 3C], and what reads the codes of a token and of the one before it of the normed output.

    `codes` [tokens, M], `state` [C, 3C]: what else the output is to hold. The second result is [2, M, C].
    """
    size, num_codes = len(state), codes.shape[1]
    low = text.features[:, :size]
    guesses = [_regress(low, codes[text.token_ids[:, column]]).T for column in (1, 2)]
    handed = text.features @ state.T
    unused = torch.linalg.eigh(handed.T @ handed / len(handed)).eigenvectors[:, : 2 * num_codes].T
    energy = handed.square().sum(1).mean()
    length = (SHARE * energy / 2).sqrt()
    fused = state - unused.T @ (unused @ state)
    fused[:, :size] += length * unused.T @ torch.cat(guesses)
    normed = length * (size / ((1 + SHARE) * energy)).sqrt()
    return fused, unused.view(2, num_codes, size) / normed


def _regress(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[inputs, outputs]: the linear guess of outputs [n, M] from inputs [n, F]."""
    spread = inputs.square().mean(0).sqrt() + 1e-6
    inputs = inputs / spread
    gram = inputs.T @ inputs
    gram += RIDGE * len(inputs) * torch.eye(len(gram))
    return torch.linalg.solve(gram, inputs.T @ outputs) / spread[:, None]


def _own_slot(everything: Tensor) -> tuple[Tensor, Tensor]:
    """Key and query [D, 2C] that match the same embedding at the same place."""
    both = torch.cat([everything, torch.zeros_like(everything)], 1)
    return both, SHARPNESS * len(both) ** 0.5 * both


def _copying(slow: Tensor, head_dim: int, match: Tensor, codes: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Key and query [D, 2C] that match the query's token, of its embedding, with the token of a key's hidden state.

    With `turn` [M, M], a rotation, also the token before each, of their hidden states.
    """
    key, query = torch.zeros(2, head_dim, 2 * match.shape[1])
    embedded, states = slice(0, match.shape[1]), slice(match.shape[1], None)
    key[slow, states], query[slow, embedded] = codes[0], match
    if turn is not None:
        key[slow, states] += turn @ codes[1]
        query[slow, states] = turn @ codes[0]
    return key, SHARPNESS * head_dim**0.5 * query


def _read_by(final_norm: Tensor, value: Tensor) -> Tensor:
    """[C, D]: what brings a value's part [D, C] of an embedding to the output as the LM head reads it."""
    return COPIED * (final_norm / final_norm.abs().mean())[:, None] * value.T


def _set_head(
    weights: dict[str, Tensor],
    shape: PublishedHead,
    head: int,
    key: Tensor,
    query: Tensor,
    value: Tensor,
    output: Tensor,
) -> None:
    """Write one key head and its group of query heads; its value [D, C] is a part of its slot's embedding."""
    size, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    rows, queries = slice(head * size, (head + 1) * size), slice(head * group * size, (head + 1) * group * size)
    q, k, v, o = (weights[f"layer.self_attn.{name}_proj.weight"] for name in "qkvo")
    sharper = torch.linspace(0.5, 1.5, group + 2)[1:-1]  # equal heads would learn the same
    k[rows], q[queries] = key, (sharper[:, None, None] * query).flatten(0, 1)
    v[rows] = torch.cat([value, torch.zeros_like(value)], 1)
    o[:, queries] = output.repeat(1, group) / group

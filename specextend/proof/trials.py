"""Trials of kernels: their results are held to those of plain torch in fp32.

A kernel of attention is right if each query's result in each head differs by no more than two
roundings of its length, and its LSE by next to nothing: behind 16K keys a result is small, and one
key counts for no more than that. One of a layer is right if it is at most twice as far away as
plain torch in its own dtype, which rounds after every operator.

Shapes: `B` sequences, `T` queries, `P` queries that are looked at, `S` keys, `R` cache rows, `H`
query heads, `K` key heads, `D` head size, `C` hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specextend.attention.plain import MAX_QUERIES, HeadNorms, LayerKernels, attend_reference
from specextend.attention.plan import Attend, KeySpan
from specextend.attention.torch_kernels import PLANNED, TORCH
from specextend.core import counted

_LOOKED_AT = 128
"""P, at most: the scores of a whole chunk of a prompt would take gigabytes."""
_SUMS = 5e-5
_LSE = 2e-4
_LONG = 1024
_LONG_LSE = 5e-5
"""How far an LSE may be away, and that of so many keys, whose errors cancel: torch's kernels show
3e-5 and 9e-6 in any dtype, because all sum in fp32.
"""
_FACTOR = 2.0
"""How many times as far away from the exact result as a rounding, or plain torch, a kernel may
be.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """The shape of one call of a kernel."""

    kind: Literal["plain", "causal", "tree"]
    num_queries: int
    prefixes: tuple[int, ...]
    """[B] rows before the masked ones."""
    num_earlier: int = 0
    """Masked rows before the queries' own, as levels of a tree have them."""

    @property
    def num_masked(self) -> int:
        """Return the rows after the prefix."""
        return self.num_earlier + self.num_queries

    def __str__(self) -> str:
        return f"T = {self.num_queries} ({self.kind}) behind {', '.join(map(str, self.prefixes))}"


@dataclass(frozen=True, slots=True)
class Heads:
    """Hold what all calls of a model have in common."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def step_calls(num_nodes: int, depth: int, batch: int, longest: int) -> list[Call]:
    """List calls of plain steps, trees, their last level and what a draft reads after a step.

    They are of one sequence and of a batch, behind short prefixes and long ones.
    """
    num_earlier = num_nodes * max(0, depth - 2)
    calls = []
    for group in ((longest,), _mixed(batch, longest) if batch > 1 else (63,)):
        calls += [
            Call("tree" if size > 1 else "plain", size, group)
            for size in {1, num_nodes + 1, MAX_QUERIES}
        ]
        calls.append(Call("causal", depth + 1, group))
        calls.append(
            Call(
                "tree",
                num_nodes,
                tuple(max(0, prefix - num_earlier) for prefix in group),
                num_earlier,
            )
        )
    return calls


def prompt_calls(chunk: int, longest: int) -> list[Call]:
    """List calls of chunks of prompts: the first one, one behind a few rows, and late ones of a
    long prompt.
    """
    prefixes = dict.fromkeys((0, 65, rows_before(chunk, longest), longest - chunk))
    return [Call("causal", chunk, (prefix,)) for prefix in prefixes]


def rows_before(chunk: int, longest: int) -> int:
    """Return the most rows, of those that any kernel takes, before a chunk of so long a prompt."""
    return max(0, longest - chunk) // PLANNED * PLANNED


def _mixed(batch: int, longest: int) -> tuple[int, ...]:
    """Return prefixes [B] around a block of 64 keys and as long as they get, none of them empty but
    one.
    """
    lengths = (63, min(16384, longest), 65, 0, 1)
    return tuple(min(lengths[b % len(lengths)], longest) for b in range(batch))


def what_is_wrong(attend: Attend, call: Call, heads: Heads, num_rows: int) -> str:
    """Run a call twice in a cache of `num_rows` rows, whose other rows are NaN; return what is
    wrong, or an empty text.

    The batch is cut to the sequences that the cache holds.
    """
    q, k, v, starts = _tensors(call, heads, num_rows)
    lengths = [prefix + call.num_masked for prefix in call.prefixes[: len(starts)]]
    mask = _mask(call, len(starts), heads.device)
    scale = heads.head_dim**-0.5
    queries = _looked_at(call.num_queries, heads.device)
    seen = KeySpan(starts, lengths, None if mask is None else mask[:, queries])
    exact, exact_lse = attend_reference(q[:, queries].float(), k, v, seen, scale)
    for _ in range(2):
        is_causal = call.kind == "causal"
        out, lse = attend(
            q, k, v, KeySpan(starts, lengths, None if is_causal else mask, is_causal), scale
        )
        errors = (out[:, queries] - exact).norm(dim=-1) / exact.norm(dim=-1)
        for b, length in enumerate(lengths):
            allowed = {
                "out": _FACTOR * _least(q.dtype),
                "lse": _LSE if length < _LONG else _LONG_LSE,
            }
            found = {"out": float(errors[b].max()), "lse": _distance(lse[b, queries], exact_lse[b])}
            for name, most in allowed.items():
                if not found[name] <= most:  # NaN is not
                    return f"{name} differs by {found[name]:.2g} ({most:.2g} is allowed) at {call}"
    return ""


def _least(dtype: torch.dtype) -> float:
    """Return the error that any kernel may have: a rounding, or in fp32 that of another order of
    many sums.
    """
    return max(torch.finfo(dtype).eps, _SUMS)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())


def _tensors(call: Call, heads: Heads, num_rows: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Make queries [B, T, H, D], keys and values [K, R, D], and the first rows of as many sequences
    as fit.
    """
    generator = torch.Generator(heads.device).manual_seed(call.num_queries + sum(call.prefixes))
    randn = partial(torch.randn, generator=generator, device=heads.device, dtype=heads.dtype)
    size = 2, heads.num_key_heads, num_rows, heads.head_dim
    k, v = torch.full(size, float("nan"), device=heads.device, dtype=heads.dtype)
    starts = []
    start = 0
    for prefix in call.prefixes:
        length = prefix + call.num_masked
        if start + length > num_rows:
            break
        for stored in (k, v):
            stored[:, start : start + length] = randn((heads.num_key_heads, length, heads.head_dim))
        starts.append(start)
        start += -(-length // 256) * 256  # as the cache aligns its regions
    assert starts, f"a cache of {counted(num_rows, 'row')} holds no sequence of {call}"
    q = randn((len(starts), call.num_queries, heads.num_heads, heads.head_dim))
    return q, k, v, starts


def _mask(call: Call, batch: int, device: torch.device) -> Tensor | None:
    """Make masks [B, T, M] of causal chunks, or of trees whose nodes have any earlier one as their
    parent.

    The queries are the last ones.
    """
    generator = torch.Generator().manual_seed(call.num_queries)
    size = call.num_masked
    if call.kind == "plain":
        return None
    if call.kind == "causal":
        return torch.ones(batch, size, size, dtype=torch.bool, device=device).tril()
    parents = (torch.rand(batch, size, generator=generator) * torch.arange(size)).long()
    mask = torch.eye(size, dtype=torch.bool).repeat(batch, 1, 1)
    for node in range(1, size):
        mask[:, node] |= mask[torch.arange(batch), parents[:, node]]
    return mask[:, call.num_earlier :].to(device)


def _looked_at(num_queries: int, device: torch.device) -> Tensor:
    """Return the numbers [P] of the queries that are compared: spread, the first and the last among
    them.
    """
    return (
        torch.linspace(0, num_queries - 1, min(num_queries, _LOOKED_AT), device=device)
        .long()
        .unique()
    )


def what_is_wrong_in_a_layer(
    kernels: LayerKernels,
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    heads: Heads,
    *,
    head_norms: bool,
) -> str:
    """Run the kernels between a layer's products on random rows; return what is wrong, or an empty
    text.
    """
    results = partial(_layer_results, num_rows, hidden_size, intermediate_size, heads, head_norms)
    exact = dict(results(TORCH, torch.float32))
    plain = dict(results(TORCH, heads.dtype))
    for name, result in results(kernels, heads.dtype):
        # Results are rounded once more than the fp32 ones, on numbers as large as they are.
        least = _least(heads.dtype) * float(exact[name].abs().max())
        allowed = _FACTOR * max(_distance(plain[name], exact[name]), least)
        if not (error := _distance(result, exact[name])) <= allowed:
            return f"{name} differs by {error:.2g} ({allowed:.2g} is allowed) at R = {num_rows}"
    return ""


def _layer_results(
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    heads: Heads,
    head_norms: bool,
    kernels: LayerKernels,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield what the kernels return and write in a dtype, by name, with the same numbers each
    time.
    """
    generator = torch.Generator(heads.device).manual_seed(num_rows)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, device=heads.device, dtype=torch.float32)
        return drawn.to(heads.dtype).to(dtype)

    num_all = heads.num_heads + 2 * heads.num_key_heads
    weight = draw(hidden_size)
    rows = (num_rows, hidden_size)
    total, normed = kernels.add_norm(draw(*rows), draw(*rows), weight, 1e-5)
    yield "the sum", total
    yield "the norm", normed
    yield "the gate", kernels.gate(draw(num_rows, 2 * intermediate_size))
    norms = HeadNorms(draw(heads.head_dim), draw(heads.head_dim), 1e-5) if head_norms else None
    cache = draw(2, heads.num_key_heads, 2 * num_rows, heads.head_dim)
    places = torch.randperm(2 * num_rows, generator=generator, device=heads.device)[:num_rows]
    qkv = draw(num_rows, num_all, heads.head_dim)
    angles = draw(num_rows, heads.head_dim)
    yield (
        "the query",
        kernels.rotate_heads(qkv, angles.cos(), angles.sin(), norms, cache[0], cache[1], places),
    )
    yield "the cache", cache

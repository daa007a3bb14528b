"""Trials of kernels. One is right if its results are at most twice as far away from fp32's as those of plain torch.

Plain torch in the kernel's own dtype rounds after every operator, so it says how far a right result may be away.

Shapes: `B` sequences, `T` queries, `P` queries that are looked at, `S` keys, `R` cache rows, `H` query heads, `K` key
heads, `D` head size, `C` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from specextend.attention.plan import Attend, KeySpan
from specextend.attention.reference import MAX_MASKED, HeadNorms, LayerKernels
from specextend.attention.torch_kernels import TORCH
from specextend.core import counted

_LOOKED_AT = 64
"""P, at most: the scores of a whole chunk of a prompt would take gigabytes."""
_SUMS = 5e-5
_FACTOR = 2.0
"""How many times as far away from the exact result as plain torch a kernel may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A kernel, or another change of how a model computes, and what came of trying it."""

    name: str
    taken: bool
    why: str
    """Why it was left out, or what it gains."""
    ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds with it, by what was timed."""
    base_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds with what it would replace."""
    floor_ms: Mapping[str, float] = field(default_factory=dict)
    """The least that memory and matrix units allow."""
    is_wrong: bool = False
    """True if it can run here and is not right."""
    is_late: bool = False
    """True if the time for it ran out, so that another try may find something else."""

    def __str__(self) -> str:
        return f"{self.name}: {'taken' if self.taken else 'left out'}, {self.why}"

    def times(self) -> str:
        """Return a line with all milliseconds, an empty text if nothing was timed."""
        return ", ".join(f"{name} {ms:.3g}{self._beside(name)}" for name, ms in self.ms.items())

    def _beside(self, name: str) -> str:
        sides = {"before": self.base_ms, "least": self.floor_ms}
        found = [f"{side} {ms[name]:.3g}" for side, ms in sides.items() if name in ms]
        return f" ({', '.join(found)})" if found else ""


@dataclass(frozen=True, slots=True)
class Call:
    """The shape of one call of a kernel."""

    kind: Literal["plain", "causal", "tree"]
    num_queries: int
    prefixes: tuple[int, ...]
    """[B] rows before the queries' own."""

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


def step_calls(num_nodes: int, batch: int, longest: int) -> list[Call]:
    """List calls of plain steps and of trees, of one sequence and of a batch, behind short prefixes and long ones."""
    sizes = dict.fromkeys((1, num_nodes + 1, MAX_MASKED))
    groups = [(longest,), *([_mixed(batch, longest)] if batch > 1 else [(63,)])]
    return [Call("plain" if size == 1 else "tree", size, group) for size in sizes for group in groups]


def prompt_calls(chunk: int, longest: int) -> list[Call]:
    """List calls of chunks of prompts: the first one, one behind a few rows, and the last one of a long prompt."""
    return [Call("causal", chunk, (prefix,)) for prefix in dict.fromkeys((0, 65, max(0, longest - chunk)))]


def _mixed(batch: int, longest: int) -> tuple[int, ...]:
    """Return prefixes [B] around a block of 64 keys and as long as they get, none of them empty but one."""
    lengths = (63, min(16384, longest), 65, 0, 1)
    return tuple(min(lengths[b % len(lengths)], longest) for b in range(batch))


def what_is_wrong(attend: Attend, call: Call, heads: Heads, num_rows: int) -> str:
    """Run a call twice in a cache of `num_rows` rows, whose other rows are NaN; return what is wrong, or an empty text.

    The batch is cut to the sequences that the cache holds.
    """
    q, k, v, starts = _tensors(call, heads, num_rows)
    lengths = [prefix + call.num_queries for prefix in call.prefixes[: len(starts)]]
    tree = _random_tree(call, len(starts), heads.device) if call.kind == "tree" else None
    scale = heads.head_dim**-0.5
    for _ in range(2):
        span = KeySpan(starts, lengths, mask=tree, causal=call.kind == "causal")
        out, lse = attend(q, k, v, span, scale)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            rows = slice(start, start + length)
            visible = _visible(call, length, None if tree is None else tree[b], heads.device)
            queries = _looked_at(call.num_queries, heads.device)
            case = q[b, queries], k[:, rows], v[:, rows], visible[queries], scale
            if found := _compare(out[b, queries], lse[b, queries], *case):
                return f"{found} at {call}"
    return ""


def _compare(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> str:
    """Say what is wrong with out [P, H, D] and lse [P, H] of queries [P, H, D], of which each sees some of the keys."""
    exact, exact_lse = _attend_plainly(q.float(), k.float(), v.float(), visible, scale)
    plain, plain_lse = _attend_plainly(q, k, v, visible, scale)
    results = {"out": (out, plain, exact), "lse": (lse, plain_lse, exact_lse)}
    for name, (found, rounded, expected) in results.items():
        allowed = _FACTOR * max(_distance(rounded, expected), _least(q.dtype))
        if not (error := _distance(found, expected)) <= allowed:  # NaN is not
            return f"{name} differs by {error:.2g} ({allowed:.2g} is allowed)"
    return ""


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with queries [P, H, D] to keys [K, S, D], visible [P, S], every operator in the dtype of the inputs."""
    group = q.shape[1] // len(k)
    keys, values = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1).T


def _least(dtype: torch.dtype) -> float:
    """Return the error that any kernel may have: a rounding, or in fp32 that of another order of many sums."""
    return max(torch.finfo(dtype).eps, _SUMS)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())


def _tensors(call: Call, heads: Heads, num_rows: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Make queries [B, T, H, D], keys and values [K, R, D], and the first rows of as many sequences as fit."""
    generator = torch.Generator(heads.device).manual_seed(call.num_queries + sum(call.prefixes))
    randn = partial(torch.randn, generator=generator, device=heads.device, dtype=heads.dtype)
    size = 2, heads.num_key_heads, num_rows, heads.head_dim
    k, v = torch.full(size, float("nan"), device=heads.device, dtype=heads.dtype)
    starts, start = [], 0
    for prefix in call.prefixes:
        length = prefix + call.num_queries
        if start + length > num_rows:
            break
        for stored in (k, v):
            stored[:, start : start + length] = randn((heads.num_key_heads, length, heads.head_dim))
        starts.append(start)
        start += -(-length // 256) * 256  # as the cache aligns its regions
    assert starts, f"a cache of {counted(num_rows, 'row')} holds no sequence of {call}"
    q = randn((len(starts), call.num_queries, heads.num_heads, heads.head_dim))
    return q, k, v, starts


def _random_tree(call: Call, batch: int, device: torch.device) -> Tensor:
    """Make masks [B, T, T] of trees whose nodes have any earlier one as their parent."""
    generator = torch.Generator().manual_seed(call.num_queries)
    size = call.num_queries
    mask = torch.eye(size, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for node in range(1, size):
            parent = int(torch.randint(node, (1,), generator=generator))
            mask[b, node] |= mask[b, parent]
    return mask.to(device)


def _visible(call: Call, length: int, tree: Tensor | None, device: torch.device) -> Tensor:
    """Return which of a sequence's rows [S] each query [T] sees."""
    visible = torch.ones(call.num_queries, length, dtype=torch.bool, device=device)
    if call.kind == "plain":
        return visible
    own = torch.ones_like(visible[:, : call.num_queries]).tril() if tree is None else tree
    visible[:, length - call.num_queries :] = own
    return visible


def _looked_at(num_queries: int, device: torch.device) -> Tensor:
    """Return the numbers [P] of the queries that are compared: spread, the first and the last among them."""
    return torch.linspace(0, num_queries - 1, min(num_queries, _LOOKED_AT), device=device).long().unique()


def what_differs(found: Tensor, expected: Tensor) -> str:
    """Compare a layer's results, whose operators may round differently; return what is wrong, or an empty text."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    allowed = 4 * _least(found.dtype)
    return "" if error <= allowed else f"a layer differs by {error:.2g} of its norm ({allowed:.2g} is allowed)"


def what_is_wrong_in_a_layer(
    kernels: LayerKernels, num_rows: int, hidden_size: int, intermediate_size: int, heads: Heads, *, head_norms: bool
) -> str:
    """Run the kernels between a layer's products on random rows; return what is wrong, or an empty text."""
    sizes = num_rows, hidden_size, intermediate_size
    exact = dict(_layer_results(TORCH, *sizes, heads, head_norms, torch.float32))
    plain = dict(_layer_results(TORCH, *sizes, heads, head_norms, heads.dtype))
    for name, result in _layer_results(kernels, *sizes, heads, head_norms, heads.dtype):
        # Results are rounded once more than the fp32 ones, on numbers as large as they are.
        least = _least(heads.dtype) * float(exact[name].abs().max())
        allowed = _FACTOR * max(_distance(plain[name], exact[name]), least)
        if not (error := _distance(result, exact[name])) <= allowed:
            return f"{name} differs by {error:.2g} ({allowed:.2g} is allowed) at R = {num_rows}"
    return ""


def _layer_results(
    kernels: LayerKernels,
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    heads: Heads,
    head_norms: bool,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield what the kernels return and write in a dtype, by name, with the same numbers each time."""
    generator = torch.Generator(heads.device).manual_seed(num_rows)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, device=heads.device, dtype=torch.float32)
        return drawn.to(heads.dtype).to(dtype)

    num_all = heads.num_heads + 2 * heads.num_key_heads
    weight, rows = draw(hidden_size), (num_rows, hidden_size)
    total, normed = kernels.add_norm(draw(*rows), draw(*rows), weight, 1e-5)
    yield "the sum", total
    yield "the norm", normed
    yield "the gate", kernels.gate(draw(num_rows, 2 * intermediate_size))
    norms = HeadNorms(draw(heads.head_dim), draw(heads.head_dim), 1e-5) if head_norms else None
    cache = draw(2, heads.num_key_heads, 2 * num_rows, heads.head_dim)
    places = torch.randperm(2 * num_rows, generator=generator, device=heads.device)[:num_rows]
    qkv, angles = draw(num_rows, num_all, heads.head_dim), draw(num_rows, heads.head_dim)
    yield "the query", kernels.rotate_heads(qkv, angles.cos(), angles.sin(), norms, cache[0], cache[1], places)
    yield "the cache", cache

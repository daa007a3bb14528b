"""Rows of the stage `kernels` for the kernels of a layer: their largest error against plain torch.

Shapes: `R` rows, `C` hidden size, `I` intermediate size, `H` query heads, `K` key heads, `D` head size, `S` cache rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from specextend.attention.backends import load_layer_kernels
from specextend.attention.layer_reference import REFERENCE, HeadNorms, LayerKernels
from specextend.bench.gpu_check.shapes import require_backend
from specextend.bench.gpu_check.stage import Row, Setting, attempt

DTYPES = (torch.bfloat16, torch.float16)
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest error, absolute plus relative."""
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one layer's call."""

    num_rows: int
    """R"""
    hidden: int
    """C"""
    intermediate: int
    """I"""
    heads: tuple[int, int]
    """H and K."""
    head_dim: int
    head_norms: bool


LAYERS = (
    LayerShape(51, 4096, 11008, (32, 32), 128, head_norms=False),
    LayerShape(1, 4096, 14336, (32, 8), 128, head_norms=False),
    LayerShape(408, 4096, 12288, (32, 8), 128, head_norms=True),
    LayerShape(2048, 576, 1536, (9, 3), 64, head_norms=False),
    LayerShape(7, 128, 192, (4, 2), 64, head_norms=True),
)
"""Vicuna-7B, Llama-3.1-8B, Qwen3-8B, SmolLM2-135M and a tiny layer: plain steps, trees, a batch of them, a chunk."""


def check_layers(setting: Setting) -> Iterator[Row]:
    """Yield one row for each dtype and shape."""
    device = torch.device(setting.device)
    for dtype, shape in product(DTYPES, LAYERS):
        cell: Row = {"kernels": "layer", "dtype": str(dtype).removeprefix("torch."), **asdict(shape)}
        yield from attempt(setting, cell, partial(_compare, shape, dtype, device))


def _compare(shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Iterator[Row]:
    require_backend("triton", device)
    kernels = load_layer_kernels("triton", device)
    assert kernels is not None, "they come with the backend"
    yield compare_layer(kernels, shape, dtype, device)


def compare_layer(kernels: LayerKernels, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> Row:
    """Run all kernels of a layer and their twins on random numbers, and return the largest error of each result."""
    found, expected = (_results(each, shape, dtype, device) for each in (kernels, REFERENCE))
    row: Row = {}
    for name, result in found.items():
        error = float((result.float() - expected[name].float()).abs().max())
        row[f"{name}_error"] = error
        if not torch.allclose(result, expected[name], atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]):
            row["wrong"] = f"{name} has an error of {error:g} in {dtype}, {shape}"
    return row


def _results(kernels: LayerKernels, shape: LayerShape, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return what the kernels return and write, with the same inputs each time."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    rows, (num_heads, num_key_heads) = shape.num_rows, shape.heads
    total, normed = kernels.add_norm(draw(rows, shape.hidden), draw(rows, shape.hidden), draw(shape.hidden), _EPS)
    gated = kernels.gate(draw(rows, 2 * shape.intermediate))
    norms = HeadNorms(draw(shape.head_dim), draw(shape.head_dim), _EPS) if shape.head_norms else None
    cache = draw(2, num_key_heads, 2 * rows, shape.head_dim)
    places = torch.randperm(2 * rows, generator=generator, device=device)[:rows]
    qkv, angles = draw(rows, num_heads + 2 * num_key_heads, shape.head_dim), draw(rows, shape.head_dim)
    query = kernels.rotate_heads(qkv, angles.cos(), angles.sin(), norms, cache[0], cache[1], places)
    return {"sum": total, "norm": normed, "gate": gated, "query": query, "cache": cache}

"""The attention backends: functions with one signature, `Attend`, and the choice between them.

`attend_reference` is the specification: plain torch, slow, obviously right. Every other backend must equal it. Those
for a CPU are in `cpu.py` and `compiled/`, flash-attn is in `flash.py`, the one in Triton in `tree_kernel.py`.

Shapes: `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specextend.attention.cpu import CPU_KERNELS, attend_by_head, attend_matmul, nothing
from specextend.attention.flash import attend_with, find_flash_attn
from specextend.attention.hybrid import attend_chunk, has_prefix, merge_states
from specextend.attention.layer_reference import LayerKernels
from specextend.attention.plan import Attend, HostReadError, KeySpan, additive
from specextend.versions import how_to_install

BACKENDS = ("reference", *CPU_KERNELS, "compiled", "flash", "triton")
KERNELS_VERSION = 3
"""To be raised with any change to a kernel's speed: times that were measured with another version are not used."""
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default


def load_backend(name: str, device: torch.device) -> Attend:
    """Return the backend called `name`; `auto` is one that is proven on the device, without any measurement.

    Raises:
        ValueError: no such backend, its package is not installed, or it does not run on the device.
    """
    if name == "auto":
        return attend_by_head if device.type == "cpu" else load_sdpa()
    if name not in BACKENDS:
        raise ValueError(f"attention.backend must be one of auto, {', '.join(BACKENDS)}, got {name!r}")
    if name == "reference":
        return attend_reference
    if name == "flash":
        return load_flash(device)
    if name == "triton":
        return load_triton(device)
    if device.type == "cpu":
        return load_compiled() if name == "compiled" else CPU_KERNELS[name]
    if name == "sdpa":
        return attend_cuda
    raise ValueError(f"attention.backend {name} runs on a CPU only; choose auto, reference, sdpa, flash or triton")


def cpu_kernels(head_dim: int, dtype: torch.dtype) -> dict[str, Attend]:
    """Return all kernels that can run here on a CPU, by name, for heads of `head_dim` elements of `dtype`."""
    kernels = dict(CPU_KERNELS)
    try:
        from specextend.attention.compiled.attend import attend_compiled, can_compile, serves
    except ImportError:
        return kernels
    if serves(head_dim, dtype) and can_compile(dtype) and _is_attention(attend_compiled, head_dim, dtype):
        kernels["compiled"] = load_compiled()
    return kernels


def _is_attention(kernel: Attend, head_dim: int, dtype: torch.dtype) -> bool:
    """Return True if a kernel made for this processor agrees with the reference on a small call."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 5, 4, head_dim), (2, 70, head_dim), (2, 70, head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    scale = head_dim**-0.5
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    found, expected = (attend(q, k, v, KeySpan([1], [69], mask), scale) for attend in (kernel, attend_reference))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return all(torch.allclose(a.float(), b.float(), atol=tolerance) for a, b in zip(found, expected, strict=True))


def load_compiled() -> Attend:
    """Import the compiled kernel, with `matmul` for calls that it does not take: a draft's heads may have another size.

    Raises:
        ValueError: numba is not installed.
    """
    try:
        from specextend.attention.compiled.attend import attend_compiled, serves
    except ImportError as error:
        raise ValueError(f"attention.backend compiled needs the cpu extra: {how_to_install('cpu')}") from error

    def compiled(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        kernel = attend_compiled if serves(q.shape[3], q.dtype) else attend_matmul
        return kernel(q, k, v, span, scale)

    return compiled


def load_sdpa() -> Attend:
    """Return torch's own kernels for a GPU; where flash-attn is installed, it attends to chunks of prompts."""
    if (flash := find_flash_attn()) is None:
        return attend_cuda
    attend_to_prompts = attend_with(flash, attend_cuda)

    def sdpa_and_flash(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        kernel = attend_to_prompts if span.causal else attend_cuda
        return kernel(q, k, v, span, scale)

    return sdpa_and_flash


def load_flash(device: torch.device) -> Attend:
    """Import flash-attn, with `sdpa` for calls that it does not take, such as trees.

    Raises:
        ValueError: flash-attn is not installed, or the device is a CPU.
    """
    if (kernel := find_flash_attn()) is None:
        raise ValueError(f"attention.backend flash needs the flash extra: {how_to_install('flash')}")
    if device.type == "cpu":
        raise ValueError("attention.backend flash runs on a GPU only; choose auto")
    return attend_with(kernel, attend_cuda)


def load_triton(device: torch.device) -> Attend:
    """Import the Triton kernel. Calls that it does not take, such as chunks of a prompt, go to flash-attn or `sdpa`.

    Raises:
        ValueError: triton is not installed, or the device is a CPU, where it is only interpreted for tests.
    """
    try:
        from specextend.attention.tree_kernel import attend_triton, is_interpreted, serves
    except ImportError as error:
        raise ValueError("attention.backend triton needs the package triton: pip install triton") from error
    if device.type == "cpu" and not is_interpreted():
        raise ValueError("attention.backend triton runs on a GPU only; choose auto")
    otherwise: Attend = attend_by_head if device.type == "cpu" else attend_cuda
    if device.type != "cpu" and (flash := find_flash_attn()) is not None:
        otherwise = attend_with(flash, attend_cuda)

    def triton(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        if serves(q, span):
            return attend_triton(q, k, v, span, scale)
        if span.captured:
            raise HostReadError(f"the Triton kernel does not take {q.shape[1]} queries with heads of {q.shape[3]}")
        return otherwise(q, k, v, span, scale)

    return triton


def load_layer_kernels(name: str, device: torch.device) -> LayerKernels | None:
    """Import the kernels of a layer that go with the backend called `name`: Triton's with `triton`, none otherwise.

    Raises:
        ValueError: as `load_triton`.
    """
    if name != "triton":
        return None
    load_triton(device)
    from specextend.attention.layer_kernels import TRITON

    return TRITON


def attend_reference(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in plain torch, computed in fp32."""
    results = [_attend_slowly(q[b], k, v, span, b, scale) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _attend_slowly(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    num_queries, num_heads, _ = q.shape
    rows = slice(span.starts[b], span.starts[b] + span.lengths[b])
    if span.lengths[b] == 0:
        return torch.zeros_like(q), torch.full((num_queries, num_heads), float("-inf"), device=q.device)
    group = num_heads // k.shape[0]
    keys = k[:, rows].float().repeat_interleave(group, dim=0)
    values = v[:, rows].float().repeat_interleave(group, dim=0)
    scores = torch.einsum("thd,hsd->hts", q.float(), keys) * scale
    if span.causal:
        own = torch.ones(num_queries, num_queries, dtype=torch.bool, device=q.device).tril()
        scores += additive(own, keys.shape[1], scores.dtype)
    elif (bias := span.bias(b, scores.dtype, q.device)) is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,hsd->thd", (scores - lse.unsqueeze(-1)).exp(), values)
    return out.to(q.dtype), lse.T


def attend_cuda(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
    """Attend by torch's own flash kernels on a GPU, one sequence after the other, without a copy of the prefix."""
    if has_prefix(span, q.shape[1]):
        return attend_chunk(attend_cuda, q, k, v, span, scale)
    results = [_attend_cuda(q[b : b + 1], k, v, span, b, scale) for b in range(q.shape[0])]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, b: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to masked rows and to those before them apart, because the flash kernel takes no mask."""
    start, length = span.starts[b], span.lengths[b]
    if length == 0:
        return nothing(q)
    key, value = (x[:, start : start + length].unsqueeze(0) for x in (k, v))
    if span.mask is None:
        return _attend_unmasked(q, key, value, scale, causal=span.causal)
    bias = span.tail_bias(b, q.shape[1], q.dtype, q.device)
    assert bias is not None
    before = length - bias.shape[1]
    tail = _attend_efficiently(q, key[:, :, before:], value[:, :, before:], bias, scale, causal=False)
    if before == 0:
        return tail
    prefix = _attend_unmasked(q, key[:, :, :before], value[:, :, :before], scale, causal=False)
    return merge_states(*prefix, *tail), torch.logaddexp(prefix[1], tail[1])


def _attend_unmasked(q: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend with q [1, T, H, D] to key, value [1, K, S, D] by flash, which takes fewer key heads than query heads."""
    if q.dtype == torch.float32:  # flash does not take it
        return _attend_efficiently(q, key, value, None, scale, causal=causal)
    out, lse, *_ = _flash_cuda(q.transpose(1, 2), key, value, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _attend_efficiently(
    q: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend by the memory-efficient kernel, which takes a bias [T, S] but needs a copy of the keys for each head."""
    num_queries, num_heads = q.shape[1:3]
    key, value = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (key, value))
    padded = None if bias is None else _aligned(bias).expand(1, num_heads, -1, -1)
    out, lse, *_ = _efficient_cuda(q.transpose(1, 2), key, value, padded, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse[..., :num_queries].transpose(1, 2)


def _aligned(bias: Tensor) -> Tensor:
    """Lay the bias [T, S] out in rows of a multiple of 16 elements, as the memory-efficient kernel requires."""
    padding = -bias.shape[1] % 16
    return torch.nn.functional.pad(bias, (0, padding))[:, : bias.shape[1]][None, None]

"""The attention backends by name, and for a CPU the choice among them by measurement on the machine that runs them.

A backend is a function of type `Attend`. `reference.py` is the specification, which every other one must equal. Kernels
of torch and of flash-attn are in `torch_kernels.py`, ours for a CPU in `compiled/`, the one in Triton in
`tree_kernel.py`.

Shapes: `L` layers, `B` sequences, `T` queries, `S` keys, `R` cache rows, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from math import inf

import torch
from torch import Tensor

from specextend.attention.plan import Attend, HostReadError, KeySpan
from specextend.attention.reference import LayerKernels, attend_reference
from specextend.attention.torch_kernels import (
    CPU_KERNELS,
    TORCH,
    attend_by_head,
    attend_cuda,
    attend_matmul,
    attend_with,
    find_flash_attn,
)
from specextend.attention.trials import Call, Heads, what_is_wrong
from specextend.core import first_line, how_to_install

BACKENDS = ("reference", *CPU_KERNELS, "compiled", "flash", "triton")
NUM_QUERIES = (1, 4, 16, 64, 512)
"""Queries of a call: a plain step, trees of several sizes, a chunk of a prompt."""
NUM_KEYS = (1024, 6144)
LONG_CALL = 64
"""Queries above which only the smaller number of keys is measured."""
_FAULT_ROWS = 512
_RUNS = 3
_ENOUGH_S = 0.2
"""Seconds of runs after which none is repeated."""
_HOPELESS = 3.0
"""Factor over the best run above which a candidate is not run again."""
_BEYOND_HOPE = 10.0
"""Factor above which a kernel is not tried in longer calls."""

Cell = tuple[bool, int, int]
"""Whether keys are masked, number of queries, number of keys."""


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
        if (kernel := find_flash_attn()) is None:
            raise ValueError(f"attention.backend flash needs the flash extra: {how_to_install('flash')}")
        if device.type == "cpu":
            raise ValueError("attention.backend flash runs on a GPU only; choose auto")
        return attend_with(kernel, attend_cuda)
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
        from specextend.attention.compiled.attend import can_compile, serves
    except ImportError:
        return kernels
    if serves(head_dim, dtype) and can_compile(dtype):
        kernels["compiled"] = load_compiled()
    return kernels


def find_faults(kernels: Mapping[str, Attend], heads: Heads) -> dict[str, str]:
    """Return what is wrong with each kernel that is not right, in small calls of every kind."""
    return {name: wrong for name, attend in kernels.items() if (wrong := _fault(attend, heads))}


def _fault(attend: Attend, heads: Heads) -> str:
    calls = Call("plain", 1, (130,)), Call("tree", 5, (65, 0)), Call("causal", 70, (65,))
    try:
        return next(filter(None, (what_is_wrong(attend, call, heads, _FAULT_ROWS) for call in calls)), "")
    except Exception as error:  # noqa: BLE001  whatever a kernel raises costs itself alone
        return f"{type(error).__name__}: {first_line(error)}"


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


def load_layer_kernels(name: str, device: torch.device) -> LayerKernels:
    """Return the kernels of a layer that go with the backend called `name`: Triton's with `triton`, else torch's own.

    Raises:
        ValueError: as `load_triton`.
    """
    if name != "triton":
        return TORCH
    load_triton(device)
    from specextend.attention.layer_kernels import TRITON

    return TRITON


@dataclass(slots=True)
class MeasuredAttention:
    """A backend that calls the kernel which was fastest for such a call."""

    kernels: Mapping[str, Attend]
    choices: Mapping[Cell, str]
    """Name of the fastest kernel in each cell."""
    _queries: dict[bool, list[int]] = field(init=False)
    _keys: dict[tuple[bool, int], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        cells = sorted(self.choices)
        self._queries = {masked: sorted({t for m, t, _ in cells if m == masked}) for masked in (False, True)}
        self._keys = {(m, t): [length for *at, length in cells if at == [m, t]] for m, t, _ in cells}

    @property
    def __name__(self) -> str:
        """Return a name that tells one set of choices from another, in the order of the cells."""
        return "measured " + " ".join(name for _, name in sorted(self.choices.items()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        """Attend as `Attend` says."""
        name = self.choice(span.mask is not None, q.shape[1], max(span.lengths))
        return self.kernels[name](q, k, v, span, scale)

    def choice(self, masked: bool, num_queries: int, num_keys: int) -> str:
        """Return the kernel for a call, by the smallest cell that holds it, or the largest that was measured."""
        masked = masked and bool(self._queries[True])
        queries = _holding(self._queries[masked], num_queries)
        return self.choices[masked, queries, _holding(self._keys[masked, queries], num_keys)]


def _holding(sizes: Sequence[int], number: int) -> int:
    return sizes[min(bisect_left(sizes, number), len(sizes) - 1)]


def make_cells(num_rows: int) -> list[Cell]:
    """List the calls to measure in a cache of `num_rows` rows, trees with a mask and without one."""
    lengths = tuple(dict.fromkeys(min(length, num_rows) for length in NUM_KEYS))
    return [
        (masked, num_queries, length)
        for num_queries in NUM_QUERIES
        for length in (lengths if num_queries <= LONG_CALL else lengths[:1])
        for masked in (False, True)
        if num_queries <= length and not (masked and (num_queries == 1 or num_queries > LONG_CALL))
    ]


def measure_attention(
    stored: Tensor, num_heads: int, kernels: Mapping[str, Attend], cells: Sequence[Cell]
) -> dict[Cell, dict[str, float]]:
    """Measure the seconds of a call with each kernel in each cell, of which later ones have no fewer queries.

    A kernel that takes ten times as long as another for some queries is not tried with more.
    stored [L, 2, K, R, D] is the cache that the calls read, one layer after the other; it must hold finite values.
    """
    layers = cycle(stored)

    def run(attend: Attend, cell: Cell) -> None:
        masked, num_queries, length = cell
        q = stored.new_zeros(1, num_queries, num_heads, stored.shape[-1])
        mask = torch.ones(1, num_queries, num_queries, dtype=torch.bool).tril() if masked else None
        span = KeySpan([0], [length], mask=mask, needs_lse=num_queries > 1 and not masked)
        for keys, values in islice(layers, 2):
            attend(q, keys, values, span, stored.shape[-1] ** -0.5)

    found, left = {}, dict(kernels)
    for cell in cells:
        found[cell] = seconds = shortest_runs(
            {name: partial(run, attend, cell) for name, attend in left.items()}, _RUNS
        )
        if cell[1] > 1:
            left = {name: left[name] for name in left if seconds[name] <= _BEYOND_HOPE * min(seconds.values())}
    return found


def shortest_runs(candidates: Mapping[str, Callable[[], object]], num_runs: int) -> dict[str, float]:
    """Return the seconds of the shortest of some runs of each candidate, after a first one that builds what they use.

    They take turns, so that a machine that is busy for a while slows all of them. One that takes much longer than
    another is not run again, and long runs say enough before there are so many.
    """
    for run in candidates.values():
        run()
    best: dict[str, float] = {}
    started_at = time.perf_counter()
    for _ in range(num_runs):
        if best and time.perf_counter() - started_at > _ENOUGH_S:
            break
        limit = _HOPELESS * min(best.values(), default=inf)
        for name, run in candidates.items():
            if best.get(name, 0.0) <= limit:
                begin = time.perf_counter()
                run()
                best[name] = min(best.get(name, inf), time.perf_counter() - begin)
    return best

"""Differences between devices, and captured steps; only this module of `decoding/` names devices.

A function of tensors can be captured and replayed as a single launch (a CUDA graph), because hosts
launch eager steps of small models more slowly than GPUs run them. Changing values of captured
functions must be tensors on the device, unread by the host.
"""

import logging
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specextend.attention.plan import HostReadError
from specextend.core import how_to_install

Outputs = tuple[Tensor, ...]
Capture = Callable[[str, Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Records a named function: returns its replay, and the outputs that each replay overwrites."""
Key = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...], tuple[int, ...]]
"""Name of a function, shapes and types of its inputs, and its shape."""
CALLS_BEFORE_CAPTURE = 8
MOST_GRAPHS = 128
"""Captured functions to keep."""
GRAPH_BYTES = 8 << 20
"""Rough memory of a captured function beside its tensors."""

DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS = {"12": 525, "13": 580}

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""Messages of allocators that raise a bare RuntimeError."""
_DEVICE = ("CUDA error", "CUDA driver error", "[CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
"""Messages of other GPU failures."""
_GENERATION = ("cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that distinguish generations of one name, such as `AMD EPYC`."""


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """Settings of the engine for a kind of device."""

    prefill_chunk: int
    """Prompt tokens of a forward."""
    decode_share: float
    """Share of time for running sequences while a prompt is read; 0: they wait."""
    packs_linears: bool
    largest_batch: int
    measured_rows: int
    workspace_bytes: int
    """Rough memory of CUDA and libraries, or of a process on a CPU."""
    probe_bytes: int
    """Bytes of the tensor that measures bandwidth, larger than caches."""
    probe_size: int
    """Size of the square product that measures the matrix rate."""


CPU = DeviceTraits(
    prefill_chunk=1024,
    decode_share=0.0,
    packs_linears=True,
    largest_batch=8,
    measured_rows=64,
    # a worker with tiny models: libraries and compiled kernels
    workspace_bytes=5 << 28,
    probe_bytes=512 << 20,
    probe_size=2048,
)
GPU = DeviceTraits(
    prefill_chunk=4096,
    decode_share=0.125,
    packs_linears=False,
    largest_batch=32,
    measured_rows=1024,
    workspace_bytes=3 << 29,
    probe_bytes=1 << 30,
    probe_size=8192,
)


def traits_of(device: torch.device) -> DeviceTraits:
    """Return the traits of a device; all but CPUs count as GPUs."""
    return CPU if device.type == "cpu" else GPU


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with its generation."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    return processor_name(info.read_text() if info.exists() else "")


def processor_name(cpuinfo: str) -> str:
    """Return name and generation, such as `AMD EPYC (cpu family 25, model 17)`."""
    pairs = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    name = values.get("model name") or platform.processor() or platform.machine()
    generation = [f"{field} {values[field]}" for field in _GENERATION if field in values]
    return f"{name} ({', '.join(generation)})" if generation else name


def device_bytes(device: torch.device) -> int | None:
    """Return a GPU's memory, or None for a CPU.

    A context would lock out other processes in the mode `exclusive process`, so none is made.
    """
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


AMPERE = (8, 0)
"""Oldest compute capability with 16-bit attention kernels."""


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, such as (8, 9); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def multiplies_bf16(device: torch.device | None = None) -> bool:
    """Return True if a device, by default this CPU, has fast bf16 products."""
    mkldnn = torch.backends.mkldnn
    is_cpu = device is None or device.type == "cpu"
    return not is_cpu or (mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def warn_of_slow_bf16() -> None:
    """Log a remedy for slow bf16 products."""
    _log.warning(
        "this processor has no products of bfloat16, so prompts take ten times as long as they "
        "could: %s, or set "
        "target.dtype: float32",
        how_to_install("cpu"),
    )


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """Begin to copy values to the host, which must synchronise before reading them."""
    if values.device.type != "cuda":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def make_current(device: torch.device) -> None:
    """Make a GPU current in this thread."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


class CudaCapture:
    """Captures functions as CUDA graphs on the current GPU; nothing runs before the first replay.

    Functions of a name share memory: read outputs before the next replay.
    """

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[str, torch.cuda.CUDAGraph] = WeakValueDictionary()

    def __call__(
        self, name: str, function: Callable[[], Outputs]
    ) -> tuple[Callable[[], None], Outputs]:
        """Capture a function in the memory of the latest graph of its name."""
        graph = torch.cuda.CUDAGraph()
        latest = self._latest.get(name)
        pool = None if latest is None else latest.pool()
        stream = torch.cuda.current_stream()
        try:
            # other threads may use the GPU
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            # torch does not restore the stream after a failed capture
            torch.cuda.set_stream(stream)
        self._latest[name] = graph
        return graph.replay, outputs


def synchronise(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Return free blocks to the device, for blocks of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes() -> int:
    """Return this process's peak memory, on its GPUs or else the host."""
    if torch.cuda.is_initialized():
        return sum(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if smaller work may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _says(error, _OUT_OF_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Return True if only a new process can use the device again."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or _says(error, _DEVICE)


def _says(error: BaseException, texts: Sequence[str]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


class Graphs:
    """Runs functions of tensors, and captures those that recur with the same shapes.

    The least recently used graph makes room. A function larger than all of its name replaces them,
    because captures in growing order would take the sum of their memory.

    Functions run eagerly if memory runs out or kernels read on the host. After another failure all
    do, because the allocator cannot be trusted.
    """

    def __init__(self, capture: Capture | None = None, num_eager_calls: int | None = None):
        """Take the way to capture, if any, and the calls before a capture, at least 1."""
        self._capture = capture
        self._num_eager_calls = CALLS_BEFORE_CAPTURE if num_eager_calls is None else num_eager_calls
        self._num_calls: Counter[Key] = Counter()
        self._graphs: dict[Key, tuple[Outputs, Callable[[], None], Outputs] | None] = {}
        """Inputs, replay and outputs of captured functions; None for eager functions."""
        self.capturing = False

    @property
    def enabled(self) -> bool:
        """Return True if functions are captured."""
        return self._capture is not None

    @property
    def num_warm_ups(self) -> int:
        """Calls with the same shapes before timings are stable."""
        return 1 if self._capture is None else self._num_eager_calls + 1

    def run(
        self,
        name: str,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        shape: tuple[int, ...] = (),
    ) -> Outputs:
        """Return `function(*inputs)`, valid until the next call of this name.

        Functions of a name may differ only in inputs and `shape`; their work grows with its
        product.
        """
        key = name, tuple((each.shape, each.dtype) for each in inputs), shape
        if self._capture is not None and key not in self._graphs:
            self._num_calls[key] += 1
            if self._num_calls[key] > self._num_eager_calls:
                self._try(self._capture, key, function, inputs)
        if key not in self._graphs:
            return function(*inputs)
        # the order is that of last use
        graph = self._graphs[key] = self._graphs.pop(key)
        if graph is None:
            return function(*inputs)
        memory, replay, outputs = graph
        for own, new in zip(memory, inputs, strict=True):
            own.copy_(new)
        replay()
        return outputs

    def _try(
        self,
        capture: Capture,
        key: Key,
        function: Callable[..., Outputs],
        inputs: tuple[Tensor, ...],
    ) -> None:
        if len(self._graphs) == MOST_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest], self._num_calls[oldest]
        alike = [
            other
            for other, graph in self._graphs.items()
            if other[0] == key[0] and graph is not None
        ]
        if all(_num_elements(other) < _num_elements(key) for other in alike):
            for other in alike:
                del self._graphs[other]
        self.capturing = True
        try:
            memory = tuple(each.clone() for each in inputs)
            self._graphs[key] = memory, *capture(key[0], partial(function, *memory))
        except Exception as error:  # noqa: BLE001  whatever it was, the allocator may be in any state
            if isinstance(error, HostReadError) or is_out_of_memory(error):
                _log.info("a step runs without a graph: %s", error)
                self._graphs[key] = None
            else:
                _log.warning(
                    "steps run without graphs from now on, because one cannot be captured: %s",
                    error,
                )
                self._capture = None
                self.clear()
        finally:
            self.capturing = False

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self._graphs.clear()
        self._num_calls.clear()


def _num_elements(key: Key) -> int:
    _, inputs, shape = key
    return sum(each.numel() for each, _ in inputs) * prod(shape)


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def toolchain_versions() -> dict[str, str]:
    """Return the versions of driver and compiler."""
    said = ""
    if path := _compiler():
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        said = done.stdout.partition("\n")[0]
    return {"driver": DRIVER.read_text() if DRIVER.exists() else "", "compiler": said}


def what_is_missing() -> list[str]:
    """List missing GPU software with its Debian package."""
    if not DRIVER.exists():
        return []
    missing = []
    found = re.search(r"\s(\d+)\.\d+", DRIVER.read_text())
    cuda = str(torch.version.cuda or "").partition(".")[0]
    least = _LEAST_DRIVERS.get(cuda, 0)
    if found and int(found[1]) < least:
        missing.append(
            f"NVIDIA's driver is {found[1]}, and CUDA {torch.version.cuda} needs {least} or newer: "
            f"apt-get install nvidia-driver-{least}-server"
        )
    if _compiler() is None:
        missing.append("Triton's kernels need a C compiler: apt-get install gcc")
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        name = "python{}.{}-dev".format(*sys.version_info)
        missing.append(f"Triton's kernels need Python.h: apt-get install {name}")
    return missing

"""What differs between devices, and captured steps: the only module of `decoding/` that knows the
names of devices.

A function of tensors can be run once, recorded, and replayed as one launch (a CUDA graph). A GPU
starts a kernel faster than its host can ask for it: an eager step of small models is mostly asking.
A captured function reads and writes fixed memory, so whatever differs between two steps must be a
tensor on the device, and nothing may be asked of it on the way.
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
from collections.abc import Callable
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
"""Records what a named function does: returns its replay, and the outputs that every replay
writes.
"""
Key = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...], tuple[int, ...]]
"""The name of a function, the shapes and types of its inputs, and its own shape."""
CALLS_BEFORE_CAPTURE = 8
MOST_GRAPHS = 128
"""Captured functions that are kept: for each size of a batch a few drafts, an absorption, and one
for each size of trees.
"""
GRAPH_BYTES = 8 << 20
"""What one of them takes of a GPU beside the tensors in it, roughly."""

DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS = {"12": 525, "13": 580}
"""The oldest driver of each version of CUDA."""

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""Messages of allocators that raise a bare RuntimeError: of the CPU, cuBLAS and cuDNN, the CUDA
driver, Triton.
"""
_DEVICE = ("CUDA error", "CUDA driver error", "[CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
"""Messages of libraries that raise a bare RuntimeError for any other failure of a GPU."""
_GENERATION = ("cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that tell processors apart: clouds give several generations one name,
such as `AMD EPYC`.
"""


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """Says what the engine does differently on a kind of device."""

    prefill_chunk: int
    """Prompt tokens of one prefill forward. Every chunk reads all weights again; from here on that
    hardly shows.
    """
    decode_share: float
    """Share of the time that the running sequences have while a prompt is read; 0: they wait for
    its end.
    """
    packs_linears: bool
    """Whether the weights of linear layers may be laid out anew."""
    largest_batch: int
    """Sequences of the largest batch that is chosen by itself; more make no step of a sequence much
    cheaper.
    """
    measured_rows: int
    """Rows of the largest step whose time is measured; those of larger ones are taken to grow with
    them.
    """
    workspace_bytes: int
    """Memory that no tensor of ours takes, roughly: CUDA's context and its libraries; of a CPU, the
    process.
    """
    probe_bytes: int
    """Size of the tensor by which bandwidth is measured: more than a cache holds, and so much that
    starting a kernel takes no share.
    """
    probe_size: int
    """Rows, inputs and outputs of the product by which the matrix rate is measured."""


CPU = DeviceTraits(
    prefill_chunk=1024,
    decode_share=0.0,
    packs_linears=True,
    largest_batch=8,
    measured_rows=64,
    # what a worker with tiny models takes: its libraries and compiled kernels
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
    """Return the traits of a device; every one but a CPU is served as a GPU is."""
    return CPU if device.type == "cpu" else GPU


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or that of the processor with its generation."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    return processor_name(info.read_text() if info.exists() else "")


def processor_name(cpuinfo: str) -> str:
    """Return the name of the first processor in the text of /proc/cpuinfo, and what tells its
    generation.

    Of an x86 processor that is `AMD EPYC (cpu family 25, model 17)`.
    """
    pairs = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    name = values.get("model name") or platform.processor() or platform.machine()
    generation = [f"{field} {values[field]}" for field in _GENERATION if field in values]
    return f"{name} ({', '.join(generation)})" if generation else name


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, whoever uses it; None for a CPU, whose memory is not the engine's
    alone.

    It makes no context: a GPU in the mode `exclusive process` would refuse every other process one.
    """
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


AMPERE = (8, 0)
"""The oldest compute capability whose attention kernels take 16 bits."""


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return what a GPU can compute, such as (8, 9); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def multiplies_bf16(device: torch.device | None = None) -> bool:
    """Return True if torch has fast products of bf16 there, by default on this CPU: if it has
    instructions for them.
    """
    mkldnn = torch.backends.mkldnn
    is_cpu = device is None or device.type == "cpu"
    return not is_cpu or (mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def warn_of_slow_bf16() -> None:
    """Say what to do where nothing multiplies bf16 fast."""
    _log.warning(
        "this processor has no products of bfloat16, so prompts take ten times as long as they "
        "could: %s, or set "
        "target.dtype: float32",
        how_to_install("cpu"),
    )


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU's tensor on the device. A GPU takes it when its turn comes; the host
    does not wait.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """Begin to copy values to the host, which may read them once it has waited for the device."""
    if values.device.type != "cuda":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def make_current(device: torch.device) -> None:
    """Let this thread's launches go to a GPU that is not the first one: Triton and captures take
    the current one.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


class CudaCapture:
    """Captures what functions ask of the current GPU as CUDA graphs; nothing runs before their
    first replay.

    Functions of one name share memory: no two of them run at once, and each one's outputs are read
    before the next.
    """

    def __init__(self) -> None:
        self._latest: WeakValueDictionary[str, torch.cuda.CUDAGraph] = WeakValueDictionary()

    def __call__(
        self, name: str, function: Callable[[], Outputs]
    ) -> tuple[Callable[[], None], Outputs]:
        """Capture a function beside the latest one of its name that is still kept."""
        graph = torch.cuda.CUDAGraph()
        latest = self._latest.get(name)
        pool = None if latest is None else latest.pool()
        stream = torch.cuda.current_stream()
        try:
            # other threads may use the GPU
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            # torch leaves the thread on its own if a capture cannot be ended
            torch.cuda.set_stream(stream)
        self._latest[name] = graph
        return graph.replay, outputs


def synchronise(device: torch.device) -> None:
    """Wait for everything that the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Return the allocator's free blocks to the device, so that blocks of other sizes find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes() -> int:
    """Return the most memory that this process has held: of its GPUs, through torch, or else of the
    host.
    """
    if torch.cuda.is_initialized():
        return sum(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the same work may succeed with less at once."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Return True if every later call on the device will fail too, so that only a new process
    helps.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE)


class Graphs:
    """Runs functions of tensors, and captures those whose inputs have the same shapes again and
    again.

    So rare shapes take no memory, and a batch needs no padding to a size that was captured before:
    rows of trees that nobody asked for take as long as others. What was not run for longest makes
    room for new shapes. A larger function than all of its name takes their memory, in which they
    are captured anew when they come again: captured one after the other, as batches grow, they
    would take the sum.

    A function whose kernels ask something of the host, or for which memory runs out, runs eagerly.
    If a capture fails in any other way, all functions run eagerly from then on, because the
    device's allocator may not be trusted with another one.
    """

    def __init__(self, capture: Capture | None = None, num_eager_calls: int | None = None):
        """Take the way to capture; without one everything runs eagerly.

        num_eager_calls: those with inputs of the same shapes before it; None:
        `CALLS_BEFORE_CAPTURE`. They build the kernels, which a capture may not, so there must be
        one.
        """
        self._capture = capture
        self._num_eager_calls = CALLS_BEFORE_CAPTURE if num_eager_calls is None else num_eager_calls
        self._num_calls: Counter[Key] = Counter()
        self._graphs: dict[Key, tuple[Outputs, Callable[[], None], Outputs] | None] = {}
        """The memory that a captured function reads, its replay, and what that writes; None: it
        runs eagerly.
        """
        self.capturing = False
        """True while a function is captured, so that what it asks of the host would be asked once
        for all replays.
        """

    @property
    def enabled(self) -> bool:
        """Return True if functions are captured, so that they must have fixed shapes and ask
        nothing of the device.
        """
        return self._capture is not None

    @property
    def num_warm_ups(self) -> int:
        """Return the calls with inputs of the same shapes after which a call takes the time that it
        will take.
        """
        return 1 if self._capture is None else self._num_eager_calls + 1

    def run(
        self,
        name: str,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        shape: tuple[int, ...] = (),
    ) -> Outputs:
        """Return `function(*inputs)`.

        What it returns is valid until the next call of this name. Functions of one name differ in
        their inputs and `shape` alone; what they compute grows with its product.
        """
        key = name, tuple((each.shape, each.dtype) for each in inputs), shape
        if self._capture is not None and key not in self._graphs:
            self._num_calls[key] += 1
            if self._num_calls[key] > self._num_eager_calls:
                self._try(self._capture, key, function, inputs)
        if key not in self._graphs:
            return function(*inputs)
        # the last one in the order is the one that ran last
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
        """Capture a function, or note that it, or all of them, run eagerly."""
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
    """Return the size of a function's inputs, times its own."""
    _, inputs, shape = key
    return sum(each.numel() for each, _ in inputs) * prod(shape)


def _compiler() -> str | None:
    """Return the C compiler that Triton calls, or None."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def toolchain_versions() -> dict[str, str]:
    """Return what the driver and the compiler say of themselves."""
    said = ""
    if path := _compiler():
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        said = done.stdout.partition("\n")[0]
    return {"driver": DRIVER.read_text() if DRIVER.exists() else "", "compiler": said}


def what_is_missing() -> list[str]:
    """List what this machine lacks for its GPU, each with Debian's and Ubuntu's name of it; nothing
    on a machine without a driver.
    """
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

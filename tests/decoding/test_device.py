"""The seam between the engine and its device, as far as it can be seen without a GPU."""

import platform
from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch

from specextend.decoding.device import (
    CudaCapture,
    Graphs,
    is_device_error,
    is_out_of_memory,
    make_current,
    processor_name,
)


def test_memory_that_triton_does_not_get_is_memory():
    """It names the device, as errors do after which only a new process helps: a batch too large cost a worker."""
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_device_error(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_device_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))


def test_launches_go_to_the_gpu_of_the_models(monkeypatch):
    """Triton and captures take the thread's current GPU, which is the first one: with `cuda:1` they broke."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_generations_of_processors_with_one_name_are_told_apart():
    """What was measured of one is no measurement of the other: clouds call all of AMD's servers `AMD EPYC`."""
    core = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
    older = core.format(0) + core.format(1)
    newer = older.replace(": 25", ": 26").replace(": 17", ": 2")
    assert processor_name(older) == "AMD EPYC (cpu family 25, model 17)"
    assert processor_name(newer) == "AMD EPYC (cpu family 26, model 2)"
    arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    assert processor_name(arm).endswith(" (CPU implementer 0x41, CPU part 0xd0c)")
    assert processor_name("") == (platform.processor() or platform.machine())


class Captured:
    """A captured function, which keeps the memory of its outputs while it lives."""

    def __init__(self, outputs):
        self.outputs = outputs

    def __call__(self):
        """Write the outputs that are there already."""


GROWING = [(batch, 32) for batch in range(1, 17)]
DRAFTS = [(batch, size) for batch in (4, 16, 8, 16) for size in (90, 28, 248)]


@pytest.mark.parametrize("shapes", [GROWING, GROWING[::-1], DRAFTS])
def test_captured_steps_take_the_memory_of_the_largest_in_whatever_order_they_come(shapes):
    """Batches grow one request at a time, so that each of them found no room in the memory of those before it."""
    alive = WeakSet()
    fits = []

    def capture(name, function):
        made = Captured(function())
        sizes = [each.outputs[0].numel() for each in alive]
        fits.append(not sizes or made.outputs[0].numel() <= max(sizes))
        alive.add(made)
        return made, made.outputs

    graphs = Graphs(capture, num_eager_calls=0)
    for batch, size in shapes * 2:
        inputs = torch.ones(batch, 1)
        [drafted] = graphs.run("draft", lambda rows, size=size: (rows.expand(-1, size),), inputs, shape=(size,))
        assert drafted.shape == (batch, size)
    assert alive
    assert all(fits), "each but the largest has room in the memory of another one"


def test_a_capture_that_cannot_be_ended_leaves_the_thread_on_its_stream(monkeypatch):
    """All that came later ran beside the copies between host and device, which wait for nobody."""
    current = ["the thread's"]

    @contextmanager
    def graph(*_, **__):
        current[0] = "the capture's"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture()("verify", tuple)
    assert current == ["the thread's"]

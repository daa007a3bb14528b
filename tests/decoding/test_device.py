"""The seam between the engine and its device, as far as it can be seen without a GPU."""

import platform
from contextlib import contextmanager
from functools import partial
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


class Pools:
    """Counts the elements that captured functions hold, as a device's allocator does for those that share memory."""

    def __init__(self):
        self.kept = WeakSet()
        self.most = 0

    def __call__(self, name, function):
        graph = Graph(function())
        if all(each.size < graph.size for each in self.kept):
            graph.takes = graph.size
        self.kept.add(graph)
        self.most = max(self.most, sum(each.takes for each in self.kept))
        return graph.replay, graph.outputs


class Graph:
    """A captured function: it has memory of its own if it fits into no other one's."""

    def __init__(self, outputs):
        self.outputs = outputs
        self.takes = 0
        self.size = sum(each.numel() for each in outputs)

    def replay(self):
        """Write the outputs that it has already."""


@pytest.mark.parametrize("batches", [range(1, 17), range(16, 0, -1), [4, 16, 3, 16, 5, 1, 12]])
def test_captured_steps_take_the_memory_of_the_largest_in_whatever_order_they_come(batches):
    """Batches grow one request at a time, so that each of them found no room in the memory of those before it."""
    pools = Pools()
    graphs = Graphs(pools, num_eager_calls=1)
    for batch in batches:
        for _ in range(3):
            [doubled] = graphs.run("verify", lambda rows: (2 * rows,), torch.ones(batch, 32))
            assert doubled.eq(2).all()
    assert pools.most == 32 * max(batches)


@pytest.mark.parametrize("shapes", [[(31, 8), (15, 6), (7, 4)], [(7, 4), (15, 6), (31, 8)], [(15, 6), (31, 8), (7, 4)]])
def test_captured_drafts_of_several_shapes_take_the_memory_of_the_largest(shapes):
    """A narrow one of a large batch may come before a wide one of a small batch, and after it."""
    pools = Pools()
    graphs = Graphs(pools, num_eager_calls=0)
    for batch in (4, 16, 8, 16):
        for nodes, depth in shapes:
            table = torch.ones(batch, 5)
            [drafted] = graphs.run("draft", partial(rows_of, nodes * depth), table, shape=(nodes, depth))
            assert drafted.shape == (batch, nodes * depth)
    assert pools.most == 16 * 31 * 8


def rows_of(width, table):
    """As many numbers as a draft has rows."""
    return (table[:, :1].expand(-1, width),)


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

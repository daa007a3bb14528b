"""The seam between the engine and its device, as far as it can be seen without a GPU."""

import platform

import torch

from specextend.decoding.device import is_device_error, is_out_of_memory, make_current, processor_name


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

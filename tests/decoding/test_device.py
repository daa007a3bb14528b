"""The seam between the engine and its device, as far as it can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch

from specextend.decoding import device
from specextend.decoding.device import CPU, GPU, traits_of, upload


def test_every_device_but_a_cpu_is_served_as_a_gpu_is():
    """Among them `meta`, on which tests count operators."""
    assert traits_of(torch.device("cpu")) is CPU
    assert traits_of(torch.device("cuda", 1)) is traits_of(torch.device("meta")) is GPU


def test_an_upload_to_a_gpu_is_pinned_and_not_waited_for(monkeypatch):
    """From pageable memory the host would wait for everything that the GPU still has to do."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *to, **how: calls.append((*to, how)) or self)
    for name in ("cpu", "cuda"):
        upload(torch.tensor([1]), torch.device(name))
    assert calls == [(torch.device("cpu"), {}), "pinned", (torch.device("cuda"), {"non_blocking": True})]


@pytest.mark.parametrize("call", [device.synchronise, device.release_cached, device.device_bytes])
def test_on_a_cpu_there_is_nothing_to_wait_for_or_to_give_back(call):
    """These must not import or start CUDA there."""
    assert call(torch.device("cpu")) is None

"""A CUDA graph without a GPU: operators are recorded once, and replayed on the memory that they had then.

What a capture bakes in, such as numbers of the host, stays as it was; what it may not do fails: read a tensor's values
on the host, make a tensor of the host's numbers, or have shapes that depend on values.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specextend.attention import backends, triton_kernels
from specextend.attention.backends import load_backend
from specextend.attention.plain import MAX_MASKED, attend_reference, masked_rows
from specextend.proof.prover import Kernels
from tests.attention.calls import attend_tree_slowly
from tests.tiny_models import engine_with, tiny_config

DOWNLOADS = ("_local_scalar_dense", "nonzero", "unique", "_unique", "masked_select", "equal")
"""Beginnings of the names of operators whose result the host reads, or whose shape depends on values."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator, with the tensors that it reads and the memory of its result."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def replay(self):
        """Run it again, into the same memory. Views need no copy, nor does what is written in place."""
        new = self.operator(*self.args, **self.kwargs)
        for mine, again in zip(tree_leaves(self.result), tree_leaves(new), strict=True):
            if isinstance(mine, Tensor) and mine.data_ptr() != again.data_ptr():
                mine.copy_(again)


class Recorder(TorchDispatchMode):
    """Records operators; refuses those that a capture would refuse."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        reads = name.startswith(DOWNLOADS) or (name.startswith("index") and has_mask(args))
        if reads or name == "lift_fresh":
            raise RuntimeError(f"{name} cannot be captured: it waits for the device, or reads the host's memory")
        result = func(*args, **kwargs)
        self.calls.append(Call(func, args, kwargs, result))
        return result


def has_mask(args):
    """Return True if one of an operator's indices is a mask, whose places have to be found."""
    return isinstance(args[1], list) and any(index is not None and index.dtype == torch.bool for index in args[1])


def record(name, function):
    """Record a function as `CudaCapture` captures it."""
    recorder = Recorder()
    with recorder:
        outputs = function()

    def replay():
        for call in recorder.calls:
            call.replay()

    return replay, outputs


class SharedMemory:
    """Records functions, of which those of one name share memory: a replay spoils what the last one wrote."""

    def __init__(self):
        self.latest = {}

    def __call__(self, name, function):
        own = {each.untyped_storage().data_ptr() for each in tree_leaves(function.args) if isinstance(each, Tensor)}
        replay, outputs = record(name, function)

        def replay_on_shared_memory():
            for each in self.latest.get(name, ()):
                if each.is_floating_point() and each.untyped_storage().data_ptr() not in own:
                    each.fill_(torch.nan)
            replay()
            self.latest[name] = outputs

        return replay_on_shared_memory, outputs


@torch.library.custom_op("specextend_tests::attend_tree", mutates_args=())
def _attend_tree(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, visible: Tensor, num_masked: int, scale: float
) -> tuple[Tensor, Tensor]:  # of which torch makes a schema
    return attend_tree_slowly(q, k, v, starts, lengths, visible, num_masked, scale)


def captured_engine(pair, draft, graphs, adaptive=None, *, prompts="triton", **changes):
    """An engine as on a GPU with the Triton kernel, whose steps go through `graphs`.

    Chunks of prompts have a kernel that a proof may choose beside it: `triton`, whose own is another one, or any other
    name, which stands for a kernel that reads places on the host.
    """
    config = tiny_config(pair, draft, attention__backend="reference", attention__tree="dense", **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "attend_triton", attend_on_device)
        patch.setattr(triton_kernels, "serves", has_few_rows)
        patch.setattr(backends, "attend_cuda", attend_reference)
        patch.setattr(backends, "find_flash_attn", lambda: None)
        triton = load_backend("triton", torch.device("cuda"))
        load = lambda name, device: triton if name == "triton" else attend_reference  # noqa: E731
        patch.setattr("specextend.proof.prover.load_backend", load)
        kernels = Kernels(prompts=prompts, steps="triton")
        return engine_with(config, kernels=kernels, graphs=graphs, adaptive=adaptive)


def has_few_rows(q, span):
    """What `triton_kernels.serves` says of a head size that the kernel takes."""
    return q.shape[1] <= triton_kernels.MAX_QUERIES and (span.mask is None or span.mask.shape[2] <= MAX_MASKED)


def attend_on_device(q, k, v, span, scale):
    """Attend as the Triton kernel does: places and masks are read from tensors, in one operator."""
    starts, lengths = span.places(q.device)
    return _attend_tree(q, k, v, starts, lengths, *masked_rows(span, q), scale)

"""A GPU that is not there: tensors that say they are on one, whose numbers the host's memory holds.

An operator that meets tensors of two devices fails, as it would there, and each wait of the host for the device is
counted at the line of ours that causes it. Kernels of a GPU have stand-ins in plain torch.
"""

import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.attention.test_attend_cuda import efficient, flash

PACKAGE = Path(__file__).parents[1] / "specextend"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
VALUES = ("_local_scalar_dense", "equal", "is_nonzero")
"""Operators whose result is the host's."""
READS = (*VALUES, "nonzero", "masked_select", "unique", "_unique2")
"""Those, and operators whose shape depends on values."""
_aten = torch.ops.aten


class OnDevice(Tensor):
    """A tensor on the GPU. Torch itself believes it to be the host's, since it may know no others."""

    @staticmethod
    def __new__(cls, held):
        kind = {"dtype": held.dtype, "device": CPU}
        return Tensor._make_wrapper_subclass(cls, held.size(), held.stride(), held.storage_offset(), **kind)

    def __init__(self, held):
        self.held = held

    @property
    def device(self):
        """Say that it is there."""
        return CUDA

    def to(self, *args, **kwargs):
        """Copy to the host, for which it waits, or do what any tensor does."""
        if "cpu" in map(str, (*args, *kwargs.values())):
            return _aten._to_copy(self, device=CPU)
        return super().to(*args, **kwargs)

    def cpu(self):
        """Copy to the host, which waits."""
        return self.to(CPU)

    def tolist(self):
        """Read the numbers, for which the host waits."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} ran where there is no GPU")


@contextmanager
def virtual_gpu():
    """Let `cuda` be a GPU; gives the counts of waits by the module and function that cause them."""
    gpu = _Gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: gpu.wait())
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "virtual")
        patch.setattr(Tensor, "pin_memory", lambda values: values)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with gpu:
                yield gpu.waits
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


class _Gpu(TorchDispatchMode):
    """Runs operators on what tensors of the GPU hold."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def wait(self):
        """Count a wait at the innermost function of ours."""
        for frame in reversed(traceback.extract_stack()):
            if Path(frame.filename).is_relative_to(PACKAGE):
                self.waits[f"{Path(frame.filename).stem}.{frame.name}"] += 1
                return

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(
            torch.device, lambda each: CUDA if each.type == "cuda" else each, (args, kwargs or {})
        )
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        wanted = kwargs.get("device")
        has_any = any(is_there(each) for each in tree_leaves((args, kwargs)))
        if has_any or name in ("_to_copy", "copy_"):
            self._check(name, args, kwargs)
        if wanted is not None:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        own_args, own_kwargs = tree_map_only(OnDevice, lambda each: each.held, (args, kwargs))
        result = STAND_INS.get(func, func)(*own_args, **own_kwargs)
        if args and result is own_args[0]:  # written in place
            return args[0]
        goes_there = has_any if wanted is None else wanted.type == "cuda"
        if name in VALUES or not goes_there:
            return result
        return tree_map_only(Tensor, OnDevice, result)

    def _check(self, name, args, kwargs):
        """Count an operator that waits, and refuse one that has tensors of two devices."""
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        strangers = [each for each in tensors if each.dim() and not is_there(each)]
        if name == "_to_copy":
            target = kwargs.get("device")
            crosses = target is not None and is_there(args[0]) != (target.type == "cuda")
            waits = crosses and not kwargs.get("non_blocking")
        elif name == "copy_":
            waits = is_there(args[0]) != is_there(args[1]) and not any(args[2:])
        elif name.startswith("index"):
            indices = args[1] if isinstance(args[1], list) else []
            waits = bool(strangers) or any(each is not None and each.dtype == torch.bool for each in indices)
        else:
            assert not strangers, f"{name} has tensors of two devices"
            waits = name in READS
        if waits:
            self.wait()


def is_there(value):
    """Whether it is a tensor on the GPU."""
    return isinstance(value, OnDevice)


STAND_INS = {
    _aten._scaled_dot_product_flash_attention.default: flash,
    _aten._scaled_dot_product_efficient_attention.default: efficient,
}

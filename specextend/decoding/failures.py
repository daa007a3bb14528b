"""Which exceptions mean that memory ran out, and which that the device is beyond use."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("can't allocate memory", "_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""What allocators say that raise a bare RuntimeError: the CPU's, those of cuBLAS and cuDNN, the CUDA driver's."""
_DEVICE = ("CUDA error", "CUDA driver error", "[CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS")
"""What libraries say that raise one after any other failure of a GPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the same work may succeed with less at once."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Whether every later call on the device fails too: only the end of the process helps."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEVICE)

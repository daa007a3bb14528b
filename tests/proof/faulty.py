"""Kernels with the faults that a proof must find. They are called by their places, so each runs where it is tried."""

import os
import signal
import threading

import torch

from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan


def raises(*call):
    """A kernel that does not take the shapes."""
    raise RuntimeError("no kernel image is available")


def not_a_number(*call):
    """A kernel that reads rows which are not the sequence's."""
    out, lse = attend_reference(*call)
    return out * torch.nan, lse


def a_little_wrong(*call):
    """A kernel that loses the last bits but one of its result."""
    out, lse = attend_reference(*call)
    return out * 1.03, lse


def wrong_lse(*call):
    """A kernel that is right but for what merges it with another."""
    out, lse = attend_reference(*call)
    return out, lse + 0.4


def reads_other_rows(q, k, v, span, scale):
    """A kernel that reads the first rows of the cache in captured steps, where a draft reads after a step."""
    from tests.recorded_graph import attend_on_device  # which a process that tries another one does without

    if span.causal and type(span.starts) is not list:
        span = KeySpan([0] * len(q), [q.shape[1]] * len(q), causal=True)
        return attend_reference(q, k, v, span, scale)
    return attend_on_device(q, k, v, span, scale)


def lacks_memory(*call):
    """A kernel that finds its GPU full: somebody else's job is there, too."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def loses_its_device(*call):
    """A kernel whose GPU fails under it."""
    raise RuntimeError("CUDA error: unspecified launch failure")


def hangs(*call):
    """A kernel that never ends."""
    threading.Event().wait()


def dies(*call):
    """A kernel that ends its process."""
    os.kill(os.getpid(), signal.SIGSEGV)


def right_but_slow(*call):
    """A kernel that does everything many times."""
    for _ in range(20):
        attend_reference(*call)
    return attend_reference(*call)


def right_alone(*call):
    """A kernel that gives every sequence of a batch the first one's result."""
    out, lse = attend_reference(*call)
    return out[:1].expand_as(out), lse[:1].expand_as(lse)

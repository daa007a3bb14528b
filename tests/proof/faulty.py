"""Kernels with the faults that a proof must find, called by their places, so each runs where it is tried."""

import os
import signal
import threading

import torch

from specextend.attention.plain import attend_reference
from specextend.attention.plan import KeySpan


def lacks_a_compiler(*call):
    """A kernel that cannot be built here, as Triton says."""
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


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


def not_a_number(*call):
    """A kernel that reads rows which are not the sequence's."""
    out, lse = attend_reference(*call)
    return out * torch.nan, lse


def a_little_wrong(*call):
    """A kernel that loses the last bits but one of its result."""
    out, lse = attend_reference(*call)
    return out * 1.03, lse


def right_alone(*call):
    """A kernel that gives every sequence of a batch the first one's result."""
    out, lse = attend_reference(*call)
    return out[:1].expand_as(out), lse[:1].expand_as(lse)


def a_key_too_few(q, k, v, span, scale):
    """A kernel that loses one key of sequences that are long."""
    size = max(span.lengths)
    num_queries = q.shape[1]
    visible = torch.ones(len(q), num_queries, size, dtype=torch.bool)
    own = torch.ones(num_queries, num_queries, dtype=torch.bool).tril() if span.causal else span.mask
    if own is not None:
        visible[..., -own.shape[-1] :] = own
    for b, length in enumerate(span.lengths):
        if length > 600:
            visible[b, :, size - 300] = False
        visible[b, :, : size - length] = False
    return attend_reference(q, k, v, KeySpan(span.starts, span.lengths, visible), scale)


def a_wrong_word(q, k, v, span, scale):
    """A kernel that takes the second word of a mask for the first one, of one query."""
    mask = span.mask
    if mask is not None and mask.shape[2] > 64:
        mask = mask.clone()
        mask[:, -1, :64] = mask[:, -2, :64]
    return attend_reference(q, k, v, KeySpan(span.starts, span.lengths, mask, span.causal), scale)


def reads_other_rows(q, k, v, span, scale):
    """A kernel that reads the first rows of the cache in captured steps, where a draft reads after a step."""
    from tests.recorded_graph import attend_on_device  # which a process that tries another one does without

    if span.causal and type(span.starts) is not list:
        span = KeySpan([0] * len(q), [q.shape[1]] * len(q), causal=True)
        return attend_reference(q, k, v, span, scale)
    return attend_on_device(q, k, v, span, scale)

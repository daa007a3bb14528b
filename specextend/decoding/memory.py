"""What the engine does when memory runs out: less at once, one rung after the other, until there is nothing to give up.

The caches are there from the start. What runs out is what a forward needs beside them, and that grows with the batch,
the tree and the prefill chunk. None of them changes an output, so documents just begin again with less.
"""

from __future__ import annotations

from typing import Literal

import torch

Work = Literal["prefill", "step"]

SMALLEST_CHUNK = 32
"""Prompt tokens of a prefill forward that are not cut further."""
PATIENCE = 8
"""Documents to be done with less before all is tried again; twice as many each time that this was in vain."""


class MemoryLadder:
    """What may run at once: all that was configured, or less since memory ran out."""

    def __init__(self, batch_size: int, num_nodes: int, chunk_size: int) -> None:
        """Start with all: `batch_size` sequences, trees of `num_nodes` (0: no draft), prefill by `chunk_size`."""
        self._all = batch_size, num_nodes, chunk_size
        self.start()

    def start(self) -> None:
        """Nothing is known: all may run."""
        self.batch_size, self.num_nodes, self.chunk_size = self._all
        self._patience, self._num_ended = PATIENCE, 0

    @property
    def is_lowered(self) -> bool:
        """Whether less than all may run."""
        return (self.batch_size, self.num_nodes, self.chunk_size) != self._all

    def lower(self, work: Work, size: int, num_active: int) -> bool:
        """Go one rung down after `work` ran out of memory; False where there is none left.

        `size`: sequences of the step, or tokens of the prompt; `num_active`: sequences in the engine.
        """
        self._num_ended = 0
        return self._lower_step(size) if work == "step" else self._lower_prefill(size, num_active)

    def ended(self) -> None:
        """A document is done or given up: after enough of them, all is tried again."""
        if not self.is_lowered:
            return
        self._num_ended += 1
        if self._num_ended >= self._patience:
            patience = 2 * self._patience
            self.start()
            self._patience = patience

    def _lower_step(self, size: int) -> bool:
        """Fewer sequences, then smaller trees, then none."""
        if size > 1:
            self.batch_size = min(self.batch_size, size // 2)
        elif self.num_nodes:
            self.num_nodes //= 2
        else:
            return False
        return True

    def _lower_prefill(self, size: int, num_active: int) -> bool:
        """Smaller chunks, then no draft, then nobody beside."""
        size = min(size, self.chunk_size)
        if size > SMALLEST_CHUNK:
            self.chunk_size = max(SMALLEST_CHUNK, size // 2)
        elif self.num_nodes:
            self.num_nodes = 0
        elif num_active > 1:
            self.batch_size = 1
        else:
            return False
        return True


def release_cached(device: torch.device) -> None:
    """Give the allocator's free blocks back, so that pieces of other sizes find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

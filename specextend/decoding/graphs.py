"""Captured steps: a function of tensors is run once, recorded, and replayed as one launch (a CUDA graph).

A GPU starts a kernel faster than its host can ask for it: an eager step of small models is mostly asking. A captured
function reads and writes fixed memory, so whatever differs between two steps must be a tensor on the device, and
nothing may be asked of it on the way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

from torch import Tensor

from specextend.decoding.device import Outputs, is_out_of_memory

Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Records what a function does: returns its replay, and the outputs that every replay writes."""

CALLS_BEFORE_CAPTURE = 8
MOST_GRAPHS = 64
"""A captured step of a large model takes some megabytes beside its outputs."""

_log = logging.getLogger(__name__)


class Graphs:
    """Runs functions of tensors, and captures those whose inputs have the same shapes again and again.

    So rare shapes take no memory, and a batch needs no padding to a size that was captured before. If the device cannot
    capture a function, all of them run eagerly from then on.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        """Take the way to capture; without one everything runs eagerly."""
        self._capture = capture
        self._num_calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Captured] = {}

    @property
    def enabled(self) -> bool:
        """Return True if functions are captured, so that they must have fixed shapes and ask nothing of the device."""
        return self._capture is not None

    @property
    def num_warm_ups(self) -> int:
        """Return the calls with inputs of the same shapes after which a call takes the time that it will take."""
        return 1 if self._capture is None else CALLS_BEFORE_CAPTURE + 1

    def run(self, name: str, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """Return `function(*inputs)`.

        What it returns is valid until the next call of this name. Functions of one name differ in their inputs alone.
        """
        key = name, *((each.shape, each.dtype) for each in inputs)
        if (graph := self._graphs.get(key)) is None:
            graph = self._captured(key, function, inputs)
        return function(*inputs) if graph is None else graph.run(inputs)

    def _captured(
        self, key: Hashable, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]
    ) -> _Captured | None:
        """Capture a function that was called often enough; its first calls built kernels, which a capture may not."""
        if self._capture is None or len(self._graphs) == MOST_GRAPHS:
            return None
        self._num_calls[key] += 1
        if self._num_calls[key] <= CALLS_BEFORE_CAPTURE:
            return None
        try:
            graph = self._graphs[key] = _Captured(self._capture, function, inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            _log.warning("steps run without graphs from now on, because one cannot be captured: %s", error)
            self._capture = None
            self.clear()
            return None
        return graph

    def clear(self) -> None:
        """Forget all graphs, and free their memory."""
        self._graphs.clear()
        self._num_calls.clear()


class _Captured:
    """One function with inputs of fixed shapes, and the memory that it reads and writes."""

    def __init__(self, capture: Capture, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]) -> None:
        self._inputs = tuple(each.clone() for each in inputs)
        self._replay, self._outputs = capture(lambda: function(*self._inputs))

    def run(self, inputs: tuple[Tensor, ...]) -> Outputs:
        for own, new in zip(self._inputs, inputs, strict=True):
            own.copy_(new)
        self._replay()
        return self._outputs

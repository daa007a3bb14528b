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

from specextend.attention.plan import HostReadError
from specextend.decoding.device import Outputs

Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Records what a function does: returns its replay, and the outputs that every replay writes."""

CALLS_BEFORE_CAPTURE = 8
MOST_GRAPHS = 64
"""A captured step of a large model takes some megabytes beside its outputs."""

_log = logging.getLogger(__name__)


class Graphs:
    """Runs functions of tensors, and captures those whose inputs have the same shapes again and again.

    So rare shapes take no memory, and a batch needs no padding to a size that was captured before. A function whose
    kernels ask something of the host runs eagerly. If a capture fails in any other way, all functions run eagerly from
    then on, because the device's allocator may not be trusted with another one.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        """Take the way to capture; without one everything runs eagerly."""
        self._capture = capture
        self._num_calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Captured | None] = {}  # None: runs eagerly
        self.capturing = False
        """True while a function is captured, so that what it asks of the host would be asked once for all replays."""

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
        if self._capture is not None and key not in self._graphs and len(self._graphs) < MOST_GRAPHS:
            self._num_calls[key] += 1
            if self._num_calls[key] > CALLS_BEFORE_CAPTURE:  # the first calls built kernels, which a capture may not
                self._try(self._capture, key, function, inputs)
        graph = self._graphs.get(key)
        return function(*inputs) if graph is None else graph.run(inputs)

    def _try(
        self, capture: Capture, key: Hashable, function: Callable[..., Outputs], inputs: tuple[Tensor, ...]
    ) -> None:
        """Capture a function, or note that it, or all of them, run eagerly."""
        self.capturing = True
        try:
            self._graphs[key] = _Captured(capture, function, inputs)
        except HostReadError as error:
            _log.info("a step runs without a graph: %s", error)
            self._graphs[key] = None
        except Exception as error:  # noqa: BLE001  whatever it was, the allocator may be in any state
            _log.warning("steps run without graphs from now on, because one cannot be captured: %s", error)
            self._capture = None
            self.clear()
        finally:
            self.capturing = False

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

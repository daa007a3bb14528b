"""A simulated cluster: nodes, workers and documents with a simulated clock.

`SimulatedCluster` replaces the pool of Ray actors, so that the real driver and scheduler can run
with thousands of workers. A worker decodes up to `BATCH` documents at a time, and reads row groups
like `Source`.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specextend.cluster.messages import (
    Died,
    Done,
    Draining,
    Event,
    Lease,
    Lost,
    Polled,
    Ready,
    Returned,
    StartFailed,
    WorkerInfo,
    WorkerReport,
)
from specextend.cluster.workers import POLL_S, POLLS_PER_S
from specextend.core import DocumentKey
from specextend.stats import DecodingStats

BATCH = 16
CACHED_GROUPS = 2
"""Row groups cached by a worker."""
TURN_S = 0.1
"""Simulated seconds per turn of the driver."""


@dataclass
class SimulatedNode:
    """A node and its workers."""

    name: str
    workers: int = 8
    tokens_per_s: float = 100.0
    """Decoding speed of each document in a batch."""
    device: str = "fast"
    is_gone: bool = False


@dataclass(frozen=True)
class Notice:
    """Announced or sudden end of a node."""

    at: float
    node: int
    """Number of the node."""
    seconds: float
    """Seconds between notice and end of the node; 0: no notice."""


@dataclass
class SimulatedWorker:
    """A worker with a place."""

    name: str
    node: SimulatedNode
    place: int
    since: float
    is_ready: bool = False
    num_steps: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    groups: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)


@dataclass
class SimulatedClock:
    """A simulated clock."""

    now: float = 0.0

    def __call__(self) -> float:
        """Return the simulated seconds."""
        return self.now


class SimulatedCluster:
    """Workers on simulated nodes.

    Args:
        row: Makes the row of a finished document.
        group: Returns the row group of a document.
        load_s: Seconds to load the models.
        polls: False leaves out polls, to measure their cost.
    """

    def __init__(
        self,
        nodes: Sequence[SimulatedNode],
        clock: SimulatedClock,
        row: Callable[[Lease], dict[str, Any]],
        group: Callable[[DocumentKey], tuple[int, int]],
        *,
        notices: Sequence[Notice] = (),
        load_s: float = 30.0,
        polls: bool = True,
    ) -> None:
        self.clock, self._row, self._group, self._load_s = clock, row, group, load_s
        self.own_s = 0.0
        """CPU seconds of the simulation."""
        self.num_reads = self.num_polls = self.num_done = 0
        self.held_s = 0.0
        """Seconds of occupied places, over all ended workers."""
        self.workers: dict[str, SimulatedWorker] = {}
        self._nodes = nodes
        self._free = [(node, place) for node in nodes for place in range(node.workers)]
        random.Random(0).shuffle(self._free)
        self._asked: list[str] = []
        self._polls: list[tuple[float, str]] | None = [] if polls else None
        self._agenda: list[tuple[float, int, Callable[[], list[Event]]]] = []
        self._number = 0
        self._owner: dict[str, str] = {}
        for notice in notices:
            self._at(notice.at, lambda notice=notice: self._reclaim(notice))  # type: ignore[misc]

    def start(self, worker: str) -> None:
        """Request a worker."""
        self._asked.append(worker)
        self._place()

    def run(self, worker: str, lease: Lease) -> None:
        """Hand a lease to a worker."""
        began = time.process_time()
        being = self.workers[worker]
        being.leases[lease.lease_id] = lease
        self._owner[lease.lease_id] = worker
        self._read(being, self._group(lease.key))
        self._begin(being)
        self.own_s += time.process_time() - began

    def cancel(self, lease_id: str) -> None:
        """Cancel a lease."""
        being = self.workers.get(self._owner[lease_id])
        if being is not None and lease_id in being.leases:
            lease = being.leases.pop(lease_id)
            being.running.discard(lease_id)
            self._begin(being)
            self._at(
                0.0,
                lambda: (
                    [Returned(being.name, lease, Lost("cancelled"))]
                    if being.name in self.workers
                    else []
                ),
            )

    def kill(self, worker: str) -> None:
        """Kill a worker."""
        if worker in self._asked:
            self._asked.remove(worker)
        else:
            being = self._end_worker(worker)
            if not being.node.is_gone:
                self._free.append((being.node, being.place))
            self._place()

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self.workers):
            self._end_worker(worker)

    def wait(self, timeout_s: float) -> list[Event]:
        """Advance the clock by a turn, or to the next event."""
        began = time.process_time()
        end = self.clock.now + TURN_S
        if self._agenda and self._agenda[0][0] > end:
            end = min(self._agenda[0][0], self.clock.now + timeout_s)
        events: list[Event] = []
        while self._agenda and self._agenda[0][0] <= end:
            at, _, what = heapq.heappop(self._agenda)
            self.clock.now = max(self.clock.now, at)
            events += what()
        self.clock.now = max(self.clock.now, end)
        events += self._poll()
        self.own_s += time.process_time() - began
        return events

    def _poll(self) -> list[Event]:
        events: list[Event] = []
        while self._polls and self._polls[0][0] <= self.clock.now:
            _, name = heapq.heappop(self._polls)
            if (being := self.workers.get(name)) is None:
                continue
            being.num_steps += bool(being.running)
            self.num_polls += 1
            self._poll_later(name)
            events.append(
                Polled(name, WorkerReport(being.num_steps, dict.fromkeys(being.running, 5)))
            )
        return events

    def _poll_later(self, worker: str) -> None:
        if self._polls is not None:
            poll_at = self.clock.now + max(POLL_S, len(self.workers) / POLLS_PER_S)
            heapq.heappush(self._polls, (poll_at, worker))

    def _ready(self, worker: str) -> list[Event]:
        if (being := self.workers.get(worker)) is None:
            return []
        self._poll_later(worker)
        node, being.is_ready = being.node, True
        info = WorkerInfo(node.name, node.name, 1, node.device, (f"GPU {being.place}",))
        return [Ready(worker, info), *([Draining(worker)] if node.is_gone else [])]

    def _end(self, being: SimulatedWorker, lease_id: str) -> list[Event]:
        if being.name not in self.workers or (lease := being.leases.pop(lease_id, None)) is None:
            return []
        being.running.discard(lease_id)
        self._begin(being)
        self.num_done += 1
        stats = DecodingStats(
            num_prompt_tokens=lease.estimate.total,
            num_output_tokens=20,
            prefill_s=1.0,
            verify_s=1.0,
        )
        return [Returned(being.name, lease, Done(self._row(lease), stats, 1.0))]

    def _begin(self, being: SimulatedWorker) -> None:
        waiting = sorted(
            being.leases.keys() - being.running, key=lambda name: -being.leases[name].estimate.total
        )
        for name in waiting[: BATCH - len(being.running)]:
            being.running.add(name)
            seconds = being.leases[name].estimate.total / being.node.tokens_per_s
            self._at(seconds, lambda name=name: self._end(being, name))  # type: ignore[misc]

    def _read(self, being: SimulatedWorker, group: tuple[int, int]) -> None:
        if group not in being.groups:
            self.num_reads += 1
            while len(being.groups) >= CACHED_GROUPS:
                being.groups.popitem(last=False)
        being.groups[group] = None
        being.groups.move_to_end(group)

    def _reclaim(self, notice: Notice) -> list[Event]:
        """Announce the end of a node and, like Ray, start nothing there."""
        node = self._nodes[notice.node]
        node.is_gone = True
        self._free = [(other, place) for other, place in self._free if other is not node]
        self._at(notice.seconds, lambda: self._go(node))
        workers = [
            name for name, being in self.workers.items() if being.node is node and being.is_ready
        ]
        return [Draining(name) for name in workers] if notice.seconds else []

    def _go(self, node: SimulatedNode) -> list[Event]:
        events: list[Event] = []
        for name in [name for name, being in self.workers.items() if being.node is node]:
            if not self._end_worker(name).is_ready:
                events.append(StartFailed(name, "its node is gone"))
                continue
            events.append(Died(name, "its node is gone", with_node=True))
        return events

    def _end_worker(self, worker: str) -> SimulatedWorker:
        being = self.workers.pop(worker)
        self.held_s += self.clock.now - being.since
        return being

    def _place(self) -> None:
        while self._asked and self._free:
            (node, place), worker = self._free.pop(0), self._asked.pop(0)
            self.workers[worker] = SimulatedWorker(worker, node, place, self.clock.now)
            self._at(self._load_s, lambda worker=worker: self._ready(worker))  # type: ignore[misc]

    def _at(self, delay_s: float, what: Callable[[], list[Event]]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (self.clock.now + delay_s, self._number, what))

"""Workers on GPUs that are made up: documents take their seconds, and one of the GPUs kills whoever works on it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from specextend.cluster.messages import (
    CallLost,
    Died,
    Done,
    Dying,
    Event,
    Lease,
    Polled,
    Ready,
    Returned,
    WorkerInfo,
    WorkerReport,
)
from specextend.core import DocumentKey
from specextend.stats import DecodingStats
from tests.properties.rows import done
from tests.properties.simulated import Clock

LOAD_S = 30.0
SHORTEST_S, LONGEST_S = 20.0, 60.0
"""Of a document."""
BATCH = 3
POLL_S = 2.0
DEATH_S = 3.0
"""From the start of a document to the death that it brings, or that its GPU brings."""


@dataclass
class Gpu:
    """Where a worker runs."""

    node: str
    number: int
    is_sick: bool = False
    worker: str | None = None


@dataclass
class Running:
    """A worker that Ray has placed."""

    gpu: Gpu
    is_ready: bool = False
    is_dying: bool = False
    num_steps: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)


class TimedPool:
    """Stands where the pool of Ray actors stands; `wait` lets the clock run to the next thing that happens.

    poison: documents that kill their worker wherever they run.
    """

    def __init__(self, draw: random.Random, clock: Clock, gpus: list[Gpu], poison: frozenset[DocumentKey]) -> None:
        self._draw, self.clock, self._gpus, self._poison = draw, clock, gpus, poison
        self._pending: list[str] = []
        self._agenda: list[tuple[float, int, Callable[[], list[Event]]]] = []
        self._number = 0
        self.workers: dict[str, Running] = {}
        self.deaths: list[str] = []
        """The GPU of each."""

    def start(self, worker: str) -> None:
        self._pending.append(worker)
        self._place()

    def run(self, worker: str, lease: Lease) -> None:
        assert self.workers[worker].is_ready
        self.workers[worker].leases[lease.lease_id] = lease
        self._begin(worker)

    def cancel(self, lease_id: str) -> None:
        for worker, running in self.workers.items():
            if lease_id in running.leases:
                lease = running.leases.pop(lease_id)
                running.begun.discard(lease_id)
                self._at(0.0, lambda worker=worker, lease=lease: [CallLost(worker, lease, "cancelled")])

    def kill(self, worker: str) -> None:
        if worker in self._pending:
            self._pending.remove(worker)
            return
        self.workers.pop(worker).gpu.worker = None
        self._place()

    def close(self) -> None:
        self.workers.clear()

    def wait(self, timeout_s: float) -> list[Event]:
        end = self._agenda[0][0] if self._agenda else self.clock.now + timeout_s
        self.clock.now = max(self.clock.now, end)
        events: list[Event] = []
        while self._agenda and self._agenda[0][0] <= self.clock.now:
            events += heapq.heappop(self._agenda)[2]()
        return events

    def _at(self, delay_s: float, what: Callable[[], list[Event]]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (self.clock.now + delay_s, self._number, what))

    def _place(self) -> None:
        """As Ray does: whoever waits gets any GPU that is free."""
        free = [gpu for gpu in self._gpus if gpu.worker is None]
        while self._pending and free:
            gpu = free.pop(self._draw.randrange(len(free)))
            gpu.worker = worker = self._pending.pop(0)
            self.workers[worker] = Running(gpu)
            self._at(LOAD_S, lambda worker=worker: self._ready(worker))

    def _ready(self, worker: str) -> list[Event]:
        if (running := self.workers.get(worker)) is None:
            return []
        running.is_ready = True
        self._at(POLL_S, lambda: self._poll(worker))
        return [Ready(worker, info(running.gpu))]

    def _poll(self, worker: str) -> list[Event]:
        if (running := self.workers.get(worker)) is None or running.is_dying:
            return []
        running.num_steps += bool(running.begun)
        self._at(POLL_S, lambda: self._poll(worker))
        return [Polled(worker, WorkerReport(running.num_steps, dict.fromkeys(running.begun, 1)))]

    def _begin(self, worker: str) -> None:
        running = self.workers[worker]
        waiting = [name for name in running.leases if name not in running.begun]
        for name in waiting[: BATCH - len(running.begun)]:
            running.begun.add(name)
            if running.gpu.is_sick or running.leases[name].key in self._poison:
                self._at(DEATH_S, lambda name=name: self._die(worker, name))
            else:
                self._at(self._draw.uniform(SHORTEST_S, LONGEST_S), lambda name=name: self._end(worker, name))

    def _end(self, worker: str, name: str) -> list[Event]:
        running = self.workers.get(worker)
        if running is None or running.is_dying or name not in running.leases:
            return []
        lease = running.leases.pop(name)
        running.begun.discard(name)
        self._begin(worker)
        row = done(lease.key) | {"attempts": lease.attempt}
        return [Returned(worker, lease, Done(row, DecodingStats(num_prompt_tokens=1, num_output_tokens=2)))]

    def _die(self, worker: str, name: str) -> list[Event]:
        running = self.workers.get(worker)
        if running is None or running.is_dying or name not in running.leases:
            return []
        running.is_dying = True
        self.deaths.append(f"{running.gpu.node}/{running.gpu.number}")
        self._at(0.0, lambda: self._bury(worker))
        return [Dying(worker, "its process ended")]

    def _bury(self, worker: str) -> list[Event]:
        self.workers.pop(worker).gpu.worker = None
        self._place()
        return [Died(worker, "its process ended", with_node=False)]


def info(gpu: Gpu) -> WorkerInfo:
    """What a worker says of where it runs."""
    return WorkerInfo(gpu.node, f"host-{gpu.node}", 1, "H200", (f"GPU {gpu.number}",))

"""Nights of the real lock, gate, commits and finalize: drivers are killed and suspended, clocks set, the store is slow
or away. Only time, the machines and the schedulers are made up.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from specextend.cluster import lock
from specextend.cluster.exits import EXIT_DONE, EXIT_FAILED, EXIT_LOCKED, RunError, exit_code, writing
from specextend.cluster.lock import OutputLock, read_lock
from specextend.data import parquet
from specextend.data.commits import CommitWriter, pending, read_commits
from specextend.data.finalize import finalize
from specextend.data.run_folder import Counts, read_success, write_success
from specextend.data.storage import Location, read_bytes, resolve, write_bytes
from tests.job.conftest import rows as rows_of
from tests.properties.rows import done, in_a_folder, source_of

KILLED = 137
RETRIED = (EXIT_FAILED, KILLED)
"""Codes after which a scheduler starts the run again."""
SIZES = [4, 5]
MAX_STEPS = 20_000


@dataclass
class World:
    """True time, and the store."""

    draw: random.Random
    now: float = 0.0
    away_until: float = 0.0
    longest_request_s: float = 0.0
    is_garbled: bool = False
    """The last answer was."""

    def asking(self, call):
        """The same call of a store that is slow or away, or for a moment answers nothing with status 200."""

        def ask(*arguments):
            self.now += self.draw.uniform(0.0, self.longest_request_s)
            if self.now < self.away_until:
                raise OSError("no route to host")
            answer = call(*arguments)
            self.is_garbled = not self.is_garbled and answer is not None and self.draw.random() < 0.05
            return b"" if self.is_garbled else answer

        return ask


@dataclass
class Machine:
    """A host with two clocks: a virtual one whose steady clock stands still while it is paused, or one that is set."""

    world: World
    is_virtual: bool
    skew: float
    paused_s: float = 0.0

    def wall(self):
        return 1e9 + self.world.now + self.skew

    def steady(self):
        return self.world.now - self.paused_s


class Start:
    """One start of the run: waits for the lock, commits what is left to do row by row, finalizes."""

    def __init__(self, night, machine, run_id):
        self.night = night
        self.machine = machine
        self.run_id = run_id
        self.lock = OutputLock(night.output, run_id, machine.wall, machine.steady, host=f"host-of-{run_id}")
        self.output = night.output.behind(self.lock.check)
        self.asleep_until = 0.0
        self.beat_at = 0.0
        self.left = None
        """Keys still to do, once the folder is ours."""
        self.code = None

    def step(self):
        try:
            with writing(self.output):
                self.wait() if self.left is None else self.work(self.left)
        except RunError as error:
            self.end(exit_code(error))

    def wait(self):
        if self.lock.try_take():
            self.beat_at = self.machine.steady()
            self.left = list(pending(map(range, SIZES), read_commits(self.output)))
            self.writer = CommitWriter(self.output, self.run_id)

    def work(self, left):
        """What either thread does next: the one that beats, or the one that writes."""
        is_due = self.machine.steady() - self.beat_at >= lock.HEARTBEAT_S
        if is_due and self.night.world.draw.random() < 0.5:
            self.beat_at = self.machine.steady()
            try:
                self.lock.beat()
            except OSError:
                return
        self.lock.check()
        if self.night.world.draw.random() < 0.7:  # decoding
            return
        if left:
            self.writer.commit([done(left[0], self.run_id)])
            del left[0]
        else:
            counts = finalize(self.night.source, self.output)
            self.lock.confirm()
            write_success(self.output, counts)
        holder = read_lock(self.night.output)
        assert holder is not None
        assert holder.run_id == self.run_id, "who writes holds the folder"
        if read_success(self.night.output) is not None:
            self.end(EXIT_DONE)

    def end(self, code):
        if code != KILLED and self.night.world.now >= self.night.world.away_until:
            self.lock.release()
        self.code = code


@dataclass
class Scheduler:
    """Starts the run, and again while its exit code says that another try may help."""

    starts_at: float
    start: Start | None = None
    codes: list[int] = field(default_factory=list)
    is_over: bool = False


class Night:
    """Some schedulers and one output folder."""

    def __init__(self, folder, draw, output, num_schedulers):
        self.draw, self.world, self.output = draw, World(draw), output
        self.source = source_of(folder / "in", SIZES)
        self.world.longest_request_s = draw.choice([0.0, 0.1, 3.0])
        self.trouble = draw.choice([0, 5, 30])
        self.schedulers = [Scheduler(draw.uniform(0.0, 100.0)) for _ in range(num_schedulers)]

    def pass_by(self):
        """Until no scheduler starts the run again."""
        for _ in range(MAX_STEPS):
            waiting = [each for each in self.schedulers if not each.is_over]
            if not waiting:
                return
            self.world.now += self.draw.uniform(0.0, 1.0)
            self.turn(self.draw.choice(waiting))
        raise AssertionError("the night does not end")

    def turn(self, scheduler):
        start = scheduler.start
        if start is None:
            if self.world.now >= scheduler.starts_at:
                machine = Machine(self.world, self.draw.random() < 0.5, self.draw.choice([0.0, -1e6, 1e6, 59.0]))
                scheduler.start = Start(self, machine, f"{self.draw.getrandbits(32):08x}")
            return
        if self.world.now < start.asleep_until:
            return
        if self.trouble and self.draw.random() < 0.05:
            self.trouble -= 1
            self.go_wrong(start)
        else:
            start.step()
        if start.code is not None:
            scheduler.codes.append(start.code)
            scheduler.is_over = start.code not in RETRIED
            scheduler.start, scheduler.starts_at = None, self.world.now + self.draw.uniform(0.0, 90.0)

    def go_wrong(self, start):
        faults = [self.kill, self.suspend, self.suspend, self.lose_store]
        self.draw.choice([*faults, self.pause if start.machine.is_virtual else self.set_clock])(start)

    def kill(self, start):
        start.end(KILLED)

    def suspend(self, start):
        start.asleep_until = self.world.now + self.draw.choice([20.0, 44.0, 66.0, 300.0])

    def pause(self, start):
        """The whole machine: only its wall clock is right afterwards."""
        seconds = self.draw.choice([20.0, 66.0, 300.0])
        start.asleep_until = self.world.now + seconds
        start.machine.paused_s += seconds

    def set_clock(self, start):
        start.machine.skew += self.draw.choice([-1e6, -100.0, 100.0, 1e6])

    def lose_store(self, start):
        self.world.away_until = self.world.now + self.draw.uniform(1.0, 120.0)


def local(folder):
    return resolve(f"{folder}/out")


def object_store(folder):
    """It has no way to keep a second writer out."""
    return Location(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "out")


def play(seed, where, num_schedulers):
    """A night; checks what holds for each, and returns the exit codes of each scheduler."""
    codes = []

    def check(folder):
        night = Night(folder, random.Random(seed), where(folder), num_schedulers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lock, "read_bytes", night.world.asking(read_bytes))
            for module in lock, parquet:
                patch.setattr(module, "write_bytes", night.world.asking(write_bytes))
            night.pass_by()
        total = sum(SIZES)
        assert read_success(night.output) == Counts(total, total, 0), "whoever should try again did, and it was enough"
        assert len(rows_of(folder / "out" / "summaries")) == total
        keys = [(row["file"], row["row"]) for row in rows_of(folder / "out" / "_run" / "parts")]
        assert len(keys) == len(set(keys)) == total, "nothing lost, nothing done twice"
        codes.extend(scheduler.codes for scheduler in night.schedulers)

    in_a_folder(check)
    return codes


@pytest.mark.parametrize("where", [local, object_store])
@pytest.mark.parametrize("allowed", [[{EXIT_DONE, *RETRIED}], [{EXIT_DONE, EXIT_LOCKED, *RETRIED}] * 2])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_of_one_or_two_schedulers_one_sees_the_run_to_its_end_whatever_the_other_is_told(seed, where, allowed):
    """Exit 4 is a promise: somebody lives who goes on, or who is started again. A single one never hears it: its own
    dead and its own suspension were taken for another driver, and the retry ended with 4.
    """
    codes = play(seed, where, len(allowed))
    assert EXIT_DONE in [each[-1] for each in codes]
    assert all(wanted.issuperset(given) for wanted, given in zip(allowed, codes, strict=True))

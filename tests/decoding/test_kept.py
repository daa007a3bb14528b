"""A measurement that another process disturbed is repeated, used at last, and not kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specextend.decoding import kept


class Machine:
    """A clock and a count of the times that the process lost its core, both moved by measurements alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.preemptions, self.num_runs = 0.0, 0, 0
        monkeypatch.setattr(kept.time, "perf_counter", lambda: self.now)
        usage = lambda _: SimpleNamespace(ru_nivcsw=self.preemptions)  # noqa: E731
        monkeypatch.setattr(kept.resource, "getrusage", usage)

    def measurement(self, *preemptions: int, seconds: float = 0.5):
        """Runs that see so many preemptions; the last one goes on for ever."""

        def measure() -> int:
            self.preemptions += preemptions[min(self.num_runs, len(preemptions) - 1)]
            self.num_runs += 1
            self.now += seconds
            return self.num_runs

        return measure


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_a_quiet_machine_measures_once(machine):
    """Idle cores show some preemptions, too."""
    assert kept.measure_undisturbed(machine.measurement(20)) == (1, True)


def test_a_disturbed_measurement_is_repeated(machine):
    """Another process ends: what it spoiled is forgotten."""
    assert kept.measure_undisturbed(machine.measurement(100, 0)) == (2, True)


def test_a_machine_that_stays_busy_gets_a_result_that_is_not_kept(machine):
    """Start-up must not wait for a neighbour's night to end."""
    result, is_quiet = kept.measure_undisturbed(machine.measurement(100))
    assert not is_quiet
    assert result == machine.num_runs
    assert 2.0 <= machine.now <= 3.0


def test_a_long_measurement_is_not_repeated(machine):
    """On a slow machine one run takes all the time there is."""
    assert kept.measure_undisturbed(machine.measurement(1000, seconds=5.0)) == (1, False)

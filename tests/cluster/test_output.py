"""The gate between a run and its output folder."""

from __future__ import annotations

import threading
import time

import pytest

from specextend.cluster.exits import OutputError
from specextend.cluster.output import OutputGate, using, writing
from specextend.data.storage import Location, resolve


@pytest.fixture
def output() -> Location:
    return resolve("/somewhere")


def test_a_request_that_does_not_come_back_is_given_up(output: Location):
    """The thread that waits cannot be stopped: another one has to say so."""
    given_up = threading.Event()
    gate = OutputGate(0.1, given_up.set)
    with using(output.behind(gate)):
        assert given_up.wait(60)


def test_many_requests_may_take_long_together_and_time_between_blocks_does_not_count(output: Location):
    """Ten thousand parts are read in an hour; decoding takes a night."""
    given_up = threading.Event()
    gate = OutputGate(0.4, given_up.set)
    with using(output.behind(gate)):
        for _ in range(10):
            output.behind(gate).touch()
            time.sleep(0.1)  # requests that take a while: that is the case
    time.sleep(0.6)
    gate.close()
    assert not given_up.is_set()


def test_what_a_file_system_has_against_a_write_is_one_line_and_other_errors_are_themselves(output: Location):
    """Exit 1 and what to do, not a traceback."""
    why = r"^/somewhere cannot be written to: disk full; what was committed is there, run again to resume$"
    with pytest.raises(OutputError, match=why), writing(output):
        raise OSError("disk full\nand more")
    with pytest.raises(ZeroDivisionError), writing(output):
        raise ZeroDivisionError

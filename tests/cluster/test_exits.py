import sys

import pytest

from tests.job.conftest import ran

STUCK = """
import os, signal, threading, time
from specextend.cluster.exits import Interrupt
interrupt = Interrupt(grace_s=0.2)
interrupt.install()
interrupt.last = {last}
os.kill(os.getpid(), signal.SIGTERM)
while True:
    time.sleep(1)
"""


def ended(code):
    """What became of a process that runs this code."""
    return ran(sys.executable, "-c", code)


@pytest.mark.parametrize("last", ["threading.Event().wait", "lambda: open('/no/such/folder/lock')"])
def test_a_lock_that_cannot_be_removed_holds_nobody_up(last):
    """On a file system that hangs or fails it would be SIGKILL again."""
    assert ended(STUCK.format(last=last)).code == 75


DEAF = """
import ctypes
from specextend.cluster.exits import Interrupt
interrupt = Interrupt(grace_s=0.2, deadline_s=0.5)
interrupt.install()
print("waiting", flush=True)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)  # for ever, and no signal ends it
"""


def test_a_deadline_holds_while_nobody_asks_for_it():
    """It was looked at between documents only: planning and writing summaries ran into the morning."""
    assert ended(DEAF).code == 75


RAY = """
import os, signal, sys, threading, time
import psutil
from specextend.cluster.environment import connected
from specextend.cluster.exits import InterruptedRunError, exit_code
from specextend.cluster.exits import Interrupt

def raylets():
    return [child for child in psutil.Process().children() if child.name() == "raylet"]

def when(condition):
    def strike():
        while not condition():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=strike)
    thread.start()
    return thread

interrupt = Interrupt(grace_s=600)
interrupt.install()
try:
    striker = when(raylets)
    with connected(interrupt):
        striker.join()
        interrupt.check()
except InterruptedRunError as error:
    sys.exit(exit_code(error))
"""


@pytest.mark.slow
def test_a_signal_is_heard_while_ray_begins():
    """Ray's handler ended the job with 15."""
    assert ended(RAY).code == 75

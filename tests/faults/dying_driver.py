"""`jobs/summarize.py`, killed as it writes: `dying_driver.py SIGNAL before|after PATTERN NUMBER ARGUMENT...`.

Its process gets the signal before or after the NUMBERth file that matches PATTERN is renamed to its final name. With
`HANG` in place of a signal, the thread that renames never goes on, and the run has one second to end.
"""

import os
import runpy
import signal
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path

from specextend.cluster import exits

SUMMARIZE = Path(__file__).parents[2] / "jobs" / "summarize.py"


def mortal(rename, death, when, pattern, number):
    seen = []

    def renames(source, target):
        matches = fnmatch(target, pattern)
        seen.extend([target] * matches)
        is_due = matches and len(seen) == number
        if is_due and when == "before":
            strike(death)
        rename(source, target)
        if is_due and when == "after":
            strike(death)

    return renames


def strike(death):
    if death == "HANG":
        threading.Event().wait()
    os.kill(os.getpid(), signal.Signals[death])


if __name__ == "__main__":
    _, death, when, pattern, number, *arguments = sys.argv
    for name in ("replace", "link"):
        setattr(os, name, mortal(getattr(os, name), death, when, pattern, int(number)))
    exits.GRACE_S = 1.0 if death == "HANG" else 600.0
    sys.argv = [str(SUMMARIZE), *arguments]
    runpy.run_path(str(SUMMARIZE), run_name="__main__")

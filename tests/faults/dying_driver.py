"""`jobs/summarize.py`, killed as it writes: `dying_driver.py SIGNAL before|after PATTERN NUMBER ARGUMENT...`.

Its process gets the signal before or after the NUMBERth file that matches PATTERN is renamed to its final name.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

SUMMARIZE = Path(__file__).parents[2] / "jobs" / "summarize.py"


Rename = Callable[[str, str], None]


def mortal(rename: Rename, death: signal.Signals, when: str, pattern: str, number: int) -> Rename:
    seen = []

    def renames(source: str, target: str) -> None:
        matches = fnmatch(target, pattern)
        seen.extend([target] * matches)
        is_due = matches and len(seen) == number
        if is_due and when == "before":
            os.kill(os.getpid(), death)
        rename(source, target)
        if is_due and when == "after":
            os.kill(os.getpid(), death)

    return renames


if __name__ == "__main__":
    _, death, when, pattern, number, *arguments = sys.argv
    for name in ("replace", "link"):
        setattr(os, name, mortal(getattr(os, name), signal.Signals[death], when, pattern, int(number)))
    sys.argv = [str(SUMMARIZE), *arguments]
    runpy.run_path(str(SUMMARIZE), run_name="__main__")

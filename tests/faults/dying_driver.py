"""`jobs/summarize.py`, killed as it writes: `dying_driver.py before|after PATTERN NUMBER ARGUMENT...`.

Its process gets SIGKILL before or after the NUMBERth file that matches PATTERN is renamed to its final name.
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


def mortal(rename: Callable[[str, str], None], when: str, pattern: str, number: int) -> Callable[[str, str], None]:
    seen = []

    def renames(source: str, target: str) -> None:
        if fnmatch(target, pattern):
            seen.append(target)
            if when == "before" and len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if when == "after" and len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return renames


if __name__ == "__main__":
    _, when, pattern, number, *arguments = sys.argv
    for name in ("replace", "link"):
        setattr(os, name, mortal(getattr(os, name), when, pattern, int(number)))
    sys.argv = [str(SUMMARIZE), *arguments]
    runpy.run_path(str(SUMMARIZE), run_name="__main__")

"""Report on a run folder. See `--help`."""

from __future__ import annotations

import sys

from specextend.cli.report import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))

"""Summarise a corpus: Parquet in, Parquet out, on Ray. See `--help`."""

from __future__ import annotations

import sys

from specextend.cli.command import end
from specextend.cli.run import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    end(main(sys.argv[1:]))

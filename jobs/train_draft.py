"""Distil a draft for a target from text in Parquet files. See `--help`."""

from __future__ import annotations

import sys

from specextend.cli.train import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))

"""Convert data sets, JSON Lines and folders of text or PDF files to Parquet. See `--help`."""

from __future__ import annotations

import sys

from specextend.cli.prepare import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))

"""Summarise a corpus: Parquet in, Parquet out, on Ray. See `--help`."""

import sys

from specextend.cli.command import run_alone
from specextend.cli.run import run

if __name__ == "__main__":
    run_alone(run, sys.argv[1:], "summarize.py")

"""Summarise a corpus: Parquet in, Parquet out, on Ray. See `--help`."""

from specextend.cli.command import script
from specextend.cli.run import run

if __name__ == "__main__":
    script(run)

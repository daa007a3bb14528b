"""Distil a draft for a target from text in Parquet files. See `--help`."""

from specextend.cli.command import script
from specextend.cli.train import train

if __name__ == "__main__":
    script(train)

"""Convert data sets, JSON Lines and folders of text or PDF files to Parquet. See `--help`."""

from specextend.cli.command import script
from specextend.cli.prepare import prepare

if __name__ == "__main__":
    script(prepare)

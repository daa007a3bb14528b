"""Convert data sets and folders of documents to Parquet. See `--help`."""

from specextend.cli.command import script
from specextend.cli.prepare import prepare

if __name__ == "__main__":
    script(prepare)

"""Convert data sets, JSON Lines and folders of text files to Parquet for jobs/summarize.py.

python jobs/prepare.py govreport --split test --limit 100 --output data/govreport.parquet
python jobs/prepare.py jsonl documents.jsonl --text-field body --output data/documents.parquet
python jobs/prepare.py text folder/ --output data/texts.parquet
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specextend.core import printable
from specextend.data.importers import HUB_DATASETS, read_hub, read_jsonl, read_text_folder, write_documents
from specextend.data.storage import resolve
from specextend.terminal import complain, guard_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 with one line on stderr if the input or output is unusable."""
    options = _parser().parse_args(arguments)
    try:
        count = write_documents(_documents(options), resolve(options.output), options.limit)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    print(printable(f"{count} documents in {options.output}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write documents as Parquet, in small row groups.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, known in HUB_DATASETS.items():
        command = commands.add_parser(name, help=f"{known.repository} from the Hugging Face Hub")
        command.add_argument("--split", default="test")
    jsonl = commands.add_parser("jsonl", help="a JSON Lines file")
    jsonl.add_argument("input", type=Path)
    jsonl.add_argument("--text-field", default="text")
    jsonl.add_argument("--id-field", help="default: the id is <file>:<line>")
    text = commands.add_parser("text", help="a folder of UTF-8 text files, searched recursively")
    text.add_argument("input", type=Path)
    text.add_argument("--pattern", default="*.txt")
    for command in commands.choices.values():
        command.add_argument("--output", required=True, help="the Parquet file, a path or a URI")
        command.add_argument("--limit", type=_positive, help="documents at most")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _documents(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.command == "jsonl":
        return read_jsonl(options.input, options.text_field, options.id_field)
    if options.command == "text":
        return read_text_folder(options.input, options.pattern)
    return read_hub(options.command, options.split)


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())

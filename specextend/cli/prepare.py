"""Convert data sets, JSON Lines and folders of text or PDF files to Parquet for jobs/summarize.py.

python jobs/prepare.py govreport --split test --limit 100 --output data/govreport.parquet
python jobs/prepare.py jsonl documents.jsonl --text-field body --output data/documents.parquet
python jobs/prepare.py text folder/ --output data/texts.parquet
python jobs/prepare.py pdf folder/ --output data/reports.parquet
python jobs/prepare.py openai requests.jsonl --output data/requests.parquet
python jobs/prepare.py repartition large.parquet --output data/smaller/

One more command unpacks a model in a GGUF file to a folder that target.model may name:

python jobs/prepare.py model file.gguf --output models/mine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specextend.core import counted, printable
from specextend.data.batch_requests import BatchRequests
from specextend.data.importers import (
    DOCUMENT_SCHEMA,
    HUB_DATASETS,
    PDF_FILES,
    REQUEST_SCHEMA,
    other_files,
    read_hub,
    read_jsonl,
    read_pdf_folder,
    read_text_folder,
    refuse,
    repartition,
    write_documents,
)
from specextend.data.inputs import InputError
from specextend.data.storage import resolve
from specextend.terminal import complain

_MOST_NAMED = 5
"""Most files of another kind that are named; the others are counted."""


class LeftOut:
    """Names each unreadable file on stderr, and counts them."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.count = 0

    def __call__(self, error: InputError) -> None:
        """Name the file and the reason."""
        self.count += 1
        print(f"left out: {error}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0, or 2 with one line on stderr if the input or output is unusable."""
    options = _parser().parse_args(argv)
    if options.command == "model":
        return _unpack(options)
    if options.command == "repartition":
        return _repartition(options)
    left_out, others = LeftOut(), _others(options)
    requests = BatchRequests(options.input) if options.command == "openai" else None
    documents, schema = (
        (_documents(options, left_out), DOCUMENT_SCHEMA) if requests is None else (requests, REQUEST_SCHEMA)
    )
    try:
        count = write_documents(documents, resolve(options.output), options.limit, schema)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    note = f"; unreadable files left out: {left_out.count}" if left_out.count else ""
    print(printable(f"{counted(count, 'document')} in {options.output}{note}"))
    if others:
        print(printable(f"of another kind, left out: {_name_some(others)}"), file=sys.stderr)
    if requests is not None:
        print(printable(f"give jobs/summarize.py: {requests.settings}"))
    return 0


def _repartition(options: argparse.Namespace) -> int:
    try:
        count = repartition(options.input, options.output)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    print(printable(f"{counted(count, 'file')} in {options.output}"))
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
    pdf = commands.add_parser("pdf", help="a folder of PDF files, searched recursively")
    pdf.add_argument("input", type=Path)
    for command in (text, pdf):
        command.add_argument("--skip-unreadable", action="store_true", help="leave out files that cannot be read")
    again = commands.add_parser("repartition", help="Parquet files with large row groups, written in smaller ones")
    again.add_argument("input", help="what input.path takes: a file, a folder or a glob, local or a URI")
    openai = commands.add_parser("openai", help="requests in the input format of OpenAI's Batch API")
    openai.add_argument("input", type=Path)
    for command in commands.choices.values():
        is_folder = command is again
        what = "the folder to write the files to" if is_folder else "the Parquet file"
        command.add_argument("--output", required=True, help=f"{what}, a path or a URI")
        if not is_folder:
            command.add_argument("--limit", type=_positive, help="documents at most")
    model = commands.add_parser("model", help="a model in a GGUF file, to unpack to a folder")
    model.add_argument("input", type=Path)
    model.add_argument("--output", required=True, type=Path, help="the folder to make")
    model.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the weights")
    return parser


def _unpack(options: argparse.Namespace) -> int:
    from specextend.models import convert_gguf  # it imports torch, which the other commands do not need

    try:
        convert_gguf(options.input, options.output, options.dtype)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    print(printable(f"model in {options.output}; give jobs/summarize.py: --set target.model={options.output}"))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _others(options: argparse.Namespace) -> list[str]:
    """List the files in a folder that the command does not take; none if it reads no folder."""
    patterns = {"text": getattr(options, "pattern", ""), "pdf": PDF_FILES}
    return other_files(options.input, patterns[options.command]) if options.command in patterns else []


def _name_some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    said = ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
    return f"{counted(len(names), 'file')} ({said})"


def _documents(options: argparse.Namespace, left_out: LeftOut) -> Iterator[dict[str, Any]]:
    if options.command == "jsonl":
        return read_jsonl(options.input, options.text_field, options.id_field)
    if options.command == "text":
        return read_text_folder(options.input, options.pattern, left_out if options.skip_unreadable else refuse)
    if options.command == "pdf":
        return read_pdf_folder(options.input, left_out if options.skip_unreadable else refuse)
    return read_hub(options.command, options.split)

"""Turn documents of many kinds into a data set of Parquet files for jobs/summarize.py.

specextend prepare documents reports/ notes/ --output data/documents   # PDF, DOCX, HTML, Markdown, text, JSONL, CSV
specextend prepare documents reports/ --pattern '*.md' --pattern '*.log' --encoding cp1252 --output data/documents
specextend prepare hf ccdv/govreport-summarization --split test --text-field report --output data/govreport
specextend prepare openai requests.jsonl --output data/requests.parquet
specextend prepare repartition large.parquet --output data/smaller/
specextend prepare model file.gguf --output models/mine

The same command again reads the files that are new, that have changed or that have failed. Exit 3: some could not be
read; _errors.jsonl in the data set names each, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from specextend.core import counted, printable
from specextend.data.batch_requests import BatchRequests, write_requests
from specextend.data.check import repartition
from specextend.data.documents import ERRORS, Prepared, prepare_documents, prepare_rows
from specextend.data.formats import DocumentOptions, hub_rows
from specextend.terminal import complain

_ONE_KIND = {"text": ("*.txt",), "pdf": ("*.[pP][dD][fF]",), "jsonl": ("*.jsonl",)}
"""Commands that read the files of a folder as one kind, with the names that they look for."""
_MOVED = {
    "govreport": "hf ccdv/govreport-summarization --text-field report",
    "booksum": "hf kmfoda/booksum --text-field chapter",
    "pg19": "hf emozilla/pg19 --id-field url",
}
"""What takes the place of commands that are gone."""
_MOST_NAMED = 5
_PROGRESS_S = 10


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0; 3 if some documents could not be read; 2 if the arguments are wrong."""
    if argv and argv[0] in _MOVED:
        complain(ValueError(f"prepare {argv[0]} is gone; use: prepare {_MOVED[argv[0]]} --split test --output FOLDER"))
        return 2
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was read is kept, and the same command reads the rest", file=sys.stderr)
        return 75


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("documents", *_ONE_KIND):
        kind = "" if name == "documents" else f", each read as {name}"
        command = commands.add_parser(name, help=f"files, folders and globs, local or URIs{kind}")
        command.add_argument("input", nargs="+")
        command.add_argument(
            "--pattern",
            action="append",
            dest="patterns",
            metavar="PATTERN",
            help="take only files like this (*.md); may be repeated",
        )
        command.add_argument("--encoding", help="of texts that are not UTF-8, such as cp1252")
        command.add_argument("--keep-lines", action="store_true", help="do not join the lines of PDFs")
        command.add_argument(
            "--time-limit", type=float, dest="time_limit_s", metavar="SECONDS", help="for each file (60)"
        )
        memory = command.add_argument("--memory-limit", type=float, dest="memory_gib", metavar="GIB")
        memory.help = "of each process that reads files (4)"
        command.add_argument("--workers", type=_positive, help="processes that read files; all processors")
        command.add_argument("--remove-gone", action="store_true", help="remove documents whose file is gone")
        command.set_defaults(run=_documents)
    hub = commands.add_parser("hf", help="a data set of the Hugging Face Hub, or a local folder of one")
    hub.add_argument("input")
    hub.add_argument("--split", default="test")
    hub.add_argument("--subset", help="the data set's configuration, if it has several")
    hub.set_defaults(run=_hub)
    for command in commands.choices.values():
        command.add_argument("--text-field", default="text", help="field of a row that holds the text (text)")
        command.add_argument("--id-field", help="field of a row that holds the id; default: <file>:<line>")
        command.add_argument("--skip-unreadable", action="store_true", help="exit 0 although some cannot be read")
        command.add_argument("--limit", type=_positive, help="most files, or rows of the Hub, of this call")
    openai = commands.add_parser("openai", help="requests in the input format of OpenAI's Batch API")
    openai.add_argument("input", type=Path)
    openai.set_defaults(run=_requests)
    openai.add_argument("--limit", type=_positive, help="rows at most")
    again = commands.add_parser("repartition", help="Parquet files with large row groups, written in smaller ones")
    again.add_argument("input", help="what input.path takes: a file, a folder or a glob, local or a URI")
    again.set_defaults(run=_repartition)
    model = commands.add_parser("model", help="a model in a GGUF file, to unpack to a folder")
    model.add_argument("input", type=Path)
    model.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the weights")
    model.set_defaults(run=_model)
    for command in commands.choices.values():
        command.add_argument("--output", required=True, help="the Parquet file" if command is openai else "a folder")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _documents(options: argparse.Namespace) -> int:
    if options.command in _ONE_KIND:
        options.kind, options.patterns = options.command, options.patterns or _ONE_KIND[options.command]
    since = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal since
        if time.monotonic() - since > _PROGRESS_S:
            since = time.monotonic()
            print(f"{done:,} of {counted(total, 'file')} read", file=sys.stderr)

    return _tell(prepare_documents(options.input, options.output, _document_options(options), show), options)


def _hub(options: argparse.Namespace) -> int:
    rows = hub_rows(options.input, options.subset, options.split, options.limit)
    name = ":".join(filter(None, (options.input, options.subset, options.split)))
    return _tell(prepare_rows(name, rows, options.output, _document_options(options)), options)


def _document_options(options: argparse.Namespace) -> DocumentOptions:
    names = {field.name for field in fields(DocumentOptions)}
    return DocumentOptions(**{name: value for name, value in vars(options).items() if name in names and value})


def _tell(prepared: Prepared, options: argparse.Namespace) -> int:
    """Print the summary, and the first failures; return the exit code."""
    for failure in prepared.failures[:_MOST_NAMED]:
        row = "" if failure.row is None else f":{failure.row}"
        print(printable(f"{failure.reason}: {failure.path}{row} {failure.message}"), file=sys.stderr)
    if (more := len(prepared.failures) - _MOST_NAMED) > 0:
        print(printable(f"and {more:,} more in {options.output}/{ERRORS}"), file=sys.stderr)
    print(printable(prepared.summary(options.output)))
    return 3 if prepared.has_failed and not options.skip_unreadable else 0


def _requests(options: argparse.Namespace) -> int:
    requests = BatchRequests(options.input)
    print(
        printable(f"{counted(write_requests(requests, options.output, options.limit), 'document')} in {options.output}")
    )
    print(printable(f"give jobs/summarize.py: {requests.settings}"))
    return 0


def _repartition(options: argparse.Namespace) -> int:
    print(printable(f"{counted(repartition(options.input, options.output), 'file')} in {options.output}"))
    return 0


def _model(options: argparse.Namespace) -> int:
    from specextend.models import convert_gguf  # it imports torch, which the other commands do not need

    convert_gguf(options.input, Path(options.output), options.dtype)
    print(printable(f"model in {options.output}; give jobs/summarize.py: --set target.model={options.output}"))
    return 0

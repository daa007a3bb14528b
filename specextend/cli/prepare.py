"""The command `prepare`: conversion of files and data sets to Parquet."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from specextend.cli.command import in_one_line, show, takes
from specextend.core import counted, printable

if TYPE_CHECKING:  # it imports pyarrow
    from specextend.data.listing import Failure
    from specextend.documents.preparation import Prepared

_MOST_NAMED = 5
_PROGRESS_S = 10
_OUTPUT = click.option("--output", required=True, metavar="FOLDER", help="the folder to write")
_POSITIVE = click.IntRange(min=1)


def _one(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("one field holds the text; join several into one before.")
    return values[0] if values else None


_ROWS = takes(
    click.option(
        "--text-field",
        multiple=True,
        callback=_one,
        help="field of a row that holds the text (text)",
    ),
    click.option("--id-field", help="field of a row that holds the id; default: <file>:<line>"),
    click.option("--skip-unreadable", is_flag=True, help="exit 0 although some cannot be read"),
    click.option("--limit", type=_POSITIVE, help="most files, or rows of the Hub, of this call"),
    _OUTPUT,
)


@click.group(no_args_is_help=False)
def prepare() -> None:
    """Convert files and data sets to Parquet.

    \b
    specextend prepare documents reports/ notes/ --output data/documents
    specextend prepare documents reports/ --pattern '*.md' --encoding cp1252 --output data/documents
    specextend prepare hf ccdv/govreport-summarization --split test --text-field report --output hf/
    specextend prepare openai requests.jsonl --output data/requests.parquet
    specextend prepare repartition large.parquet --output data/smaller/
    specextend prepare model file.gguf --output models/mine
    specextend prepare draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --output drafts/eagle3

    The same command again reads only new, changed and failed files. Exit code 3: some could not be
    read; _errors.jsonl in the data set has a line for each.
    """


@prepare.command()
@click.argument("sources", metavar="INPUT...", nargs=-1, required=True)
@takes(
    click.option(
        "patterns",
        "--pattern",
        multiple=True,
        help="take only files like this (*.md); may be repeated",
    ),
    click.option("--encoding", help="of what is not UTF-8 and names none, such as cp1252"),
    click.option("--keep-lines", is_flag=True, help="do not join the lines of PDFs"),
    click.option("--main-only", is_flag=True, help="no menus, footers and cookie banners of HTML"),
    click.option(
        "time_limit_s", "--time-limit", type=float, metavar="SECONDS", help="for each file (60)"
    ),
    click.option(
        "memory_gib",
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="of each process that reads (4)",
    ),
    click.option(
        "--reader",
        metavar="MODULE:FUNCTION",
        help="your function from path and bytes to a text, texts of pages, or None",
    ),
    click.option("--workers", type=_POSITIVE, help="processes that read files; all processors"),
    click.option("--remove-gone", is_flag=True, help="remove documents whose file is gone"),
)
@_ROWS
@in_one_line
def documents(sources: tuple[str, ...], output: str, skip_unreadable: bool, **given: Any) -> int:
    """Read files, folders and globs, local or URIs: PDF, DOCX, EPUB, PPTX, ODT, HTML, Markdown,
    text, JSON Lines, CSV.
    """
    from specextend.documents.preparation import prepare_documents
    from specextend.documents.text import DocumentOptions

    since = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal since
        if time.monotonic() - since > _PROGRESS_S:
            since = time.monotonic()
            print(f"{done:,} of {counted(total, 'file')} read", file=sys.stderr)

    options = DocumentOptions(**{name: value for name, value in given.items() if value})
    return _conclude(prepare_documents(sources, output, options, tell), output, skip_unreadable)


@prepare.command()
@click.argument("source", metavar="INPUT")
@click.option("--split", default="test")
@click.option("--subset", help="the data set's configuration, if it has several")
@_ROWS
@in_one_line
def hf(
    source: str, split: str, subset: str | None, output: str, skip_unreadable: bool, **given: Any
) -> int:
    """Read a data set of the Hugging Face Hub, or a local folder of one."""
    from specextend.documents.preparation import prepare_rows
    from specextend.documents.table_rows import hub_rows
    from specextend.documents.text import DocumentOptions

    rows = hub_rows(source, subset, split, given["limit"])
    name = ":".join(filter(None, (source, subset, split)))
    options = DocumentOptions(**{name: value for name, value in given.items() if value})
    return _conclude(prepare_rows(name, rows, output, options), output, skip_unreadable)


def _conclude(prepared: Prepared, output: str, skip_unreadable: bool) -> int:
    from specextend.data.listing import ERRORS

    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in prepared.failures:
        alike.setdefault((failure.reason, failure.message), []).append(failure)
    for (reason, message), failures in [*alike.items()][:_MOST_NAMED]:
        first = failures[0]
        place = first.path if first.row is None else f"{first.path}:{first.row}"
        others = f" (and {len(failures) - 1:,} more like this)" if len(failures) > 1 else ""
        print(printable(f"{reason}: {place} {message}{others}"), file=sys.stderr)
    if more := sum(map(len, [*alike.values()][_MOST_NAMED:])):
        print(printable(f"and {more:,} more in {output}/{ERRORS}"), file=sys.stderr)
    show(printable(prepared.summary(output)))
    return 3 if prepared.has_failed and not skip_unreadable else 0


@prepare.command()
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option("--limit", type=_POSITIVE, help="rows at most")
@click.option("--output", required=True, metavar="FILE", help="the Parquet file")
@in_one_line
def openai(source: Path, limit: int | None, output: str) -> int:
    """Read requests in the input format of OpenAI's Batch API."""
    from specextend.documents.batch_requests import BatchRequests, write_requests

    requests = BatchRequests(source)
    show(printable(f"{counted(write_requests(requests, output, limit), 'document')} in {output}"))
    show(printable(f"give specextend run: {requests.settings}"))
    return 0


@prepare.command()
@click.argument("source", metavar="INPUT")
@_OUTPUT
@in_one_line
def repartition(source: str, output: str) -> int:
    """Write Parquet files with large row groups in smaller ones.

    INPUT is what input.path takes: a file, a folder or a glob, local or a URI.
    """
    from specextend.data.check import repartition

    show(printable(f"{counted(repartition(source, output), 'file')} in {output}"))
    return 0


@prepare.command()
@click.argument("source", metavar="INPUT", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    help="of weights",
)
@_OUTPUT
@in_one_line
def model(source: Path, dtype: Literal["bfloat16", "float16", "float32"], output: str) -> int:
    """Unpack a model in a GGUF file to a folder."""
    from specextend.models.causal_lm import convert_gguf

    convert_gguf(source, Path(output), dtype)
    show(printable(f"model in {output}; give specextend run: --set target.model={output}"))
    return 0


@prepare.command()
@click.argument("source", metavar="NAME")
@_OUTPUT
@in_one_line
def draft(source: str, output: str) -> int:
    """Fetch an EAGLE head of the Hub, or of a folder, with its weights as safetensors."""
    from specextend.drafters.formats import convert_head

    kind = convert_head(source, Path(output))
    show(
        printable(
            f"{kind} head in {output}; give specextend run: --set draft.kind=eagle --set "
            f"draft.model={output}"
        )
    )
    return 0

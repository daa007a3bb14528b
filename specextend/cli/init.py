"""The command `init`: a configuration for the columns of somebody's own file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from specextend.cli.command import in_one_line, show
from specextend.core import printable
from specextend.shipped import CONFIGS, config_names


@click.command()
@click.argument("path", metavar="INPUT")
@click.option("--config", type=click.Choice(config_names()), default="smollm2", help="the configuration to begin with")
@click.option("--to", type=click.Path(path_type=Path), help="the file to write; default: the input's name")
@in_one_line
def init(path: str, config: str, to: Path | None) -> int:
    """Write a configuration for your own Parquet.

    It looks at the first rows of INPUT (a Parquet file, a folder or a glob), asks nothing, and says in the file why it
    takes which columns for the text and the id.
    """
    from specextend.data.columns import guess_columns
    from specextend.data.storage import is_uri

    stem = Path(path.rstrip("/")).stem.strip("*") or "documents"
    to = to or Path(f"{stem}.yaml")
    if to.exists():
        raise ValueError(f"{to} is there already; name another file with --to")
    found = guess_columns(path)
    place = path if is_uri(path) else os.path.relpath(path, to.parent)
    others = ", ".join(map(_quoted, found.others))
    id_line = f"id_column: {_quoted(found.id)}" if found.id else "# id_column: NAME"
    without = "" if found.id else "; an id is then the file and the number of its row"
    lines = [
        f"# Begun by `specextend init` from the shipped {config}. Relative paths are relative to this file.",
        f"# Look at the two columns; then: specextend plan --config {to}, and specextend run --config {to}",
        "input:",
        f"  path: {_quoted(place)}",
        f"  text_column: {_quoted(found.text)} # {printable(found.why_text)}",
        f"  {id_line} # {printable(found.why_id)}{without}",
        *([f"  # passthrough: [{others}] # columns to copy to the summaries"] if others else []),
        "output:",
        f"  path: {_quoted(f'out/{stem}')}",
    ]
    shipped = (CONFIGS / f"{config}.yaml").read_text(encoding="utf-8")
    to.write_text("\n".join(lines) + shipped[shipped.index("\nprompt:") :], encoding="utf-8")
    show(printable(f"{to}: text {found.text} ({found.why_text}), id {found.id} ({found.why_id})"))
    show(printable(f"next: specextend plan --config {to}"))
    return 0


def _quoted(text: str) -> str:
    """Write a name or a path as YAML, whatever it would mean without quotes."""
    return json.dumps(text, ensure_ascii=False)

"""The commands `configs`, `config` and `init`: configurations that there are, what one holds, and one to begin with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specextend.cli.command import SET, config_option, in_one_line, show
from specextend.core import printable
from specextend.shipped import CONFIGS, config_names

if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig


@click.command()
def configs() -> int:
    """List the shipped configurations and their needs."""
    names = config_names()
    width = max(map(len, names))
    for name in names:
        lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        about = " ".join(line.removeprefix("#").strip() for line in lines[:2] if line.startswith("#"))
        show(f"{name:{width}}  {about.partition('. ')[0].removesuffix('.')}")
    return 0


@click.group(no_args_is_help=False)
def config() -> None:
    """Show the values of a run, or their JSON Schema."""


@config.command(name="show")
@config_option(required=True)
@SET
@in_one_line
def show_config(config: str, settings: tuple[str, ...]) -> int:
    """Print every value that a run would use, as YAML, each with its source."""
    from specextend.config import RunConfig, read_yaml
    from specextend.shipped import find_config

    loaded, in_file = RunConfig.load(config, settings), read_yaml(find_config(config))
    given = {override.partition("=")[0].strip() for override in settings}
    for section, values in loaded.model_dump(mode="json").items():
        if values is None:
            show(f"{section}: null  # default")
            continue
        show(f"{section}:")
        of_file = in_file.get(section) or {}
        for key, value in values.items():
            is_given = bool({section, f"{section}.{key}"} & given)
            source = "--set" if is_given else config if key in of_file else "default"
            show(f"  {key}: {json.dumps(value, ensure_ascii=False)}  # {source}")
    return 0


@config.command()
@in_one_line
def schema() -> int:
    """Print the JSON Schema of a configuration, by which editors complete and check it."""
    from specextend.config import RunConfig

    show(json.dumps(described_schema(RunConfig), indent=2, ensure_ascii=False))
    return 0


def described_schema(config: type[RunConfig]) -> dict[str, Any]:
    """Return the JSON Schema of the configuration, with the meaning of each key: the docstring below its field."""

    class Described(config):  # type: ignore[misc, valid-type]
        model_config = config.model_config | {"use_attribute_docstrings": True, "title": config.__name__}

    found = Described.model_json_schema()
    for owner in found["$defs"].values():
        for key in owner["properties"].values():
            key["description"] = " ".join(key.get("description", "").split())
    return found


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

"""The commands `configs`, `config` and `init`: configurations that there are, what one holds, and one to begin with."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specextend.cli.command import SET, config_option, in_one_line, show
from specextend.core import Values, printable
from specextend.shipped import TASKS, find_config, shipped_configs

if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig


@click.command()
def configs() -> int:
    """List the shipped configurations: pairs with their needs, and tasks."""
    found = shipped_configs()
    width = max(map(len, found))
    for name, file in found.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        about = " ".join(line.removeprefix("#").strip() for line in lines[:2] if line.startswith("#"))
        kind = "task" if file.parent == TASKS else "pair"
        show(f"{name:{width}}  {kind}  {about.partition('. ')[0].removesuffix('.')}")
    return 0


@click.group(no_args_is_help=False)
def config() -> None:
    """Show the values of a run, or their JSON Schema."""


@config.command(name="show")
@config_option(required=True)
@SET
@in_one_line
def show_config(config: tuple[str, ...], settings: tuple[str, ...]) -> int:
    """Print every value that a run would use, as YAML, each with its source."""
    from specextend.config import RunConfig, merge

    loaded, (given, origins) = RunConfig.load(config, settings), merge(config, settings)
    for section, values in loaded.model_dump(mode="json").items():
        if values is None:
            show(f"{section}: null  # default")
            continue
        show(f"{section}:")
        of_section = given.get(section) or {}
        for key, value in values.items():
            source = origins[f"{section}.{key}"].name if key in of_section else "default"
            show(f"  {key}: {json.dumps(value, ensure_ascii=False)}  # {printable(source)}")
    return 0


@config.command()
@in_one_line
def schema() -> int:
    """Print the JSON Schema of a configuration, by which editors complete and check it."""
    from specextend.config import RunConfig

    show(json.dumps(described_schema(RunConfig), indent=2, ensure_ascii=False))
    return 0


def described_schema(config: type[RunConfig]) -> Values:
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
@click.option(
    "configs",
    "--config",
    type=click.Choice(list(shipped_configs())),
    multiple=True,
    default=["smollm2"],
    help="the pair to begin with, and perhaps a task",
)
@click.option("--to", type=click.Path(path_type=Path), help="the file to write; default: the input's name")
@in_one_line
def init(path: str, configs: tuple[str, ...], to: Path | None) -> int:
    """Write a configuration for your own Parquet.

    It looks at the first rows of INPUT (a Parquet file, a folder or a glob), asks nothing, and says in the file why it
    takes which columns for the text and the id.
    """
    from specextend.config import read_yaml
    from specextend.data.check import guess_columns
    from specextend.data.instructions import Instruction
    from specextend.data.storage import is_uri

    stem = Path(path.rstrip("/")).stem.strip("*") or "documents"
    to = to or Path(f"{stem}.yaml")
    if to.exists():
        raise ValueError(f"{to} is there already; name another file with --to")
    tasks = [name for name in configs if find_config(name).parent == TASKS]
    if len(tasks) == len(configs):
        configs = ("smollm2", *configs)
    found = guess_columns(path)
    output = "-".join([f"out/{stem}", *tasks])
    place = path if is_uri(path) else os.path.relpath(path, to.parent)
    others = ", ".join(map(_quoted, found.others))
    id_line = f"id_column: {_quoted(found.id)}" if found.id else "# id_column: NAME"
    without = "" if found.id else "; an id is then the file and the number of its row"
    lines = [
        "input:",
        f"  path: {_quoted(place)}",
        f"  text_column: {_quoted(found.text)} # {printable(found.why_text)}",
        f"  {id_line} # {printable(found.why_id)}{without}",
        "  # limit: 20 # for a trial",
        f"  # except_done_in: [{_quoted(f'{output}/*')}] # every night: only what is new, with output.path as below",
        *([f"  # passthrough: [{others}] # columns to copy to the summaries"] if others else []),
        "output:",
        f"  path: {_quoted(output)}",
        f"  # path: {_quoted(f'{output}/{{run_date}}')} # every night",
    ]
    about = (
        f"# Begun by `specextend init` from {' and '.join(configs)}. Relative paths are relative to this file.\n"
        f"# Look at the two columns; then: specextend plan --config {to}, and specextend run --config {to}\n"
    )
    to.write_text(about + _merged_text("\n".join(lines) + "\n", configs), encoding="utf-8")
    show(printable(f"{to}: text {found.text} ({found.why_text}), id {found.id or 'none'} ({found.why_id})"))
    if found.differs:
        show(printable(f"the files differ: {found.differs}"))
    has = tuple(filter(None, (found.text, found.id, *found.others)))
    instruction = read_yaml(to).get("prompt", {}).get("instruction", "")
    for column in sorted({*Instruction("prompt.instruction", instruction).columns} - {*has}):
        wanted = f"the task wants a column {column}; the data has {', '.join(has)}"
        show(printable(f"{wanted}: set prompt.instruction"))
    show(printable(f"next: specextend plan --config {to}"))
    return 0


def _merged_text(own: str, configs: tuple[str, ...]) -> str:
    """Return the text of shipped configurations with their comments: later keys in place of earlier ones, `own` first.

    Of theirs, the paths and columns of their input and output are left out.
    """
    merged = _text_by_key(own)
    for name in configs:
        shipped = _text_by_key(find_config(name).read_text(encoding="utf-8"))
        shipped.pop("input", None)
        shipped.get("output", {}).pop("  path", None)
        for section, keys in shipped.items():
            begun = merged.setdefault(section, keys)
            merged[section] = begun | keys | {"": begun[""]}
    return "".join(text for keys in merged.values() for text in keys.values())


def _text_by_key(text: str) -> dict[str, dict[str, str]]:
    """Return the lines of each key of each section; the section's own line is that of the key ''."""
    found = {}
    for section in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        header, *keys = re.split(r"^(?=  \w)", section, flags=re.MULTILINE)
        found[header.partition(":")[0]] = {"": header} | {key.partition(":")[0]: key for key in keys}
    return found


def _quoted(text: str) -> str:
    """Write a name or a path as YAML, whatever it would mean without quotes."""
    return json.dumps(text, ensure_ascii=False)

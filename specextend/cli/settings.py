"""The commands `configs`, `config` and `init`: list, show and create configurations."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specextend.cli.command import SET, config_option, in_one_line, show
from specextend.core import Values, printable
from specextend.folders import TASKS, find_config, shipped_configs

if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig
    from specextend.data.check import Guess


@click.command()
def configs() -> int:
    """List the shipped configurations: pairs with their needs, and tasks."""
    found = shipped_configs()
    width = max(map(len, found))
    for name, file in found.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        about = " ".join(
            line.removeprefix("#").strip() for line in lines[:2] if line.startswith("#")
        )
        kind = "task" if file.parent == TASKS else "pair"
        show(f"{name:{width}}  {kind}  {about.partition('. ')[0].removesuffix('.')}")
    return 0


@click.group(no_args_is_help=False)
def config() -> None:
    """Show the values of a configuration, or the JSON Schema."""


@config.command(name="show")
@config_option(required=True)
@SET
@in_one_line
def show_config(config: tuple[str, ...], settings: tuple[str, ...]) -> int:
    """Print every value of a configuration as YAML, each with its source."""
    from specextend.config import OF_TASKS, RunConfig, merge

    loaded, (given, origins) = RunConfig.load(config, settings), merge(config, settings)
    for section, values in loaded.model_dump(mode="json").items():
        if section == "tasks" or values is None:
            note = "" if values else "  # default"
            show(f"{section}: {json.dumps(values, ensure_ascii=False)}{note}")
            continue
        show(f"{section}:")
        of_section = given.get(section) or {}
        for key, value in values.items():
            source = origins[f"{section}.{key}"].name if key in of_section else "default"
            if loaded.tasks and key in OF_TASKS.get(section, ()):
                source = "the first of the tasks"
            show(f"  {key}: {json.dumps(value, ensure_ascii=False)}  # {printable(source)}")
    return 0


@config.command()
@in_one_line
def schema() -> int:
    """Print the JSON Schema of configurations, for validation and completion in editors."""
    from specextend.config import RunConfig

    show(json.dumps(described_schema(RunConfig), indent=2, ensure_ascii=False))
    return 0


def described_schema(config: type[RunConfig]) -> Values:
    """Return the JSON Schema with the docstring of each key as its description."""

    class Described(config):  # type: ignore[misc, valid-type]
        model_config = config.model_config | {
            "use_attribute_docstrings": True,
            "title": config.__name__,
        }

    found = Described.model_json_schema()
    base = "A configuration to change, or a list of several: shipped names or files."
    found["properties"]["base"] = {"type": ["string", "array"], "description": base}
    tasks = "Several tasks for each document: names of tasks, or mappings with a `name` and keys."
    found["properties"]["tasks"] = {
        "type": "array",
        "items": {"type": ["string", "object"]},
        "description": tasks,
    }
    for owner in found["$defs"].values():
        for key in owner["properties"].values():
            key["description"] = " ".join(key.get("description", "").split())
    return found


@click.command()
@click.argument("path", metavar="INPUT")
@config_option(default=["smollm2"])
@click.option(
    "--to", type=click.Path(path_type=Path), help="the file to write; default: the input's name"
)
@in_one_line
def init(path: str, config: tuple[str, ...], to: Path | None) -> int:
    """Write a configuration for your Parquet files.

    It chooses text and id columns by the first rows of INPUT (a Parquet file, a folder or a glob),
    and explains the choice in the file. --config: a pair to start from, and optionally a task.
    """
    from specextend.config import merge
    from specextend.data.check import guess_columns
    from specextend.data.instructions import Instruction

    stem = Path(path.rstrip("/")).stem.strip("*") or "documents"
    to = to or Path(f"{stem}.yaml")
    if to.exists():
        raise ValueError(f"{to} exists already; name another file with --to")
    tasks = [name for name in config if find_config(name).parent == TASKS]
    if len(tasks) == len(config):
        config = ("smollm2", *config)
    instruction = merge(config, ())[0].get("prompt", {}).get("instruction", "")
    found = guess_columns(path)
    to.write_text(
        _begun(path, config, to, "-".join([f"out/{stem}", *tasks]), found), encoding="utf-8"
    )
    show(
        printable(
            f"{to}: column of the text: {found.text} ({found.why_text}), "
            f"of the id: {found.id or 'none'} ({found.why_id})"
        )
    )
    if found.differs:
        show(printable(f"the files differ: {found.differs}"))
    if found.skipped:
        prepared = f"specextend prepare documents {shlex.quote(path)} --output out/{stem}-documents"
        show(printable(f"skipped, not Parquet: {found.skipped}; run {prepared}"))
    has = tuple(filter(None, (found.text, found.id, *found.others)))
    for column in sorted({*Instruction("prompt.instruction", instruction).columns} - {*has}):
        wanted = f"the task wants a column {column}; the data has {', '.join(has)}"
        show(printable(f"{wanted}: set prompt.instruction"))
    show(printable(f"next: specextend plan --config {to}"))
    return 0


def _begun(path: str, config: tuple[str, ...], to: Path, output: str, found: Guess) -> str:
    from specextend.data.storage import is_uri

    place = path if is_uri(path) else os.path.relpath(path, to.parent)
    bases = [
        name if name in shipped_configs() else os.path.relpath(name, to.parent) for name in config
    ]
    others = ", ".join(map(_quoted, found.others))
    id_line = f"id_column: {_quoted(found.id)}" if found.id else "# id_column: NAME"
    without = "" if found.id else "; an id is then the file and the number of its row"
    lines = [
        "# Begun by `specextend init`. Relative paths are relative to this file.",
        f"# Look at the two columns; then: specextend plan --config {to}, and specextend run "
        f"--config {to}",
        f"base: [{', '.join(map(_quoted, bases))}] # all other keys; specextend config show "
        f"--config {to} prints them",
        "input:",
        f"  path: {_quoted(place)}",
        f"  text_column: {_quoted(found.text)} # {printable(found.why_text)}",
        f"  {id_line} # {printable(found.why_id)}{without}",
        "  # limit: 20 # for a trial",
        f"  # except_done_in: [{_quoted(f'{output}*')}] # every night: only new rows; "
        "with the other output.path",
        *([f"  # passthrough: [{others}] # columns to copy to the summaries"] if others else []),
        "output:",
        f"  path: {_quoted(output)}",
        f"  # path: {_quoted(f'{output}-{{run_date}}')} # for every night",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

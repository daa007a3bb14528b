"""The commands `configs` and `config`: the shipped configurations, what a run would use, and the schema of a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specextend.cli.command import SET, config_option, in_one_line, show
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


@click.group()
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
    from pydantic import ConfigDict

    class Described(config):  # type: ignore[misc, valid-type]
        model_config = ConfigDict(use_attribute_docstrings=True, title=config.__name__)

    found = Described.model_json_schema()
    for owner in found["$defs"].values():
        for key in owner["properties"].values():
            key["description"] = " ".join(key.get("description", "").split())
    return found

"""YAML of people: files, and the values of `--set`. What is wrong is said in one line, which shows no secret."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from specextend.core import Values, did_you_mean, first_line
from specextend.shipped import shipped_configs

MOST_SHOWN = 200
"""Characters of a value that a message repeats."""


class ConfigError(ValueError):
    """A key or value is not allowed; the message is one line that names the key and what is allowed."""


def read_yaml(path: Path) -> Values:
    """Read a YAML file's mapping. Raises ConfigError for anything else, a repeated key and an alias."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} cannot be read: {error}{_other_name(path)}") from None
    try:
        values = yaml.load(text, _PlainValues)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"configuration {path} is not valid YAML: {_yaml_problem(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys with their values")
    return values


def _other_name(path: Path) -> str:
    """Say which configuration may be meant by a path that cannot be read; empty if it is that file."""
    if os.path.isfile(path):  # False, too, if nobody may look there
        return ""
    if os.path.isfile(f"{path}.yaml"):
        return f"; did you mean {path}.yaml?"
    shipped = shipped_configs()
    near = did_you_mean(path.name.removesuffix(".yaml"), shipped)
    return near or f"; the names of shipped ones are {', '.join(shipped)}"


def _yaml_problem(error: Exception) -> str:
    """Say what is wrong with a text and where, without the text, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    what = str(getattr(error, "problem", None) or type(error).__name__) if mark else first_line(error)
    return f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else what


class _PlainValues(yaml.SafeLoader):
    """A loader that refuses a repeated key, of which YAML silently keeps the last, and aliases.

    A few lines of aliases can stand for more values than any memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias is not taken, write the value itself", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), names[-1])
            raise yaml.constructor.ConstructorError(None, None, f"key {twice} is repeated", node.start_mark)
        return mapping


def parse(key: str, text: str) -> Any:
    """Read the value of `--set key=text`. Raises ConfigError for what is no YAML, or would be read in part."""
    try:
        value = yaml.load(text, _PlainValues)
        tokens = [token for token in yaml.scan(text) if not isinstance(token, yaml.StreamEndToken)]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"--set {key}: {shown(text)} is not a valid YAML value ({_yaml_problem(error)})"
        raise ConfigError(f"{problem}; {_how_to_quote(key, text)}") from None
    if comment := text[tokens[-1].end_mark.index :].strip():
        raise ConfigError(f"--set {key}: {shown(comment)} is a comment in YAML and would be left out; quote the value")
    return value


def _how_to_quote(key: str, text: str) -> str:
    """Say how a text is written that YAML would read as something else."""
    value = json.dumps(text, ensure_ascii=False) if shown(text) == repr(text) else '"..."'
    return f"quote a text: --set {shlex.quote(f'{key}={value}')}"


def shown(value: object) -> str:
    """Write a value for a message, but not one that holds an address, which may hold a secret, nor a long one."""
    text = repr(value)
    return text if "://" not in text and len(text) <= MOST_SHOWN else f"a value of type {type(value).__name__}"

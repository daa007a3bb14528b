"""Write `docs/configuration.md` from the dataclasses of options.

python -m scripts.configuration_page > docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import Any, get_args

from specextend.cli.settings import described_schema
from specextend.config import RunConfig

HEAD = """\
# Configuration: every key, its default and its meaning

This page lists what a configuration file may hold. It is generated from the code, and a test keeps
the two equal. Complete files are in `configs/`, such as [`smollm2.yaml`](../configs/smollm2.yaml).

A configuration is YAML with one section for each heading below; an unknown key is refused, and the
nearest known one suggested. On the command line `--set key.path=value` changes one value; `--input`
and `--output` are short for `input.path` and `output.path`. "none" means that the key is unset.
`base` names configurations that come before the file's own keys: `base: [smollm2, keywords]`.
`tasks` lists [several tasks](tasks.md#several-tasks-in-one-run) of one run.

A relative path in a file is relative to the file's folder; on the command line, and in a shipped
configuration, to the current folder. In a job that is submitted to a cluster local paths must be
absolute.

`{shipped}` is the folder of what comes with the package, and `{models}` that of models
which `make models` has made in a clone, or else `~/.cache/specextend/models`, each on the machine
that loads the model. The target of `smollm2` is fetched into it where it is missing.
"""
TABLE = ["| key | default | meaning |", "|---|---|---|"]


def page() -> str:
    """Return the page as Markdown."""
    owners = described_schema(RunConfig)["$defs"]
    sections = [
        _section(name, owners[_owner(name).__name__]["properties"])
        for name in RunConfig.model_fields
        if name != "tasks"
    ]
    return "\n".join([HEAD, *sections])


def _section(name: str, keys: dict[str, Any]) -> str:
    owner = _owner(name)
    rows = [
        _row(name, field, keys[field.name]["description"]) for field in dataclasses.fields(owner)
    ]
    return "\n".join([f"## `{name}`", "", _lead(owner), "", *TABLE, *rows, ""])


def _owner(section: str) -> Any:
    annotation = RunConfig.model_fields[section].annotation
    return (get_args(annotation) or (annotation,))[0]


def _lead(owner: Any) -> str:
    text = re.sub(r"^`\w+\.\*`: ", "", inspect.getdoc(owner) or "")
    return " ".join(text.split())


def _row(section: str, field: dataclasses.Field[Any], doc: str) -> str:
    meaning = doc.replace("|", "\\|")
    return f"| `{section}.{field.name}` | {_default(field)} | {meaning} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING:
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    known = {None: "none", True: "`true`", False: "`false`", "": "empty"}
    return (
        known[value]
        if isinstance(value, (str, bool, type(None))) and value in known
        else f"`{value}`"
    )


if __name__ == "__main__":
    sys.stdout.write(page())

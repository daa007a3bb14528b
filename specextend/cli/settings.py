"""Commands before a run: `configs`, `config` and `init`, and `check` for the machine."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specextend.cli.command import (
    JSON,
    SET,
    config_option,
    in_one_line,
    machine_bytes,
    show,
    show_found,
)
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


if TYPE_CHECKING:  # it imports torch
    from specextend.config import RunConfig

_EXTRAS = {
    "numba": "compiled CPU kernels (cpu)",
    "flash_attn": "flash-attn (flash)",
    "pypdfium2": "PDF (documents)",
    "torchao": "weights in fp8 and int4 (quantize)",
}


@click.command()
@config_option()
@SET
@click.option("--kernels", is_flag=True, help="verify the kernels as a start does: a minute or two")
@click.option("--time", is_flag=True, help="with --kernels: verify them again, and time them")
@JSON
@in_one_line
def check(
    config: tuple[str, ...], settings: tuple[str, ...], kernels: bool, time: bool, json: str | None
) -> int:
    """Describe this machine and check whether a configuration fits.

    With --config: the memory of a worker; exit code 2 if it does not fit. No weights are loaded.
    With --kernels: the kernels a start would use here.
    """
    from specextend.config import RunConfig

    if kernels and not config:
        raise click.UsageError("--kernels needs --config, for the shapes of the target")
    if time and not kernels:
        raise click.UsageError("--time needs --kernels")
    found = _machine()
    if config:
        loaded = RunConfig.load(config, settings)
        found["worker"] = _worker(loaded)
        if kernels and not found["worker"]["problem"]:
            found |= _kernels(loaded, timed=time)
    show_found(_describe(found), json, found)
    return 2 if found.get("worker", {}).get("problem") else 0


def _machine() -> Values:
    import torch

    from specextend.cluster.environment import num_cores
    from specextend.cluster.records import library_versions
    from specextend.decoding.device import device_bytes, device_name, what_is_missing
    from specextend.models.loading import GIB

    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return {
        "processor": device_name(torch.device("cpu")),
        "cores": num_cores(),
        "memory_gib": machine_bytes() / GIB,
        "gpus": [
            {"name": device_name(gpu), "memory_gib": (device_bytes(gpu) or 0) / GIB} for gpu in gpus
        ],
        "missing": what_is_missing(),
        "installed": {what: find_spec(package) is not None for package, what in _EXTRAS.items()},
        "versions": library_versions(),
    }


def _worker(config: RunConfig) -> Values:
    from specextend.cluster.checks import check_machine
    from specextend.models.causal_lm import load_tokenizer
    from specextend.models.loading import GIB, memory_bytes, usable_bytes, with_batch_size
    from specextend.models.pairing import check_pair, describe_asks

    os.environ["RAY_ADDRESS"] = "local"  # not a cluster
    facts = check_pair(config.target, config.active_draft)
    problem = of_gpu = None
    try:
        check_machine(config)
        of_gpu = usable_bytes(config)
    except ValueError as error:
        problem = str(error)
    sized = with_batch_size(config, facts, of_gpu)
    sizes = {name: size / GIB for name, size in memory_bytes(sized, facts).items()}
    has = (of_gpu or machine_bytes() // max(1, config.job.workers)) / GIB
    if problem is None and sum(sizes.values()) > has:
        problem = (
            f"a worker takes {sum(sizes.values()):.1f} GiB and has {has:.1f}: lower "
            "decoding.cache_gib"
        )
    name = load_tokenizer(config.target.model).convert_ids_to_tokens
    ends = [
        f"{token_id} {name(token_id)} ({place})"
        for place, ids in facts.ends.items()
        for token_id in ids
    ]
    return {
        "memory_gib": sizes,
        "batch_size": sized.decoding.batch_size,
        "ends": ends,
        "asks": [*describe_asks(facts)],
        "problem": problem,
    }


def _kernels(config: RunConfig, *, timed: bool) -> Values:
    import torch

    from specextend.cluster.environment import cores_per_worker, this_machine
    from specextend.models.loading import try_kernels

    if not config.job.gpus_per_worker:
        torch.set_num_threads(cores_per_worker(config.job, [this_machine()]))
    proof, times = try_kernels(config, timed=timed)
    said = [asdict(trial) | {"says": str(trial)} for trial in proof.trials]
    return {"kernels": said, "times_ms": times}


def _describe(found: Values) -> str:
    from specextend.cluster.dry_run import describe_memory
    from specextend.report.sections import Section, to_text

    gpus = [f"{gpu['name']}, {gpu['memory_gib']:.1f} GiB" for gpu in found["gpus"]] or ["none"]
    lines: list[Section | str] = [
        f"processor: {found['processor']}, {found['cores']} cores, {found['memory_gib']:.1f} GiB",
        *(f"GPU: {gpu}" for gpu in gpus),
        *(f"missing: {each}" for each in found["missing"]),
        *(
            f"{what}: {'installed' if is_there else 'not installed'}"
            for what, is_there in found["installed"].items()
        ),
        "versions: "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    ]
    if worker := found.get("worker"):
        lines.append(f"ends of sequence: {', '.join(worker['ends']) or 'none found'}")
        lines += worker["asks"]
        lines += describe_memory(worker | {"cache": None})
        lines.append(
            f"does not fit: {worker['problem']}" if worker["problem"] else "fits this machine"
        )
    lines += [trial["says"] for trial in found.get("kernels", ())]
    lines += [f"ms: {line}" for line in found.get("times_ms", ())]
    return to_text(lines)

"""The command `check`: capabilities of this machine, and whether a configuration fits."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from specextend.cli.command import JSON, SET, config_option, in_one_line, machine_bytes, show_found
from specextend.core import Values

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

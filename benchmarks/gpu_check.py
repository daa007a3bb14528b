"""Check a GPU in parts: correct results, a start's choices, and the duration of steps.

`python3 -m benchmarks.gpu_check --out out/gpu` writes `summary.json`, files of its parts, and
`said.txt` with all output, each as early as possible. Each part has a process and a time limit, so
hangs and broken GPUs affect a single part. The exit code is 1 if a part failed, or a runnable
kernel is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_pairs import FULL, GRAPHS, TINY, EngineParts, Pair
from benchmarks.gpu_steps import decode, try_steps
from specextend.attention.backends import shortest_runs
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.device import (
    compute_capability,
    device_name,
    release_cached,
    synchronise,
    traits_of,
)
from specextend.decoding.measurements import measure_limits
from specextend.folders import code_commit
from specextend.proof.child import times_of
from specextend.proof.prover import (
    LayerShape,
    Proof,
    Subject,
    candidates_for,
    chosen,
    identity,
    prove,
)

Found = dict[str, Any]
LIMITS_S = {
    "kernels": 80,
    "tiny-pair": 45,
    "proof": 180,
    "steps": 130,
    "profile": 40,
}
"""Time limits in seconds, less than eight minutes together."""
_CPU_FACTOR = 10
"""Factor of the limits on a CPU."""
_TESTS = {"kernels": "tests/gpu/test_cuda.py", "tiny-pair": "tests/gpu/test_cuda_engine.py"}
PYTEST = (
    *(
        "-m",
        "gpu",
        "-q",
        "-rfEs",
        "--tb=short",
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        "--confcutdir",
        "tests/gpu",
    ),
    *("--import-mode", "importlib", "-p", "no:cacheprovider"),
)
"""Ignores the repository's pytest settings, which need more packages."""
_SHOWN = 4000
"""Maximum characters kept of a part's output, from its end."""
_GRACE_S = 5
_OPERATORS = 25
"""Lines of a profile."""
_LENGTH = 16384
_WIDE, _NARROW = TreeOptions(nodes=31, depth=8), TreeOptions(nodes=31, depth=4)
_CELLS = (
    (4, GRAPHS, _WIDE),
    (4, GRAPHS, None),
    (4, "triton", _WIDE),
    (4, GRAPHS, _NARROW),
    (4, "sdpa", None),
    (16, GRAPHS, _WIDE),
    (16, GRAPHS, None),
    (4, "sdpa", _WIDE),
    (16, GRAPHS, _NARROW),
    (16, "triton", _WIDE),
)
"""Sequences, engine mode and tree (None: plain steps), the most telling first."""


def proofs(name: str, device: torch.device, limit_s: float, *, tiny: bool) -> Iterator[Found]:
    """Yield the verdicts of a start, then the milliseconds of its choices."""
    shape = TINY[0] if tiny else FULL[-1]
    values = shape.target
    num_heads = values["num_attention_heads"]
    layers = LayerShape(
        num_heads=num_heads,
        num_key_heads=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
    )
    subject = Subject(
        device=str(device),
        dtype="bfloat16",
        layers=(layers,),
        num_drafts=_WIDE.most_drafts,
        depth=_WIDE.depth,
        chunk=traits_of(device).prefill_chunk,
    )
    candidates = candidates_for(compute_capability(device) or (8, 0))
    trials = prove(subject, candidates)
    proof = Proof(chosen(candidates, trials), tuple(trials))
    print("\n".join(map(str, trials)), flush=True)
    yield {"pair": shape.name, "holds_for": identity(subject), **asdict(proof)}
    yield {
        "limits": measure_limits(device, torch.bfloat16),
        "times_ms": [] if tiny else [*times_of(subject, proof.kernels)],
    }


def steps(name: str, device: torch.device, limit_s: float, *, tiny: bool) -> Iterator[Found]:
    """Yield the milliseconds of steps and prompts of each combination until the time is up."""
    ends_at, shape = time.monotonic() + limit_s, TINY[-1] if tiny else FULL[-1]
    pair = Pair(shape, device, torch.bfloat16)
    for batch, backend, tree in _CELLS[:5] if tiny else _CELLS:
        if time.monotonic() > ends_at:
            return
        pair.shape = replace(shape, tree=tree or _WIDE)
        size = "" if tree is None else f"{tree.nodes} x {tree.depth}"
        length = 256 if tiny else _LENGTH
        cell: Found = {
            "pair": shape.name,
            "backend": backend,
            "batch": batch,
            "tokens": length,
            "tree": size,
        }
        cell |= try_steps(pair, backend, batch, length, speculates=tree is not None)
        print(cell, flush=True)
        yield cell
        gc.collect()
        release_cached(device)


def profiles(name: str, device: torch.device, limit_s: float, *, tiny: bool) -> Iterator[Found]:
    """Yield a comparison of prompt kernels, then the slowest operators of chunks and steps."""
    length = 256 if tiny else _LENGTH
    yield from _prompt_kernels(device, traits_of(device).prefill_chunk if not tiny else 64, length)
    pair = Pair(TINY[-1] if tiny else FULL[-1], device, torch.bfloat16)
    is_gpu = device.type == "cuda"
    parts = EngineParts(pair, GRAPHS if is_gpu else "sdpa", 1, length + 32)
    engine = parts.engine(speculates=True)
    decode(engine, 1, 64)
    for what, num_tokens in (("steps", 64), ("a prompt and steps", length)):
        with profile(
            activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
        ) as seen:
            decode(engine, 1, num_tokens)
        order = "self_device_time_total" if is_gpu else "self_cpu_time_total"
        events = sorted(seen.key_averages(), key=lambda event: -getattr(event, order))[:_OPERATORS]
        rows = [
            {"name": each.key[:80], "calls": each.count, "ms": getattr(each, order) / 1e3}
            for each in events
        ]
        yield {"of": what, "tokens": num_tokens, "operators": rows}


def _prompt_kernels(device: torch.device, num_queries: int, num_keys: int) -> Iterator[Found]:
    """Compare a chunk's attention to earlier rows by cuDNN and torch flash."""
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, k, v = make(1, 32, num_queries, 128), make(1, 32, num_keys, 128), make(1, 32, num_keys, 128)
    operators = torch.ops.aten
    candidates = {
        "cudnn": lambda: operators._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False
        ),
        "flash": lambda: operators._scaled_dot_product_flash_attention(q, k, v, 0.0, False),
    }
    for kernel, run in candidates.items():

        def timed(run: Any = run) -> None:
            run()
            synchronise(device)

        try:
            found: Found = {"ms": 1e3 * shortest_runs({"": timed}, 5)[""]}
        except (RuntimeError, NotImplementedError) as error:
            found = {"skipped": str(error)[:200]}
        yield {"kernel": kernel, "queries": num_queries, "keys": num_keys, **found}


def run_part(name: str, device: torch.device, folder: Path, *, tiny: bool) -> int:
    """Run a part in this process and write each finding at once; return the exit code."""
    part = {"proof": proofs, "steps": steps, "profile": profiles}[name]
    found: list[Found] = []
    for each in part(name, device, seconds_for(name, device) - 15, tiny=tiny):
        found.append(each)
        write(folder, name, found)
    trials = [trial for each in found for trial in each.get("trials", ())]
    return int(any(trial["is_wrong"] or not trial["is_final"] for trial in trials))


def seconds_for(name: str, device: torch.device) -> float:
    """Return the time limit of a part."""
    return LIMITS_S[name] * (_CPU_FACTOR if device.type == "cpu" else 1)


def write(folder: Path, name: str, found: Any) -> None:
    """Write the findings so far, atomically."""
    temporary = folder / f".{name}.tmp"
    temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / f"{name}.json")


def run_limited(command: list[str], limit_s: float, log: Path) -> tuple[int, str]:
    """Run a command with its output in `log`; return the exit code and the end of the output."""
    with log.open("ab") as said:
        begin = said.tell()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        late = ""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code, late = 124, f"\nnot done after {limit_s:g} s"
            _interrupt(process)
    return code, log.read_bytes()[begin:].decode(errors="replace")[-_SHOWN:] + late


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, which would keep using the GPU."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Run all parts or the named part; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--part", choices=[*LIMITS_S])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    if given.part:
        return run_part(given.part, device, given.out, tiny=given.shapes == "tiny")
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    summary: Found = {
        "commit": code_commit(),
        "device": device_name(device),
        "versions": versions,
        "parts": {},
    }
    for name in LIMITS_S:
        command = [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:], "--part", name]
        if name in _TESTS:
            command = [sys.executable, "-m", "pytest", _TESTS[name], *PYTEST]
            command += ["--collect-only"] if device.type == "cpu" else []
        begin = time.monotonic()
        code, said = run_limited(command, seconds_for(name, device), given.out / "said.txt")
        summary["parts"][name] = {"code": code, "seconds": time.monotonic() - begin, "said": said}
        write(given.out, "summary", summary)
        print(f"{name}: {'ok' if code == 0 else 'failed'}\n{said}", flush=True)
    return int(any(part["code"] for part in summary["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())

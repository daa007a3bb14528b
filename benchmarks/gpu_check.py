"""What only a GPU can prove, in stages: `python3 -m benchmarks.gpu_check --device cuda --out out/gpu`.

Each stage is a process of its own, so that a fault of the device ends nothing else, and has a time limit. It leaves its
rows in `<stage>.jsonl` as they come; a row with `wrong` says what is not as it must be, one with `skipped` what this
machine cannot run. `summary.json` says how each stage ended. The exit code is 1 if one failed, or if none was ok.

Shapes: `B` sequences, `T` queries, `R` rows, `H` query heads, `K` key heads, `D` head size, `C` hidden size.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu_pairs import FULL, GRAPHS, TINY, EngineParts, Pair, SkippedError, require_backend
from specextend.attention.backends import load_layer_kernels, shortest_runs
from specextend.attention.plan import Attend, KeySpan
from specextend.attention.reference import HeadNorms, LayerKernels, attend_reference
from specextend.attention.torch_kernels import TORCH
from specextend.core import Completion, Request
from specextend.decoding.device import GPU, device_name, is_out_of_memory, release_cached, synchronise, traits_of
from specextend.decoding.measurements import measure_limits
from specextend.decoding.tree import tree_mask
from specextend.shipped import code_commit, package_version
from specextend.stats import DecodingStats

Row = dict[str, Any]
LIMITS_S = {"machine": 35, "kernels": 90, "tests": 125, "tokens": 75, "steps": 200}
"""Seconds of each stage; together less than nine minutes."""
CPU_SLACK = 10
"""Factor of the limits for a trial on a CPU, which may be slow and busy, and costs nothing."""
SKIPPED = 77
"""Exit code of a stage of which this machine can run nothing."""
_SHOWN = 1000
"""Characters of a message that are kept."""
_PACKAGES = ("torch", "transformers", "triton", "flash-attn", "numpy", "pytest", "pydantic")
_DTYPES = (torch.bfloat16, torch.float16)
_BACKENDS = ("sdpa", "triton", "flash")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What every stage is given."""

    device: torch.device
    tiny: bool
    """Shapes that a CPU runs in seconds, instead of those of models in use."""
    ends_at: float
    """Time of `time.monotonic` at which a stage begins nothing new."""


def attempt(setting: Setting, cell: Row, measure: Callable[[], Row]) -> Row:
    """Return the row of one cell, with what names it; if it fails, the row says why, and the stage goes on.

    That time or memory runs out is not wrong: cells are tried up to the last that fits.
    """
    if time.monotonic() > setting.ends_at:
        return cell | {"skipped": "no time is left"}
    try:
        return cell | measure()
    except SkippedError as error:
        return cell | {"skipped": str(error)}
    except Exception as error:  # noqa: BLE001  one kernel that fails must not cost the cells behind it
        if is_out_of_memory(error) or "out of memory" in str(error):
            return cell | {"skipped": "out of memory"}
        return cell | {"wrong": f"{type(error).__name__}: {error}"[:_SHOWN]}


def machine(setting: Setting) -> Iterator[Row]:
    """Yield the device and the versions, then the limits of the machine."""
    cuda = setting.device.type == "cuda"
    yield {
        "device": device_name(setting.device),
        "device_bytes": torch.cuda.get_device_properties(setting.device).total_memory if cuda else None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: package_version(name) for name in _PACKAGES},
    }
    limits = measure_limits(setting.device, torch.bfloat16)
    yield asdict(limits) | {"copy_bytes_per_s": measure_copy(setting.device)}


def measure_copy(device: torch.device) -> float:
    """Measure the bytes per second of a copy inside the device's memory, those read and those written together."""
    source = torch.ones(traits_of(device).probe_bytes // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronise(device)

    return 2 * source.nbytes / shortest_runs({"": copy}, 5)[""]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The shape of one kernel call."""

    kind: Literal["plain", "causal", "tree"]
    heads: tuple[int, int]
    """H and K."""
    head_dim: int
    num_queries: int
    prefixes: tuple[int, ...]
    """[B] rows before the queries' own."""


CALLS = (
    AttentionCall("plain", (32, 32), 128, 1, (16000,)),
    AttentionCall("plain", (32, 8), 128, 1, (1, 16000, 65, 4096)),
    AttentionCall("plain", (9, 3), 64, 1, (63, 64, 65, 127, 128, 300, 1000, 5000)),
    AttentionCall("causal", (32, 8), 128, 128, (0, 1000)),
    AttentionCall("causal", (14, 2), 64, 17, (2000, 0, 64)),
    AttentionCall("tree", (32, 32), 128, 51, (16000,)),
    AttentionCall("tree", (32, 32), 128, 51, (1000, 2, 8000, 64)),
    AttentionCall("tree", (32, 8), 128, 51, (16000, 0, 63, 65, 4096, 1, 700, 127)),
    AttentionCall("tree", (32, 8), 128, 17, (30000,)),
    AttentionCall("tree", (32, 8), 128, 128, (500, 0)),
    AttentionCall("tree", (8, 1), 128, 51, (3000,)),
    AttentionCall("tree", (12, 12), 64, 51, (1000, 1024, 900, 64)),
    AttentionCall("tree", (9, 3), 64, 16, (8192,)),
    AttentionCall("tree", (14, 2), 64, 128, (0, 5000)),
    AttentionCall("tree", (8, 2), 64, 2, (100,)),
)
"""Every head size, every ratio of heads in use, sizes around a block of 64 keys, and empty prefixes."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The sizes of one layer's call."""

    num_rows: int
    """R"""
    hidden: int
    """C"""
    intermediate: int
    heads: tuple[int, int]
    """H and K."""
    head_dim: int
    head_norms: bool


LAYERS = (
    LayerCall(51, 4096, 11008, (32, 32), 128, head_norms=False),
    LayerCall(1, 4096, 14336, (32, 8), 128, head_norms=False),
    LayerCall(408, 4096, 12288, (32, 8), 128, head_norms=True),
    LayerCall(2048, 576, 1536, (9, 3), 64, head_norms=False),
    LayerCall(7, 128, 192, (4, 2), 64, head_norms=True),
)
"""Vicuna-7B, Llama-3.1-8B, Qwen3-8B, SmolLM2-135M and a tiny layer: plain steps, trees, a batch of them, a chunk."""


def kernels(setting: Setting) -> Iterator[Row]:
    """Yield the largest error of each kernel against its twin in plain torch, in every dtype and shape."""
    for name, dtype, call in product(_BACKENDS, _DTYPES, CALLS):
        if (name, call.kind) == ("flash", "tree"):
            continue
        if setting.tiny and max(call.prefixes) > 5000:
            continue
        cell: Row = {"backend": name, "dtype": str(dtype), **asdict(call)}
        yield attempt(setting, cell, partial(_compare_backend, name, call, dtype, setting.device))
    for dtype, layer in product(_DTYPES, LAYERS):
        cell = {"backend": "layer", "dtype": str(dtype), **asdict(layer)}
        yield attempt(setting, cell, partial(_compare_layer, layer, dtype, setting.device))


def _compare_backend(name: str, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> Row:
    return compare_call(require_backend(name, device), call, dtype, device)


def _compare_layer(layer: LayerCall, dtype: torch.dtype, device: torch.device) -> Row:
    require_backend("triton", device)
    found = load_layer_kernels("triton", device)
    return compare_layer(found, layer, dtype, device)


def compare_call(attend: Attend, call: AttentionCall, dtype: torch.dtype, device: torch.device) -> Row:
    """Run a call on a kernel and in plain torch, and return the largest errors of output and LSE."""
    q, k, v, starts, lengths, mask = _attention_tensors(call, dtype, device)
    span = KeySpan(starts, lengths, mask=mask if call.kind == "tree" else None, causal=call.kind == "causal")
    scale = call.head_dim**-0.5
    expected = attend_reference(q, k, v, span, scale)
    found = attend(q, k, v, span, scale)
    tolerances = {"out": 2e-2 if dtype == torch.bfloat16 else 4e-3, "lse": 2e-3}  # kernels keep the LSE in fp32
    return _errors(dict(zip(tolerances, zip(found, expected, strict=True), strict=True)), tolerances)


def compare_layer(kernels: LayerKernels, layer: LayerCall, dtype: torch.dtype, device: torch.device) -> Row:
    """Run all kernels of a layer and their twins on random numbers, and return the largest error of each result."""
    found, expected = (_layer_results(each, layer, dtype, device) for each in (kernels, TORCH))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 6e-3
    pairs = {name: (result, expected[name]) for name, result in found.items()}
    return _errors(pairs, dict.fromkeys(pairs, tolerance))


def _errors(pairs: Mapping[str, tuple[Tensor, Tensor]], tolerances: Mapping[str, float]) -> Row:
    """Return the largest errors, and what exceeds its tolerance, absolute plus relative; NaN does."""
    row: Row = {}
    for name, (found, expected) in pairs.items():
        row[f"{name}_error"] = error = float((found.float() - expected.float()).abs().max())
        if not torch.allclose(found.float(), expected.float(), atol=tolerances[name], rtol=tolerances[name]):
            row["wrong"] = f"{name} has an error of {error:g}"
    return row


def _attention_tensors(
    call: AttentionCall, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int], Tensor]:
    """Make queries [B, T, H, D], keys and values [K, R, D], the regions, and a mask [B, T, T] of random trees."""
    generator = torch.Generator(device).manual_seed(call.num_queries + sum(call.prefixes))
    lengths = [prefix + call.num_queries for prefix in call.prefixes]
    starts = [5, *(5 + end for end in accumulate(lengths))]
    batch, (num_heads, num_key_heads) = len(lengths), call.heads
    shapes = [(batch, call.num_queries, num_heads, call.head_dim), *[(num_key_heads, starts[-1], call.head_dim)] * 2]
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes)
    if call.kind == "causal":
        mask = torch.ones(call.num_queries, call.num_queries, dtype=torch.bool, device=device).tril()
        return q, k, v, starts[:-1], lengths, mask.expand(batch, -1, -1)
    nodes = torch.arange(call.num_queries, device=device)
    drawn = torch.rand(batch, call.num_queries, generator=generator, device=device)
    parents = (drawn * nodes).long() - (nodes == 0).long()
    return q, k, v, starts[:-1], lengths, tree_mask(parents, call.num_queries)


def _layer_results(
    kernels: LayerKernels, layer: LayerCall, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return what the kernels return and write, with the same inputs each time."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    rows, (num_heads, num_key_heads) = layer.num_rows, layer.heads
    total, normed = kernels.add_norm(draw(rows, layer.hidden), draw(rows, layer.hidden), draw(layer.hidden), 1e-5)
    gated = kernels.gate(draw(rows, 2 * layer.intermediate))
    norms = HeadNorms(draw(layer.head_dim), draw(layer.head_dim), 1e-5) if layer.head_norms else None
    cache = draw(2, num_key_heads, 2 * rows, layer.head_dim)
    places = torch.randperm(2 * rows, generator=generator, device=device)[:rows]
    qkv, angles = draw(rows, num_heads + 2 * num_key_heads, layer.head_dim), draw(rows, layer.head_dim)
    query = kernels.rotate_heads(qkv, angles.cos(), angles.sin(), norms, cache[0], cache[1], places)
    return {"sum": total, "norm": normed, "gate": gated, "query": query, "cache": cache}


_LENGTHS = {"a": (1, 40), "b": (63, 8), "c": (300, 30), "d": (GPU.prefill_chunk + 70, 20), "e": (64, 1), "f": (17, 33)}
"""Name of a request -> tokens of its prompt, and most new tokens."""


def tokens(setting: Setting) -> Iterator[Row]:
    """Yield whether tiny pairs decode the CPU's tokens on the device, greedily and in fp32, while requests join.

    The CPU decodes plainly, in plain torch, one request at a time.
    """
    for shape in TINY:
        pair = Pair(shape, torch.device("cpu"), torch.float32)
        expected = decode(EngineParts(pair, "reference", 1, GPU.prefill_chunk + 200), speculates=False)
        moved = pair.to(setting.device)
        for backend, batch in product(("reference", "sdpa", "triton", GRAPHS), (1, 3)):
            cell: Row = {"pair": shape.name, "backend": backend, "batch": batch}
            yield attempt(setting, cell, partial(_compare_decoding, moved, backend, batch, expected))


def _compare_decoding(pair: Pair, backend: str, batch: int, expected: Mapping[str, Completion]) -> Row:
    return compare_tokens(decode(EngineParts(pair, backend, batch, GPU.prefill_chunk + 200), speculates=True), expected)


def decode(parts: EngineParts, *, speculates: bool) -> dict[str, Completion]:
    """Decode requests of random tokens, some longer than a chunk of prefill; return the completions by name."""
    generator, vocabulary = torch.Generator().manual_seed(0), TINY[0].target["vocab_size"]
    requests = [
        Request(
            request_id=name,
            prompt_token_ids=torch.randint(vocabulary, (length,), generator=generator).tolist(),
            max_new_tokens=num_new,
        )
        for name, (length, num_new) in _LENGTHS.items()
    ]
    return {done.request_id: done for done in parts.engine(speculates=speculates).generate(requests)}


def compare_tokens(found: Mapping[str, Completion], expected: Mapping[str, Completion]) -> Row:
    """Name the requests whose tokens differ."""
    different = [name for name, done in expected.items() if found[name].token_ids != done.token_ids]
    row: Row = {"requests": len(expected), "accepted": sum(done.stats.num_accepted_tokens for done in found.values())}
    return row | {"wrong": f"tokens of {', '.join(different)} differ from the CPU's"} if different else row


GRID = ((1, 16384), (4, 8192), (1, 2048))
"""Sequences, and tokens of their prompts; the most telling first."""
TINY_GRID = ((2, 256),)
NEW_TOKENS = 32


def steps(setting: Setting) -> Iterator[Row]:
    """Yield the times of prefill and of plain and speculative steps, at the shapes of shipped pairs.

    Weights and prompts are random, so times are real and tokens mean nothing.
    """
    shapes, grid = (TINY, TINY_GRID) if setting.tiny else (FULL, GRID)
    for shape in shapes:
        pair = Pair(shape, setting.device, torch.bfloat16)
        for (batch, length), backend, speculates in product(grid, (*_BACKENDS, GRAPHS), (False, True)):
            cell: Row = {"pair": shape.name, "backend": backend, "batch": batch, "tokens": length, "draft": speculates}
            yield attempt(setting, cell, partial(measure_steps, pair, backend, batch, length, speculates))
            gc.collect()
            release_cached(setting.device)
        del pair


def measure_steps(pair: Pair, backend: str, batch: int, length: int, speculates: bool) -> Row:
    """Decode a batch of prompts of one length after a warm-up, and return the milliseconds of a step by phase."""
    engine = EngineParts(pair, backend, batch, length + NEW_TOKENS).engine(speculates=speculates)

    def run(num_tokens: int) -> DecodingStats:
        requests = [
            Request(request_id=str(i), prompt_token_ids=[1 + i] * num_tokens, max_new_tokens=NEW_TOKENS)
            for i in range(batch)
        ]
        total = DecodingStats()
        for done in engine.generate(requests):
            total.add(done.stats)
        return total

    run(min(length, 64))
    stats = run(length)
    num_steps = (stats.num_spec_steps + stats.num_plain_steps) / batch
    phases = {"step": stats.step_s, "draft": stats.draft_s, "verify": stats.verify_s, "retrieval": stats.retrieval_s}
    return {
        "prefill_tokens_per_s": batch * length / stats.prefill_s,
        "steps": num_steps,
        **{f"{name}_ms": 1e3 * seconds / num_steps for name, seconds in phases.items()},
    }


STAGES = {"machine": machine, "kernels": kernels, "tokens": tokens, "steps": steps}
"""All but the tests, which pytest runs."""


def run_stage(name: str, setting: Setting, out: Path) -> int:
    """Run a stage, and return its exit code: 0, 1 if a row is wrong, or SKIPPED."""
    rows: list[Row] = []
    with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for row in STAGES[name](setting):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    if wrong := [row["wrong"] for row in rows if "wrong" in row]:
        print(f"wrong rows: {len(wrong)}, the first: {wrong[0]}", file=sys.stderr)
        return 1
    if all("skipped" in row for row in rows):
        print("; ".join(dict.fromkeys(row["skipped"] for row in rows)), file=sys.stderr)
        return SKIPPED
    return 0


def supervise(command: list[str], limit_s: float) -> Row:
    """Run a stage's process, and return how it ended: `ok`, `failed` or `skipped`, with the reason and the seconds."""
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"it exceeded its limit of {limit_s:g} s", "seconds": limit_s}
    status = {0: "ok", SKIPPED: "skipped"}.get(done.returncode, "failed")
    reason = "" if status == "ok" else (done.stdout + done.stderr).strip()[-_SHOWN:]
    if done.returncode < 0:
        reason = f"it ended with signal {-done.returncode}: {reason}"
    return {"status": status, "reason": reason, "seconds": round(time.monotonic() - begin, 1)}


def commands(device: str, shapes: str, out: Path) -> dict[str, list[str]]:
    """Return the command of each stage. A CPU has no tests of its own here."""
    own = [sys.executable, "-m", "benchmarks.gpu_check", "--device", device, "--shapes", shapes, "--out", str(out)]
    found = {name: [*own, "--stage", name] for name in STAGES}
    if device == "cuda":
        tests = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-rs", "-c", "/dev/null"]
        tests += ["--rootdir", ".", "--confcutdir", "tests/gpu", "--import-mode", "importlib", "-p", "no:cacheprovider"]
        found["tests"] = tests
    return found


def code_sha256() -> str:
    """Compute a hash of the package's Python files, which tells edits apart that no commit holds."""
    folder, found = Path(__file__).parents[1] / "specextend", hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder).as_posix()} {sha256}\n".encode())
    return found.hexdigest()


def main() -> int:
    """Run all stages, write the summary, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--stage", choices=STAGES, help="run this one in this process")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    slack = CPU_SLACK if given.device == "cpu" else 1
    if given.stage:
        ends_at = time.monotonic() + 0.9 * slack * LIMITS_S[given.stage]
        setting = Setting(device=torch.device(given.device), tiny=given.shapes == "tiny", ends_at=ends_at)
        return run_stage(given.stage, setting, given.out)
    ended: dict[str, Row] = {}
    for name, command in commands(given.device, given.shapes, given.out).items():
        ended[name] = supervise(command, slack * LIMITS_S[name])
        print(f"{name}: {ended[name]['status']} {ended[name]['reason']}", flush=True)
    summary = {"commit": code_commit(), "code_sha256": code_sha256(), "device": given.device, "stages": ended}
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    statuses = {stage["status"] for stage in ended.values()}
    return int("failed" in statuses or "ok" not in statuses)


if __name__ == "__main__":
    sys.exit(main())

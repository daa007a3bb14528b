"""Measurements of the machine: limits and step times, kept between starts.

A measurement is a JSON file in the user's cache folder, written only if the machine was quiet: on a
busy one, kernels can take thirty times as long. Damaged or outdated files are ignored.

Memory bandwidth limits decoding, and the rate of matrix products limits prefill. Step times
determine tree sizes.
"""

import hashlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch.nn.functional import linear

from specextend.attention.backends import shortest_runs
from specextend.attention.plan import TreeAttention
from specextend.core import ReadOnly
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.device import Graphs, device_name, multiplies_bf16, synchronise, traits_of
from specextend.decoding.model import CachedModel
from specextend.decoding.speculation import Line, StepCosts
from specextend.decoding.verification import Verifier
from specextend.folders import cache_folder

_MOST_WAITING = 0.1
"""Share of time that threads of a quiet machine wait for a core: 0.005 with two free cores, 0.05
under Ray, 0.2 to 0.7 beside a busy process.
"""
_PATIENCE_S = 1.5
_REPEATS = 5
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
"""Rows of measured forwards; sizes in between cost as much as the next larger."""
MOST_ALONE = 64
LENGTHS = (512, 6000, 2048)
"""Tokens of prefix, in the order of measurement."""
BUDGET_S = 1.2
"""Seconds after which the third length is skipped."""
_STRIDE = 7919
"""Distance of the token ids in a measured step, a prime."""
_LONG_S = 0.05


def kept_or_measured(kind: str, key: ReadOnly, measure: Callable[[], Any]) -> Any:
    """Return the JSON value kept as `kind` for `key`, or measure it."""
    if value := read_kept(kind, key):
        return value
    value, is_quiet = measure_undisturbed(measure)
    if is_quiet:
        keep(kind, key, value)
    return value


def read_kept(kind: str, key: ReadOnly) -> Any:
    """Return the kept JSON value, if any."""
    path = _path(kind, key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return None
    is_known = isinstance(stored, dict) and _about(key).items() <= stored.items()
    return stored["value"] if is_known else None


def keep(kind: str, key: ReadOnly, value: Any) -> None:
    """Keep a JSON value, if the folder is writable."""
    if path := _path(kind, key):
        with suppress(OSError):
            _write(path, json.dumps(_about(key) | {"value": value}, indent=1))


def _about(key: ReadOnly) -> dict[str, Any]:
    return {"code": code_sha256(), "key": json.loads(json.dumps(dict(key)))}


def measure_undisturbed(measure: Callable[[], Any]) -> tuple[Any, bool]:
    """Measure until the machine is quiet, for a second or two; return result and whether it was."""
    started_at = time.perf_counter()
    while True:
        begin = time.perf_counter()
        before = _waited_s()
        result = measure()
        end = time.perf_counter()
        waited_s = _waited_s() - before
        is_quiet = waited_s <= _MOST_WAITING * (end - begin)
        if is_quiet or end - started_at > _PATIENCE_S:
            return result, is_quiet


def _waited_s() -> float:
    waited = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has just ended
            waited.append(int(path.read_text().split()[1]) / 1e9)
    return sum(waited) if waited else math.nan


def code_sha256() -> str:
    """Hash the code that is measured or proved, or does so."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for folder in ("attention", "decoding", "drafters", "proof"):
        for path in sorted((package / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _path(kind: str, key: ReadOnly) -> Path | None:
    folder = cache_folder()
    text = json.dumps(dict(key), sort_keys=True)
    return folder and folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def measure_limits(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure memory bandwidth and matrix rate with all threads, in a few seconds.

    The best of several sums of a large tensor, and of products, count.
    """
    num_bytes = traits_of(device).probe_bytes
    size = traits_of(device).probe_size
    values = torch.ones(num_bytes // 4, device=device)
    read_s = _best_s(values.sum, device)
    del values
    product_s = _best_s(_large_product(size, device, dtype), device)
    return {"read_bytes_per_s": num_bytes / read_s, "flop_per_s": 2 * size**3 / product_s}


def _large_product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    weight = torch.randn(size, size, device=device, dtype=dtype)
    x = torch.ones(size, size, device=device, dtype=dtype)
    if (
        dtype != torch.bfloat16
        or not traits_of(device).packs_linears
        or not multiplies_bf16(device)
    ):
        return partial(linear, x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, size)
    return partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    def run() -> None:
        work()
        synchronise(device)

    return shortest_runs({"": run}, _REPEATS)[""]


def load_limits(device: torch.device, dtype: torch.dtype) -> Any:
    """Return `measure_limits`, kept or measured now."""
    key = {"device": device_name(device), "threads": torch.get_num_threads(), "dtype": str(dtype)}
    key["torch"] = str(torch.__version__)
    return kept_or_measured("limits", key, partial(measure_limits, device, dtype))


def fit_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit a least-squares line to (length, seconds); flat if it would fall or start below 0."""
    lengths, seconds = zip(*points, strict=True)
    slope = max(0.0, linear_regression(lengths, seconds).slope) if len({*lengths}) > 1 else 0.0
    first = fmean(seconds) - slope * fmean(lengths)
    return (first, slope) if first > 0 else (fmean(seconds), 0.0)


def choose_sizes(num_drafts: int, max_batch_size: int, most: int) -> list[int]:
    """Choose the rows of steps to measure, ascending from 1 to at most `most`."""
    rows = num_drafts + 1
    all_rows = max(rows, min(rows * max_batch_size, most))
    return sorted({rows, all_rows, *(size for size in SIZES if size < all_rows)})


def measure(
    target: CachedModel,
    kind: TreeAttention,
    sizes: Sequence[int],
    lengths: Sequence[int],
    graphs: Graphs,
    points: defaultdict[int, dict[int, float]],
) -> StepCosts:
    """Measure steps of each size after prefixes of several lengths.

    Steps above `MOST_ALONE` rows are batches, with the longest prefixes of the cache. They
    overwrite its front, so no request may be running. `points` keeps the shortest seconds by size
    and prefix.
    """
    begin = time.perf_counter()
    num_free = target.cache.rows.num_free
    num_rows = num_free if max(sizes) > MOST_ALONE else max(lengths) + max(sizes)
    # fresh memory may hold NaN, and costs nothing until it is written
    for part in target.cache.parts:
        part[..., :num_rows, :] = 0
    for number, length in enumerate(lengths):
        # a single length would show no slope
        if number > 1 and time.perf_counter() - begin > BUDGET_S:
            break
        for size in sizes:
            batch = -(-size // MOST_ALONE)
            each = min(length, num_free // batch - -(-size // batch))
            step = partial(time_step, target, kind, size, each, graphs, batch)
            if size not in points:  # first calls of a size build kernels
                for _ in range(graphs.num_warm_ups):
                    step()
            first_s = step()
            seconds = first_s if first_s > _LONG_S else min(first_s, step())
            points[size][batch * each] = min(seconds, points[size].get(batch * each, seconds))
    return StepCosts({size: fit_line([*points[size].items()]) for size in sizes})


@torch.inference_mode()
def time_step(
    target: CachedModel, kind: TreeAttention, size: int, length: int, graphs: Graphs, batch: int = 1
) -> float:
    """Time the verification of chains of `size` rows in all, each after `length` rows.

    A single row is a plain step.
    """
    num_new = -(-size // batch)
    starts = [b * (target.cache.rows.num_free // batch) for b in range(batch)]
    lengths = [length] * batch
    target.assume_read(starts, length)
    begin = time.perf_counter()
    places = torch.tensor([*zip(starts, lengths, strict=True)], device=target.device)
    parents = torch.arange(-1, num_new - 1, device=target.device).repeat(batch, 1)
    depths = parents + 1
    forward = partial(Verifier(target, (), (), num_new, kind, graphs).forward, starts, lengths)
    # unlike each other, so that they pass other experts
    token_ids = torch.arange(parents.numel(), device=target.device).view_as(parents)
    token_ids = token_ids * _STRIDE % target.config.vocab_size
    logits = graphs.run(f"step {kind}", forward, places, token_ids, parents, depths)[0]
    logits.max(-1).indices.tolist()  # waits for the device
    return time.perf_counter() - begin


def load_step_costs(
    target: CachedModel, tree: TreeOptions, kind: TreeAttention, max_batch_size: int, graphs: Graphs
) -> StepCosts | None:
    """Return the costs of steps, kept or measured now; None if trees have a fixed size.

    The cache is overwritten, so no request may be running.
    """
    if tree.nodes != "auto":
        return None
    sizes = choose_sizes(tree.most_drafts, max_batch_size, traits_of(target.device).measured_rows)
    longest = max(1, target.cache.rows.num_free - sizes[-1])
    lengths = [*dict.fromkeys(min(length, longest) for length in LENGTHS)]
    key = target.timing_key() | {"backend": target.attend.__name__, "graphs": graphs.enabled}
    key |= {"kind": kind, "sizes": sizes, "lengths": lengths}
    points: defaultdict[int, dict[int, float]] = defaultdict(dict)
    kept = kept_or_measured(
        "step-costs", key, lambda: measure(target, kind, sizes, lengths, graphs, points).lines
    )
    graphs.clear()
    # in JSON, keys are strings and tuples lists
    return StepCosts({int(size): tuple(line) for size, line in kept.items()})

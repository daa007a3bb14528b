"""Stage `synchronisations`: the waits for the device in decoding steps, by the line of Python that causes them."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import torch

from specextend.bench.gpu_check.shapes import GRAPHS, TINY, EngineParts, Pair
from specextend.bench.gpu_check.stage import Row, Setting, SkippedError, attempt
from specextend.core import Request

BACKENDS = ("sdpa", "triton", GRAPHS)
PROMPT_TOKENS = 300
NEW_TOKENS = 24


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each tiny pair and backend: all lines run as with large ones."""
    device = torch.device(setting.device)
    for shape, backend in product(TINY, BACKENDS):
        pair = Pair(shape, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        row: Row = {"pair": shape.name, "backend": backend}
        yield from attempt(setting, row, partial(_count, pair, backend))
    if device.type == "cpu":
        raise SkippedError("a CPU is never waited for, so nothing was counted")


def _count(pair: Pair, backend: str) -> Iterator[Row]:
    yield count_in_steps(EngineParts(pair, backend, 2, PROMPT_TOKENS + NEW_TOKENS))


def count_in_steps(parts: EngineParts) -> Row:
    """Decode one request, and count the synchronisations after its prefill."""
    engine, watches = parts.engine(speculates=True), parts.target.device.type == "cuda"

    def source() -> Iterator[Request]:
        yield Request(request_id="only", prompt_token_ids=[7] * PROMPT_TOKENS, max_new_tokens=NEW_TOKENS)
        if watches:  # the batch has room for two, so this is asked for a second request after the prefill
            torch.cuda.set_sync_debug_mode("warn")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            [done] = engine.generate(source())
        finally:
            if watches:
                torch.cuda.set_sync_debug_mode("default")
    lines = count_by_line(caught)
    steps = done.stats.num_spec_steps + done.stats.num_plain_steps
    return {
        "steps": steps,
        "synchronisations_per_step": sum(lines.values()) / steps,
        "lines": dict(lines.most_common()),
    }


def count_by_line(caught: Iterable[warnings.WarningMessage]) -> Counter[str]:
    """Count torch's warnings of synchronising operations by `file:line`."""
    return Counter(
        f"{os.path.relpath(warning.filename)}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    )

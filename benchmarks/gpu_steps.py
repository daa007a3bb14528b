"""Prefill, plain and speculative steps at the shapes of shipped pairs on a GPU.

    python3 -m benchmarks.gpu_steps

Weights and prompts are random, so times are real and tokens meaningless. Prints a line of JSON per
combination, with the reason if it failed. Shapes: `B` sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_pairs import FULL, GRAPHS, TINY, EngineParts, Pair, SkippedError
from specextend.core import Request
from specextend.decoding.device import is_out_of_memory, peak_bytes, release_cached
from specextend.decoding.engine import Engine
from specextend.stats import DecodingStats

Row = dict[str, Any]
_BACKENDS = ("sdpa", "triton", "flash")
GRID = ((1, 16384), (4, 8192), (1, 2048))
"""Sequences and prompt tokens, the most telling first."""
TINY_GRID = ((2, 256),)
NEW_TOKENS = 32


def steps(device: torch.device, limit_s: float, *, tiny: bool) -> Iterator[Row]:
    """Yield the milliseconds of each combination, or the reason of a failure, until the time is
    up.
    """
    shapes, grid = (TINY, TINY_GRID) if tiny else (FULL, GRID)
    ends_at = time.monotonic() + limit_s
    for shape in shapes:
        pair = Pair(shape, device, torch.bfloat16)
        for (batch, length), backend, speculates in product(
            grid, (*_BACKENDS, GRAPHS), (False, True)
        ):
            if time.monotonic() > ends_at:
                return
            cell: Row = {
                "pair": shape.name,
                "backend": backend,
                "batch": batch,
                "tokens": length,
                "draft": speculates,
            }
            yield cell | try_steps(pair, backend, batch, length, speculates=speculates)
            gc.collect()
            release_cached(device)
        del pair


def try_steps(pair: Pair, backend: str, batch: int, length: int, *, speculates: bool) -> Row:
    """Return the result of `measure_steps`, or the reason of a failure."""
    try:
        return measure_steps(pair, backend, batch, length, speculates=speculates)
    except (SkippedError, RuntimeError) as error:
        return {"skipped": "out of memory" if is_out_of_memory(error) else str(error)}


def decode(engine: Engine, batch: int, num_tokens: int) -> DecodingStats:
    """Decode a batch of equally long prompts, all read before the first step."""
    engine.decode_share = 0.0
    requests = [
        Request(request_id=str(i), prompt_token_ids=[1 + i] * num_tokens, max_new_tokens=NEW_TOKENS)
        for i in range(batch)
    ]
    total = DecodingStats()
    for done in engine.generate(requests):
        total.add(done.stats)
    return total


def measure_steps(pair: Pair, backend: str, batch: int, length: int, *, speculates: bool) -> Row:
    """Warm up, decode a batch of equally long prompts, and return milliseconds per step by
    phase.
    """
    device = pair.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    engine = EngineParts(pair, backend, batch, length + NEW_TOKENS).engine(speculates=speculates)
    decode(engine, batch, min(length, 64))
    stats = decode(engine, batch, length)
    num_steps = (stats.num_spec_steps + stats.num_plain_steps) / batch
    phases = {
        "step": stats.step_s,
        "draft": stats.draft_s,
        "verify": stats.verify_s,
        "retrieval": stats.retrieval_s,
    }
    return {
        "prefill_tokens_per_s": batch * length / stats.prefill_s,
        "decode_tokens_per_s": stats.num_output_tokens / stats.step_s,
        "steps": num_steps,
        "accepted": stats.num_accepted_tokens / max(1, stats.num_spec_steps),
        "peak_gib": peak_bytes() / 2**30,
        **{f"{name}_ms": 1e3 * seconds / num_steps for name, seconds in phases.items()},
    }


def main() -> int:
    """Measure and print a line per combination."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit-s", type=float, default=500.0)
    given = parser.parse_args()
    for row in steps(torch.device(given.device), given.limit_s, tiny=given.shapes == "tiny"):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Stage `prefill`: tokens per second of a prompt by chunk size, and the share of the matrix rate that this is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from specextend.attention.plan import AttentionPlan
from specextend.bench.gpu_check.machine_facts import ceiling
from specextend.bench.gpu_check.shapes import FULL, TINY, EngineParts, Pair
from specextend.bench.gpu_check.stage import Row, Setting, attempt
from specextend.bench.gpu_check.step_times import release, spread_ms
from specextend.decoding.device import traits_of

BACKENDS = ("sdpa", "flash")
"""The kernel of our own takes no chunk of a prompt. The draft is measured with the first."""
PROMPT_TOKENS = {"full": 8192, "tiny": 256}
CHUNKS = {"full": (512, 2048, 8192), "tiny": (64, 256)}


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each pair, backend and chunk size, and one for the prompt's pass through each draft."""
    device = torch.device(setting.device)
    for shape in FULL if setting.shapes == "full" else TINY:
        pair = Pair(shape, device, torch.bfloat16)
        for backend in BACKENDS:
            cell: Row = {"pair": shape.name, "backend": backend, "tokens": PROMPT_TOKENS[setting.shapes]}
            yield from attempt(setting, cell, partial(_measure, pair, backend, setting))
            release(device)
        del pair
        release(device)


def _measure(pair: Pair, backend: str, setting: Setting) -> Iterator[Row]:
    device = torch.device(setting.device)
    num_tokens, flop_per_s = PROMPT_TOKENS[setting.shapes], ceiling(setting.out, "bf16_flop_per_s")
    parts, flop = EngineParts(pair, backend, 1, num_tokens), pair.work().prefill_flop(num_tokens)
    for chunk_size in CHUNKS[setting.shapes]:
        ms = spread_ms(partial(read_prompt, parts, num_tokens, chunk_size), device)
        per_s = 1e3 / ms["median"]
        share = None if flop_per_s is None else flop * per_s / flop_per_s
        speed = {"tokens_per_s": num_tokens * per_s, "matrix_share": share}
        yield {"model": "target", "chunk": chunk_size, "ms": ms, **speed}
    if backend != BACKENDS[0]:
        return
    ms = spread_ms(partial(read_prompt_with_draft, parts, num_tokens), device)
    yield {"model": "draft", "chunk": traits_of(device).prefill_chunk, "ms": ms}


def read_prompt(parts: EngineParts, num_tokens: int, chunk_size: int) -> None:
    """Run a prompt through the target in chunks, up to the choice of the first token."""
    target = parts.target
    token_ids = torch.ones(1, num_tokens, dtype=torch.int64, device=target.device)
    for first in range(0, num_tokens, chunk_size):
        chunk = token_ids[:, first : first + chunk_size]
        length = first + chunk.shape[1]
        positions = torch.arange(first, length, device=target.device).unsqueeze(0)
        plan = AttentionPlan([0], [length], chunk.shape[1])
        hidden, _ = target.forward_with_features(chunk, positions, plan, parts.drafter.hidden_layers)
    target.logits(hidden[:, -1]).argmax(-1).tolist()


def read_prompt_with_draft(parts: EngineParts, num_tokens: int) -> None:
    """Run a prompt through the draft, in the engine's chunks."""
    drafter, target = parts.drafter, parts.target
    width = max(1, len(drafter.hidden_layers)) * target.config.hidden_size
    drafter.admit(0, num_tokens, 1)
    chunk_size = traits_of(target.device).prefill_chunk
    for first in range(0, num_tokens, chunk_size):
        count = min(chunk_size, num_tokens - first)
        token_ids = torch.ones(count, dtype=torch.int64, device=target.device)
        drafter.prefill(0, token_ids, torch.ones(count, width, device=target.device, dtype=target.dtype))
    drafter.release(0)

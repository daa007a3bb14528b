"""Stage `tokens`: tiny pairs decode the same tokens on the device and on the CPU, greedily and in fp32.

The CPU decodes plainly, in plain torch, one request at a time. On the device requests join a running batch as others
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product, zip_longest

import torch

from specextend.bench.gpu_check.shapes import GRAPHS, TINY, EngineParts, Pair
from specextend.bench.gpu_check.stage import Row, Setting, attempt
from specextend.core import Completion, Request
from specextend.decoding.device import GPU

BACKENDS = ("reference", "sdpa", "triton", GRAPHS)
BATCHES = (1, 3)
MAX_TOKENS = GPU.prefill_chunk + 200
_LENGTHS = {"a": (1, 40), "b": (63, 8), "c": (300, 30), "d": (GPU.prefill_chunk + 70, 20), "e": (64, 1), "f": (17, 33)}
"""Name of a request -> tokens of its prompt, and most new tokens."""


def run(setting: Setting) -> Iterator[Row]:
    """Yield one row for each pair, backend and batch size."""
    device = torch.device(setting.device)
    for shape in TINY:
        pair = Pair(shape, torch.device("cpu"), torch.float32)
        expected = decode(EngineParts(pair, "reference", 1, MAX_TOKENS), speculates=False)
        moved = pair.to(device)
        for backend, batch in product(BACKENDS, BATCHES):
            row: Row = {"pair": shape.name, "backend": backend, "batch": batch}
            yield from attempt(setting, row, partial(_compare, moved, backend, batch, expected))


def _compare(pair: Pair, backend: str, batch: int, expected: Mapping[str, Completion]) -> Iterator[Row]:
    yield compare_tokens(decode(EngineParts(pair, backend, batch, MAX_TOKENS), speculates=True), expected)


def requests() -> list[Request]:
    """Make the requests: prompts of random tokens, some longer than a chunk of prefill."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = TINY[0].target["vocab_size"]
    return [
        Request(
            request_id=name,
            prompt_token_ids=torch.randint(vocabulary, (length,), generator=generator).tolist(),
            max_new_tokens=num_new,
        )
        for name, (length, num_new) in _LENGTHS.items()
    ]


def decode(parts: EngineParts, *, speculates: bool) -> dict[str, Completion]:
    """Decode all requests, and return the completions by name."""
    engine = parts.engine(speculates=speculates)
    return {done.request_id: done for done in engine.generate(requests())}


def compare_tokens(found: Mapping[str, Completion], expected: Mapping[str, Completion]) -> Row:
    """Count the requests whose tokens are equal, and say where the others first differ."""
    differences = {
        name: first_difference(found[name].token_ids, done.token_ids)
        for name, done in expected.items()
        if found[name].token_ids != done.token_ids
    }
    row: Row = {
        "requests": len(expected),
        "equal": len(expected) - len(differences),
        "accepted_tokens": sum(done.stats.num_accepted_tokens for done in found.values()),
        "first_differences": differences,
    }
    return row | {"wrong": f"tokens differ from the CPU's: {differences}"} if differences else row


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the index of the first token in which two different outputs differ."""
    return next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y)

"""What attention kernels do to logits: their error against the target in float32, beside transformers' own error.

Every side reads a document in the same way: most of it in chunks, as a prompt; its last tokens one at a time, as plain
steps; the same tokens again in masked steps of several rows, as a tree whose every node has one child.

Shapes: `T` tokens of a forward, `P` positions whose logits are compared, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specextend.attention.plan import Attend, AttentionPlan
from specextend.decoding.device import CPU
from specextend.decoding.model import CachedModel
from specextend.models import TargetOptions, load_causal_lm, load_target

NUM_STEPS = 64
"""Tokens at the end of a document that are read in steps."""
TREE_ROWS = 16
"""Rows of a masked step."""
EVERY = 8
"""Of the positions of a chunk, every eighth is compared: logits of all take gigabytes."""
PARTS = ("prefill", "plain", "tree")
"""The parts of a document, as it is read: chunks, plain steps, masked steps."""

Forward = Callable[[Tensor, int, Tensor, bool], Tensor]
"""(token_ids [T], first position, rows to keep [P], whether the rows are a tree's) -> logits [P, V]."""
Logits = dict[str, Tensor]
"""Logits [P, V] of each part of a document."""


@torch.inference_mode()
def exact_logits(options: TargetOptions, documents: Sequence[Sequence[int]]) -> list[Logits]:
    """Run the stock model in float32 over each document (token ids) in one forward; return what sides compare with."""
    model = load_causal_lm(options.model, options.revision, "float32", options.device, "sdpa")
    found = []
    for document in documents:
        body = len(document) - NUM_STEPS
        kept = torch.cat([torch.arange(0, body, EVERY), torch.arange(body, len(document))])
        logits = model(torch.tensor([document]), use_cache=False, logits_to_keep=kept).logits[0]
        prefill, steps = logits[:-NUM_STEPS], logits[-NUM_STEPS:]
        found.append({"prefill": prefill, "plain": steps, "tree": steps})
    return found


@torch.inference_mode()
def read_document(forward: Forward, document: Sequence[int]) -> Logits:
    """Run a side over a document (token ids) part by part."""
    token_ids, body = torch.tensor(document), len(document) - NUM_STEPS

    def run(begin: int, end: int, size: int, every: int, *, is_tree: bool) -> Tensor:
        pieces = [token_ids[first : min(first + size, end)] for first in range(begin, end, size)]
        return torch.cat(
            [
                forward(piece, begin + number * size, torch.arange(0, len(piece), every), is_tree)
                for number, piece in enumerate(pieces)
            ]
        )

    return {
        "prefill": run(0, body, CPU.prefill_chunk, EVERY, is_tree=False),
        "plain": run(body, len(document), 1, 1, is_tree=False),
        "tree": run(body, len(document), TREE_ROWS, 1, is_tree=True),
    }


def kernel_errors(
    target: CachedModel, kernels: Mapping[str, Attend], documents: Sequence[Sequence[int]], exact: Sequence[Logits]
) -> dict[str, dict[str, Any]]:
    """Compare the logits of our engine's target with each kernel; it writes to the front of the target's cache."""
    found = {}
    for name, kernel in kernels.items():
        target.attend = kernel
        found[name] = compare_logits(_our_forward(target), documents, exact)
    return found


def stock_errors(
    options: TargetOptions, documents: Sequence[Sequence[int]], exact: Sequence[Logits]
) -> dict[str, dict[str, Any]]:
    """Compare the logits of the stock model in the configured dtype with both of its own implementations."""
    model = load_target(options, "sdpa")
    found = {"transformers sdpa": compare_logits(_stock_forward(model), documents, exact)}
    model.set_attn_implementation("eager")
    return found | {"transformers eager": compare_logits(_stock_forward(model), documents, exact)}


def compare_logits(
    forward: Forward, documents: Sequence[Sequence[int]], exact: Sequence[Logits]
) -> dict[str, dict[str, float | int]]:
    """Compare a side's logits with the exact ones: figures of each part, over all documents."""
    sums = {part: _LogitErrors() for part in PARTS}
    for document, expected in zip(documents, exact, strict=True):
        logits = read_document(forward, document)
        for part in PARTS:
            sums[part].add(logits[part], expected[part])
    return {part: errors.figures() for part, errors in sums.items()}


@dataclass(slots=True)
class _LogitErrors:
    """Sums over positions and over the entries of their logits."""

    num_positions: int = 0
    num_entries: int = 0
    largest: float = 0.0
    total: float = 0.0
    num_same: int = 0
    """Positions whose likeliest token is the exact one."""

    def add(self, logits: Tensor, exact: Tensor) -> None:
        """Count logits [P, V]."""
        errors = (logits.float() - exact).abs()
        self.num_positions += len(exact)
        self.num_entries += errors.numel()
        self.largest = max(self.largest, errors.max().item())
        self.total += errors.sum(dtype=torch.float64).item()
        self.num_same += int((logits.argmax(-1) == exact.argmax(-1)).sum())

    def figures(self) -> dict[str, float | int]:
        """Return the largest and the mean error, and the share of positions with the exact likeliest token."""
        return {
            "positions": self.num_positions,
            "largest": self.largest,
            "mean": self.total / self.num_entries,
            "same_token": self.num_same / self.num_positions,
        }


def _our_forward(target: CachedModel) -> Forward:
    """Run our engine's target with the kernel that it has."""

    def forward(token_ids: Tensor, first: int, kept: Tensor, is_tree: bool) -> Tensor:
        size = len(token_ids)
        mask = torch.ones(1, size, size, dtype=torch.bool).tril() if is_tree else None
        plan = AttentionPlan([0], [first + size], size, mask, tree="dense")
        positions = torch.arange(first, first + size).unsqueeze(0)
        return target.logits(target.forward(token_ids.unsqueeze(0), positions, plan)[0, kept])

    return forward


def _stock_forward(model: Any) -> Forward:
    """Run the stock model with its own cache. A tree in which every node has one child needs no mask there."""
    cache = DynamicCache()

    def forward(token_ids: Tensor, first: int, kept: Tensor, is_tree: bool) -> Tensor:
        nonlocal cache
        if first == 0:
            cache = DynamicCache()
        elif (ahead := cache.get_seq_length() - first) > 0:
            cache.crop(-ahead)
        logits: Tensor = model(token_ids.unsqueeze(0), past_key_values=cache, logits_to_keep=kept).logits[0]
        return logits

    return forward

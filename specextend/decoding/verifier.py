"""Verification: which part of a draft tree the target agrees with (METHOD, step 6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step commits."""

    path: list[int]
    """Accepted nodes, the root first."""
    bonus_token_id: int
    """The target's own next token after the path."""


def verify(token_ids: list[int], parents: list[int], target_token_ids: list[int]) -> Verdict:
    """Follow the target's choice from the root for as long as the draft holds it.

    All three have one entry a node; `target_token_ids[n]` is the target's token after node n.
    """
    edges = zip(parents, token_ids, strict=True)
    child = {edge: node for node, edge in enumerate(edges)}
    path = [0]
    while (node := child.get((path[-1], target_token_ids[path[-1]]))) is not None:
        path.append(node)
    return Verdict(path, target_token_ids[path[-1]])

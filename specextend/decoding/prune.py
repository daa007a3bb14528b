"""Cutting a tree to its likeliest nodes."""

from __future__ import annotations

import torch

from specextend.decoding.tree import DraftTree


def prune(tree: DraftTree, num_nodes: int) -> DraftTree:
    """The `num_nodes` likeliest nodes, the root counted; the tree itself where it has no more.

    Path probabilities never grow towards the leaves and parents come first, so the ancestors of a node that stays stay:
    of equals the earlier is taken.
    """
    size = len(tree.token_ids)
    if size <= num_nodes:
        return tree
    kept = tree.log_probs.sort(descending=True, stable=True).indices[:num_nodes].sort().values
    numbers = torch.full_like(tree.parents, -1)
    numbers[kept] = torch.arange(num_nodes, device=kept.device)
    parents = numbers[tree.parents[kept].clamp(min=0)]
    parents[0] = -1
    return DraftTree(tree.token_ids[kept], parents, tree.depths[kept], tree.log_probs[kept])

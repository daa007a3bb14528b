"""SpecExtend for one prompt (arXiv 2505.20776, algorithm 1): retrieve, grow, verify, accept.

Slow and plain: nothing is cached or batched, every forward reads the whole text, and decoding is
greedy. It shows how the engine decodes, and its tests hold the engine to it. One thing differs:
after a new choice the draft reads all chosen chunks, where the engine reads only new ones.

A node of a tree is the path of tokens from the text to it; the end of the text is the empty path.
"""

from typing import Any

import torch
from torch import Tensor

Path = tuple[int, ...]
Tree = dict[Path, float]
"""Candidates for the next tokens, each with the log of its path's probability by the draft."""


@torch.inference_mode()
def generate(
    target: Any,
    draft: Any,
    prompt: list[int],
    *,
    max_new_tokens: int,
    num_nodes: int = 8,
    max_depth: int = 3,
    chunk_size: int = 32,
    top_k_chunks: int = 4,
    recent: int = 32,
    refresh_every: int = 4,
) -> tuple[list[int], list[int]]:
    """Return the target's greedy tokens, and the numbers of each step's that the draft foresaw.

    target, draft: causal models of transformers with one vocabulary and eager attention.
    """
    text = list(prompt)
    accepted = list[int]()
    text += [int(logits_of(target, text, {})[()].argmax())]
    while len(text) < len(prompt) + max_new_tokens:
        if len(accepted) % refresh_every == 0:
            end = len(text) - 1
            visible = retrieve(target, text[:end], chunk_size, top_k_chunks, recent)
        seen = [text[i] for i in visible] + text[end:]
        tree = grow(draft, seen, num_nodes, max_depth)
        path, bonus = accept(tree, logits_of(target, text, tree))
        text += [*path, bonus]
        accepted.append(len(path))
    return text[len(prompt) :][:max_new_tokens], accepted


def retrieve(
    target: Any, text: list[int], chunk_size: int, top_k_chunks: int, recent: int
) -> list[int]:
    """Return the positions of the chunks that the target's last layer attends to most (3.2).

    The attention is that of the last token, its mean over heads, added up by chunk. The text is all
    but the last token that the target chose. The first chunk and the chunks of the `recent` last
    tokens are always seen.
    """
    attention = target(torch.tensor([text]), output_attentions=True).attentions[-1]
    mass = torch.stack([each.sum() for each in attention[0, :, -1].mean(0).split(chunk_size)])
    mass[0] = mass[max(0, len(text) - recent) // chunk_size :] = torch.inf
    chosen = mass.topk(min(top_k_chunks, len(mass))).indices.tolist()
    return [i for i in range(len(text)) if i // chunk_size in chosen]


def grow(draft: Any, text: list[int], num_nodes: int, max_depth: int) -> Tree:
    """Grow the tree of the likeliest paths (OPT-Tree, arXiv 2406.17276).

    Each level is read by the draft; the best nodes of all levels stay, of equally likely nodes the
    earlier, which is no deeper. A parent is never less likely than its child.
    """
    tree: Tree = {}
    for depth in range(max_depth):
        logits = logits_of(draft, text, tree)
        for node in [node for node in logits if len(node) == depth]:
            best = logits[node].log_softmax(-1).topk(num_nodes)
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                tree[*node, token] = tree.get(node, 0.0) + log_prob
        likeliest = sorted(tree, key=lambda node: -tree[node])[:num_nodes]
        tree = {node: tree[node] for node in tree if node in likeliest}
    return tree


def logits_of(model: Any, text: list[int], tree: Tree) -> dict[Path, Tensor]:
    """Return the logits after the text and after each node, from one forward over both (3.1).

    A token of the text sees the tokens before it, a node the text and its path.
    """
    places = {node: place for place, node in enumerate(tree, len(text))}
    size = len(text) + len(tree)
    sees = torch.ones(size, size).tril().bool()
    positions = list(range(len(text)))
    for node, place in places.items():
        sees[place, len(text) :] = False
        sees[place, [places[node[:end]] for end in range(1, len(node) + 1)]] = True
        positions.append(len(text) + len(node) - 1)
    mask = torch.zeros(size, size).masked_fill(~sees, torch.finfo(torch.float32).min)
    tokens = torch.tensor([text + [node[-1] for node in tree]])
    logits: Tensor = model(
        tokens, position_ids=torch.tensor([positions]), attention_mask=mask[None, None]
    ).logits
    return dict(zip([(), *tree], logits[0, len(text) - 1 :], strict=True))


def accept(tree: Tree, logits: dict[Path, Tensor]) -> tuple[Path, int]:
    """Return the path of the target's choices as far as the tree has it, and its next token."""
    path: Path = ()
    while True:
        token = int(logits[path].argmax())
        if (*path, token) not in tree:
            return path, token
        path = (*path, token)

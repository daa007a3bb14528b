"""SpecExtend for one prompt on one page (arXiv 2505.20776, algorithm 1): retrieve, grow, verify,
accept.

Slow and plain: nothing is cached or batched, every forward reads the whole text, and decoding is
greedy. It shows what the engine does, and its tests hold the engine to it. One thing differs: the
draft reads the chosen chunks anew, where the engine gathers their keys and values.

Shapes: `S` tokens of a text, `N` nodes of a tree, `V` vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Tree:
    """Candidates for the next tokens. A node stands behind its parent, which is -1 for those behind
    the text.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of each node's path, by the draft."""

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first level down to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def add(self, parent: int, token: int, log_prob: float) -> None:
        """Add a node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)


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
    refresh_every: int = 4,
) -> tuple[list[int], list[int]]:
    """Return the target's own greedy tokens, and how many of each step's the draft had foreseen.

    target, draft: causal models of transformers with one vocabulary and eager attention.
    """
    text = list(prompt)
    accepted = list[int]()
    text += [int(logits_of(target, text, Tree())[0].argmax())]
    while len(text) < len(prompt) + max_new_tokens:
        if len(accepted) % refresh_every == 0:
            visible = retrieve(target, text, chunk_size, top_k_chunks)
            end = len(text)
        seen = [text[i] for i in visible] + text[end:]
        tree = grow(draft, seen, num_nodes, max_depth)
        path, bonus = accept(tree, logits_of(target, text, tree))
        text += [tree.tokens[node] for node in path] + [bonus]
        accepted.append(len(path))
    return text[len(prompt) :][:max_new_tokens], accepted


def retrieve(target: Any, text: list[int], chunk_size: int, top_k_chunks: int) -> list[int]:
    """Return the positions that the draft may see: the chunks that the target's last layer attends
    to most (3.2).

    It is the attention of the last token, its mean over heads, added up by chunk. The last chunk is
    always seen.
    """
    attention = target(torch.tensor([text]), output_attentions=True).attentions[-1]
    mass = torch.stack([each.sum() for each in attention[0, :, -1].mean(0).split(chunk_size)])
    mass[-1] = torch.inf
    chosen = mass.topk(min(top_k_chunks, len(mass))).indices.sort().values.tolist()
    return [
        i
        for chunk in chosen
        for i in range(chunk * chunk_size, (chunk + 1) * chunk_size)
        if i < len(text)
    ]


def grow(draft: Any, text: list[int], num_nodes: int, max_depth: int) -> Tree:
    """Grow the tree whose nodes are likeliest by the product of their probabilities (OPT-Tree,
    arXiv 2406.17276).

    Each level is read by the draft; the best nodes of all levels stay. A parent is never less
    likely than its child.
    """
    tree = Tree()
    level = [-1]
    for depth in range(max_depth):
        log_probs = logits_of(draft, text, tree).log_softmax(-1)
        for node in level:
            above = tree.log_probs[node] if node >= 0 else 0.0
            best = log_probs[1 + node].topk(num_nodes)
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                tree.add(node, token, above + log_prob)
        tree = best_of(tree, num_nodes)
        level = [node for node in range(len(tree.tokens)) if len(tree.path(node)) == depth + 1]
    return tree


def best_of(tree: Tree, num_nodes: int) -> Tree:
    """Return a tree of the likeliest nodes; of equally likely ones the earlier, which is no
    deeper.
    """
    ranked = sorted(range(len(tree.tokens)), key=lambda node: -tree.log_probs[node])[:num_nodes]
    places = {node: place for place, node in enumerate(sorted(ranked))}
    best = Tree()
    for node in places:
        best.add(places.get(tree.parents[node], -1), tree.tokens[node], tree.log_probs[node])
    return best


def logits_of(model: Any, text: list[int], tree: Tree) -> Tensor:
    """Return the logits [1 + N, V] behind the text and behind each node, from one forward over both
    (3.1).

    A token of the text sees those before it, a node the text and its own path.
    """
    num_read = len(text)
    size = len(text) + len(tree.tokens)
    sees = torch.ones(size, size).tril().bool()
    positions = list(range(num_read))
    for node in range(len(tree.tokens)):
        path = tree.path(node)
        sees[num_read + node, num_read:] = False
        sees[num_read + node, [num_read + each for each in path]] = True
        positions.append(num_read + len(path) - 1)
    mask = torch.zeros(size, size).masked_fill(~sees, torch.finfo(torch.float32).min)
    tokens = torch.tensor([text + tree.tokens])
    logits: Tensor = model(
        tokens, position_ids=torch.tensor([positions]), attention_mask=mask[None, None]
    ).logits
    return logits[0, num_read - 1 :]


def accept(tree: Tree, logits: Tensor) -> tuple[list[int], int]:
    """Return the path of nodes that are the target's own choices, and the token that it chooses
    behind them.

    logits [1 + N, V] as `logits_of` returns them.
    """
    path = list[int]()
    node = -1
    while True:
        token = int(logits[1 + node].argmax())
        children = [
            each
            for each, parent in enumerate(tree.parents)
            if parent == node and tree.tokens[each] == token
        ]
        if not children:
            return path, token
        [node] = children
        path.append(node)

"""Scored answers: an output is put together of choices, each made by the target's probabilities of
all its values. In an output that was written, fields of known values are scored once it is done.

The values of a choice are a tree behind the prompt and the choices before; one forward scores them,
several if there are many. Nothing is drafted or sampled. The log probability of a value is the sum
over its tokens, given that it is one of the values. It is not divided by the length: texts end
where they are told apart, so they exclude each other, and the sum is what the target says of them.

Shapes: `N` tree nodes, the forced tokens before the root included, `V` vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.core import FinishReason, Scored, json_values
from specextend.decoding.device import upload
from specextend.decoding.model import CachedModel
from specextend.decoding.sampling import FARTHEST, NonFiniteLogits, where_finite
from specextend.decoding.sequence import RunningSequence
from specextend.decoding.tree import DraftTrees, TreeNode, tree_mask

MOST_NODES = 96
"""Nodes of values in one forward. With forced tokens before them they are as many as every kernel
takes.
"""
_MOST_FORCED = 32
"""Forced tokens in one forward."""
Path = list[int]
"""Tokens of an output, from its first one on."""


@dataclass(frozen=True)
class ChoiceScorer:
    """Makes the choices of requests whose prompts were read."""

    _tokenizer: Any
    _target: CachedModel
    _on_forward: Callable[[], None]
    """Called for each forward of the target."""

    def answer(self, sequence: RunningSequence) -> tuple[Path, FinishReason]:
        """Make a sequence's choices, one after the other; return its output, and why it ends
        there.
        """
        request = sequence.request
        text = ""
        path = Path()
        for choice in request.choices:
            texts = [text + each for each in choice.texts]
            paths = self._paths(texts)
            num_shared = _num_shared(paths)
            if max(map(len, paths)) > request.max_new_tokens:
                return paths[0][: min(num_shared or 1, request.max_new_tokens)], "length"
            log_probs = self._log_probs(sequence, paths) if len(paths) > 1 else [0.0]
            best = max(range(len(paths)), key=log_probs.__getitem__)  # the first of equals
            scored = zip(choice.values, log_probs, strict=True)
            sequence.scored += [Scored(choice.field, value, log_prob) for value, log_prob in scored]
            text = texts[best]
            path = paths[best]
            others = log_probs[:best] + log_probs[best + 1 :]
            lead = min((log_probs[best] - other for other in others), default=FARTHEST)
            sequence.leads += [lead] * (len(path) - len(sequence.leads))
        return path, "stop"

    def score(self, sequence: RunningSequence) -> None:
        """Score the values of the closed fields of an output that is done, behind what it says
        before them. An output that broke off has none.

        The last field comes first, because it is scored in the rows of what stands behind it.
        """
        request = sequence.request
        text = sequence.stopper.text
        try:
            spans = {name: (begin, end) for name, begin, end in json_values(text)}
        except ValueError:
            return
        for choice in reversed(request.closed):
            if choice.field in spans:
                begin, end = spans[choice.field]
                paths = self._paths([text[:begin] + each + text[end] for each in choice.texts])
                if max(map(len, paths)) > sequence.region.size - len(request.prompt_token_ids):
                    continue  # a longer value does not fit into its rows
                log_probs = self._behind_output(sequence, paths) if len(paths) > 1 else [0.0]
                values = zip(choice.values, log_probs, strict=True)
                sequence.scored[:0] = [Scored(choice.field, *each) for each in values]

    def _behind_output(self, sequence: RunningSequence, paths: Sequence[Path]) -> list[float]:
        """Return what `_log_probs` does, where the rows are those of an output, which may have the
        same text in other tokens.
        """
        begin = len(sequence.request.prompt_token_ids)
        forced = paths[0][: _num_shared(paths)]
        known = begin + _num_shared([forced, sequence.stopper.token_ids])
        sequence.length = min(sequence.length, known)
        while (rest := forced[sequence.length - begin :])[_MOST_FORCED:]:
            nodes = [TreeNode(at - 1, each, at, 0.0) for at, each in enumerate(rest[:_MOST_FORCED])]
            self._logits(sequence, DraftTrees.pad([nodes], self._target.device))
            sequence.length += _MOST_FORCED
        return self._log_probs(sequence, paths)

    def _paths(self, texts: Sequence[str]) -> list[Path]:
        paths: list[Path] = self._tokenizer([*texts], add_special_tokens=False)["input_ids"]
        return paths

    def _log_probs(self, sequence: RunningSequence, paths: Sequence[Path]) -> list[float]:
        """Return the log probability of each path, given that it is one of them."""
        prompt = sequence.request.prompt_token_ids
        num_shared = _num_shared(paths)
        root = len(prompt) + num_shared - 1  # place of the last token that all paths share
        sums = torch.empty(len(paths), dtype=torch.float64)
        sequence.length = min(sequence.length, root)
        for group in self._groups(sequence, paths, num_shared):
            forced = [*prompt[sequence.length :], *paths[0][:num_shared]][
                -(root + 1 - sequence.length) :
            ]
            sums[group] = self._sums(
                sequence, forced, [paths[place][num_shared:] for place in group]
            )
            sequence.length = root  # the forced tokens were read into their rows
        if not bool(sums.isfinite().all()):
            raise NonFiniteLogits(num_shared)
        return sums.log_softmax(0).tolist()

    def _groups(
        self, sequence: RunningSequence, paths: Sequence[Path], num_shared: int
    ) -> Iterator[list[int]]:
        """Yield places of paths that fit into one tree; of one path if trees must be chains."""
        room = min(
            MOST_NODES, sequence.region.size - len(sequence.request.prompt_token_ids) - num_shared
        )
        group = list[int]()
        num_nodes = 0
        before = Path()
        for place in sorted(range(len(paths)), key=paths.__getitem__):
            path = paths[place][:-1]  # nothing is asked behind its last token
            num_new = len(path) - max(num_shared, _num_shared([before, path]))
            if group and (self._target.is_recurrent or num_nodes + num_new > room):
                yield group
                group = []
                num_nodes = 0
                num_new = len(path) - num_shared
            group = [*group, place]
            num_nodes = num_nodes + num_new
            before = path
        yield group

    def _sums(self, sequence: RunningSequence, forced: Path, tails: Sequence[Path]) -> Tensor:
        """Return [n] fp64: for each of the tails, which follow `forced`, the sum of its tokens' log
        probabilities.
        """
        root = len(forced) - 1
        nodes = [TreeNode(at - 1, token_id, at, 0.0) for at, token_id in enumerate(forced)]
        known: dict[tuple[int, int], int] = {}
        asked: list[tuple[int, int, int]] = []  # tail, node, and the token behind it
        for tail, rest in enumerate(tails):
            node = root
            for depth, token_id in enumerate(rest, root + 1):
                asked.append((tail, node - root, token_id))
                if depth - root < len(rest) and (node, token_id) not in known:
                    known[node, token_id] = len(nodes)
                    nodes.append(TreeNode(node, token_id, depth, 0.0))
                node = known.get((node, token_id), -1)
        logits = self._logits(sequence, DraftTrees.pad([nodes], self._target.device))[root:]
        tail_of, node_of, token_of = upload(torch.tensor(asked).T.contiguous(), logits.device)
        norms = where_finite(logits.logsumexp(-1), logits, math.nan)
        log_probs = logits[node_of, token_of].double() - norms.double()[node_of]
        return torch.zeros(len(tails), dtype=torch.float64).index_add_(
            0, tail_of.cpu(), log_probs.cpu()
        )

    def _logits(self, sequence: RunningSequence, tree: DraftTrees) -> Tensor:
        """Run N nodes behind the sequence's rows; return logits [N, V] fp32."""
        length = sequence.length
        depths = tree.depths
        is_chain = bool((depths.diff() == 1).all())
        mask = None if is_chain else tree_mask(tree.parents, int(depths.max()))
        plan = AttentionPlan(
            [sequence.region.start], [length + tree.num_nodes], tree.num_nodes, mask=mask
        )
        hidden = self._target.forward(tree.token_ids, length + depths, plan)
        sequence.stats.num_forwards += 1
        self._on_forward()
        return self._target.logits(hidden[0]).float()


def _num_shared(paths: Sequence[Path]) -> int:
    """Return how many tokens all paths begin with."""
    return len(commonprefix(paths))  # noqa: RUF071  of lists it compares item by item

"""Scored answers: outputs made of choices between known values, and scores after an output is done.

The values of a choice form a tree after the forced tokens, and few forwards score all of them. The
log probability of a value is the sum over its tokens, normalised over the values. Texts end where
they differ, so no value is a prefix of another.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.core import FinishReason, Questions, Scored, json_values
from specextend.decoding.device import upload
from specextend.decoding.model import CachedModel
from specextend.decoding.sampling import FARTHEST, NonFiniteLogits, where_finite
from specextend.decoding.sequence import RunningSequence
from specextend.decoding.tree import DraftTrees, TreeNode, tree_mask

MOST_NODES = 96
"""Most nodes of values in one forward: kernels take them with `_MOST_FORCED` tokens."""
_MOST_FORCED = 32
Path = list[int]
"""Tokens of an output from its start."""


@dataclass(frozen=True)
class ChoiceScorer:
    """Scores choices and questions of requests after prefill."""

    _tokenizer: Any
    _target: CachedModel
    _on_forward: Callable[[], None]

    def answer(self, sequence: RunningSequence) -> tuple[Path, FinishReason]:
        """Make the choices of a sequence; return its output and finish reason."""
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
        """Score the values of the closed fields of a complete output.

        The order is reverse, because each field overwrites the cache rows after it.
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
                    continue  # longer than its cache rows
                log_probs = self._behind_output(sequence, paths) if len(paths) > 1 else [0.0]
                values = zip(choice.values, log_probs, strict=True)
                sequence.scored[:0] = [Scored(choice.field, *each) for each in values]

    def judge(self, sequence: RunningSequence, questions: Questions) -> None:
        """Answer questions in the cache rows of a complete output."""
        begin = questions.num_read
        prompt = sequence.request.prompt_token_ids
        room = len(prompt) + sequence.request.max_new_tokens - begin
        fits = [len(question) <= room for question in questions.token_ids]
        paths = [
            [*question, answer]
            for question, is_fitting in zip(questions.token_ids, fits, strict=True)
            if is_fitting
            for answer in (questions.yes, questions.no)
        ]
        found: Iterator[float] = iter(())
        if paths:
            sequence.length = begin
            self._read(sequence, begin, paths[0][: _num_shared(paths)])
            sums = self._all_sums(sequence, prompt[:begin], paths, only_last=True)
            found = iter(sums.unflatten(0, (-1, 2)).softmax(-1)[:, 0].tolist())
        probabilities = [next(found) if is_fitting else math.nan for is_fitting in fits]
        sequence.verdicts = tuple(
            None if math.isnan(probability) else probability for probability in probabilities
        )

    def _behind_output(self, sequence: RunningSequence, paths: Sequence[Path]) -> list[float]:
        begin = len(sequence.request.prompt_token_ids)
        forced = paths[0][: _num_shared(paths)]
        known = begin + _num_shared([forced, sequence.stopper.token_ids])
        sequence.length = min(sequence.length, known)
        self._read(sequence, begin, forced)
        return self._log_probs(sequence, paths)

    def _read(self, sequence: RunningSequence, begin: int, forced: Path) -> None:
        """Read tokens from row `begin` on, without the last `_MOST_FORCED`."""
        while (rest := forced[sequence.length - begin :])[_MOST_FORCED:]:
            nodes = [TreeNode(at - 1, each, at, 0.0) for at, each in enumerate(rest[:_MOST_FORCED])]
            self._run(sequence, DraftTrees.pad([nodes], self._target.device))
            sequence.length += _MOST_FORCED

    def _paths(self, texts: Sequence[str]) -> list[Path]:
        paths: list[Path] = self._tokenizer([*texts], add_special_tokens=False)["input_ids"]
        return paths

    def _log_probs(self, sequence: RunningSequence, paths: Sequence[Path]) -> list[float]:
        """Return the log probability of each path, normalised over the paths."""
        sums = self._all_sums(sequence, sequence.request.prompt_token_ids, paths)
        if not bool(sums.isfinite().all()):
            raise NonFiniteLogits(_num_shared(paths))
        return sums.log_softmax(0).tolist()

    def _all_sums(
        self,
        sequence: RunningSequence,
        prompt: Path,
        paths: Sequence[Path],
        *,
        only_last: bool = False,
    ) -> Tensor:
        """Return `_sums` [n] fp64 of paths after a prompt, in several forwards if necessary."""
        num_shared = _num_shared(paths)
        root = len(prompt) + num_shared - 1  # position of the last shared token
        sums = torch.empty(len(paths), dtype=torch.float64)
        sequence.length = min(sequence.length, root)
        room = min(MOST_NODES, sequence.region.size - len(prompt) - num_shared)
        for group in self._groups(paths, num_shared, room):
            forced = [*prompt[sequence.length :], *paths[0][:num_shared]][
                -(root + 1 - sequence.length) :
            ]
            tails = [paths[place][num_shared:] for place in group]
            sums[group] = self._sums(sequence, forced, tails, only_last=only_last)
            sequence.length = root
        return sums

    def _groups(self, paths: Sequence[Path], num_shared: int, room: int) -> Iterator[list[int]]:
        """Yield indices of paths that fit into a tree; single paths for chains."""
        group = list[int]()
        num_nodes = 0
        before = Path()
        for place in sorted(range(len(paths)), key=paths.__getitem__):
            path = paths[place][:-1]  # no logits after the last token
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

    def _sums(
        self, sequence: RunningSequence, forced: Path, tails: Sequence[Path], *, only_last: bool
    ) -> Tensor:
        """Return for tails after `forced` the sums [n] fp64 of log probabilities.

        `only_last`: of the last token of each tail.
        """
        root = len(forced) - 1
        nodes = [TreeNode(at - 1, token_id, at, 0.0) for at, token_id in enumerate(forced)]
        known: dict[tuple[int, int], int] = {}
        asked: list[tuple[int, int, int]] = []  # tail, node, next token
        for tail, rest in enumerate(tails):
            node = root
            for depth, token_id in enumerate(rest, root + 1):
                is_last = depth - root == len(rest)
                if is_last or not only_last:
                    asked.append((tail, node, token_id))
                if not is_last and (node, token_id) not in known:
                    known[node, token_id] = len(nodes)
                    nodes.append(TreeNode(node, token_id, depth, 0.0))
                node = known.get((node, token_id), -1)
        tail_of, at_of, token_of = upload(torch.tensor(asked).T.contiguous(), self._target.device)
        hidden = self._run(sequence, DraftTrees.pad([nodes], self._target.device))
        read, node_of = at_of.unique(return_inverse=True)
        logits = self._target.logits(hidden[read]).float()
        norms = where_finite(logits.logsumexp(-1), logits, math.nan)
        log_probs = logits[node_of, token_of].double() - norms.double()[node_of]
        return torch.zeros(len(tails), dtype=torch.float64).index_add_(
            0, tail_of.cpu(), log_probs.cpu()
        )

    def _run(self, sequence: RunningSequence, tree: DraftTrees) -> Tensor:
        """Run N nodes after the sequence's rows; return hidden [N, C]."""
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
        return hidden[0]


def _num_shared(paths: Sequence[Path]) -> int:
    return len(commonprefix(paths))  # noqa: RUF071  of lists it compares item by item

"""Replays: the tokens that the engine would accept from a draft under a cache policy, computed from a trace.

The target does not run. The draft is called as the engine calls it, one document at a time, with whole trees. The
accepted path of a tree is the longest one that follows the target's choices along the known text. If the target would
choose another token than the text has, the path ends, and the replay continues with the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specextend.bench.trace import Trace
from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.device import traits_of
from specextend.decoding.drafter import Decided, Drafter
from specextend.decoding.retrieval import CachePolicy, mean_mass, scored_layers
from specextend.decoding.tree import DraftTree
from specextend.stats import DecodingStats

_ROW = 0


@runtime_checkable
class FirstLevel(Protocol):
    """A drafter that has a distribution over the root's children; an n-gram drafter has none."""

    def first_level(self, row: int) -> tuple[Tensor | None, Tensor]:
        """Return token ids [V] (None: all of the target's, in order) and their logits [V]."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance between the target's next-token distribution and the draft's, both over the draft's vocabulary."""

    total_variation: float
    """Half the sum of absolute differences, from 0 to 1."""
    kl: float
    """Sum of p log(p / q) in nats, p of the target and q of the draft."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One verification."""

    first: int
    """Index of the first known token that it decides."""
    num_accepted: int
    num_nodes: int
    """Number of draft tokens in the tree."""
    agrees: bool
    """True if the root's likeliest child is the target's choice; False if nothing was proposed."""
    divergence: Divergence | None
    num_visible: int
    """Number of tokens that the draft saw."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps of one document."""

    steps: list[ReplayedStep]
    stats: DecodingStats
    """Statistics of retrievals only."""
    selections: list[tuple[int, Tensor]] = field(default_factory=list)
    """(index of a known token, positions [S] of earlier text visible from it on); later text is visible as well."""


class Replayer:
    """Replays one trace with one drafter, which needs room for a document of that length."""

    def __init__(self, trace: Trace, drafter: Drafter, options: CacheOptions, num_layers: int) -> None:
        """Take a trace and the draft to replay it with; `num_layers` is the number of the target's layers."""
        self._trace, self._drafter = trace, drafter
        self._features = trace.features(drafter.hidden_layers)
        self._policy, self._chunk_size = CachePolicy(options), options.chunk_size
        self._layers = scored_layers(options, num_layers)
        self._replay = Replay([], DecodingStats())

    def run(self, scale: float) -> Replay:
        """Replay every step up to the end of the text; `scale` is that of the target's attention.

        Raises ValueError if the draft's caches are too small.
        """
        trace = self._trace
        num_prompt, num_new = trace.num_prompt_tokens, trace.max_new_tokens
        if not self._drafter.admit(_ROW, num_prompt, num_new):
            raise ValueError(f"the draft has no room for {num_prompt} + {num_new} tokens; choose smaller lengths")
        try:
            with torch.inference_mode():
                self._run(scale)
        finally:
            self._drafter.release(_ROW)
        return self._replay

    def _run(self, scale: float) -> None:
        trace = self._trace
        num_prompt_tokens = trace.num_prompt_tokens
        prompt = torch.tensor(trace.prompt_token_ids, device=self._features.device)
        chunk_size = traits_of(self._features.device).prefill_chunk
        features = self._features[:num_prompt_tokens].split(chunk_size)
        for chunk, chunk_features in zip(prompt.split(chunk_size), features, strict=True):
            self._drafter.prefill(_ROW, chunk, chunk_features)
        self._select(0, scale)
        self._absorb(0, 1)
        decided = 1
        while decided < trace.num_counted:
            step = self._step(decided)
            self._replay.steps.append(step)
            before, decided = decided, decided + step.num_accepted + 1
            if decided >= trace.num_counted:
                return
            self._policy.count_step()
            if self._policy.is_due(num_prompt_tokens + decided - 1):
                self._select(decided - 1, scale)
            self._absorb(before, decided)

    def _step(self, first: int) -> ReplayedStep:
        """Propose a tree and follow the target's choices through it."""
        divergence = self._diverge(first)
        [tree] = self._drafter.propose([_ROW])
        num_visible = len(self._replay.selections[-1][1]) + first - self._replay.selections[-1][0]
        choices, known = self._trace.choice_token_ids, self._trace.known_token_ids
        edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        child = {edge: node for node, edge in enumerate(edges)}
        node, at = child.get((0, choices[first])), first
        while node is not None and choices[at] == known[at]:
            at += 1
            node = child.get((node, choices[at]))
        agrees = _likeliest_child(tree) == choices[first]
        return ReplayedStep(first, at - first, len(tree.token_ids) - 1, agrees, divergence, num_visible)

    def _select(self, decided: int, scale: float) -> None:
        """Choose what the draft sees by the query of the last committed token, after `decided` known tokens."""
        trace, num_tokens = self._trace, self._trace.num_prompt_tokens + decided
        mass = None
        if self._layers:
            queries = [trace.queries[layer][decided] for layer in self._layers]
            keys = [trace.keys[layer][:, :num_tokens] for layer in self._layers]
            mass = mean_mass(queries, keys, self._chunk_size, scale)
        positions = self._policy.select(num_tokens, mass, self._replay.stats)
        self._replay.selections.append((decided, positions))
        self._drafter.select(_ROW, positions)

    def _absorb(self, start: int, stop: int) -> None:
        """Give the draft the known tokens `start` to `stop`; the last becomes the new root."""
        first = self._trace.num_prompt_tokens - 1
        new = self._trace.known_token_ids[start:stop]
        self._drafter.absorb([_ROW], Decided.pad([new], [self._features[first + start : first + stop]]))

    def _diverge(self, first: int) -> Divergence | None:
        if not isinstance(self._drafter, FirstLevel):
            return None
        vocabulary, logits = self._drafter.first_level(_ROW)
        target = self._trace.logits[first]
        return diverge(target if vocabulary is None else target[vocabulary], logits)


def diverge(target_logits: Tensor, draft_logits: Tensor) -> Divergence:
    """Compare two distributions over the same tokens, given by their logits [V], in fp32."""
    p, q = (logits.float().log_softmax(-1) for logits in (target_logits, draft_logits))
    return Divergence(float((p.exp() - q.exp()).abs().sum()) / 2, float((p.exp() * (p - q)).sum()))


def _likeliest_child(tree: DraftTree) -> int | None:
    """Return the token of the root's likeliest child."""
    children = (tree.parents == 0).nonzero().flatten()
    if len(children) == 0:
        return None
    return int(tree.token_ids[children[tree.log_probs[children].argmax()]])

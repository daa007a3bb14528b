"""A draft and a cache policy held against a recording: what the engine would have accepted, without the target.

The draft is driven as the engine drives it, one document at a time, whole trees. A tree's accepted path is the longest
one that follows the target's choices along the known text; where the target's own choice is another token than the
text's, the path ends and the text goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specextend.bench.recording import Recording
from specextend.decoding.chunks import Chunks
from specextend.decoding.drafter import Drafter
from specextend.decoding.engine import PREFILL_CHUNK
from specextend.decoding.options import CacheOptions
from specextend.decoding.retrieval import CachePolicy, mean_mass, scored_layers
from specextend.decoding.tree import DraftTree
from specextend.stats import DecodingStats

_ROW = 0


@runtime_checkable
class FirstLevel(Protocol):
    """A drafter that has a distribution over the root's children; a copying one has none."""

    def first_level(self, row: int) -> tuple[Tensor | None, Tensor]:
        """Token ids [V] (None: all of the target's, in order) and their logits [V]."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of the target's next token from the draft's first level, both over the draft's vocabulary."""

    total_variation: float
    """Half the sum of absolute differences, 0 to 1."""
    kl: float
    """Nats, of the draft's distribution from the target's: the sum of p log(p / q)."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One verification."""

    first: int
    """Number of the first known token that it decides."""
    num_accepted: int
    num_nodes: int
    """Draft tokens of the tree."""
    agrees: bool
    """Whether the likeliest child of the root is the target's choice; no where nothing was proposed."""
    divergence: Divergence | None
    num_visible: int
    """Tokens that the draft saw."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a document."""

    steps: list[ReplayedStep]
    stats: DecodingStats
    """Retrievals only."""
    selections: list[tuple[int, Tensor]] = field(default_factory=list)
    """From which known token on which positions [S] of the text before were shown; later text is visible, too."""


class Replayer:
    """Replays one recording with one drafter, which must have room for a document of its length."""

    def __init__(
        self, recording: Recording, drafter: Drafter, options: CacheOptions, chunks: Chunks, num_layers: int
    ) -> None:
        """`chunks` of the prompt by `options`; `num_layers` of the target."""
        self._recording, self._drafter = recording, drafter
        self._features = recording.features(drafter.hidden_layers)
        self._policy, self._heads = CachePolicy(options), options.score_heads
        self._policy.chunks = chunks
        self._layers = scored_layers(options, num_layers)
        self._replay = Replay([], DecodingStats())

    def run(self, scale: float) -> Replay:
        """Every step up to the end of the text. `scale` is the target's attention's.

        Raises ValueError where the draft's caches are too small.
        """
        recording = self._recording
        num_prompt, num_new = recording.num_prompt_tokens, recording.max_new_tokens
        if not self._drafter.admit(_ROW, num_prompt, num_new):
            raise ValueError(f"the draft has no room for {num_prompt} + {num_new} tokens; choose smaller lengths")
        try:
            with torch.inference_mode():
                self._run(scale)
        finally:
            self._drafter.release(_ROW)
        return self._replay

    def _run(self, scale: float) -> None:
        recording = self._recording
        num_prompt_tokens = recording.num_prompt_tokens
        prompt = torch.tensor(recording.prompt_token_ids, device=self._features.device)
        features = self._features[:num_prompt_tokens].split(PREFILL_CHUNK)
        for chunk, chunk_features in zip(prompt.split(PREFILL_CHUNK), features, strict=True):
            self._drafter.prefill(_ROW, chunk, chunk_features)
        self._select(0, scale)
        self._absorb(0, 1)
        decided = 1
        while decided < recording.num_counted:
            step = self._step(decided)
            self._replay.steps.append(step)
            before, decided = decided, decided + step.num_accepted + 1
            if decided >= recording.num_counted:
                return
            if step.num_nodes:
                self._policy.observe(step.num_accepted)
            else:
                self._policy.observe_plain()
            if self._policy.is_due(num_prompt_tokens + decided - 1):
                self._select(decided - 1, scale)
            self._absorb(before, decided)

    def _step(self, first: int) -> ReplayedStep:
        """Propose a tree and follow the target's choices through it."""
        divergence = self._diverge(first)
        [tree] = self._drafter.propose([_ROW])
        num_visible = len(self._replay.selections[-1][1]) + first - self._replay.selections[-1][0]
        choices, known = self._recording.choice_token_ids, self._recording.known_token_ids
        edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        child = {edge: node for node, edge in enumerate(edges)}
        node, at = child.get((0, choices[first])), first
        while node is not None and choices[at] == known[at]:
            at += 1
            node = child.get((node, choices[at]))
        agrees = _likeliest_child(tree) == choices[first]
        return ReplayedStep(first, at - first, len(tree.token_ids) - 1, agrees, divergence, num_visible)

    def _select(self, decided: int, scale: float) -> None:
        """Choose what the draft sees, by the query of the last committed token, `decided` known ones being behind."""
        recording, num_tokens = self._recording, self._recording.num_prompt_tokens + decided
        mass = None
        if self._layers:
            queries = [recording.queries[layer][decided] for layer in self._layers]
            keys = [recording.keys[layer][:num_tokens] for layer in self._layers]
            mass = mean_mass(queries, keys, self._policy.chunks, scale, self._heads)
        if self._policy.still_covers(mass):
            return
        positions = self._policy.select(num_tokens, mass, self._replay.stats)
        self._replay.selections.append((decided, positions))
        self._drafter.select(_ROW, positions.to(self._features.device))

    def _absorb(self, start: int, stop: int) -> None:
        """Give the draft the known tokens `start` to `stop`, the last of them the new root."""
        first = self._recording.num_prompt_tokens - 1
        new = self._recording.known_token_ids[start:stop]
        self._drafter.absorb([_ROW], [new], [self._features[first + start : first + stop]])

    def _diverge(self, first: int) -> Divergence | None:
        if not isinstance(self._drafter, FirstLevel):
            return None
        vocabulary, logits = self._drafter.first_level(_ROW)
        target = self._recording.logits[first]
        return diverge(target if vocabulary is None else target[vocabulary], logits)


def diverge(target_logits: Tensor, draft_logits: Tensor) -> Divergence:
    """Of two distributions over the same tokens, from their logits [V]; in fp32."""
    p, q = (logits.float().log_softmax(-1) for logits in (target_logits, draft_logits))
    return Divergence(float((p.exp() - q.exp()).abs().sum()) / 2, float((p.exp() * (p - q)).sum()))


def _likeliest_child(tree: DraftTree) -> int | None:
    """The token of the root's likeliest child."""
    children = (tree.parents == 0).nonzero().flatten()
    if len(children) == 0:
        return None
    return int(tree.token_ids[children[tree.log_probs[children].argmax()]])

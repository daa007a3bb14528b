"""Constrained decoding: allowed and forced tokens in a tree, by the library llguidance.

A grammar is a JSON Schema with fixed white space. Forbidden tokens get the logit -inf after all
penalties, at the nodes that the target reaches, so the output equals plain decoding under the same
masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specextend.decoding.device import upload
from specextend.decoding.tree import TreeNode

if TYPE_CHECKING:
    from llguidance import LLMatcher

LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of the library: force the separators that Python's `json` writes."""
_ABSENT = -2
_FORCED = log(0.99)
"""Log probability of a forced token: the target may spell its characters otherwise."""


class Grammars:
    """Factory of grammars, which keeps the last compiled schema."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], vocab_size: int):
        """Take a fast tokenizer, the EOS tokens, and V, which may exceed the tokenizer's size."""
        self._tokenizer, self._eos_token_ids = tokenizer, sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._compiled: tuple[str, LLMatcher] | None = None

    def begin(self, schema: str) -> Grammar:
        """Return the grammar at the start of an output.

        Raises:
            ValueError: The library cannot compile the schema, or no object satisfies it.
        """
        from llguidance import LLMatcher, LLTokenizer  # only for schemas
        from llguidance.hf import from_tokenizer

        if self._vocabulary is None:  # takes up to a second
            num_tokens = max(self._vocab_size, len(self._tokenizer))
            slices = LLTokenizer.json_slices()
            self._vocabulary = from_tokenizer(
                self._tokenizer, num_tokens, self._eos_token_ids, slices
            )
        if self._compiled is None or self._compiled[0] != schema:
            matcher = LLMatcher(
                self._vocabulary, LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
            )
            if matcher.is_error() or matcher.is_stopped():
                raise ValueError(
                    f"output.schema: {matcher.get_error() or 'no object satisfies it'}"
                )
            self._compiled = schema, matcher
        return Grammar(self._compiled[1].deep_copy(), self._eos_token_ids)


class Grammar:
    """Position of one output in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: list[int]):
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the output; tokens after its end are ignored."""
        self._matcher.try_consume_tokens(list(token_ids))

    def follow(
        self, token_ids: Sequence[int], parents: Sequence[int], choose: Callable[[int], int]
    ) -> list[int]:
        """Return the chosen token after each reached node of a tree, -1 after other nodes.

        The root is the last token of the output. `choose` is called with the grammar at a node.
        """
        nodes = {place: node for node, place in enumerate(zip(parents, token_ids, strict=True))}
        chosen = [-1] * len(token_ids)
        num_taken = 0
        node: int | None = 0
        while node is not None:
            chosen[node] = choose(node)
            if (behind := nodes.get((node, chosen[node]))) is not None:
                num_taken += self._enter(chosen[node]) or 0
            node = behind
        self._matcher.rollback(num_taken)
        return chosen

    def allows(self, token_id: int) -> bool:
        """Return True if a token may follow."""
        taken = self._enter(token_id)
        self._matcher.rollback(taken or 0)
        return taken is not None

    def mask(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [1, V] with -inf for forbidden tokens.

        `logits` [1, V] are used if penalties exclude every allowed token.
        """
        bits = ~np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        unpacked = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=logits.shape[1]))
        forbidden = upload(unpacked.view(torch.bool), logits.device)
        allowed = scores.masked_fill(forbidden, -inf)
        if scores is not logits and bool(allowed.amax() == -inf):
            return logits.to(scores.dtype).masked_fill(forbidden, -inf)
        return allowed

    def keep(self, tree: Sequence[TreeNode], num_levels: int) -> list[TreeNode]:
        """Return the allowed nodes of a draft's tree, with forced tokens up to `num_levels`."""
        children: dict[int, list[int]] = {}
        for number, node in enumerate(tree):
            children.setdefault(node.parent, []).append(number)
        kept = [tree[0]]

        def grow(number: int, old: int) -> None:
            """Add the nodes after a kept node; `old` is its number in the draft's tree."""
            node = kept[number]
            if node.depth >= num_levels:
                return
            offers = {
                tree[child].token_id: (child, tree[child].log_prob - tree[old].log_prob)
                for child in children.get(old, ())
            }
            for token_id in self._forced():
                offers[token_id] = offers.get(token_id, (_ABSENT, 0))[0], _FORCED
            for token_id, (child, log_prob) in offers.items():
                if (taken := self._enter(token_id)) is not None:
                    kept.append(
                        TreeNode(number, token_id, node.depth + 1, node.log_prob + log_prob)
                    )
                    if taken:
                        grow(len(kept) - 1, child)
                    self._matcher.rollback(taken)

        grow(0, 0)
        return kept

    def _forced(self) -> list[int]:
        return (
            self._eos_token_ids[:1]
            if self._matcher.is_stopped()
            else self._matcher.compute_ff_tokens()[:1]
        )

    def _enter(self, token_id: int) -> int | None:
        """Advance by a token; return the tokens to roll back, None if forbidden."""
        if self._matcher.is_stopped():
            return 0 if token_id in self._eos_token_ids else None
        return self._matcher.try_consume_tokens([token_id]) or None

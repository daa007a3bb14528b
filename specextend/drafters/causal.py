"""The drafter of networks with a KV cache: a small causal LM, an EAGLE head or an MTP layer.

More shapes: `F` frontier nodes, `M` expanded nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specextend.attention.plan import AttentionPlan, TreeAttention
from specextend.decoding.cache import VisibleCache
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.device import Graphs, upload
from specextend.decoding.tree import Decided, Drafter, DraftTrees, grow_trees, prune

_MEMORY = 0.9
"""Weight of a running mean after another step."""
HISTORY = 3
"""Earlier tokens that a network may read."""
Clock = Callable[[], float]
"""Seconds."""


def stands_still() -> float:
    """Return the same time always: nothing is learned from it."""
    return 0.0


class DraftNetwork(Protocol):
    """A draft network for `CausalDrafter`."""

    @property
    def cache(self) -> VisibleCache:
        """Rows of the visible tokens."""

    hidden_size: int
    vocabulary: Tensor | None
    """Token ids [V] of the logits; None: the target's, in order."""
    hidden_layers: tuple[int, ...] | None
    """See `Drafter.hidden_layers`."""
    reads_history: bool
    """Whether `forward` needs the tokens before each token."""
    at_once: Any
    """Reads and grows in one call (`attention.compiled.calls.Head`), if made."""

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Take a prompt's next chunk: tokens [3 + T], three of them earlier, and features [T,
        F].
        """

    def read(self, slots: Sequence[int]) -> int:
        """Read selected tokens without rows; return their number."""

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run token_ids [B, T] at `positions` [B, T], write their rows, return hidden [B, T, C].

        Args:
            hidden: The target's features [B, T, F] before each token, or the parent's output [B, T,
                C].
            history: Three earlier tokens [B, T, 3], nearest first; None if not read.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""


class _SlotPlaces(NamedTuple):
    slots: Tensor
    starts: Tensor
    ends: Tensor
    positions: Tensor
    full_ends: Tensor
    """Row after the tokens in the full cache."""


def moved(mean: float, value: float) -> float:
    """Return a running mean (0 before the first value) after another value."""
    return _MEMORY * mean + (1 - _MEMORY) * value if mean else value


@dataclass(slots=True)
class LevelGain:
    """Learns the least gain of a level: tokens decided in its time."""

    clock: Clock
    least: float
    _begun_at: float | None = None
    """Start of the last tree; None if a prompt was read since."""
    _num_read: int = 0
    """Readings since; more than 1 after steps without a tree."""
    _level_s: float = 0.0
    _step_s: float = 0.0
    _num_tokens: float = 0.0

    def begin(self) -> None:
        """Record the start of a tree."""
        now = self.clock()
        if self._begun_at is not None and self._num_read == 1 and now > self._begun_at:
            self._step_s = moved(self._step_s, now - self._begun_at)
            self.least = self._level_s * self._num_tokens / self._step_s
        self._begun_at = now
        self._num_read = 0

    def end(self, num_levels: int) -> None:
        """Record the end of a tree."""
        if self._begun_at is not None:
            self._level_s = moved(self._level_s, (self.clock() - self._begun_at) / num_levels)

    def read(self, num_tokens: Sequence[int]) -> None:
        """Record decided tokens by sequence."""
        self._num_read += 1
        if max(num_tokens) > 1 + TreeOptions.ngram_depth:  # several steps
            self.interrupt()
        elif self._num_read == 1:
            self._num_tokens = moved(self._num_tokens, sum(num_tokens) / len(num_tokens))

    def interrupt(self) -> None:
        """Record other work, such as reading a prompt."""
        self._begun_at = None


class CausalDrafter(Drafter):
    """Grows OPT-Trees with a draft network."""

    def __init__(
        self,
        network: DraftNetwork,
        tree: TreeOptions,
        tree_attention: TreeAttention,
        num_visible_rows: int | None,
        num_slots: int,
        graphs: Graphs | None = None,
        clock: Clock = stands_still,
    ):
        """Take the network.

        Args:
            num_visible_rows: Most tokens of a selection; None: all.
            graphs: With captured steps levels have full width, and trees a shape of
                `tree.captured`.
            clock: Finds the level that does not pay, at which a tree ends.
        """
        self.network = network
        self._cache = network.cache
        self.hidden_layers = network.hidden_layers
        self.num_levels = tree.depth
        self._options = tree
        self._tree_attention = tree_attention
        self._num_visible_rows = num_visible_rows
        self._graphs = graphs or Graphs()
        self._gain = LevelGain(clock, tree.threshold)
        stored = self._cache.working.parts[0]
        device = stored.device
        self._root_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Last decided tokens [slots]."""
        self._root_hidden = stored.new_zeros(num_slots, network.hidden_size)
        self._texts = torch.zeros(num_slots, HISTORY, dtype=torch.int64, device=device)
        """Last tokens [slots, 3], -1 before the first; of outputs only for history."""
        self._unread: dict[int, tuple[list[int], Tensor]] = {}
        """Decided tokens and features by slot, left to `propose`."""
        self._located: tuple[list[list[int]], Tensor] | None = None

    def admit(self, slot: int, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Reserve room for a sequence; return False without room."""
        num_tokens = num_prompt_tokens + max_new_tokens + self._options.depth + 1
        chosen = num_prompt_tokens if self._num_visible_rows is None else self._num_visible_rows
        visible = min(num_tokens, chosen + max_new_tokens + self._options.depth + 1)
        scratch = self._options.depth * self._options.most_drafts
        self._texts[slot] = -1
        return self._cache.admit(slot, num_tokens, visible + scratch)

    def prefill(self, slot: int, token_ids: Tensor, hidden: Tensor) -> None:
        """Read a prompt's next chunk: token_ids [T] with features [T, F]."""
        self._gain.interrupt()
        before = self._texts[slot]
        # the first token of a text stands for tokens before it
        text = torch.cat([before.where(before >= 0, token_ids[:1]), token_ids])
        self._texts[slot] = text[-HISTORY:]
        self.network.prefill(slot, text, hidden)

    def select(self, slot: int, positions: Tensor) -> None:
        """Show committed positions [S], ascending and on the host, and later tokens."""
        self._cache.select(slot, positions)

    def read_selected(self, slots: Sequence[int]) -> int:
        """Read selected tokens without rows; return their number."""
        return self.network.read(slots)

    def absorb(self, slots: Sequence[int], decided: Decided) -> None:
        """Read decided tokens. With `at_once` the next tree's call reads them."""
        self._gain.read([*map(len, decided.token_ids)])
        if self.network.at_once is not None:
            for slot, new, features in zip(slots, decided.token_ids, decided.features, strict=True):
                token_ids, before = self._unread.get(slot, ([], features[:0]))
                token_ids = token_ids + new
                before = torch.cat([before, features[: len(new)]])
                late = len(token_ids) - 1
                if late > TreeOptions.ngram_depth:  # padding all slots to it would cost more
                    self._gain.interrupt()
                    read = torch.tensor([token_ids[:late]])
                    self._read([slot], self._locate([slot]), read, before[None, :late])
                    self._cache.advance(slot, token_ids[:late])
                    token_ids, before = token_ids[late:], before[late:]
                self._unread[slot] = token_ids, before
            return
        [table] = self._graphs.run(
            "absorb",
            partial(self._read, slots),
            self._locate(slots),
            decided.padded,
            decided.features,
        )
        for slot, new in zip(slots, decided.token_ids, strict=True):
            self._cache.advance(slot, new)
        self._located = self._known(slots), table

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Grow trees of up to `num_drafts` nodes, captured in the smallest shape with room."""
        if not self._graphs.enabled:
            self._gain.begin()
            if self.network.at_once is None:
                trees = self._grow(slots, self._locate(slots), self._options, num_drafts)
            else:
                trees = self._grow_at_once(slots, num_drafts or self._options.most_drafts)
            self._gain.end(self._num_levels)
            return trees
        tree = self._options
        for smaller in tree.captured:
            tree = smaller if smaller.most_drafts >= (num_drafts or tree.most_drafts) else tree
        outputs = self._graphs.run(
            "draft",
            lambda table: self._grow(slots, table, tree).tensors,
            self._locate(slots),
            shape=(tree.most_drafts, tree.depth),
        )
        return DraftTrees.of(outputs, [outputs[0].shape[1]] * len(slots))

    def release(self, slot: int) -> None:
        """Free the slot."""
        self._unread.pop(slot, None)
        self._cache.release(slot)
        self._located = None

    def _known(self, slots: Sequence[int]) -> list[list[int]]:
        held = [self._cache.of[slot] for slot in slots]
        return [
            [
                slot,
                each.working.start,
                each.working.start + each.visible,
                each.visible,
                each.full_end,
            ]
            for slot, each in zip(slots, held, strict=True)
        ]

    def _locate(self, slots: Sequence[int]) -> Tensor:
        """Return the places [B, 5], uploaded if they changed."""
        known = self._known(slots)
        if self._located is None or self._located[0] != known:
            self._located = known, upload(torch.tensor(known), self._texts.device)
        return self._located[1]

    def _read(
        self, slots: Sequence[int], table: Tensor, padded: Tensor, features: Tensor
    ) -> tuple[Tensor]:
        """Run `padded` tokens [B, T], -1 for padding; return the new places."""
        places = _SlotPlaces(*table.split(1, 1))
        is_token = padded >= 0
        token_ids = padded.clamp(min=0)
        counts = is_token.sum(1, keepdim=True)
        history = (
            self._read_history(places.slots, token_ids, counts)
            if self.network.reads_history
            else None
        )
        output = self._forward(slots, places, token_ids, features, None, 0, history)
        offsets = torch.arange(padded.shape[1], device=padded.device)
        rows, full_rows = ((first + offsets).flatten() for first in (places.ends, places.full_ends))
        self._cache.write_back(rows, (places.positions + offsets).flatten(), full_rows)
        last = counts - 1
        hidden = output.gather(1, last.unsqueeze(2).expand(-1, -1, output.shape[2])).squeeze(1)
        self._root_ids.index_copy_(0, table[:, 0], token_ids.gather(1, last).squeeze(1))
        self._root_hidden.index_copy_(0, table[:, 0], hidden)
        return (torch.cat([table[:, :2], table[:, 2:] + counts], 1),)

    def _grow_at_once(self, slots: Sequence[int], num_drafts: int) -> DraftTrees:
        unread = {slot: self._unread.pop(slot) for slot in slots}
        width = max(len(new) for new, _ in unread.values())
        texts, features = [], []
        places, read = [], []
        for slot, (new, before) in unread.items():
            held = self._cache.of[slot]
            first = held.working.start + held.visible
            read += [(first + i, held.visible + i, held.full_end + i) for i in range(len(new))]
            places.append((held.working.start, held.visible + len(new), len(new)))
            text = torch.cat([self._texts[slot], torch.tensor(new)])
            self._texts[slot] = text[-HISTORY:]
            missing = width - len(new)
            texts.append(pad(text.clamp(min=0), (missing, 0)))  # -1 before the text
            features.append(pad(before, (0, 0, missing, 0)))
            self._cache.advance(slot, new)
        nodes, log_probs = self.network.at_once.grow(
            torch.stack(texts),
            torch.stack(features),
            torch.tensor(places),
            self._cache.working.stored,
            num_drafts,
            self._options.depth,
            self._gain.least,
        )
        self._cache.write_back(*torch.tensor(read).T)
        trees = DraftTrees.of([*nodes, log_probs], [log_probs.shape[1]] * len(slots))
        self._num_levels = 1 + int(trees.depths.max())
        return prune(trees, 1 + num_drafts)

    def _read_history(self, slots: Tensor, token_ids: Tensor, counts: Tensor) -> Tensor:
        """Return three tokens [B, T, 3] before each new token, nearest first."""
        slots = slots.squeeze(1)
        texts = torch.cat([self._texts.index_select(0, slots), token_ids], 1)
        last = counts + torch.arange(HISTORY, device=counts.device)
        self._texts.index_copy_(0, slots, texts.gather(1, last))
        return texts[:, :-1].unfold(1, HISTORY, 1).flip(2)

    def _grow(
        self,
        slots: Sequence[int],
        table: Tensor,
        tree: TreeOptions,
        num_drafts: int | None = None,
    ) -> DraftTrees:
        places = _SlotPlaces(*table.split(1, 1))
        token_ids, hidden, texts = (
            stored.index_select(0, table[:, 0])
            for stored in (self._root_ids, self._root_hidden, self._texts)
        )
        self._num_levels = 1
        lineage = texts.flip(1).unsqueeze(1) if self.network.reads_history else None
        outputs = hidden.unsqueeze(1)

        def expand(token_ids: Tensor, indices: Tensor, mask: Tensor, depth: int) -> Tensor:
            nonlocal outputs, lineage
            self._num_levels = 1 + depth
            indices = indices.unsqueeze(2)
            parents = outputs.gather(1, indices.expand(-1, -1, outputs.shape[2]))
            history = None
            if lineage is not None:
                history = lineage.gather(1, indices.expand(-1, -1, HISTORY))
                lineage = torch.cat([token_ids.unsqueeze(2), history[:, :, :-1]], 2)
            outputs = self._forward(slots, places, token_ids, parents, mask, depth, history)
            return self.network.logits(outputs)

        return grow_trees(
            token_ids,
            self.network.logits(hidden),
            expand,
            tree,
            least_gain=None if self._graphs.enabled else self._gain.least,
            num_drafts=num_drafts,
            vocabulary=self.network.vocabulary,
        )

    def _forward(
        self,
        slots: Sequence[int],
        places: _SlotPlaces,
        token_ids: Tensor,
        hidden: Tensor,
        mask: Tensor | None,
        depth: int,
        history: Tensor | None,
    ) -> Tensor:
        """Run tokens after the visible rows: decided, or a tree's with its `mask` [B, T, M]."""
        num_new = token_ids.shape[1]
        behind = num_new if mask is None else mask.shape[2]
        offsets = torch.arange(behind - num_new, behind, device=token_ids.device)
        plan = AttentionPlan(
            starts=[self._cache.of[slot].working.start for slot in slots],
            lengths=[self._cache.of[slot].reach(behind) for slot in slots],
            num_new=num_new,
            mask=mask,
            tree=self._tree_attention,
            on_device=(places.starts, places.ends + offsets),
            captured=self._graphs.capturing,
        )
        positions = places.positions + (offsets if mask is None else depth - 1)
        return self.network.forward(
            token_ids, hidden, positions.expand_as(token_ids), plan, history
        )

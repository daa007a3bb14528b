"""A small causal LM as the draft. It reads only visible tokens.

In the paper (arXiv 2505.20776) it reads the whole prompt. Here retrieval comes first, so work and
memory do not grow with the document, and a new choice is read into the rows of tokens that left.

More shapes: `S` visible tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.decoding.cache import DraftRows, VisibleCache
from specextend.decoding.device import upload
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import HISTORY


@dataclass(slots=True)
class Reading(DraftRows):
    """A sequence's text and visible tokens."""

    text: list[Tensor] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    """Positions of the tokens in the visible rows."""
    wanted: list[int] | None = None

    def tokens_at(self, positions: Sequence[int]) -> Tensor:
        """Return the ids of the tokens at `positions` [n]."""
        device = self.text[0].device
        self.text = [torch.cat([*self.text, upload(torch.tensor(self.decided).long(), device)])]
        self.decided = []
        return self.text[0].index_select(0, upload(torch.tensor(positions), device))

    def replace(self, size: int) -> list[list[int]]:
        """Give new tokens the rows of tokens that left; return runs of these rows.

        If more than half change, or new tokens are no runs of `size`, one run has all rows.
        """
        assert self.wanted is not None
        wanted = [position for position in self.wanted if position < self.length]
        self.wanted = None
        chosen = set(wanted)
        free = [row for row, position in enumerate(self.shown) if position not in chosen]
        new = sorted(chosen.difference(self.shown))
        runs = [free[first : first + size] for first in range(0, len(new), size)]
        are_runs = all(run == [*range(run[0], run[0] + size)] for run in runs if run)
        num_kept = len(self.shown) - len(free)
        if sum(map(len, runs)) != len(new) or not are_runs or 2 * num_kept < len(self.shown):
            self.shown = wanted
            self.visible = len(wanted)
            return [[*range(len(wanted))]]
        for row, position in zip(chain(*runs), new, strict=True):
            self.shown[row] = position
        return runs


class ReadCache(VisibleCache):
    """Rows of a draft that reads what it sees, filled by `ModelNetwork.read`."""

    of: dict[int, Reading]  # type: ignore[assignment]

    def admit(self, slot: int, num_tokens: int, num_working_rows: int) -> bool:
        """Reserve the rows of the visible tokens; return False without room."""
        if not super().admit(slot, num_tokens, num_working_rows):
            return False
        self.of[slot] = Reading(self.of[slot].working)
        return True

    def select(self, slot: int, positions: Tensor) -> None:
        """Choose the tokens at `positions` [S], to be read before the next draft."""
        self.of[slot].wanted = positions.tolist()

    def write_back(self, rows: Tensor, positions: Tensor, full_rows: Tensor) -> None:
        """Keep no copies: a token that is chosen again is read again."""

    def advance(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count the next tokens, after the visible rows."""
        held = self.of[slot]
        held.decided += token_ids
        held.shown += range(held.length, held.length + len(token_ids))
        super().advance(slot, token_ids)


class ModelNetwork:
    """A causal LM of transformers, which ignores the target's hidden states."""

    vocabulary: Tensor | None = None
    hidden_layers: tuple[int, ...] | None = None
    reads_history = False
    at_once = None

    def __init__(
        self,
        model: CachedModel,
        chunk_size: int,
        max_chunk: int,
        num_shared: int | None = None,
        other_id: int = 0,
    ):
        """Take the model.

        Args:
            chunk_size: Tokens that a retrieval shows or hides together.
            max_chunk: Most tokens of a forward.
            num_shared: First ids, shared with the target; None: all. Other ids are never proposed,
                and read as `other_id`.
        """
        self._model = model
        self._chunk_size = chunk_size
        self._max_chunk = max_chunk
        self._num_shared = num_shared
        self._other_id = other_id
        self.hidden_size: int = model.config.hidden_size
        self.cache = ReadCache(model.cache)

    def prefill(self, slot: int, text: Tensor, hidden: Tensor) -> None:
        """Keep a prompt's next chunk, unread."""
        held = self.cache.of[slot]
        held.text.append(text[HISTORY:])
        held.length += len(text) - HISTORY

    def read(self, slots: Sequence[int]) -> int:
        """Read selected tokens without rows; return their number."""
        num_read = 0
        changed: list[tuple[Reading, list[int]]] = []
        for slot in slots:
            held = self.cache.of[slot]
            if held.wanted is None:
                continue
            runs = held.replace(self._chunk_size)
            num_read += sum(map(len, runs))
            if len(runs) == 1:
                rows, step = runs[0], self._max_chunk
                for first in range(0, len(rows), step):
                    self._read([(held, rows[first : first + step])])
            else:
                changed += [(held, run) for run in runs]
        if changed:
            self._read(changed)
        return num_read

    def _read(self, runs: Sequence[tuple[Reading, list[int]]]) -> None:
        token_ids = torch.stack(
            [held.tokens_at([held.shown[row] for row in rows]) for held, rows in runs]
        )
        plan = AttentionPlan(
            starts=[held.working.start for held, _ in runs],
            lengths=[rows[-1] + 1 for _, rows in runs],
            num_new=token_ids.shape[1],
            ends_only=True,
        )
        positions = upload(torch.tensor([rows for _, rows in runs]), token_ids.device)
        self.forward(token_ids, positions, positions, plan, None)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        history: Tensor | None,
    ) -> Tensor:
        """Run the model, see `DraftNetwork.forward`."""
        if self._num_shared is not None:
            token_ids = token_ids.where(token_ids < self._num_shared, self._other_id)
        return self._model.forward(token_ids, positions, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., C]."""
        return self._model.logits(hidden)[..., : self._num_shared]

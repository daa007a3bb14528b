"""The plan of one forward pass: the cache rows that each query attends to, in one kernel call or
two.

Hybrid attention (arXiv 2505.20776, section 3) calls a kernel for each span of keys, and merges the
results.

Shapes: `B` sequences, `T` new rows of each, `M` masked rows, `S` keys, `H` query heads, `K` key
heads, `D` head size.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

TreeAttention = Literal["dense", "hybrid"]


class HostReadError(RuntimeError):
    """A captured step needs a kernel that reads places on the host; a replay would read those of
    the capture.
    """


class _Unreadable(list[int]):
    """The places of a captured step, which only the device may read: whatever kernel asks for them
    says so.
    """

    def __iter__(self, *_: object) -> NoReturn:
        raise HostReadError("a kernel reads places of rows on the host")

    __len__ = __contains__ = __getitem__ = __iter__  # type: ignore[assignment]


@dataclass(slots=True)
class KeySpan:
    """The cache rows that each sequence's queries attend to in one kernel call.

    All `lengths[b]` rows from `starts[b]` on are visible, except where `mask` says otherwise for
    the last ones.
    """

    starts: list[int]
    """[B] first row."""
    lengths: list[int]
    """[B] number of rows; 0 is allowed and gives LSE -inf."""
    mask: Tensor | None = None
    """[B, T, M] bool over the last M rows, True = visible. M may exceed a length only in columns
    that are False. A node of a tree stands behind those of its path.
    """
    causal: bool = False
    """The last T rows are the queries' own: query t sees the rows up to its own, all earlier ones
    included. Excludes `mask`.
    """
    on_device: tuple[Tensor, Tensor] | None = None
    """The first row [B, 1] of each sequence and the new rows [B, T], which are the last ones, int64
    on the device; None: only the host knows them.
    """
    made: dict[Hashable, Tensor] = field(default_factory=dict)
    """What a kernel makes of the span once per forward, for all layers."""

    def places(self, device: torch.device) -> Tensor:
        """Return `starts` and `lengths` [2, B] int64 on the device, where a kernel reads them
        without the host.
        """
        if "places" not in self.made:
            if self.on_device is None:
                self.made["places"] = torch.tensor([self.starts, self.lengths]).to(device)
            else:
                starts, rows = self.on_device
                self.made["places"] = torch.cat(
                    [starts, rows[:, -1:] + 1 - starts], 1
                ).T.contiguous()
        return self.made["places"]

    def bias(self, b: int, like: Tensor, *, tail: bool = False) -> Tensor | None:
        """Return sequence b's mask as a bias [T, S] of the type of `like` and on its device, over
        all rows, or over their `tail`, the rows of the mask.

        None if there is no mask. Made once per forward and shared by all layers.
        """
        if self.mask is None:
            return None
        key = tail, b, like.dtype
        if key not in self.made:
            length = min(self.mask.shape[2], self.lengths[b]) if tail else self.lengths[b]
            self.made[key] = additive(self.mask[b].to(like.device), length, like.dtype)
        return self.made[key]


def additive(mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask [T, M] over the last M keys into a bias [T, length] of 0 and -inf."""
    mask = mask[:, max(0, mask.shape[1] - length) :]
    bias = torch.zeros(mask.shape[0], length, dtype=dtype, device=mask.device)
    bias[:, length - mask.shape[1] :].masked_fill_(~mask, float("-inf"))
    return bias


Attend = Callable[[Tensor, Tensor, Tensor, KeySpan, float], tuple[Tensor, Tensor]]
"""(q [B, T, H, D], k [K, R, D], v [K, R, D], span, scale) -> out [B, T, H, D] in q's dtype, lse [B,
T, H] fp32.

Each sequence attends to the span's rows of k and v. lse is the natural logarithm of the sum of
exponentials, -inf where a span is empty; out is finite there.
"""


@dataclass(slots=True)
class AttentionPlan:
    """One forward: `T` new rows behind each sequence's cached rows.

    The new rows are the last T of `lengths`; the forward writes them before it attends.
    """

    starts: list[int]
    """[B] first cache row of each sequence."""
    lengths: list[int]
    """[B] rows after this forward, the T new ones included."""
    num_new: int
    """T"""
    mask: Tensor | None = None
    """[B, T, M] bool over the last M rows (M >= T), True = visible; all earlier rows are visible.
    None: causal.
    """
    tree: TreeAttention = "hybrid"
    """The kind of attention of a masked forward."""
    keep_layers: frozenset[int] = frozenset()
    """Layers whose queries are kept for retrieval."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """Filled by the forward: layer -> [B, T, H, D]."""
    spans: tuple[KeySpan, ...] = ()
    """One or two disjoint sets of keys, whose results are merged."""
    on_device: tuple[Tensor, Tensor] | None = None
    """The first row [B, 1] of each sequence and the new rows [B, T], int64 on the device; None:
    made from the lists.
    """
    ends_only: bool = False
    """True if nobody reads the last layer's output but at each sequence's last row: it computes no
    other, only all keys and values.
    """
    decided: bool = False
    """True if the new rows are the sequence's own tokens, and no proposal: a recurrent layer keeps
    its state after them.
    """
    captured: bool = False
    """True while a step is captured: its replays have other `starts` and `lengths`, so that reading
    them raises.
    """
    windows: dict[int, tuple[KeySpan, ...]] = field(default_factory=dict)
    """Spans of layers with a sliding window, by its width; made once per forward."""

    def __post_init__(self) -> None:
        assert all(length >= self.num_new for length in self.lengths)
        if self.captured:
            self.starts = self.lengths = _Unreadable()
        self.spans = self._split()

    def new_rows(self, device: torch.device) -> Tensor:
        """Return the cache rows [B, T] int64 that this forward writes."""
        if self.on_device is not None:
            return self.on_device[1]
        ends = torch.tensor([self.starts, self.lengths]).sum(0)
        return (ends[:, None] + torch.arange(-self.num_new, 0)).to(device)

    def spans_within(self, window: int) -> tuple[KeySpan, ...]:
        """Return spans of the last `window` rows that each query sees, its own row included.

        Visible rows have consecutive positions, so a number of rows is a distance in the text.
        """
        if max(self.lengths) <= window:
            return self.spans
        if self.mask is None and self.num_new == 1:
            ends = [sum(each) for each in zip(self.starts, self.lengths, strict=True)]
            lengths = [min(length, window) for length in self.lengths]
            starts = [end - length for end, length in zip(ends, lengths, strict=True)]
            return (KeySpan(starts, lengths),)
        if window not in self.windows:
            own = torch.ones(1, self.num_new, self.num_new, dtype=torch.bool).tril()
            mask = own.expand(len(self.lengths), -1, -1) if self.mask is None else self.mask
            split = self._around_common if mask.shape[2] < window else self._in_one_mask
            self.windows[window] = split(mask, window)
        return self.windows[window]

    def _around_common(self, mask: Tensor, window: int) -> tuple[KeySpan, ...]:
        """Split a wide window into the masked rows, the rows that all queries see, and its edge.

        A query with n visible masked rows sees the edge but for its first n - 1 rows.
        """
        width = mask.shape[2]
        tail = [min(width, length) for length in self.lengths]
        before = [length - rows for length, rows in zip(self.lengths, tail, strict=True)]
        common = [min(rows, window - width - 1) for rows in before]
        edge = [min(rows - shared, width) for rows, shared in zip(before, common, strict=True)]
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        spans = []
        for lengths, seen in ((tail, mask), (common, None), (edge, self._edge(mask))):
            ends = [end - length for end, length in zip(ends, lengths, strict=True)]
            spans.append(KeySpan(ends, lengths, seen))
        return tuple(span for span in spans if any(span.lengths))

    @staticmethod
    def _edge(mask: Tensor) -> Tensor:
        """Return which rows of a window's edge [B, T, M] the queries see."""
        numbers = torch.arange(1, mask.shape[2] + 1, device=mask.device)
        return numbers >= mask.sum(-1, keepdim=True)

    def _in_one_mask(self, mask: Tensor, window: int) -> tuple[KeySpan, ...]:
        """Mask all rows of a window that is no wider than the masked rows."""
        width = mask.shape[2] + window - 1
        lengths = [min(length, width) for length in self.lengths]
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        seen = pad(mask, (window - 1, 0), value=True)
        num_later = seen.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        return (KeySpan(starts, lengths, seen & (num_later <= window)),)

    def _split(self) -> tuple[KeySpan, ...]:
        """Split a tree's keys into the unmasked prefix and the masked rest; any other plan has one
        span.
        """
        if self.mask is None or self.tree == "dense":
            # the one query of a plain step sees every row
            causal = self.mask is None and self.num_new > 1
            return (KeySpan(self.starts, self.lengths, self.mask, causal, self.on_device),)
        num_masked = self.mask.shape[2]
        prefix = [length - num_masked for length in self.lengths]
        tails = [start + length for start, length in zip(self.starts, prefix, strict=True)]
        tail = KeySpan(tails, [num_masked] * len(tails), self.mask)
        return (KeySpan(self.starts, prefix), tail) if any(prefix) else (tail,)


def attend_plan(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with q [B, T, H, D] to the rows of k, v [K, R, D] that the plan names.

    Args:
        attend: The kernel.
        q: Queries.
        k: Keys of all rows.
        v: Values of all rows.
        plan: The forward's rows.
        scale: Factor on the scores.
        window: Rows that a query sees at most, its own included; None: all.
        sinks: Scores [H] of a key without a value, which every query sees; None: there is none.

    Returns:
        The mean of the values [B, T, H, D].
    """
    spans = plan.spans if window is None else plan.spans_within(window)
    out, lse = attend(q, k, v, spans[0], scale)
    for number, span in enumerate(spans[1:], 2):
        other, other_lse = attend(q, k, v, span, scale)
        out = merge_states(out, lse, other, other_lse)
        if number < len(spans) or sinks is not None:
            lse = torch.logaddexp(lse, other_lse)
    if sinks is None:
        return out
    return (out * torch.sigmoid(lse - sinks.float()).unsqueeze(-1)).to(q.dtype)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Merge the results of attention over two disjoint key sets. out [..., D], lse [...] fp32.

    An empty set has lse -inf and any finite out; at most one of the two is empty.
    """
    weight_a = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    return torch.lerp(out_b.float(), out_a.float(), weight_a).to(out_a.dtype)

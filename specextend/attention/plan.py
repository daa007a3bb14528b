"""The plan of a forward pass: the cache rows that each query attends to, in one or more calls.

Hybrid attention (arXiv 2505.20776, section 3) calls a kernel for each span of keys and merges the
results.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

TreeAttention = Literal["dense", "hybrid"]


class HostReadError(RuntimeError):
    """A kernel of a captured step reads places on the host, where replays read stale values."""


class _Unreadable(list[int]):
    """The places of a captured step; reading them on the host raises."""

    def __iter__(self, *_: object) -> NoReturn:
        raise HostReadError("a kernel reads places of rows on the host")

    __len__ = __contains__ = __getitem__ = __iter__  # type: ignore[assignment]


@dataclass(slots=True)
class KeySpan:
    """The cache rows that each sequence's queries attend to in one kernel call.

    Sequence b sees `lengths[b]` rows from `starts[b]` on, except as `mask` says for the last rows.
    """

    starts: list[int]
    """First row of each sequence [B]."""
    lengths: list[int]
    """Rows of each sequence [B]; 0 gives LSE -inf."""
    mask: Tensor | None = None
    """Visibility [B, T, M] of the last M rows, False beyond a length. Tree nodes follow their
    path.
    """
    causal: bool = False
    """Whether query t sees the rows up to row t of the last T. Excludes `mask`."""
    on_device: tuple[Tensor, Tensor] | None = None
    """First row [B, 1] and new rows [B, T], int64 on the device; None: only the host knows them."""
    window: int | None = None
    """Most rows that a causal query sees, on a CPU; None: all."""
    made: dict[Hashable, Tensor] = field(default_factory=dict)
    """Tensors that a kernel derives once per forward, for all layers."""

    def places(self, device: torch.device) -> Tensor:
        """Return `starts` and `lengths` as [2, B] int64 on the device."""
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
        """Return the mask of sequence b, if any, as a bias [T, S] like `like`.

        `tail` covers only the masked rows.
        """
        if self.mask is None:
            return None
        key = tail, b, like.dtype
        if key not in self.made:
            length = min(self.mask.shape[2], self.lengths[b]) if tail else self.lengths[b]
            self.made[key] = additive(self.mask[b].to(like.device), length, like.dtype)
        return self.made[key]


def causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None = None
) -> Tensor:
    """Return the keys [T, S] that causal queries see."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = seen.tril(num_keys - num_queries)
    return seen if window is None else seen.triu(num_keys - num_queries - window + 1)


def additive(mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask [T, M] of the last M keys into a bias [T, length] of 0 and -inf."""
    mask = mask[:, max(0, mask.shape[1] - length) :]
    bias = torch.zeros(mask.shape[0], length, dtype=dtype, device=mask.device)
    bias[:, length - mask.shape[1] :].masked_fill_(~mask, float("-inf"))
    return bias


Attend = Callable[[Tensor, Tensor, Tensor, KeySpan, float], tuple[Tensor, Tensor]]
"""(q [B, T, H, D], k [K, R, D], v [K, R, D], span, scale) -> out [B, T, H, D] in q's dtype, lse [B,
T, H] fp32.

lse is the natural logarithm of the sum of exponentials. Where a span is empty, it is -inf and out
is finite.
"""


@dataclass(slots=True)
class AttentionPlan:
    """A forward pass of `T` new rows after the cached rows of each sequence.

    The new rows are the last T of `lengths`, written before attention.
    """

    starts: list[int]
    """First cache row of each sequence [B]."""
    lengths: list[int]
    """Rows after this forward [B], including the T new rows."""
    num_new: int
    mask: Tensor | None = None
    """Visibility [B, T, M] of the last M >= T rows; earlier rows are visible. None: causal."""
    tree: TreeAttention = "hybrid"
    keep_layers: frozenset[int] = frozenset()
    """Layers that keep their queries, for retrieval."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """Queries [B, T, H, D] by layer, filled by the forward."""
    spans: tuple[KeySpan, ...] = ()
    """Disjoint sets of keys; their results are merged."""
    on_device: tuple[Tensor, Tensor] | None = None
    """As in `KeySpan`; None: made from the lists."""
    ends_only: bool = False
    """Whether the last layer computes only each sequence's last row, besides keys and values."""
    decided: bool = False
    """Whether the new rows are final tokens, after which recurrent layers keep their state."""
    captured: bool = False
    """Whether a step is being captured; reading `starts` or `lengths` then raises."""
    recent_starts: list[int] | None = None
    """[B] first rows in layers with a sliding window and other rows; below 0 if they are gone."""
    windows: dict[int, tuple[KeySpan, ...]] = field(default_factory=dict)
    """Spans by width of a sliding window, made once per forward."""

    def __post_init__(self) -> None:
        assert all(length >= self.num_new for length in self.lengths)
        if self.captured:
            self.starts = self.lengths = _Unreadable()
        self.spans = self._split(self.starts, self.on_device)

    def new_rows(self, device: torch.device) -> Tensor:
        """Return the cache rows [B, T] int64 that this forward writes."""
        if self.on_device is not None:
            return self.on_device[1]
        ends = torch.tensor([self.starts, self.lengths]).sum(0)
        return (ends[:, None] + torch.arange(-self.num_new, 0)).to(device)

    def spans_within(self, window: int, *, is_cpu: bool = False) -> tuple[KeySpan, ...]:
        """Return spans of the last `window` rows of each query, at consecutive positions.

        On a CPU, kernels take the window of a causal span.
        """
        starts = self.starts if self.recent_starts is None else self.recent_starts
        if max(self.lengths) <= window and starts is self.starts:
            return self.spans
        if self.mask is None and (is_cpu or self.num_new == 1):
            lengths = [min(length, window + self.num_new - 1) for length in self.lengths]
            forgotten = zip(starts, self.lengths, lengths, strict=True)
            firsts = [start + all_ - kept for start, all_, kept in forgotten]
            if self.num_new == 1:
                return (KeySpan(firsts, lengths),)
            return (KeySpan(firsts, lengths, causal=True, window=window),)
        if window not in self.windows:
            self.windows[window] = self._within(window, starts)
        return self.windows[window]

    def _within(self, window: int, starts: list[int]) -> tuple[KeySpan, ...]:
        if max(self.lengths) <= window:
            return self._split(starts)
        own = causal_mask(self.num_new, self.num_new, torch.device("cpu"))
        mask = own.expand(len(self.lengths), -1, -1) if self.mask is None else self.mask
        split = self._around_common if mask.shape[2] < window else self._in_one_mask
        ends = [start + length for start, length in zip(starts, self.lengths, strict=True)]
        return split(mask, window, ends)

    def _around_common(self, mask: Tensor, window: int, ends: list[int]) -> tuple[KeySpan, ...]:
        """Split a wide window into masked rows, rows that all queries see, and an edge.

        A query with n visible masked rows sees the edge except for its first n - 1 rows.
        """
        width = mask.shape[2]
        tail = [min(width, length) for length in self.lengths]
        before = [length - rows for length, rows in zip(self.lengths, tail, strict=True)]
        common = [min(rows, window - width - 1) for rows in before]
        edge = [min(rows - shared, width) for rows, shared in zip(before, common, strict=True)]
        spans = []
        for lengths, seen in ((tail, mask), (common, None), (edge, self._edge(mask))):
            ends = [end - length for end, length in zip(ends, lengths, strict=True)]
            spans.append(KeySpan(ends, lengths, seen))
        return tuple(span for span in spans if any(span.lengths))

    @staticmethod
    def _edge(mask: Tensor) -> Tensor:
        numbers = torch.arange(1, mask.shape[2] + 1, device=mask.device)
        return numbers >= mask.sum(-1, keepdim=True)

    def _in_one_mask(self, mask: Tensor, window: int, ends: list[int]) -> tuple[KeySpan, ...]:
        width = mask.shape[2] + window - 1
        lengths = [min(length, width) for length in self.lengths]
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        seen = pad(mask, (window - 1, 0), value=True)
        num_later = seen.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        return (KeySpan(starts, lengths, seen & (num_later <= window)),)

    def _split(
        self, starts: list[int], on_device: tuple[Tensor, Tensor] | None = None
    ) -> tuple[KeySpan, ...]:
        """Split keys into the unmasked prefix and the masked rows, if hybrid."""
        if self.mask is None or self.tree == "dense":
            # the one query of a plain step sees every row
            causal = self.mask is None and self.num_new > 1
            return (KeySpan(starts, self.lengths, self.mask, causal, on_device),)
        num_masked = self.mask.shape[2]
        prefix = [length - num_masked for length in self.lengths]
        tails = [start + length for start, length in zip(starts, prefix, strict=True)]
        tail = KeySpan(tails, [num_masked] * len(tails), self.mask)
        return (KeySpan(starts, prefix), tail) if any(prefix) else (tail,)


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
    """Attend with q [B, T, H, D] to the rows of k, v [K, R, D] in a plan.

    `window` is the most rows that a query sees. `sinks` are scores [H] of a key without a value.
    Return the weighted mean of values [B, T, H, D].
    """
    spans = plan.spans if window is None else plan.spans_within(window, is_cpu=q.is_cpu)
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
    """Merge attention over two disjoint sets of keys: out [..., D], lse [...] fp32.

    At most one set may be empty, with lse -inf and any finite out.
    """
    weight_a = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    return torch.lerp(out_b.float(), out_a.float(), weight_a).to(out_a.dtype)

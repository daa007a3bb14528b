"""The target's choice of a token: penalties, distribution, and noise.

Penalties change logits by the earlier tokens, as in transformers. At a node of a tree these are the
prompt, the output and the path. Sampling takes `argmax(log p + g)`. The Gumbel noise g depends only
on request seed, absolute position and token id, so every decoding mode chooses the same tokens.

More shapes: `P` positions, `K` a prefix of the tokens in order of probability.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from specextend.core import Asks, Request, SamplingParams, counted
from specextend.decoding.device import upload

Places = tuple[list[int], list[int]]
"""Entries of logits [N, V]: nodes, and token ids."""
_WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the stride of splitmix64
# its finaliser: shift and factor
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_MASK = (1 << 64) - 1
FARTHEST = 1000.0
"""Lead over an impossible token, in logits, and so the largest lead."""
NOT_FINITE = -2
"""Placeholder for a token from logits that are not finite."""
_NOISE_ROWS = 8
"""Rows of noise that fit a processor's cache."""
_NORMED_ROWS = 16
_FIRST_PREFIX = 64
"""Sorted tokens for top_p at first; eight times more until they suffice."""


class NonFiniteLogits(ValueError):  # noqa: N818  error rows have the name
    """The target's logits are NaN or infinite."""

    def __init__(self, num_tokens: int):
        super().__init__(
            "the target's logits are NaN or infinite behind "
            f"{counted(num_tokens, 'output token')}: its weights are "
            "damaged, or target.dtype does not hold its numbers (float16 overflows where bfloat16 "
            "does not)"
        )


def where_finite(values: Tensor, logits: Tensor, other: float) -> Tensor:
    """Return `values` [...], or `other` where logits [..., V] are not finite."""
    sums = logits.sum(-1, dtype=torch.float32)
    return values.masked_fill(sums - sums != 0, other)  # the difference of infinite sums is NaN


def noise_keys(seeds: Sequence[int], positions: Tensor) -> Tensor:
    """Return keys [B, N] of the noise, by seeds of requests and absolute positions [B, N]."""
    mixed = _mix(torch.tensor([_signed(seed & _MASK) for seed in seeds]))
    return _mix(positions * _signed(_WEYL) + upload(mixed, positions.device).unsqueeze(1))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise [..., K] fp32, the same on every device and in every shape.

    Logarithms are in fp64 and rounded once. `token_ids` are [K] or [..., K] int64.
    """
    bits = _mix(keys.unsqueeze(-1) + token_ids * _signed(_WEYL))
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-52)  # exact, and neither 0 nor 1
    return uniform.log_().neg_().log_().neg_().float()


def choose_tokens(logits: Tensor, positions: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Choose a token [B, N] int64 for each node of B sequences.

    Greedy decoding takes the first of equal logits and never waits for the device. Nodes at one
    position share noise. Sequences with the same options are one call.

    Args:
        logits: [B, N, V].
        positions: Positions [B, N] int64 of the chosen tokens.
        sampling: Options of each sequence.
    """
    alike = defaultdict[tuple[float, ...], list[int]](list)
    for b, each in enumerate(sampling):
        alike[each.temperature, each.top_k, each.top_p].append(b)
    if len(alike) == 1:
        return _choose_alike(logits, positions, sampling)
    chosen = torch.empty_like(positions)
    for places in alike.values():
        rows = upload(torch.tensor(places), logits.device)
        of_rows = _choose_alike(logits[rows], positions[rows], [sampling[b] for b in places])
        chosen.index_copy_(0, rows, of_rows)
    return chosen


def log_probs_of(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Return the log probability of a token by each row of the target's logits [N, V].

    The bits do not depend on the other rows. Threads would divide the sum of a single row, so
    another row is always added.
    """
    chosen = upload(torch.tensor(token_ids), logits.device)
    own = logits.gather(1, chosen.unsqueeze(1))[:, 0].float()
    parts = torch.cat([logits, logits[:1]]).tensor_split(1 + len(logits) // _NORMED_ROWS)
    norms = torch.cat([part.float().logsumexp(-1) for part in parts])
    found: list[float] = (own - norms[:-1]).tolist()
    return found


def _choose_alike(logits: Tensor, positions: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    first = sampling[0]
    if first.temperature == 0:
        # as argmax, in a quarter of the time for bf16 on a CPU
        return logits.max(-1).indices
    keys = noise_keys([each.seed for each in sampling], positions)
    vocab_size = logits.shape[-1]
    top_k = first.top_k if 0 < first.top_k < vocab_size else vocab_size
    if top_k < vocab_size or first.top_p < 1:
        scaled = _scaled(logits, first.temperature).flatten(0, 1)
        return _choose_likely(scaled, keys.flatten(), top_k, first.top_p).view_as(positions)
    distinct, row_of = keys.unique(return_inverse=True)
    token_ids = torch.arange(vocab_size, device=logits.device)
    noise = torch.cat([gumbel_noise(each, token_ids) for each in distinct.split(_NOISE_ROWS)])
    pairs = zip(logits, row_of, strict=True)
    chosen = [_scaled(own, first.temperature).add_(noise[rows]).argmax(-1) for own, rows in pairs]
    return torch.stack(chosen)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits [..., V] by the temperature in fp32.

    They are relative to the largest, so no temperature makes them overflow.
    """
    assert temperature > 0, "greedy decoding has no distribution"
    values = logits.to(torch.float32, copy=True)
    least = torch.finfo(torch.float32).tiny
    return values.sub_(values.amax(-1, keepdim=True)).div_(max(temperature, least))


def lead_of(logits: Tensor, position: Tensor, sampling: SamplingParams, chosen: int) -> float:
    """Return the lead, in logits [V], of the chosen token over every other token.

    It is 0 if a token without a chance, by top_k or top_p, is ahead. `position` is [] int64.
    """
    scores = logits.double()
    if sampling.temperature > 0:
        token_ids = torch.arange(len(logits), device=logits.device)
        noise = gumbel_noise(noise_keys([sampling.seed], position.reshape(1, 1)), token_ids)[0, 0]
        scores = scores + noise * sampling.temperature
    leads = scores[chosen] - scores
    leads[chosen] = FARTHEST
    return float(leads.clamp(0.0, FARTHEST).min())


def _choose_likely(scaled: Tensor, keys: Tensor, top_k: int, top_p: float) -> Tensor:
    """Choose tokens [R] among the likeliest of `scaled` [R, V], with the noise of `keys` [R].

    A short prefix is sorted first. Rows in need of more are sorted again, with a wait of the host.
    """
    vocab_size = scaled.shape[-1]
    probs = scaled.softmax(-1) if top_k == vocab_size else None
    size = min(_FIRST_PREFIX if probs is not None else top_k + 1, vocab_size)
    chosen = torch.empty_like(keys)
    rows = torch.arange(len(keys), device=keys.device)
    while True:
        values, token_ids = _likeliest(scaled, size)
        likeliest = (
            values[..., :top_k].softmax(-1) if probs is None else probs.gather(-1, token_ids)
        )
        num_kept = _nucleus_size(likeliest, top_p)
        last = values.gather(-1, num_kept - 1)
        end = values[..., -1:]
        # a token after the prefix may be as likely as the last
        lacks = ((end >= last) & ~end.isneginf()).squeeze(-1)
        cut = torch.arange(size, device=keys.device) >= num_kept
        noisy = values.masked_fill_(cut, -math.inf).add_(gumbel_noise(keys, token_ids))
        best = noisy.argmax(-1, keepdim=True)
        chosen.index_copy_(0, rows, token_ids.gather(-1, best).squeeze(-1))
        if size == vocab_size:
            return chosen
        left = lacks.nonzero().squeeze(-1)
        if not len(left):
            return chosen
        scaled = scaled[left]
        keys = keys[left]
        rows = rows[left]
        probs = None if probs is None else probs[left]
        size = min(size * 8, vocab_size)


def _likeliest(scaled: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest of `scaled` [..., V], descending, ties by id, and their ids."""
    token_ids = scaled.topk(size).indices.sort(-1).values
    values, order = scaled.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, order)


def _nucleus_size(probs: Tensor, top_p: float) -> Tensor:
    """Return the length [..., 1] of the shortest prefix of `probs` [..., K] that sums to top_p.

    `probs` are descending. The length is K if their sum is too small.
    """
    if top_p >= 1:
        return torch.full_like(probs[..., :1], probs.shape[-1], dtype=torch.int64)
    num_below = (probs.cumsum(-1, dtype=torch.float64) < top_p).sum(-1, keepdim=True)
    return (num_below + 1).clamp_(max=probs.shape[-1])


def _mix(state: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 `state` in place. Products wrap around."""
    spare = torch.empty_like(state)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(state, shift, out=spare)
        spare.bitwise_and_((1 << (64 - shift)) - 1)  # an int64 shift copies the sign: cut it off
        state.bitwise_xor_(spare).mul_(_signed(factor))
    return state


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class NgramIndex:
    """The followers of each run of `size - 1` tokens in a growing text."""

    def __init__(self, size: int):
        """Take the n of the n-grams."""
        assert size > 0, "an n-gram has at least one token"
        self.size = size
        self.end: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], set[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            if len(self.end) == self.size - 1:
                self._followers.setdefault(self.end, set()).add(token_id)
            self.end = self.behind(self.end, token_id)

    def behind(self, end: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """Return the `end` of a text after one more token."""
        longer = (*end, token_id)
        return longer[1:] if len(longer) == self.size else longer

    def repeating(self, token_ids: Sequence[int], parents: Sequence[int]) -> Places:
        """Find the tokens after nodes of a tree, rooted at the text's last token, that repeat an
        n-gram.
        """
        ends = [self.end]
        nodes = list[int]()
        repeating = list[int]()
        for node, path in enumerate(_paths(parents)):
            if node > 0:
                ends.append(self.behind(ends[parents[node]], token_ids[node]))
            if len(ends[node]) == self.size - 1:
                found = [*self._followers.get(ends[node], ())]
                found += [token_ids[each] for each in path if ends[parents[each]] == ends[node]]
                nodes += [node] * len(found)
                repeating += found
        return nodes, repeating


class Penalties:
    """The penalties of a request, and its tokens so far."""

    def __init__(self, request: Request, device: torch.device, asks: Asks):
        self._penalty = asks.repetition_penalty
        self._ngrams = NgramIndex(asks.no_repeat_ngram_size) if asks.no_repeat_ngram_size else None
        self._suppressed = torch.tensor(asks.suppress_tokens, dtype=torch.int64, device=device)
        self._seen_ids = torch.empty(0, dtype=torch.int64, device=device)
        self.extend(request.prompt_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count new tokens."""
        if self._ngrams is not None:
            self._ngrams.extend(token_ids)
        if self._penalty != 1:
            new = self._seen_ids.new_tensor([*{*token_ids}])
            self._seen_ids = torch.cat([self._seen_ids, new])

    def apply(self, logits: Tensor, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Penalise the logits [N, V] after each node of a tree, rooted at the last token, in fp32.

        Each earlier token is penalised once. Then repeated n-grams and suppressed tokens become
        -inf.
        """
        scores = logits.to(torch.float32, copy=True)
        if self._penalty != 1:
            scores.index_copy_(
                1, self._seen_ids, self._penalised(scores.index_select(1, self._seen_ids))
            )
            paths = _paths(parents)
            nodes = [node for node, path in enumerate(paths) for _ in path]
            on_paths = [token_ids[each] for path in paths for each in path]
            places = _as_index((nodes, on_paths), scores.device)
            scores[places] = self._penalised(logits[places].float())
        if self._ngrams is not None:
            scores[_as_index(self._ngrams.repeating(token_ids, parents), scores.device)] = float(
                "-inf"
            )
        return scores.index_fill_(1, self._suppressed, float("-inf"))

    def _penalised(self, scores: Tensor) -> Tensor:
        return torch.where(scores < 0, scores * self._penalty, scores / self._penalty)


def penalties_of(request: Request, device: torch.device, asks: Asks) -> Penalties | None:
    """Return the penalties of a request, or of its model; None without penalties."""
    asks = asks.of(request.sampling)
    return Penalties(request, device, asks) if asks.penalises else None


def _paths(parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths


def _as_index(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes, token_ids = upload(torch.tensor(places, dtype=torch.int64), device)
    return nodes, token_ids

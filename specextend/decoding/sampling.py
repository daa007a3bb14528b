"""The target's choice of a token: repetition penalties, its processed distribution, and noise.

Penalties change the logits by the tokens that a sequence already has, as transformers changes them.
At a node of a tree the sequence is prompt, output and the path from the root to the node. Sampling
takes `argmax(log p + g)` with Gumbel noise g that depends on (request seed, absolute position,
token id) alone. So every decoding mode that sees the same logits chooses the same tokens, whatever
the tree or the batch.

Letters: N rows, the nodes of a tree (root included), P positions, V vocabulary, K a prefix of the
tokens in order of probability.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from specextend.core import Asks, Request, SamplingParams, counted
from specextend.decoding.device import upload

Places = tuple[list[int], list[int]]
"""Entries of logits [N, V]: their nodes, and their token ids."""
_WEYL = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the stride of splitmix64
# its finaliser: shift and factor
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_MASK = (1 << 64) - 1
FARTHEST = 1000.0
"""Largest lead of a token, in logits: that over tokens which cannot be chosen at all."""
NOT_FINITE = -2
"""Stands in the place of a token where the logits that it would be chosen from are not finite."""
_NOISE_ROWS = 8  # whose noise is made at once
_NORMED_ROWS = 16  # that are summed at once
_FIRST_PREFIX = 64  # tokens sorted first for top_p; eight times more until they suffice


class NonFiniteLogits(ValueError):  # noqa: N818  error rows have the name
    """Logits of the target that are NaN or infinite: whatever is chosen from them is not the
    model's.
    """

    def __init__(self, num_tokens: int):
        super().__init__(
            "the target's logits are NaN or infinite behind "
            f"{counted(num_tokens, 'output token')}: its weights are "
            "damaged, or target.dtype does not hold its numbers (float16 overflows where bfloat16 "
            "does not)"
        )


def where_finite(values: Tensor, logits: Tensor, other: float) -> Tensor:
    """Return `values` [...] with `other` in their place where logits [..., V] are not finite. The
    host is not asked.
    """
    sums = logits.sum(-1, dtype=torch.float32)
    return values.masked_fill(sums - sums != 0, other)  # the difference of infinite sums is NaN


def noise_keys(seeds: Sequence[int], positions: Tensor) -> Tensor:
    """Return keys [B, N] of the noise of requests with these seeds at absolute `positions` [B, N]
    int64. Noise is a function of its key and the token id.
    """
    mixed = _mix(torch.tensor([_signed(seed & _MASK) for seed in seeds]))
    return _mix(positions * _signed(_WEYL) + upload(mixed, positions.device).unsqueeze(1))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise [..., K] fp32 of int64 `token_ids`, [K] or [..., K], by `keys`
    [...] of `noise_keys`.

    A counter-based generator: an entry is a function of (seed, position, token id). The logarithms
    are taken in fp64, so the rounded result is the same on every device and in every shape.
    """
    bits = _mix(keys.unsqueeze(-1) + token_ids * _signed(_WEYL))
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-52)  # exact, and neither 0 nor 1
    return uniform.log_().neg_().log_().neg_().float()


def choose_tokens(logits: Tensor, positions: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Choose the target's tokens [B, N] int64 of B sequences from `logits` [B, N, V]; `positions`
    [B, N] int64 are those of the tokens chosen.

    Sequences that sample alike, whatever their seeds, are one call. Greedy decoding takes the first
    of equal logits and never waits for the device. Nodes at one position share noise. Where top_k
    or top_p leaves tokens out, noise is made for the others alone.
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
    """Return the log probability of a token by each row of logits [N, V], which are the target's
    own.

    A row's has the same bits beside any rows: only the sum of a row alone would be divided among
    threads, so there is always another.
    """
    chosen = upload(torch.tensor(token_ids), logits.device)
    own = logits.gather(1, chosen.unsqueeze(1))[:, 0].float()
    parts = torch.cat([logits, logits[:1]]).tensor_split(1 + len(logits) // _NORMED_ROWS)
    norms = torch.cat([part.float().logsumexp(-1) for part in parts])
    found: list[float] = (own - norms[:-1]).tolist()
    return found


def _choose_alike(logits: Tensor, positions: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Choose as `choose_tokens` does, for sequences whose options differ in their seeds alone."""
    first = sampling[0]
    if first.temperature == 0:
        # the first of equals, as argmax, at a quarter of its time for bf16 on a CPU
        return logits.max(-1).indices
    keys = noise_keys([each.seed for each in sampling], positions)
    vocab_size = logits.shape[-1]
    top_k = first.top_k if 0 < first.top_k < vocab_size else vocab_size
    if top_k < vocab_size or first.top_p < 1:
        scaled = _scaled(logits, first.temperature).flatten(0, 1)
        return _choose_likely(scaled, keys.flatten(), top_k, first.top_p).view_as(positions)
    distinct, row_of = keys.unique(return_inverse=True)
    token_ids = torch.arange(vocab_size, device=logits.device)
    # in pieces that a processor's cache holds
    noise = torch.cat([gumbel_noise(each, token_ids) for each in distinct.split(_NOISE_ROWS)])
    pairs = zip(logits, row_of, strict=True)
    chosen = [_scaled(own, first.temperature).add_(noise[rows]).argmax(-1) for own, rows in pairs]
    return torch.stack(chosen)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide `logits` [..., V] by the temperature, in fp32, relative to the largest: a tiny one
    cannot overflow.
    """
    assert temperature > 0, "greedy decoding has no distribution"
    values = logits.to(torch.float32, copy=True)
    least = torch.finfo(torch.float32).tiny
    return values.sub_(values.amax(-1, keepdim=True)).div_(max(temperature, least))


def lead_of(logits: Tensor, position: Tensor, sampling: SamplingParams, chosen: int) -> float:
    """Return by how much of its logit the `chosen` token stands above every other of `logits` [V].

    `position` [] int64 is that of the token. Each token has its noise. It is 0 if a token is ahead
    that top_k or top_p leaves out.
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
    """Choose tokens [R] among the likeliest of `scaled` [R, V], ties by id, with the noise of
    `keys` [R].

    The likeliest are sorted, as many as most rows need; rows that need more are sorted again, with
    one wait of the host each time.
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
        # a token beyond may be as likely as the last
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
    """Return the `size` largest of `scaled` [..., V], falling, and their ids, which rise among
    equals.
    """
    token_ids = scaled.topk(size).indices.sort(-1).values
    values, order = scaled.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, order)


def _nucleus_size(probs: Tensor, top_p: float) -> Tensor:
    """Count [..., 1] how many of the falling `probs` [..., K] it takes to reach top_p; K if all do
    not.
    """
    if top_p >= 1:
        return torch.full_like(probs[..., :1], probs.shape[-1], dtype=torch.int64)
    num_below = (probs.cumsum(-1, dtype=torch.float64) < top_p).sum(-1, keepdim=True)
    return (num_below + 1).clamp_(max=probs.shape[-1])


def _mix(state: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 `state`, in place; products wrap around."""
    spare = torch.empty_like(state)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(state, shift, out=spare)
        spare.bitwise_and_((1 << (64 - shift)) - 1)  # an int64 shift copies the sign: cut it off
        state.bitwise_xor_(spare).mul_(_signed(factor))
    return state


def _signed(value: int) -> int:
    """Return the int64 of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


class NgramIndex:
    """Knows what followed each run of `size - 1` tokens in a growing text. A token more takes the
    same time in any.
    """

    def __init__(self, size: int):
        """Take the length of an n-gram, in tokens."""
        assert size > 0, "an n-gram has at least one token"
        self.size = size
        self.end: tuple[int, ...] = ()
        """The last `size - 1` tokens, or the whole text if it is shorter."""
        self._followers: dict[tuple[int, ...], set[int]] = {}  # run -> tokens that followed it

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token_id in token_ids:
            if len(self.end) == self.size - 1:
                self._followers.setdefault(self.end, set()).add(token_id)
            self.end = self.behind(self.end, token_id)

    def behind(self, end: tuple[int, ...], token_id: int) -> tuple[int, ...]:
        """Return the last tokens of a text that ended in `end` and has one token more."""
        longer = (*end, token_id)
        return longer[1:] if len(longer) == self.size else longer

    def repeating(self, token_ids: Sequence[int], parents: Sequence[int]) -> Places:
        """Return the tokens behind each node of a tree that would repeat an n-gram of the text or
        of the node's path.

        The root is the text's last token.
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
    """The penalties of one request, and the tokens that they count. Lives as long as its
    request.
    """

    def __init__(self, request: Request, device: torch.device, asks: Asks):
        """Take a request, the device of the logits, and the penalties of its own and of the
        model.
        """
        self._penalty = asks.repetition_penalty
        self._ngrams = NgramIndex(asks.no_repeat_ngram_size) if asks.no_repeat_ngram_size else None
        self._suppressed = torch.tensor(asks.suppress_tokens, dtype=torch.int64, device=device)
        self._seen_ids = torch.empty(0, dtype=torch.int64, device=device)
        self.extend(request.prompt_token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count tokens behind those counted so far."""
        if self._ngrams is not None:
            self._ngrams.extend(token_ids)
        if self._penalty != 1:
            new = self._seen_ids.new_tensor([*{*token_ids}])
            self._seen_ids = torch.cat([self._seen_ids, new])

    def apply(self, logits: Tensor, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Return the penalised logits [N, V] fp32 behind each node of a tree, whose root is the
        last token counted.

        First each token that occurred is penalised once, then what would repeat an n-gram becomes
        -inf, and what is never chosen.
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
    """Return the penalties of a request, or else what its model asks; None if there are none, so
    that it costs nothing.
    """
    asks = asks.of(request.sampling)
    return Penalties(request, device, asks) if asks.penalises else None


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """List the nodes on the path to each node of a tree, itself included and the root not."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths


def _as_index(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places as an index of [N, V]."""
    nodes, token_ids = upload(torch.tensor(places, dtype=torch.int64), device)
    return nodes, token_ids

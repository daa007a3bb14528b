"""The EAGLE head against a slow twin: no cache, no chunks, everything computed again from the start."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from specextend.attention.reference import attend_reference
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.eagle_config import WEIGHTS_FILE, load_eagle_config
from specextend.drafters.eagle_network import EagleNetwork
from specextend.drafters.formats import read_head, read_vocabulary, read_weights
from specextend.models import load_causal_lm, rope_frequencies
from tests.covering import covering
from tests.drafters.twin_case import OPTIONS, TwinCase
from tests.tiny_models import FAMILIES, random_prompt, write_pair

DRAFTS = ["eagle", "copy"]


class SlowHead:
    """The formula of `specextend/drafters/eagle_network.py`, written down once more, over whole sequences."""

    def __init__(self, folder: str, embedding: Tensor, lm_head: Tensor) -> None:
        self.config = load_eagle_config(folder)
        self.weights = load_file(f"{folder}/{WEIGHTS_FILE}")
        self.embedding, self.lm_head = embedding, lm_head

    def __call__(self, token_ids: Tensor, before: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Output [n, C] at slots, causal, at RoPE `positions` [n].

        A slot has its next token [n], the three before that one [n, 3], nearest first, and a hidden state [n, C].
        """
        w, size = self.weights, 12
        x = torch.cat([self.norm("en", self.embedding[token_ids]), self.norm("hn", hidden)], -1)
        x = linear(x, w["fc.weight"])
        normed = self.norm("layer.input_layernorm", x)
        q, k, v = (linear(normed, w[f"layer.self_attn.{name}_proj.weight"]) for name in "qkv")
        q, k, v = (y.view(len(y), -1, size).transpose(0, 1) for y in (q, k, v))
        q, k = self.turn(q, positions), self.turn(k, positions)
        if self.config.copy_heads:
            q, k, v = (torch.cat(both) for both in zip((q, k, v), self.copies(token_ids, before), strict=True))
        k, v = (y.repeat_interleave(2, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        scores += torch.full_like(scores[0], -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, w["layer.self_attn.o_proj.weight"])
        normed = self.norm("layer.post_attention_layernorm", x)
        gate, up = (linear(normed, w[f"layer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return self.norm("norm", x + linear(silu(gate) * up, w["layer.mlp.down_proj.weight"]))

    def copies(self, token_ids: Tensor, before: Tensor) -> list[Tensor]:
        """Queries, keys and values [heads, n, D]: what came next, found by the two tokens before it and its own."""
        one, two, three, four = (self.norm("en", self.embedding[x]) for x in (token_ids, *before.T))
        reads = {"q": [one, two, three], "k": [two, three, four], "v": [one]}
        projected = [linear(torch.cat(x, -1), self.weights[f"copy.{name}_proj.weight"]) for name, x in reads.items()]
        return [y.view(len(y), -1, 12).transpose(0, 1) for y in projected]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE by complex numbers; pairs are (i, i + D / 2)."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * 10000.0 ** -(torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)


class Case(TwinCase):
    """A drafter and its twin, on one random text."""

    def __init__(self, pair, length: int, draft: str = "eagle") -> None:
        model = load_causal_lm(pair.target, None, "float32", "cpu")
        model.lm_head.weight.mul_(8)  # sure of itself, so that trees are deep
        target = CachedModel(model, attend_reference, 256)
        folder = pair.drafts[draft]
        head = read_head(folder)
        rope = rope_frequencies(head.rope, head.head_dim, "tiny")
        weights, vocabulary, lm_head = read_weights(head), read_vocabulary(head), model.lm_head.weight
        self.network = EagleNetwork(head, weights, vocabulary, target, lm_head, 4096, rope)
        self.drafter = CausalDrafter(self.network, OPTIONS, "hybrid", None, num_slots=3)
        self.twin = SlowHead(folder, model.model.embed_tokens.weight, model.lm_head.weight)
        self.token_ids = torch.tensor(random_prompt(length))
        self.features = torch.randn(length, 48, generator=torch.Generator().manual_seed(length))

    def slow_output(self, visible: list[int], path: tuple[int, ...] = ()) -> Tensor:
        """[C] after the visible slots (slot i: token i + 1 and hidden state i) and a path behind them."""
        positions = torch.arange(len(visible) + len(path), dtype=torch.float32)
        text = torch.cat([self.token_ids[: visible[-1] + 2], torch.tensor(path, dtype=torch.int64)])
        slots = torch.tensor([*visible, *range(visible[-1] + 1, len(text) - 1)])
        before = text[(slots[:, None] - torch.arange(3)).clamp(min=0)]
        hidden = self.features[visible]
        for count in range(len(visible), len(slots) + 1):
            output = self.twin(text[slots[:count] + 1], before[:count], hidden, positions[:count])
            hidden = torch.cat([hidden, output[-1:]])
        return output[-1]

    def slow_log_probs(self, visible: list[int], path: tuple[int, ...] = ()) -> Tensor:
        """[V] over the tokens that the head can propose; -inf for others."""
        logits = self.slow_output(visible, path) @ self.twin.lm_head.T
        if (own := self.network.vocabulary) is not None:
            logits = torch.full_like(logits, -torch.inf).index_copy(0, own, logits[own])
        return logits.log_softmax(-1)

    def assert_tree_is_the_twins(self, row: int, visible: list[int]) -> None:
        """The first level's logits are the twin's, too."""
        super().assert_tree_is_the_twins(row, visible)
        vocabulary, logits = self.drafter.first_level(row)
        expected = self.slow_output(visible) @ self.twin.lm_head.T
        expected = expected if vocabulary is None else expected[vocabulary]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


@pytest.mark.parametrize(("length", "chunk", "draft"), covering([1, 2, 8, 60], [1, 7, 512], DRAFTS))
@torch.inference_mode()
def test_the_head_equals_its_twin_whatever_the_prefill_chunk(length, chunk, pair, draft):
    """Slot i needs token i + 1, so a chunk's last slot waits for the next chunk, and the prompt's for the root."""
    case = Case(pair, 100, draft)
    case.prefill(0, length, chunk)
    case.drafter.select(0, torch.arange(length))
    case.absorb([0], [length], [length + 1])
    case.assert_tree_is_the_twins(0, list(range(length)))


@pytest.mark.parametrize("draft", DRAFTS)
@torch.inference_mode()
def test_a_selection_is_seen_at_contiguous_slots(pair, draft):
    """The twin runs over the visible slots alone, numbered from 0: the draft cannot tell that others exist."""
    case = Case(pair, 100, draft)
    case.prefill(0, 60, 512)
    chosen = [*range(8), *range(24, 32), *range(48, 60)]
    case.drafter.select(0, torch.tensor(chosen))
    case.absorb([0], [60], [61])
    visible = [*(slot for slot in chosen if slot < 59), 59]
    case.assert_tree_is_the_twins(0, visible)
    case.absorb([0], [61], [64])
    case.assert_tree_is_the_twins(0, [*visible, 60, 61, 62])
    case.drafter.select(0, torch.tensor([0, 1, 2, 60, 61, 62, 63]))
    case.absorb([0], [64], [66])
    case.assert_tree_is_the_twins(0, [0, 1, 2, 60, 61, 62, 63, 64])


@pytest.mark.parametrize("draft", DRAFTS)
@torch.inference_mode()
def test_a_batch_of_unequal_rows_is_each_row_alone(pair, draft):
    """Rows absorb one, three and four tokens at once; padding must not reach a neighbour or the row itself."""
    case = Case(pair, 100, draft)
    lengths = [5, 60, 31]
    for row, length in enumerate(lengths):
        case.prefill(row, length, 16)
        case.drafter.select(row, torch.arange(length))
    case.absorb([0, 1, 2], lengths, [length + n for length, n in zip(lengths, (1, 4, 3), strict=True)])
    together = case.drafter.propose([0, 1, 2])
    for row, (length, new) in enumerate(zip(lengths, (1, 4, 3), strict=True)):
        case.assert_tree_is_the_twins(row, list(range(length + new - 1)))
        [alone] = case.drafter.propose([row])
        assert torch.equal(together[row].token_ids, alone.token_ids)

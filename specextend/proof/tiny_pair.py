"""A pair of tiny models with random weights, which decode in fp32 with the tree that is
configured.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from specextend.core import Completion, Request
from specextend.decoding.cache import aligned
from specextend.decoding.decoding_options import CacheOptions, TreeOptions
from specextend.decoding.device import Graphs
from specextend.decoding.engine import Engine
from specextend.decoding.model import CachedModel
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.small_lm import ModelNetwork
from specextend.proof.subject import Kernels, Subject

_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "layer_types": None,
}
_CACHE = CacheOptions(
    chunk_size=8, top_k_chunks=8, recent=16, refresh_every=3, score_layers=(-1, 2)
)
_OTHER = 0.02
"""How far the draft's weights are from the target's, in standard deviations: some of its guesses
are wrong.
"""


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a causal LM with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


class TinyPair:
    """A target of the subject's family with its heads' size, and a draft much like it."""

    vocabulary: ClassVar[int] = 500

    def __init__(self, subject: Subject):
        """Make the weights."""
        heads = {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": subject.heads().head_dim,
        }
        config = subject.config(**_SHAPE, **heads, vocab_size=self.vocabulary)
        self._subject, self._device = subject, torch.device(subject.device)
        self._target = random_model(config, self._device, torch.float32)
        self._draft = copy.deepcopy(self._target)
        for weight in self._draft.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * _OTHER)

    def decode(
        self,
        kernels: Kernels,
        requests: Sequence[Request],
        batch: int,
        graphs: Graphs | None = None,
        *,
        speculates: bool = True,
    ) -> dict[str, Completion]:
        """Decode requests in batches of at most `batch`, the same ones each time; return what came
        of each, by name.
        """
        subject = self._subject
        tree = TreeOptions(nodes=subject.num_nodes, depth=subject.depth)
        num_tokens = max(len(each.prompt_token_ids) + each.max_new_tokens for each in requests)
        rows = batch * aligned(num_tokens + tree.most_nodes + tree.depth + 2)
        attend = kernels.attend(self._device)
        layers = kernels.of_layers(self._device)
        target = CachedModel(_own(self._target), attend, rows, layers)
        drafter = None
        if speculates:
            window = _CACHE.draft_prefill_window
            scratch = batch * aligned(tree.most_nodes * tree.depth + window + subject.chunk)
            cached = CachedModel(_own(self._draft), attend, rows + scratch, layers)
            network = ModelNetwork(cached, rows + scratch, window, subject.chunk)
            visible = _CACHE.top_k_chunks * _CACHE.chunk_size
            drafter = CausalDrafter(network, tree, "dense", visible, batch, graphs)
        engine = Engine(
            TokenNumbers(),
            target,
            drafter,
            eos_token_ids=frozenset(),
            max_tokens=num_tokens,
            max_batch_size=batch,
            tree=tree,
            tree_attention="dense",
            cache=_CACHE,
            graphs=graphs,
        )
        engine.decode_share = 0.0  # who joins whom is no matter of time
        return {done.request_id: done for done in engine.generate(requests)}


class TokenNumbers:
    """A tokenizer whose tokens are called by their numbers."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: bool) -> str:
        """Return the numbers with spaces between."""
        return " ".join(map(str, token_ids))


def _own(model: Any) -> Any:
    """Return a copy of a model, whose layers the engine may replace; the weights are shared."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})

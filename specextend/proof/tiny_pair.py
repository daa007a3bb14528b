"""The check of whole steps, on tiny random models in fp32 with the configured tree."""

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from specextend.core import Completion, Request, Values, counted
from specextend.decoding.cache import aligned
from specextend.decoding.decoding_options import CacheOptions, TreeOptions
from specextend.decoding.device import Capture, Graphs
from specextend.decoding.engine import Engine
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import DraftTrees
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.small_lm import ModelNetwork
from specextend.proof.prover import LONGEST, Kernels, Subject

_SHAPE: Values = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_CACHE = CacheOptions(
    chunk_size=8, top_k_chunks=8, recent=16, refresh_every=3, score_layers=(-1, 2)
)
_OTHER = 0.02
"""Standard deviations between weights of draft and target: some guesses are wrong."""
_LENGTHS = ((1, 24), (63, 8), (300, 20), (17, 33)) * 2
"""Prompt tokens and new tokens of requests after the longest."""
_BATCHES = (1, 4)
_LEAST_SHARED = 0.9
"""Least share of eager trees that replayed steps also grow; near ties may differ."""

Trees = Counter[tuple[tuple[float, ...], ...]]


def wrong_steps(
    subject: Subject, kernels: Kernels, capture: Capture, requests: Sequence[Request]
) -> str:
    """Decode with captured steps; return an error message, if any.

    Tokens must equal plain decoding in plain torch, and trees must equal eager steps: drafts that
    read wrong rows change no token. Requests join as others end, so steps are replayed at other
    lengths and places.
    """
    pair = TinyPair(subject)
    reference = Kernels(prompts="reference", steps="reference")
    expected = pair.decode(reference, requests, 1, speculates=False)
    for batch in _BATCHES:
        replayed, eager = Trees(), Trees()
        graphs = Graphs(capture, 1)
        found = pair.decode(kernels, requests, batch, graphs, trees=replayed)
        if not graphs.enabled:
            raise RuntimeError("steps cannot be captured")
        if different := [
            name for name, done in expected.items() if found[name].token_ids != done.token_ids
        ]:
            return f"{counted(len(different), 'text')} of a tiny pair differ in batches of {batch}"
        pair.decode(kernels, requests, batch, Graphs(capture, sys.maxsize), trees=eager)
        shared = (replayed & eager).total() / max(1, eager.total())
        if shared < _LEAST_SHARED:
            return f"{shared:.0%} of its trees are those of eager steps, in batches of {batch}"
    return ""


def make_requests(longest: int = LONGEST) -> list[Request]:
    """Make more requests than a batch, of random tokens; the first prompt has `longest`."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=torch.randint(
                TinyPair.vocabulary, (length,), generator=generator
            ).tolist(),
            max_new_tokens=num_new,
        )
        for number, (length, num_new) in enumerate(((longest, 20), *_LENGTHS))
    ]


def random_model(config: Values, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    """Make a causal LM with random weights from a changed `config.json`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # by a process that proves nothing

    values = config | changes
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype
        )
    return model.eval().requires_grad_(False)


class TinyPair:
    """A target with heads of the subject's size, and a similar draft."""

    vocabulary: ClassVar[int] = 500

    def __init__(self, subject: Subject):
        self._subject, self._device = subject, torch.device(subject.device)
        self._target = random_model(
            _SHAPE,
            self._device,
            torch.float32,
            head_dim=subject.layers[0].head_dim,
            vocab_size=self.vocabulary,
        )
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
        trees: Trees | None = None,
    ) -> dict[str, Completion]:
        """Decode the same requests in batches of at most `batch`; return results by name.

        `trees` counts proposed trees, which waits for the device.
        """
        subject = self._subject
        tree = TreeOptions(nodes=subject.num_drafts, depth=subject.depth)
        num_tokens = max(len(each.prompt_token_ids) + each.max_new_tokens for each in requests)
        rows = batch * aligned(num_tokens + tree.most_drafts + tree.depth + 2)
        attend = kernels.attend(self._device)
        layers = kernels.of_layers(self._device)
        target = CachedModel(_own(self._target), attend, rows, layers)
        drafter = None
        if speculates:
            scratch = batch * aligned(tree.most_drafts * tree.depth)
            cached = CachedModel(_own(self._draft), attend, rows + scratch, layers)
            network = ModelNetwork(cached, _CACHE.chunk_size, subject.chunk)
            visible = _CACHE.top_k_chunks * _CACHE.chunk_size
            drafter = _NotingDrafter(network, tree, "dense", visible, batch, graphs)
            drafter.trees = trees
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
        engine.decode_share = 0.0  # joins must not depend on time
        return {done.request_id: done for done in engine.generate(requests)}


class _NotingDrafter(CausalDrafter):
    """A drafter that counts the trees it proposes."""

    trees: Trees | None

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Grow trees, and count them."""
        proposed = super().propose(slots, num_drafts)
        if self.trees is not None:
            self.trees.update(
                tuple(tuple(node[:3]) for node in nodes) for nodes in proposed.nodes()
            )
        return proposed


class TokenNumbers:
    """A tokenizer that names tokens by number."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: bool) -> str:
        """Join the numbers by spaces."""
        return " ".join(map(str, token_ids))


def _own(model: Any) -> Any:
    """Copy a model, sharing weights, so that the engine may replace its layers."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})

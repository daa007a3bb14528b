"""A transformers causal LM that runs with its own layers: only attention and its cache are ours.

Transformers hands queries, keys and values, after norms and rotary embedding, to the attention
function that a config names. `attend` is ours: it asks the forward that runs now, which writes the
keys and values to our cache and attends as its plan says. Begin with `StockDecoder.run`.

Shapes: `B` sequences, `T` new rows of each, `C` hidden size, `V` vocabulary, `H` query heads, `K`
key heads, `R` cache rows, `D` head size.
"""

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from specextend.attention.plain import attend_reference
from specextend.attention.plan import Attend, AttentionPlan, attend_plan
from specextend.decoding.cache import KVCache

ATTENTION = "specextend"
"""Name of our attention function in transformers."""
_IRRELEVANT = {"dropout", "position_ids", "use_cache", "output_attentions"}
"""Keywords of attention without a meaning here: nothing is trained, and the cache is ours."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of one layer of a model."""

    num_kv_heads: int = 0
    """Heads of keys and values; 0 for a layer without attention."""
    head_dim: int = 0
    """Size of a key, or of a value if that is wider."""
    window: int | None = None
    """Tokens that a token sees at most, itself included; None: all before it."""
    scale: float = 1.0
    """Factor on the products of queries and keys."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the heads and their size, as `KVCache` takes them."""
        return self.num_kv_heads, self.head_dim

    @property
    def numbers(self) -> int:
        """Return how many numbers the keys and values of one token are."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function by a layer."""

    layer: int
    query: Tensor
    """[B, H, T, D]"""
    key: Tensor
    """[B, K, T, D]"""
    value: Tensor
    """[B, K, T, D], maybe of another size."""
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """Scores [H] of a key without a value."""


_running: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("forward")
"""The forward that runs in this thread: it returns the mean of values [B, T, H, D]."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer of transformers.

    Raises:
        ValueError: The layer asks for something that is not served.
    """
    others["attention_mask"] = attention_mask
    unknown = {name for name, each in others.items() if each is not None} - _IRRELEVANT
    if unknown:
        raise ValueError(f"its attention has {min(unknown)}, which is not served")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux)
    return _running.get()(call), None


@dataclass(frozen=True, slots=True)
class StockForward:
    """One forward: writes the new rows of each layer, then attends."""

    attend: Attend
    plan: AttentionPlan
    cache: KVCache
    rows: Tensor
    """Cache rows [B * T] of the new tokens."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the mean of values [B, T, H, D]."""
        keys, values = self.cache.layers[call.layer]
        for new, place in ((call.key, keys), (call.value, values)):
            wide = pad(new, (0, place.shape[-1] - new.shape[-1]))
            place.index_copy_(1, self.rows, wide.transpose(0, 1).flatten(1, 2))
        query = call.query.transpose(1, 2).contiguous()
        if call.layer in self.plan.keep_layers:
            self.plan.queries[call.layer] = query
        kernel = self.attend
        if call.softcap is not None:
            kernel = partial(attend_reference, softcap=call.softcap)
        how = call.scale, call.window, call.sinks
        mixed = attend_plan(kernel, query, keys, values, self.plan, *how)
        return mixed[..., : call.value.shape[-1]]


class StockDecoder:
    """The layers of a causal LM, and its own head."""

    def __init__(self, model: Any, attend: Attend, cache: KVCache):
        """Take the model, whose attention is replaced, and a cache for its layers."""
        _name_attention(model)
        self._attend = attend
        self._cache = cache
        self._decoder = _decoder_of(model)
        self._head = _without(self._decoder, model)

    def run(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, wanted: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run token_ids [B, T] at positions [B, T], and write their rows.

        Returns:
            Hidden [B, T, C] after the final norm, and the outputs [B, T, C] of `wanted` layers.
        """
        rows = plan.new_rows(token_ids.device).flatten()
        forward = StockForward(self._attend, plan, self._cache, rows)
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            for layer in wanted:
                keep = partial(_keep_output, outputs)
                hook = self._decoder.layers[layer].register_forward_hook(keep)
                stack.callback(hook.remove)
            stack.callback(_running.reset, _running.set(forward))
            hidden: Tensor = _run(self._decoder, token_ids, positions)
        return hidden, outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's own logits [..., V] of hidden [..., C], scaled and capped as it
        does.
        """
        logits: Tensor = self._head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1])).logits
        return logits.view(*hidden.shape[:-1], -1)


def attention_layers(model: Any) -> list[AttentionLayer]:
    """Return the attention of each layer of a causal LM, as one token on `meta` shows it.

    Raises:
        ValueError: A layer asks for something that is not served.
    """
    config = deepcopy(model.config)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "batched_mm"  # which asks for no values
    with torch.device("meta"), torch.inference_mode():
        shown = type(model)(config).eval()
        _name_attention(shown)
        found = [AttentionLayer()] * config.get_text_config().num_hidden_layers

        def show(call: AttentionCall) -> Tensor:
            head_dim = max(call.key.shape[-1], call.value.shape[-1])
            found[call.layer] = AttentionLayer(call.key.shape[1], head_dim, call.window, call.scale)
            return call.query.transpose(1, 2)[..., : call.value.shape[-1]]

        token = _running.set(show)
        try:
            _run(_decoder_of(shown), *torch.zeros(2, 1, 1, dtype=torch.int64))
        finally:
            _running.reset(token)
    return found


def _name_attention(model: Any) -> None:
    """Let the layers of a model call `attend`."""
    from transformers import AttentionInterface  # by a process that has a model

    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def _run(decoder: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Return hidden [B, T, C]."""
    hidden: Tensor = decoder(
        input_ids=token_ids, position_ids=positions, use_cache=False
    ).last_hidden_state
    return hidden


def _keep_output(outputs: list[Tensor], _module: Any, _inputs: Any, output: Any) -> None:
    outputs.append(output[0] if isinstance(output, tuple) else output)


def _decoder_of(model: Any) -> Any:
    """Return the layers of a causal LM with its embedding and last norm."""
    found = model.get_decoder()
    return model.model if found is model else found


def _without(decoder: Any, model: Any) -> Any:
    """Return a model that computes logits from `inputs_embeds` as if they were its decoder's
    output. It shares the weights.
    """
    head = copy(model)
    children = model.named_children()
    [place] = [name for name, child in children if any(each is decoder for each in child.modules())]
    vars(head)["_modules"] = vars(model)["_modules"] | {place: _Given()}
    return head


class _Given(nn.Module):
    """A decoder that returns the hidden states it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        """Return them as transformers' decoders do."""
        return _Output(inputs_embeds)


class _Output(NamedTuple):
    """The output of a decoder; what a family adds to it is None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None

"""A causal LM on the layers of transformers, with our attention and cache.

The layers call `attend` with queries, keys and values after norms and rotary embedding. It hands
them to the current forward, which writes them to our cache and attends by its plan. Begin with
`StockDecoder.run`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import pad

from specextend.attention.plain import attend_reference
from specextend.attention.plan import Attend, AttentionPlan, KeySpan, attend_plan
from specextend.decoding.cache import KVCache
from specextend.decoding.recurrent import RecurrentLayer

ATTENTION = "specextend"
"""Name of our attention function in transformers."""
_IRRELEVANT = {"dropout", "position_ids", "use_cache", "output_attentions"}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of a layer."""

    num_kv_heads: int = 0
    """0 for a layer without attention."""
    head_dim: int = 0
    """Size of a key, or of a wider value."""
    window: int | None = None
    """Most visible tokens, itself included; None: all."""
    scale: float = 1.0
    has_softcap: bool = False
    """Whether scores have a limit, computed in plain torch."""
    recurrent: str = ""
    """Module with a recurrent state, if any."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent state, in float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """Key heads and head size for `KVCache`."""
        return self.num_kv_heads, self.head_dim

    @property
    def numbers(self) -> int:
        """Numbers in the keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of the attention function by a layer."""

    layer: int
    query: Tensor
    """[B, H, T, D]"""
    key: Tensor
    """[B, K, T, D]"""
    value: Tensor
    """[B, K, T, D], possibly with another D."""
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    """Scores [H] of a key without a value."""


_running: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("forward")
"""The current forward of this thread; it returns [B, T, H, D]."""


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
        ValueError: The layer passes an unknown keyword.
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
    """A forward, which writes the new rows of each layer and attends."""

    attend: Attend
    plan: AttentionPlan
    cache: KVCache
    rows: Tensor
    """Cache rows [B * T] of the new tokens."""
    recent_rows: Tensor
    """Rows [B * T] in layers with a window."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Return the mean of values [B, T, H, D]."""
        keys, values = self.cache.layers[call.layer]
        rows = self.rows if call.window is None else self.recent_rows
        for new, place in ((call.key, keys), (call.value, values)):
            if missing := place.shape[-1] - new.shape[-1]:
                new = pad(new, (0, missing))
            place.index_copy_(1, rows, new.transpose(0, 1).flatten(1, 2))
        query = call.query.transpose(1, 2).contiguous()
        if call.layer in self.plan.keep_layers:
            self.plan.queries[call.layer] = query
        kernel = self.attend
        if call.softcap is not None:
            kernel = partial(_attend_capped, call.softcap)
        how = call.scale, call.window, call.sinks
        mixed = attend_plan(kernel, query, keys, values, self.plan, *how)
        return mixed[..., : call.value.shape[-1]]


def _attend_capped(
    softcap: float, q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend head by head, since scores take much memory."""
    heads = zip(q.chunk(len(k), 2), k.split(1), v.split(1), strict=True)
    results = [attend_reference(*head, span, scale, softcap) for head in heads]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


class StockDecoder:
    """The layers and the head of a causal LM."""

    def __init__(
        self, model: Any, layers: Sequence[AttentionLayer], attend: Attend, cache: KVCache
    ):
        """Replace the model's attention and recurrent layers."""
        _name_attention(model)
        honor_time_steps(model)
        self._attend = attend
        self._cache = cache
        self._decoder = decoder_of(model)
        self._head = _without(self._decoder, model)
        self._states: Any = None
        self.recurrent: list[RecurrentLayer] = []
        if any(layer.recurrent for layer in layers):
            self._states = _new_states(model.config)
        for index, layer in enumerate(layers):
            if layer.recurrent:
                stock = self._decoder.get_submodule(layer.recurrent)
                kept = RecurrentLayer(stock, self._states.layers[index], _current_plan)
                self._decoder.set_submodule(layer.recurrent, kept)
                self.recurrent.append(kept)

    def run(
        self, inputs: Tensor, positions: Tensor, plan: AttentionPlan, wanted: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run tokens [B, T], or embeddings [B, T, C], at positions [B, T], and write their rows.

        Return hidden [B, T, C] after the final norm, and outputs [B, T, C] of the `wanted` layers.
        """
        rows = recent_rows = plan.new_rows(inputs.device)
        if (recent := self._cache.recent) is not None:
            recent.locate(plan, rows.device)
            recent_rows = rows + recent.shift
        forward = StockForward(
            self._attend, plan, self._cache, rows.flatten(), recent_rows.flatten()
        )
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            for layer in wanted:
                keep = partial(_keep_output, outputs)
                hook = self._decoder.layers[layer].register_forward_hook(keep)
                stack.callback(hook.remove)
            stack.callback(_running.reset, _running.set(forward))
            hidden: Tensor = _run(self._decoder, inputs, positions, self._states)
        return hidden, outputs

    def project(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Return keys and values [2, 1, n, K, D] of the first layer for embeddings [n, C] at
        positions [n].

        They are as wide as in the cache, and no row is written.
        """
        found: list[Tensor] = []

        def keep(call: AttentionCall) -> Tensor:
            width = self._cache.layers[call.layer].shape[-1]
            both = (pad(each, (0, width - each.shape[-1])) for each in (call.key, call.value))
            found.append(torch.stack([each.transpose(1, 2) for each in both]))
            return call.query.transpose(1, 2)[..., : call.value.shape[-1]]

        token = _running.set(keep)
        try:
            _run(self._decoder, embedded[None], positions[None], None)
        finally:
            _running.reset(token)
        return found[0]

    def take_over(self, start: int, num_tokens: int) -> int:
        """Begin a sequence, see `CachedModel.take_over`."""
        starts = self._cache.rows.starts
        kept = [layer.take_over(start, num_tokens, starts) for layer in self.recurrent]
        num_kept = min(kept, default=num_tokens)
        return num_kept if self._cache.recent is None else self._cache.recent.begin(start, num_kept)

    def assume_read(self, starts: Sequence[int], num_tokens: int) -> None:
        """Count tokens as read, see `CachedModel.assume_read`."""
        if self._cache.recent is not None:
            self._cache.recent.assume(starts, num_tokens)
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=self._cache.layers[0].device)
        for start in starts if self.recurrent else ():
            self.run(zeros, zeros, AttentionPlan([start], [1], 1, decided=True), ())
            for layer in self.recurrent:
                layer.assume(start, num_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden [..., C] with the model's scale and cap."""
        logits: Tensor = self._head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1])).logits
        return logits.view(*hidden.shape[:-1], -1)


def attention_layers(model: Any) -> list[AttentionLayer]:
    """Return the attention of each layer of a causal LM, found with a token on `meta`.

    Raises:
        ValueError: A layer is not served.
    """
    config = deepcopy(model.config)
    for each in (config, config.get_text_config()):
        each._experts_implementation = "batched_mm"  # the others read values
    with torch.device("meta"), torch.inference_mode():
        shown = type(model)(config).eval()
        _name_attention(shown)
        decoder = decoder_of(shown)
        if decoder.config._attn_implementation != ATTENTION:
            raise ValueError("its layers do not call transformers' attention interface")
        found = [AttentionLayer()] * config.get_text_config().num_hidden_layers

        def show(call: AttentionCall) -> Tensor:
            head_dim = max(call.key.shape[-1], call.value.shape[-1])
            has_cap = call.softcap is not None
            found[call.layer] = AttentionLayer(
                call.key.shape[1], head_dim, call.window, call.scale, has_cap
            )
            return call.query.transpose(1, 2)[..., : call.value.shape[-1]]

        token = _running.set(show)
        Distribution.set_default_validate_args(False)  # Gemma 3n makes one on `meta`
        try:
            modules = _modules_with_states(config, decoder)
        finally:
            Distribution.set_default_validate_args(__debug__)
            _running.reset(token)
    for layer, (name, num_bytes) in modules.items():
        found[layer] = replace(found[layer], recurrent=name, state_bytes=num_bytes)
    return found


def _modules_with_states(config: Any, decoder: Any) -> dict[int, tuple[str, int]]:
    states = _new_states(config)
    if not any(hasattr(layer, "conv_states") for layer in states.layers):
        states = None
    running: list[str] = []
    found: dict[int, tuple[str, int]] = {}

    def note(layer: Any, update: Callable[..., Tensor], *args: Any, **others: Any) -> Tensor:
        updated = update(*args, **others)
        kept = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        num_bytes = sum(each.nbytes for each in kept if each is not None)
        found[states.layers.index(layer)] = running[-1], num_bytes
        return updated

    for layer in states.layers if states else ():
        for name in ("update_conv_state", "update_recurrent_state"):
            if update := getattr(layer, name, None):
                setattr(layer, name, partial(note, layer, update))
    for name, module in decoder.named_modules():
        if hasattr(module, "layer_idx"):
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(lambda *_: running.pop() and None)
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    _run(decoder, zeros, zeros, states)
    return found


def honor_time_steps(model: Any) -> None:
    """Apply the config's limits of time steps, which Nemotron H's layers ignore."""
    limits = getattr(model.config.get_text_config(), "time_step_limit", None)
    for module in model.modules():
        if limits and hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(limits)


def _new_states(config: Any) -> Any:
    """Make a cache of transformers for recurrent states only."""
    from transformers import DynamicCache

    class States(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            return key_states, value_states

    return States(config=config)


def _current_plan() -> AttentionPlan:
    forward = _running.get()
    assert isinstance(forward, StockForward)
    return forward.plan


def _name_attention(model: Any) -> None:
    from transformers import AttentionInterface  # by a process that has a model

    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def _run(decoder: Any, inputs: Tensor, positions: Tensor, states: Any) -> Tensor:
    given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
    hidden: Tensor = decoder(
        **given,
        position_ids=positions,
        past_key_values=states,
        use_cache=states is not None,
    ).last_hidden_state
    return hidden


def _keep_output(outputs: list[Tensor], _module: Any, _inputs: Any, output: Any) -> None:
    outputs.append(output[0] if isinstance(output, tuple) else output)


def decoder_of(model: Any) -> Any:
    """Return the embedding, layers and final norm of a causal LM."""
    found = model.get_decoder()
    return model.model if found in (model, model.get_output_embeddings()) else found


def _without(decoder: Any, model: Any) -> Any:
    head = copy(model)
    children = model.named_children()
    [place] = [name for name, child in children if any(each is decoder for each in child.modules())]
    vars(head)["_modules"] = vars(model)["_modules"] | {place: _Given(decoder)}
    return head


class _Given(nn.Module):
    def __init__(self, decoder: Any):
        """Take the settings of a decoder, because a head may read them."""
        super().__init__()
        settings = {name: each for name, each in vars(decoder).items() if name[0] != "_"}
        vars(self).update(settings, decoder=self)  # for OPT's head

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output(NamedTuple):
    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None

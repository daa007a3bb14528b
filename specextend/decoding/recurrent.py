"""Layers with a recurrent state (gated delta rule, Mamba 2, short convolution) under drafts.

A recurrent state cannot forget a token. So a layer keeps its inputs for undecided tokens, and its
state before them. In the next step it reads the decided inputs again before the new inputs. A state
has a single past, so drafts are chains. Begin with `RecurrentLayer.forward`.

More shapes: `n` pending tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specextend.attention.plan import AttentionPlan

State = dict[str, dict[int, Any]]
"""Fields of a layer in transformers' cache: tensors [B, ...] and flags; empty at the start."""
MOST_PENDING = 16
"""Most decided tokens without a state: a state takes another reading of the weights."""
MOST_KEPT = 4
"""States kept of the last prompt's chunks, for a prompt with the same start."""
_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


@dataclass(slots=True)
class Past:
    """The past of a sequence in a layer."""

    length: int
    """Tokens in the state."""
    state: State
    inputs: Tensor
    """Inputs [n, C] of later tokens, drafts included."""
    next_state: State | None = None
    """State if all inputs are decided; None if unknown."""


class RecurrentLayer(nn.Module):
    """A layer of transformers with a recurrent state, for batches."""

    def __init__(self, layer: Any, cached: Any, plan: Callable[[], AttentionPlan]):
        """Take a layer of the model.

        Args:
            layer: Maps inputs [B, T, C] (first argument, or `hidden_states`) to outputs, perhaps in
                a tuple.
            cached: Layer of the model's cache.
            plan: Returns the plan of the current forward.
        """
        super().__init__()
        self._layer = layer
        self._cached = cached
        self._empty: State = {name: dict(getattr(cached, name)) for name in _FIELDS}
        self._plan = plan
        self._pasts: dict[int, Past] = {}
        """Pasts by first cache row."""
        self._last_prompt: list[Past] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on pending inputs, then new inputs [B, T, C]."""
        is_named = "hidden_states" in kwargs
        new: Tensor = kwargs["hidden_states"] if is_named else args[0]

        def run(inputs: Tensor) -> Any:
            if is_named:
                return self._layer(*args, **{**kwargs, "hidden_states": inputs})
            return self._layer(inputs, *args[1:], **kwargs)

        plan = self._plan()
        pasts = [
            self._past_of(start, length - plan.num_new, new)
            for start, length in zip(plan.starts, plan.lengths, strict=True)
        ]
        for past in pasts:
            if len(past.inputs) > (0 if plan.decided else MOST_PENDING):
                self._put([past.state])
                run(past.inputs.unsqueeze(0))
                self._keep(past, len(past.inputs), self._state_of(0))
        rows = [torch.cat([past.inputs, each]) for past, each in zip(pasts, new, strict=True)]
        self._put([past.state for past in pasts])
        result = run(pad_sequence(rows, batch_first=True))
        is_tuple = isinstance(result, tuple)
        found: Tensor = result[0] if is_tuple else result
        ends = [(each, len(row)) for each, row in zip(found, rows, strict=True)]
        outputs = torch.stack([each[end - plan.num_new : end] for each, end in ends])
        if plan.decided:
            [past] = pasts
            self._keep(past, plan.num_new, self._state_of(0))
            self._last_prompt = [*self._last_prompt, replace(past)][-MOST_KEPT:]
        else:
            longest = max(map(len, rows))
            for b, (past, row) in enumerate(zip(pasts, rows, strict=True)):
                past.inputs = row
                past.next_state = self._state_of(b) if len(row) == longest else None
        return (outputs, *result[1:]) if is_tuple else outputs

    def take_over(self, start: int, num_tokens: int, starts: Collection[int]) -> int:
        """Begin a sequence with a state of the last prompt; return its tokens, or 0.

        Args:
            start: First cache row of the sequence.
            num_tokens: Tokens in common with the last prompt.
            starts: First rows of all sequences; other pasts are dropped.
        """
        self._pasts = {row: past for row, past in self._pasts.items() if row in starts}
        self._last_prompt = [past for past in self._last_prompt if past.length <= num_tokens]
        if not self._last_prompt:
            return 0
        self._pasts[start] = replace(self._last_prompt[-1])
        return self._last_prompt[-1].length

    def assume(self, start: int, num_tokens: int) -> None:
        """Count tokens as read, see `CachedModel.assume_read`."""
        self._pasts[start].length = num_tokens

    def _past_of(self, start: int, num_decided: int, new: Tensor) -> Past:
        if num_decided == 0:
            self._pasts[start] = Past(0, self._empty, new.new_empty(0, new.shape[2]))
        past = self._pasts[start]
        num_pending = num_decided - past.length
        assert 0 <= num_pending <= len(past.inputs), "a recurrent layer missed tokens"
        if past.next_state is not None and num_pending == len(past.inputs):
            self._keep(past, num_pending, _changed(past.next_state, Tensor.clone))
        past.inputs = past.inputs[: num_decided - past.length]
        return past

    @staticmethod
    def _keep(past: Past, num_tokens: int, state: State) -> None:
        past.state = state
        past.length += num_tokens
        past.inputs = past.inputs[:0]
        past.next_state = None

    def _state_of(self, b: int) -> State:
        fields = {name: getattr(self._cached, name) for name in _FIELDS}
        return _changed(fields, lambda tensor: tensor[b : b + 1])

    def _put(self, states: Sequence[State]) -> None:
        """Copy states to the cache as a batch. An empty state becomes zeros."""
        for name in _FIELDS:
            columns = [state[name] for state in states]
            known = max(columns, key=_is_known)
            setattr(self._cached, name, {n: _batch(columns, n, known[n]) for n in known})


def _changed(state: State, change: Callable[[Tensor], Tensor]) -> State:
    return {
        name: {n: change(v) if isinstance(v, Tensor) else v for n, v in field.items()}
        for name, field in state.items()
    }


def _is_known(column: dict[int, Any]) -> bool:
    return any(value is not None and value is not False for value in column.values())


def _batch(columns: Sequence[dict[int, Any]], number: int, known: Any) -> Any:
    if not isinstance(known, Tensor):
        return known
    tensors = (column[number] for column in columns)
    return torch.cat([torch.zeros_like(known) if each is None else each for each in tensors])

"""The kernels that a card takes if they are right there, and what a proof of them is about, as
values that go from one process to another.

The table is known from what others measured, which `docs/dev/log.md` cites: a start times nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from specextend.attention.backends import load_backend, load_layer_kernels
from specextend.attention.plain import MAX_QUERIES, LayerKernels
from specextend.attention.plan import Attend, KeySpan
from specextend.decoding.device import AMPERE
from specextend.decoding.quantized import Scheme


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a worker, by name. As they stand here they are torch's own, which need no
    proof.

    A kernel that has no name is called by its place, `module:object`.
    """

    prompts: str = "sdpa"
    """The backend of causal chunks of more than `MAX_QUERIES` tokens."""
    steps: str = "sdpa"
    """The backend of trees, of single tokens, and of what a draft reads after a step."""
    layers: str = "sdpa"
    """The backend whose `LayerKernels` are used."""
    graphs: bool = False
    """Whether steps are captured and replayed."""

    def attend(self, device: torch.device) -> Attend:
        """Return the backend. Raises ValueError if it does not run on the device."""
        prompts: Attend
        steps: Attend
        prompts, steps = (_named(each, load_backend, device) for each in (self.prompts, self.steps))
        if self.prompts == self.steps:
            return steps

        def chosen(
            q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float
        ) -> tuple[Tensor, Tensor]:
            return (prompts if span.causal and q.shape[1] > MAX_QUERIES else steps)(
                q, k, v, span, scale
            )

        chosen.__name__ = f"{self.prompts} {self.steps}"  # step costs are kept for each
        return chosen

    def of_layers(self, device: torch.device) -> LayerKernels:
        """Return what computes between a layer's products. Raises ValueError if it does not run on
        the device.
        """
        found: LayerKernels = _named(self.layers, load_layer_kernels, device)
        return found


def _named(name: str, load: Callable[[str, torch.device], Any], device: torch.device) -> Any:
    return resolve_name(name) if ":" in name else load(name, device)


_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel that takes the place of torch's own."""

    name: str
    field: Literal["prompts", "steps", "layers", "graphs"]
    """Of `Kernels`."""
    value: str | bool

    def among(self, kernels: Kernels) -> Kernels:
        """Return `kernels` with this one in its place."""
        change: dict[str, Any] = {self.field: self.value}
        return replace(kernels, **change)


TREES = Candidate(name="Triton for trees", field="steps", value="triton")
LAYERS = Candidate(name="Triton for layers", field="layers", value="triton")
FLASH = Candidate(name="flash-attn for prompts", field="prompts", value="flash")
CUDNN = Candidate(name="cuDNN for prompts", field="prompts", value="cudnn")
GRAPHS = Candidate(name="captured steps", field="graphs", value=True)


def candidates_for(capability: tuple[int, int] | None) -> tuple[Candidate, ...]:
    """Return the candidates of a compute capability, in the order of their proof; captured steps
    come last, since they run all others.
    """
    if capability is None or capability < AMPERE:
        return ()
    return (TREES, LAYERS, FLASH if capability < _HOPPER else CUDNN, GRAPHS)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The shape of a model's layers."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    has_norms: bool = False
    """Whether queries and keys are normalised before RoPE."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Names what kernels are proven for, in JSON values.

    Nothing in it depends on documents, a batch or the room for a cache, so that one proof holds for
    every run of a pair.
    """

    device: str
    dtype: str
    """As torch calls it, such as `bfloat16`."""
    layers: tuple[LayerShape, ...]
    """Of the target, then of its draft if that has another shape."""
    num_nodes: int
    """Draft tokens of a tree, at most."""
    depth: int
    chunk: int
    """Tokens of a forward of a prompt."""
    quantize: Scheme | None = None
    """How the target's weights are stored."""

    def __post_init__(self) -> None:
        """Take shapes as they come from JSON."""
        shapes = (
            each if isinstance(each, LayerShape) else LayerShape(**each) for each in self.layers
        )
        object.__setattr__(self, "layers", tuple(shapes))

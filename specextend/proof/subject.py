"""The candidate kernels of a card, and the subject of their proof, as values that pass between
processes.

The table rests on the measurements in `docs/dev/log.md`: a start times nothing.
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
    """The kernels of a worker by name, or by place as `module:object`.

    The defaults are torch's, which need no proof.
    """

    prompts: str = "sdpa"
    """Backend of causal chunks of more than `MAX_QUERIES` tokens."""
    steps: str = "sdpa"
    """Backend of trees, single tokens, and a draft's reading after a step."""
    layers: str = "sdpa"
    graphs: bool = False

    def attend(self, device: torch.device) -> Attend:
        """Return the attention backend. Raises ValueError if it cannot run on the device."""
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
        """Return the kernels of layers. Raises ValueError if they cannot run on the device."""
        found: LayerKernels = _named(self.layers, load_layer_kernels, device)
        return found


def _named(name: str, load: Callable[[str, torch.device], Any], device: torch.device) -> Any:
    return resolve_name(name) if ":" in name else load(name, device)


_HOPPER = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel that may replace torch's."""

    name: str
    field: Literal["prompts", "steps", "layers", "graphs"]
    value: str | bool

    def among(self, kernels: Kernels) -> Kernels:
        """Return `kernels` with this kernel in its field."""
        change: dict[str, Any] = {self.field: self.value}
        return replace(kernels, **change)


TREES = Candidate(name="Triton for trees", field="steps", value="triton")
LAYERS = Candidate(name="Triton for layers", field="layers", value="triton")
FLASH = Candidate(name="flash-attn for prompts", field="prompts", value="flash")
CUDNN = Candidate(name="cuDNN for prompts", field="prompts", value="cudnn")
GRAPHS = Candidate(name="captured steps", field="graphs", value=True)


def candidates_for(capability: tuple[int, int] | None) -> tuple[Candidate, ...]:
    """Return the candidates of a compute capability; captured steps run all others and come
    last.
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
    """The conditions of a proof, as JSON values.

    They leave out documents, batches and cache size, so a proof holds for every run of a pair.
    """

    device: str
    dtype: str
    """Name in torch, such as `bfloat16`."""
    layers: tuple[LayerShape, ...]
    """Shapes of the target's layers, and of the draft's if different."""
    num_drafts: int
    """Most draft tokens of a tree."""
    depth: int
    chunk: int
    """Tokens of a prompt's forward."""
    quantize: Scheme | None = None

    def __post_init__(self) -> None:
        shapes = (
            each if isinstance(each, LayerShape) else LayerShape(**each) for each in self.layers
        )
        object.__setattr__(self, "layers", tuple(shapes))

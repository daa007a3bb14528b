"""What a proof is about, and the kernels that it chooses from, as values that go from one process
to another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from specextend.attention.backends import load_backend, load_layer_kernels
from specextend.attention.plain import MAX_QUERIES, LayerKernels
from specextend.attention.plan import Attend, KeySpan
from specextend.core import ReadOnly
from specextend.decoding.model import head_size
from specextend.decoding.quantized import Scheme
from specextend.proof.trials import Heads


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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The shapes that kernels are proven for; all of them are JSON values."""

    device: str
    dtype: str
    """As torch calls it, such as `bfloat16`."""
    model: ReadOnly
    """The target's config, as transformers writes it."""
    num_nodes: int
    """Draft tokens of a tree, at most."""
    depth: int
    batch: int
    longest: int
    """Tokens of the longest request."""
    num_rows: int
    """Rows of the target's cache."""
    chunk: int
    """Tokens of a forward of a prompt."""
    quantize: Scheme | None = None
    """What becomes of the weights of the target's layers, with which forwards are timed."""

    def heads(self) -> Heads:
        """Return what the calls of attention have in common."""
        config = self.config()
        return Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size(config),
            getattr(torch, self.dtype),
            torch.device(self.device),
        )

    def config(self, **changes: Any) -> Any:
        """Return the target's config, with changes."""
        from transformers import AutoConfig  # by a process that proves nothing

        values = dict(self.model) | changes
        return AutoConfig.for_model(values.pop("model_type"), **values)

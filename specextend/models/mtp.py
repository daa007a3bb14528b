"""The draft inside a checkpoint (multi-token prediction, MTP), under each family's names.

The layer joins the embedding of a token with the target's hidden state before it, runs a decoder
layer of the target's class, and uses the target's LM head. Begin with `split_mtp`.

| | Qwen3.5, Qwen3-Next | GLM-4.x, DeepSeek-V3 with N layers |
|---|---|---|
| decoder layer | `mtp.layers.0.` | `model.layers.N.` |
| join of embedding and state, in this order | `mtp.fc` | `eh_proj` |
| norms of embedding and state | `mtp.pre_fc_norm_embedding`, `..._hidden` | `enorm`, `hnorm` |
| norm of the output | `mtp.norm` | `shared_head.norm` |

The state is the target's after its final norm, or the layer's output after its norm.
"""

from collections.abc import Mapping
from typing import NamedTuple

from specextend.models.checkpoints import Weight
from specextend.models.model_files import ModelError

JOINING = ("join", "embedding_norm", "hidden_norm")
"""Modules before the decoder layer."""
_LAYER = "model.layers.0."
_NORM = "model.norm.weight"


class _Layout(NamedTuple):
    prefix: str
    """Begins every name."""
    layer: str
    join: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    copies: tuple[str, ...] = ()
    """Of the target's embedding and LM head, which are used instead."""


def _layouts(num_layers: int) -> tuple[_Layout, ...]:
    last = f"model.layers.{num_layers}."
    return (
        _Layout(
            "mtp.",
            "mtp.layers.0.",
            "mtp.fc.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.norm.weight",
        ),
        _Layout(
            last,
            last,
            f"{last}eh_proj.weight",
            f"{last}enorm.weight",
            f"{last}hnorm.weight",
            f"{last}shared_head.norm.weight",
            (f"{last}embed_tokens.weight", f"{last}shared_head.head.weight"),
        ),
    )


def split_mtp(
    weights: Mapping[str, Weight], num_layers: int
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Split weights into the target's and those of its MTP layer, which may be missing.

    The MTP layer has JOINING and a model of one layer; names of no known layer stay as they are.
    """
    for layout in _layouts(num_layers):
        if layout.join in weights:
            own = {name: each for name, each in weights.items() if name.startswith(layout.prefix)}
            rest = {name: each for name, each in weights.items() if name not in own}
            return rest, {
                _renamed(name, layout): each
                for name, each in own.items()
                if name not in layout.copies
            }
    return dict(weights), {}


def _renamed(name: str, layout: _Layout) -> str:
    ours = {getattr(layout, each): f"{each}.weight" for each in JOINING} | {layout.norm: _NORM}
    if name in ours:
        return ours[name]
    return name.replace(layout.layer, _LAYER, 1) if name.startswith(layout.layer) else name


def check_names(found: Mapping[str, Weight], model: str) -> None:
    """Check the names of a split MTP layer. Raises ModelError."""
    if not found:
        raise ModelError(
            f"{model} has no layer for draft.kind mtp (mtp.fc.weight or eh_proj.weight); take "
            "another draft"
        )
    required = {_NORM, *(f"{name}.weight" for name in JOINING)}
    if missing := required - found.keys():
        raise ModelError(f"{model} lacks {min(missing)} of its MTP layer; fetch it again")
    if odd := [n for n in found if n not in required and not n.startswith(_LAYER)]:
        raise ModelError(
            f"{model} has the tensor {min(odd)}, which no known MTP layer has; take another draft"
        )

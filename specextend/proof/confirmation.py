"""The last check, on the loaded target itself: a prompt and a step after it, in plain torch and
with chosen kernels.

Shapes: `P` positions that are compared, `V` vocabulary.
"""

import torch
from torch import Tensor

from specextend.attention.plain import attend_reference
from specextend.attention.plan import AttentionPlan
from specextend.attention.torch_kernels import TORCH
from specextend.decoding.device import Graphs
from specextend.decoding.measurements import make_step
from specextend.decoding.model import CachedModel

_NUM_TOKENS = 2048
_CHUNK = 512
_POSITIONS = 64
"""P, those of the step."""
_MOST_NOISE = 0.2
"""How far logits may be away from the reference's, root mean square, in standard deviations of
those.
"""
_NEARLY_TIED = 0.5
"""By how many standard deviations the reference may prefer its own first choice to another one."""


@torch.inference_mode()
def what_is_wrong_in_logits(target: CachedModel, graphs: Graphs) -> str:
    """Read random tokens with the target's kernels and in plain torch; return what differs too
    much.

    The last ones are read in a step, again and again, so that `graphs` replay it. It writes to the
    front of the cache, so no request may be running.
    """
    num_tokens = min(_NUM_TOKENS, target.cache.rows.num_free)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(target.config.vocab_size, (num_tokens,), generator=generator).to(
        target.device
    )
    found = _read(target, token_ids, graphs)
    chosen = target.attend, target.kernels
    target.attend = attend_reference
    target.kernels = TORCH
    try:
        expected = _read(target, token_ids, Graphs())
    finally:
        target.attend, target.kernels = chosen
    return compare_logits(found, expected)


def _read(target: CachedModel, token_ids: Tensor, graphs: Graphs) -> Tensor:
    """Return the logits [P, V] in fp32 of the last tokens, a chain of nodes behind all others."""
    length = len(token_ids)
    positions = torch.arange(length, device=target.device).unsqueeze(0)
    for first in range(0, length - _POSITIONS, _CHUNK):
        end = min(first + _CHUNK, length - _POSITIONS)
        plan = AttentionPlan([0], [end], end - first)
        target.forward(token_ids[None, first:end], positions[:, first:end], plan)

    step = make_step(target, "dense", 1, _POSITIONS, length - _POSITIONS, graphs)
    for _ in range(graphs.num_warm_ups + 1):
        logits = step(token_ids[None, -_POSITIONS:])
    return logits[0].float()


def compare_logits(found: Tensor, expected: Tensor) -> str:
    """Say what is wrong with logits [P, V], or return an empty text."""
    spread = expected.std(-1, keepdim=True)
    noise = float(((found - expected) / spread).square().mean().sqrt())
    if not noise <= _MOST_NOISE:  # NaN is not
        return f"logits differ by {noise:.2g} standard deviations"
    chosen = expected.gather(-1, found.argmax(-1, keepdim=True))
    lead = float(((expected.amax(-1, keepdim=True) - chosen) / spread).max())
    if lead > _NEARLY_TIED:
        return f"a first choice differs that leads by {lead:.2g} standard deviations"
    return ""

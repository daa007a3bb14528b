"""Which tokens a draft proposes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def frequent_tokens(texts: Iterable[Sequence[int]], special: Sequence[int], size: int) -> Tensor:
    """[size] int64, ascending: the special ids and the most frequent others; a tie goes to the lower id.

    Raises ValueError where the texts have fewer different tokens.
    """
    counts: Counter[int] = Counter()
    for token_ids in texts:
        counts.update(token_ids)
    kept = sorted(set(special))
    others = sorted((token_id for token_id in counts if token_id not in set(kept)), key=lambda i: (-counts[i], i))
    if len(kept) + len(others) < size:
        raise ValueError(f"a vocabulary of {size} needs more text: it has {len(kept) + len(others)} different tokens")
    return torch.tensor(sorted([*kept, *others[: size - len(kept)]]))

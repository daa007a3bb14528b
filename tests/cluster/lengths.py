"""Documents of which a scheduler knows no more than how long they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specextend.cluster.estimates import Estimates, TokenEstimate
from specextend.core import DocumentKey


def of_length(lengths: Mapping[DocumentKey, int]) -> Estimates:
    """Documents by key."""
    return Estimates.of({key: TokenEstimate(length, 0) for key, length in lengths.items()})


def rows_of_length(lengths: Sequence[int]) -> Estimates:
    """The rows of a file."""
    return of_length({DocumentKey(0, row): length for row, length in enumerate(lengths)})

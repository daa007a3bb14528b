"""Documents of which a scheduler knows no more than how long they are."""

import numpy as np

from specextend.cluster.backlog import Estimates, TokenEstimate
from specextend.core import DocumentKey


def estimates_of(documents):
    """Columns of estimates by key."""
    keys = sorted(documents)
    found = [documents[key] for key in keys]
    columns = (
        [key.file for key in keys],
        [key.row for key in keys],
        [estimate.num_prompt_tokens for estimate in found],
        [estimate.max_new_tokens for estimate in found],
    )
    return Estimates(*(np.array(column, np.int64) for column in columns))


def of_length(lengths):
    """Documents by key."""
    return estimates_of({key: TokenEstimate(length, 0) for key, length in lengths.items()})


def rows_of_length(lengths):
    """The rows of a file."""
    return of_length({DocumentKey(0, row): length for row, length in enumerate(lengths)})

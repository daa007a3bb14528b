"""Recognise a data set of `specextend prepare`, and read its errors."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from specextend.data.storage import Location, read_bytes

PART_NAME = re.compile(r"part-\d{6,}-[0-9a-f]{8}\.parquet")
PAGE_STARTS = "page_starts"
PAGE_LABELS = "page_labels"
ERRORS = "_errors.jsonl"
"""File with a line for each `Failure`."""
LEFT_OUT = "left out"
GONE = "gone"
"""Reasons that are not failures: ignored by name, or deleted since."""


class Failure(NamedTuple):
    """A file, or a row of a file, that is missing in the data set."""

    path: str
    row: int | None
    reason: str
    """Two words for counting."""
    message: str


def is_data_set(names: Iterable[str]) -> bool:
    """Return True if all names belong to a data set."""
    return all(map(PART_NAME.fullmatch, names))


def read_errors(folder: Location) -> list[Failure]:
    """Read the errors of a data set; none for other folders."""
    lines = (read_bytes(folder.child(ERRORS)) or b"").decode().split("\n")
    return [Failure(**json.loads(line)) for line in filter(None, lines)]

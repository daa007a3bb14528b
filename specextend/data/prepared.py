"""How a run recognises a data set of `specextend prepare`, and reads which files it lacks."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from specextend.data.storage import Location, read_bytes

PART_NAME = re.compile(r"part-\d{6,}-[0-9a-f]{8}\.parquet")
ERRORS = "_errors.jsonl"
"""Name of the file in a data set that has a line for each file, or row of one, that is not in
it.
"""
LEFT_OUT = "left out"
GONE = "gone"
"""Reasons that are no failures: by its name a file is not wanted, or it is not found any more."""


class Failure(NamedTuple):
    """A file, or a row of one, that is not in the data set."""

    path: str
    row: int | None
    reason: str
    """Two words that are counted."""
    message: str


def id_column_of(names: Iterable[str]) -> str | None:
    """Return the id column of a data set, which the names of its files tell; None for any other
    files.
    """
    return "id" if all(map(PART_NAME.fullmatch, names)) else None


def read_errors(folder: Location) -> list[Failure]:
    """Return what a data set lacks; nothing of any other folder."""
    lines = (read_bytes(folder.child(ERRORS)) or b"").decode().split("\n")
    return [Failure(**json.loads(line)) for line in filter(None, lines)]

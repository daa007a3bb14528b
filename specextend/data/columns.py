"""Which columns of a Parquet file hold the text and the id: a guess with its reason, to begin a configuration with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from specextend.core import counted
from specextend.data.inputs import InputError, unreadable
from specextend.data.listing import list_input
from specextend.data.parquet import DAMAGED, is_text, open_parquet

SAMPLE_ROWS = 200
_ID_NAMES = re.compile(r"(^|_)(id|uuid|guid|key|doi|url|path|file|filename|name|number|no)$|Id$|ID$")


@dataclass(frozen=True, slots=True)
class Guess:
    """The columns of an input by their use, and why."""

    text: str
    why_text: str
    id: str | None
    why_id: str
    others: tuple[str, ...]


def guess_columns(path: str) -> Guess:
    """Look at the first rows of the first file. Raises InputError if there is none, or no column holds text."""
    listing = list_input(path)
    name = listing.relative_paths[0]
    try:
        parquet = open_parquet(listing.root.child(name))
        schema = parquet.schema_arrow
        flat = [field.name for field in schema if is_text(field.type) or pa.types.is_integer(field.type)]
        batch = next(parquet.iter_batches(batch_size=SAMPLE_ROWS, columns=flat), None)
    except DAMAGED as error:
        raise unreadable(name, error) from error
    values = {} if batch is None else batch.to_pydict()
    lengths = {column: _mean_length(values[column]) for column in values if is_text(schema.field(column).type)}
    if not any(lengths.values()):
        raise InputError(f"{name} has no column of texts; it has {', '.join(schema.names)}")
    text = max(lengths, key=lengths.__getitem__)
    rows = f"the first {counted(len(values[text]), 'row')} of {name}"
    unique = [column for column in values if column != text and _is_unique(values[column])]
    ids = [column for column in unique if _ID_NAMES.search(column)]
    found = min(ids, key=lambda column: (column.lower() != "id", not column.lower().endswith("id")), default=None)
    why = f"named as an id, unique and never null in {rows}" if found else "no column is named as an id and unique"
    others = tuple(column for column in schema.names if column not in (text, found))
    return Guess(text, f"the longest texts: {lengths[text]:,.0f} characters on average in {rows}", found, why, others)


def _mean_length(values: list[Any]) -> float:
    return sum(len(value or "") for value in values) / max(1, len(values))


def _is_unique(values: list[Any]) -> bool:
    return None not in values and len(set(values)) == len(values) and "" not in values

"""Pages of documents, numbered from 1: where they begin, and which page a place is on."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import pyarrow as pa

from specextend.core import ReadOnly, Values
from specextend.data.inputs import DocumentError

_PARTS = "part_summaries"
_PLACES = (_PARTS, "evidence", "sources", "figures")
_FIELDS = ("page", "last_page")
"""Fields of places that only runs with `input.pages_column` write."""


def is_pages(kind: pa.DataType) -> bool:
    """Return True for a valid type of `input.pages_column`."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return pa.types.is_null(kind) or (is_list and pa.types.is_integer(kind.value_type))


def check_pages(starts: Sequence[int | None] | None, text: str) -> Sequence[int]:
    """Return the offsets at which pages begin; empty for null.

    Raises:
        DocumentError: The offsets do not begin with 0, fall, or are beyond the text (`BadPages`).
    """
    checked: list[int] = []
    for start in starts or ():
        least, most = (checked[-1], len(text)) if checked else (0, 0)
        if start is None or not least <= start <= most:
            where = "null" if start is None else f"{start:,}"
            raise DocumentError(
                "BadPages",
                f"page {len(checked) + 1} begins at {where}; offsets of pages begin with 0, do not "
                f"fall, and end within the text of {len(text):,} characters",
            )
        checked.append(start)
    return checked


def with_pages(columns: ReadOnly, starts: Sequence[int]) -> Values:
    """Return columns of an answer in which each place names its page.

    Args:
        starts: Offsets at which the pages begin; empty for a document without pages.
    """
    return dict(columns) | {
        name: [place | _pages_of(name, place, starts) for place in columns[name]]
        for name in _PLACES
        if starts and columns[name]
    }


def _pages_of(name: str, place: ReadOnly, starts: Sequence[int]) -> Values:
    if place["begin"] is None:
        return {}
    found = {"page": bisect_right(starts, place["begin"])}
    if name == _PARTS:
        found["last_page"] = bisect_right(starts, place["end"] - 1)
    return found


def without_pages(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return fields of a schema without fields for pages."""
    return [field.with_type(_without_pages(field.type)) for field in fields]


def _without_pages(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_without_pages(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct(without_pages(field for field in kind if field.name not in _FIELDS))
    return kind

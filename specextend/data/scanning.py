"""What planning needs of each input row, from tables of a few columns: without the text, if its length is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from specextend.core import DocumentKey
from specextend.data.inputs import MOST_TOKENS, DocumentError, InputOptions
from specextend.data.parquet import as_bytes
from specextend.data.rows import check_max_new_tokens, decode_text


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """The facts about a row that planning needs."""

    key: DocumentKey
    text: bytes | None
    """None if it is null, or if `num_tokens_column` makes reading it unnecessary."""
    num_bytes: int | None
    """Bytes of the text, 0 if it is null; None if `num_tokens_column` makes reading it unnecessary."""
    num_tokens: int | None
    """Value of `num_tokens_column`; None without that column, and if it cannot be a document's length."""
    max_new_tokens: int | None
    """None, too, if it is not a limit."""
    error_class: str | None
    """The error that `Source.read` will raise for the row, as far as the scanned columns can tell; or None."""


def count_columns(options: InputOptions) -> list[str]:
    """Choose the columns to scan in a file where every document has a token count."""
    columns = (options.num_tokens_column, options.max_new_tokens_column, options.options_column)
    return list(dict.fromkeys(name for name in columns if name is not None))


def text_columns(options: InputOptions) -> list[str]:
    """Choose the columns to scan in any other file: those with text, too."""
    columns = (*count_columns(options), options.text_column)
    return list(dict.fromkeys(name for name in columns if name is not None))


def lacks_counts(counts: pa.ChunkedArray) -> bool:
    """Return True if a value of `num_tokens_column` cannot be a document's length."""
    return any(_usable(count) is None for count in counts.to_pylist())


def scanned_rows(batch: pa.Table, keys: Iterator[DocumentKey], options: InputOptions) -> Iterator[ScannedRow]:
    """Yield the facts about a table's rows, whose keys are the next ones of `keys`. A bad row raises nothing."""
    limits = _limits(batch, options)
    counts = [_usable(count) for count in _column_or_none(batch, options.num_tokens_column)]
    texts = _texts_without(counts, batch, options.text_column)
    for count, text, limit in zip(counts, texts, limits, strict=True):
        yield _scanned(next(keys), count, text, limit)


def _limits(batch: pa.Table, options: InputOptions) -> list[int | None]:
    """Return the rows' own limits of their outputs, from the column that holds them."""
    if options.options_column is None:
        return _column_or_none(batch, options.max_new_tokens_column)
    return [(own or {}).get("max_new_tokens") for own in batch[options.options_column].to_pylist()]


def _column_or_none(batch: pa.Table, column: str | None) -> list[int | None]:
    return [None] * len(batch) if column is None else batch[column].to_pylist()


def _usable(num_tokens: int | None) -> int | None:
    """Return a document's own token count; None if it has none or an impossible one."""
    return None if num_tokens is None or not 1 <= num_tokens <= MOST_TOKENS else num_tokens


def _texts_without(counts: list[int | None], batch: pa.Table, column: str) -> list[bytes | None]:
    """Return the texts of documents without a token count, and None for the others."""
    if all(count is not None for count in counts):
        return [None] * len(counts)
    texts = as_bytes(batch[column])
    return [texts[i].as_py() if count is None else None for i, count in enumerate(counts)]


def _scanned(key: DocumentKey, num_tokens: int | None, text: bytes | None, limit: int | None) -> ScannedRow:
    """Collect what the plan needs of a row; `text` was not read if `num_tokens` is known."""
    error_class = None
    try:
        check_max_new_tokens(limit)
    except DocumentError as error:
        error_class, limit = error.error_class, None
    try:
        if num_tokens is None:
            decode_text(text)
    except DocumentError as error:
        error_class = error.error_class
    num_bytes = len(text or b"") if num_tokens is None else None
    return ScannedRow(key, text, num_bytes, num_tokens, limit, error_class)

"""Documents in: a Parquet file, a folder or a glob, audited before any model is loaded, read row group by row group."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Document, DocumentKey
from specextend.data.audit import audit
from specextend.data.inputs import (
    DocumentError,
    InputChangedError,
    InputError,
    InputFile,
    InputOptions,
    InputUnreachableError,
    OutputOptions,
    Row,
    ScannedRow,
    unreadable,
)
from specextend.data.listing import ask, check_apart, list_input
from specextend.data.parquet import DAMAGED, as_bytes, document_columns, open_parquet, plain_text, stream
from specextend.data.storage import Location, check_writable, resolve

__all__ = [
    "Copy",
    "DocumentError",
    "InputError",
    "InputFile",
    "InputOptions",
    "OutputOptions",
    "Row",
    "ScannedRow",
    "Source",
    "open_source",
]

_OPEN_FILES = 8
_CACHED_GROUPS = 2

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Copy:
    """A file's rows in smaller row groups, read in its place."""

    location: Location
    group_rows: tuple[int, ...]


class Source:
    """The input of a run. Pickles small (file list and row counts, no data), reads lazily, thread-safe."""

    def __init__(
        self,
        options: InputOptions,
        root: Location,
        files: tuple[InputFile, ...],
        passthrough_fields: tuple[pa.Field, ...],
        copies: Mapping[int, Copy] | None = None,
    ) -> None:
        self.options = options
        self.root = root
        self.files = files
        self.passthrough_fields = passthrough_fields
        self.copies = dict(copies or {})
        self._lock = threading.Lock()
        self._open: OrderedDict[Hashable, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[Hashable, pa.Table] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.options, self.root, self.files, self.passthrough_fields, self.copies)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)

    def location(self, number: int) -> Location:
        """Where the input file `number` is."""
        return self.root.child(self.files[number].relative_path)

    def read(self, key: DocumentKey) -> Row:
        """The row at `key`.

        Raises DocumentError for null, empty or undecodable text or a bad `max_new_tokens`, OSError for a file that
        cannot be read there, InputChangedError for one that has been written to.
        """
        values = self._row(key, document_columns(self.options))
        doc_id = self._id(key, values)
        try:
            text = decode_text(as_bytes(values[self.options.text_column]).to_pylist()[0])
            column = self.options.max_new_tokens_column
            max_new_tokens = None if column is None else check_max_new_tokens(values[column].to_pylist()[0])
        except DocumentError as error:
            raise DocumentError(error.error_class, error.message, error.stage, error.retryable, doc_id) from error
        return Row(Document(key, doc_id, text), max_new_tokens)

    def place(self, key: DocumentKey) -> str:
        """Where a row is, in words: `<path relative to the root>:<row in file>`. Reads nothing."""
        return f"{self.files[key.file].relative_path}:{key.row}"

    def doc_id(self, key: DocumentKey) -> str:
        """The row's id alone, for an error row about a document that nobody could read; its place if that fails too.

        Raises InputChangedError.
        """
        column = self.options.id_column
        try:
            return self._id(key, None if column is None else self._row(key, [column]))
        except (InputUnreachableError, *DAMAGED):
            return self.place(key)

    def check_unchanged(self, number: int) -> None:
        """Raise InputChangedError where a file is gone, or has another size or time than when it was audited, and
        InputUnreachableError where its store does not say.
        """
        file = self.files[number]
        info = ask(self.location(number), file.relative_path)
        if info.is_file and (info.size, info.mtime_ns) == (file.size, file.modified_ns):
            return
        what = f"was written to ({file.size} bytes, now {info.size})" if info.is_file else "was taken away"
        raise InputChangedError(
            f"{file.relative_path} {what} after the run began; put back what was there and run again, "
            "or take another output folder"
        )

    def opens(self, number: int) -> bool:
        """Whether a file is there to be read, damaged or not; False: it is out of reach."""
        try:
            open_parquet(self._read_location(number)).close()
        except OSError:
            return False
        except DAMAGED:
            return True
        return True

    def scan(self) -> Iterator[ScannedRow]:
        """Every row in key order, streaming; raises nothing for a bad row, `error_class` says it."""
        options = self.options
        measured = options.num_tokens_column or options.text_column
        columns = [measured, *([options.max_new_tokens_column] if options.max_new_tokens_column else [])]
        for file in self.files:
            row = 0
            for batch in self.batches(file.number, columns):
                limits = self._column_or_none(batch, options.max_new_tokens_column)
                if options.num_tokens_column:
                    tokens, texts = batch[measured].to_pylist(), [None] * len(batch)
                else:
                    tokens, texts = [None] * len(batch), as_bytes(batch[measured]).to_pylist()
                for num_tokens, text, limit in zip(tokens, texts, limits, strict=True):
                    yield self._scanned(DocumentKey(file.number, row), num_tokens, text, limit)
                    row += 1

    def batches(self, number: int, columns: list[str], *, original: bool = False) -> Iterator[pa.Table]:
        """Columns of a file as small tables in row order; `original`: of the input itself even if there is a copy.

        Raises InputError for a file that cannot be read to its end, of which only the footer was looked at so far, and
        InputChangedError, after the last table, for one that has been written to.
        """
        file, num_rows = self.files[number], 0
        try:
            with open_parquet(self.location(number) if original else self._read_location(number)) as parquet:
                for batch in stream(parquet, columns):
                    num_rows += len(batch)
                    yield batch
            if num_rows != file.num_rows:
                raise pa.ArrowInvalid(f"it holds {num_rows} rows, its footer says {file.num_rows}")
        except DAMAGED as error:
            self.check_unchanged(number)
            if isinstance(error, OSError) and not self.opens(number):
                raise InputUnreachableError(f"{file.relative_path} cannot be reached ({error}); run again") from error
            raise unreadable(file.relative_path, error) from error
        self.check_unchanged(number)

    def _scanned(self, key: DocumentKey, num_tokens: int | None, text: bytes | None, limit: int | None) -> ScannedRow:
        by_tokens, error_class = self.options.num_tokens_column is not None, None
        try:
            if not by_tokens:
                decode_text(text)
            check_max_new_tokens(limit)
        except DocumentError as error:
            error_class = error.error_class
        num_bytes = None if by_tokens else len(text or b"")
        return ScannedRow(key, num_bytes, num_tokens, limit, error_class)

    def _column_or_none(self, batch: pa.Table, column: str | None) -> list[int | None]:
        return [None] * len(batch) if column is None else batch[column].to_pylist()

    def _read_location(self, number: int) -> Location:
        return self.copies[number].location if number in self.copies else self.location(number)

    def _group_rows(self, number: int) -> tuple[int, ...]:
        return (self.copies.get(number) or self.files[number]).group_rows

    def _row(self, key: DocumentKey, columns: list[str]) -> pa.Table:
        """Columns of a row, as a table of one row."""
        if not 0 <= key.file < len(self.files) or not 0 <= key.row < self.files[key.file].num_rows:
            raise IndexError(f"{key} is not in the input")
        group_rows = self._group_rows(key.file)
        ends = list(accumulate(group_rows))
        group = bisect_right(ends, key.row)
        with self._lock:
            name = (key.file, group, *columns)
            table = _cached(self._groups, name, _CACHED_GROUPS, lambda: self._read_group(key.file, group, columns))
        return table.slice(key.row - (ends[group] - group_rows[group]), 1)

    def _read_group(self, number: int, group: int, columns: list[str]) -> pa.Table:
        num_rows = self._group_rows(number)[group]
        try:
            parquet = _cached(self._open, number, _OPEN_FILES, lambda: open_parquet(self._read_location(number)))
            table = parquet.read_row_group(group, columns=columns, use_threads=False)
            if len(table) != num_rows:
                raise pa.ArrowInvalid(f"row group {group} holds {len(table)} rows, the footer says {num_rows}")
        except (pa.ArrowException, OSError) as error:
            self._open.pop(number, None)  # its handle may be of a mount that is gone
            self.check_unchanged(number)
            raise OSError(str(unreadable(self.files[number].relative_path, error))) from error
        self.check_unchanged(number)
        return table

    def _id(self, key: DocumentKey, values: pa.Table | None) -> str:
        if values is None or self.options.id_column is None:
            return self.place(key)
        return str(plain_text(values[self.options.id_column])[0].as_py())


def open_source(options: InputOptions, output: OutputOptions | None = None) -> Source:
    """List and audit the input (and that `output` can be written and is apart); reads footers and the id column only.

    Raises InputError (a run error, exit 2) before anything is loaded or written.
    """
    listing = list_input(options.path)
    if output is not None:
        check_apart(listing, output.path)
        _check_writable(output.path)
    files, passthrough_fields = audit(listing, options)
    return Source(options, listing.root, files, passthrough_fields)


def _check_writable(output: str) -> None:
    try:
        check_writable(resolve(output))
    except ValueError as error:
        raise InputError(f"output.path {output}: {error}; give another folder") from None


def decode_text(data: bytes | None) -> str:
    """A document's text. Raises DocumentError for one that is null, not UTF-8, or nothing but white space."""
    if data is None:
        raise DocumentError("NullText", "the text is null")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(
            "UndecodableText", f"the text is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not text or text.isspace():
        raise DocumentError("EmptyText", "the text is empty or white space")
    return text


def check_max_new_tokens(value: int | None) -> int | None:
    """A row's own limit. Raises DocumentError for one below 1."""
    if value is not None and value < 1:
        raise DocumentError("BadMaxNewTokens", f"max_new_tokens must be at least 1, got {value}")
    return value


def _cached(cache: OrderedDict[Hashable, Value], key: Hashable, size: int, make: Callable[[], Value]) -> Value:
    """The cached value, or a new one in place of the least recently used."""
    if key not in cache:
        while len(cache) >= size:
            cache.popitem(last=False)
        cache[key] = make()
    cache.move_to_end(key)
    return cache[key]

"""The documents of a run: opening the input, reading rows from it, and copying files with large row groups."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Document, DocumentKey
from specextend.data.audit import ask, audit, check_apart, describe_skipped, list_input
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
    check_max_new_tokens,
    decode_text,
    unreadable,
)
from specextend.data.parquet import (
    DAMAGED,
    as_bytes,
    halved,
    is_damaged,
    is_text,
    open_parquet,
    plain_text,
    read_group,
    stream,
)
from specextend.data.run_folder import copies_folder
from specextend.data.storage import (
    Location,
    atomic_output,
    check_writable,
    delete,
    exists,
    list_files,
    remove_temporary_files,
    resolve,
)

MAX_GROUP_BYTES = 64 << 20
"""Most bytes that a row group may take when the columns of a document are read from it; a file with a larger one is
copied."""
_GROUPS_PER_LIMIT = 4
"""A row group of a copy ends at this fraction of the limit, in uncompressed bytes."""

_COPY_NAME = re.compile(r"file-\d{5,}\.parquet")
_ORIGIN = b"specextend.footer_sha256"
_OPEN_FILES = 8
_CACHED_GROUPS = 2

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Copy:
    """A file's rows in smaller row groups, read in its place."""

    location: Location
    group_rows: tuple[int, ...]


class Source:
    """The input of a run. Pickles small (file list and row counts, no data), reads lazily, and is thread-safe."""

    def __init__(
        self,
        options: InputOptions,
        root: Location,
        files: tuple[InputFile, ...],
        passthrough_fields: tuple[pa.Field, ...],
        copies: Mapping[int, Copy] | None = None,
        skipped: Mapping[str, int] | None = None,
    ) -> None:
        self.options = options
        self.root = root
        self.files = files
        self.passthrough_fields = passthrough_fields
        self.copies = dict(copies or {})
        self.skipped = dict(skipped or {})  # number of files in the input's folder that are not read, by extension
        self._lock = threading.Lock()
        self._open: OrderedDict[Hashable, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[Hashable, pa.Table] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.options, self.root, self.files, self.passthrough_fields, self.copies)

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all files."""
        return sum(file.num_rows for file in self.files)

    def location(self, number: int) -> Location:
        """Return the place of the input file `number`."""
        return self.root.child(self.files[number].relative_path)

    def read(self, key: DocumentKey) -> Row:
        """Read the row at `key`.

        Raises DocumentError for null, empty or undecodable text or a bad `max_new_tokens`, OSError if the file cannot
        be read at that place, and InputChangedError if it has been written to.
        """
        values = self._row(key, self.options.document_columns)
        doc_id = self._id(key, values)
        try:
            text = decode_text(as_bytes(values[self.options.text_column]).to_pylist()[0])
            column = self.options.max_new_tokens_column
            max_new_tokens = None if column is None else check_max_new_tokens(values[column].to_pylist()[0])
        except DocumentError as error:
            raise DocumentError(error.error_class, error.message, error.stage, error.retryable, doc_id) from error
        return Row(Document(key, doc_id, text), max_new_tokens, self._reference(values))

    def _reference(self, values: pa.Table) -> str | None:
        """Return a row's reference summary. What is not UTF-8 in it is replaced: no document is lost by it."""
        column = self.options.reference_column
        data = None if column is None else as_bytes(values[column]).to_pylist()[0]
        return None if data is None else data.decode("utf-8", errors="replace")

    @property
    def warning(self) -> str:
        """Describe what may surprise a user about the input; empty if there is nothing."""
        return f"files not read in {self.root.path}: {describe_skipped(self.skipped)}" if self.skipped else ""

    def place(self, key: DocumentKey) -> str:
        """Describe the place of a row: `<path relative to the root>:<row in file>`. Reads nothing."""
        return f"{self.files[key.file].relative_path}:{key.row}"

    def doc_id(self, key: DocumentKey) -> str:
        """Read the row's id alone, for an error row about an unreadable document; return its place if that fails too.

        Raises InputChangedError.
        """
        column = self.options.id_column
        try:
            return self._id(key, None if column is None else self._row(key, [column]))
        except (InputUnreachableError, *DAMAGED):
            return self.place(key)

    def check_unchanged(self, number: int) -> None:
        """Raise InputChangedError if a file is gone, or has another size or time than when it was audited.

        Raises InputUnreachableError if its store does not answer.
        """
        file = self.files[number]
        info = ask(self.location(number), file.relative_path)
        if info.is_file and (info.size, info.mtime_ns) == (file.size, file.modified_ns):
            return
        what = f"was written to ({file.size} bytes, now {info.size})" if info.is_file else "was removed"
        raise InputChangedError(
            f"{file.relative_path} {what} after the run began; restore it and run again, "
            "or start a new run in another output folder"
        )

    def opens(self, number: int) -> bool:
        """Return True if a file can be opened, damaged or not; False if it is out of reach."""
        try:
            open_parquet(self._read_location(number)).close()
        except OSError:
            return False
        except DAMAGED:
            return True
        return True

    def scan(self) -> Iterator[ScannedRow]:
        """Stream the facts about every row, in key order. A bad row raises nothing: its `error_class` is set."""
        for file in self.files:
            row = 0
            for batch in self.batches(file.number, self._scanned_columns(file.number)):
                limits = self._column_or_none(batch, self.options.max_new_tokens_column)
                counts = [_usable(count) for count in self._column_or_none(batch, self.options.num_tokens_column)]
                texts = self._texts_without(counts, batch)
                for count, text, limit in zip(counts, texts, limits, strict=True):
                    yield _scanned(DocumentKey(file.number, row), count, text, limit)
                    row += 1

    def batches(self, number: int, columns: list[str], *, original: bool = False) -> Iterator[pa.Table]:
        """Stream columns of a file as small tables, in row order. original: read the input itself, not its copy.

        Raises InputError for a file that cannot be read to its end (only its footer has been read before), and
        InputChangedError, after the last table, for one that has been written to.
        """
        file, num_rows = self.files[number], 0
        try:
            location = self.location(number) if original else self._read_location(number)
            with open_parquet(location, self._compact(columns)) as parquet:
                for batch in stream(parquet, columns, plain=lambda: open_parquet(location)):
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

    def _scanned_columns(self, number: int) -> list[str]:
        """Choose the columns to scan: without the text in a file where every document has a token count."""
        options = self.options
        columns = [name for name in (options.num_tokens_column, options.max_new_tokens_column) if name is not None]
        if options.num_tokens_column is None or self._has_uncounted(number, options.num_tokens_column):
            columns.append(options.text_column)
        return list(dict.fromkeys(columns))

    def _has_uncounted(self, number: int, column: str) -> bool:
        batches = self.batches(number, [column])
        return any(_usable(count) is None for batch in batches for count in batch[column].to_pylist())

    def _texts_without(self, counts: list[int | None], batch: pa.Table) -> list[bytes | None]:
        """Return the texts of documents without a token count, and None for the others."""
        if all(count is not None for count in counts):
            return [None] * len(counts)
        texts = as_bytes(batch[self.options.text_column])
        return [texts[i].as_py() if count is None else None for i, count in enumerate(counts)]

    def _column_or_none(self, batch: pa.Table, column: str | None) -> list[int | None]:
        return [None] * len(batch) if column is None else batch[column].to_pylist()

    def _compact(self, columns: list[str]) -> list[str]:
        """Choose the columns that hold text: a file of a kilobyte may repeat a text a million times."""
        fields = [field for field in self.passthrough_fields if not pa.types.is_dictionary(field.type)]
        own = {self.options.text_column, self.options.reference_column}
        texts = {*own, *(field.name for field in fields if is_text(field.type))}
        return [column for column in columns if column in texts]

    def _read_location(self, number: int) -> Location:
        return self.copies[number].location if number in self.copies else self.location(number)

    def _group_rows(self, number: int) -> tuple[int, ...]:
        return (self.copies.get(number) or self.files[number]).group_rows

    def _row(self, key: DocumentKey, columns: list[str]) -> pa.Table:
        """Read columns of a row as a table of one row."""
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
            location, texts = self._read_location(number), self._compact(self.options.document_columns)
            parquet = _cached(self._open, number, _OPEN_FILES, lambda: open_parquet(location, texts))
            table = read_group(parquet, group, columns, plain=lambda: open_parquet(location))
            if len(table) != num_rows:
                raise pa.ArrowInvalid(f"row group {group} holds {len(table)} rows, the footer says {num_rows}")
        except (pa.ArrowException, OSError) as error:
            self._open.pop(number, None)  # its handle may belong to a mount that is gone
            self.check_unchanged(number)
            raise OSError(str(unreadable(self.files[number].relative_path, error))) from error
        self.check_unchanged(number)
        return table

    def _id(self, key: DocumentKey, values: pa.Table | None) -> str:
        if values is None or self.options.id_column is None:
            return self.place(key)
        return str(plain_text(values[self.options.id_column])[0].as_py())


def open_source(options: InputOptions, output: OutputOptions | None = None) -> Source:
    """List and audit the input; reads footers and the id column only.

    output: checked too, if given: it must be writable and apart from the input.

    Raises InputError (a run error, exit 2) before anything is loaded or written.
    """
    listing = list_input(options.path)
    if output is not None:
        check_apart(listing, output.path)
        _check_writable(output.path)
    files, passthrough_fields = audit(listing, options)
    return Source(options, listing.root, files, passthrough_fields, skipped=listing.skipped)


def _check_writable(output: str) -> None:
    try:
        check_writable(resolve(output))
    except ValueError as error:
        raise InputError(f"output.path {output}: {error}; give another folder") from None


def _usable(num_tokens: int | None) -> int | None:
    """Return a document's own token count; None if it has none or an impossible one."""
    return None if num_tokens is None or num_tokens < 1 else num_tokens


def _scanned(key: DocumentKey, num_tokens: int | None, text: bytes | None, limit: int | None) -> ScannedRow:
    """Collect what the plan needs of a row; `text` was not read if `num_tokens` is known."""
    error_class = None
    try:
        if num_tokens is None:
            decode_text(text)
        check_max_new_tokens(limit)
    except DocumentError as error:
        error_class = error.error_class
    num_bytes = len(text or b"") if num_tokens is None else None
    return ScannedRow(key, text, num_bytes, num_tokens, limit, error_class)


def _cached(cache: OrderedDict[Hashable, Value], key: Hashable, size: int, make: Callable[[], Value]) -> Value:
    """Return the cached value, or make one in place of the least recently used."""
    if key not in cache:
        while len(cache) >= size:
            cache.popitem(last=False)
        cache[key] = make()
    cache.move_to_end(key)
    return cache[key]


def regroup(
    source: Source,
    output: Location,
    checkpoint: Callable[[], object] = lambda: None,
    max_group_bytes: int = MAX_GROUP_BYTES,
) -> Source:
    """Copy files that have a row group over the limit into `_run/input/`, in groups of a quarter of it.

    Keys stay the same. The driver calls it once it holds the lock. Streams; a copy that is already there and whole is
    used again. Returns the source for the workers (`source` itself if nothing is oversized). checkpoint: called between
    tables; may raise.
    """
    oversized = [file for file in source.files if file.largest_group_bytes > max_group_bytes]
    remove_temporary_files(copies_folder(output))
    group_bytes = max_group_bytes // _GROUPS_PER_LIMIT
    copies = {file.number: _copy(source, file, output, group_bytes, checkpoint) for file in oversized}
    return Source(source.options, source.root, source.files, source.passthrough_fields, copies) if copies else source


def remove_copies(output: Location) -> None:
    """Remove what `regroup` wrote, once the run no longer needs it; the driver calls it while it holds the lock."""
    folder = copies_folder(output)
    for name in list_files(folder):
        if _COPY_NAME.fullmatch(name):
            delete(folder.child(name))


def _columns(source: Source) -> list[str]:
    tokens = source.options.num_tokens_column
    return list(dict.fromkeys(source.options.document_columns + ([tokens] if tokens else [])))


def _copy(
    source: Source, file: InputFile, output: Location, group_bytes: int, checkpoint: Callable[[], object]
) -> Copy:
    location = copies_folder(output).child(f"file-{file.number:05d}.parquet")
    if not (exists(location) and _is_copy(location, file)):
        with atomic_output(location) as path:
            batches = source.batches(file.number, _columns(source), original=True)
            _write_copy(_grouped(batches, group_bytes), file, path, checkpoint)
    with open_parquet(location) as parquet:
        metadata = parquet.metadata
        return Copy(location, tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))


def _is_copy(location: Location, file: InputFile) -> bool:
    """Return True if it is a whole copy of this file; a damaged one (an upload cut short) is written again."""
    try:
        with open_parquet(location) as parquet:
            origin = (parquet.schema_arrow.metadata or {}).get(_ORIGIN)
            return origin == file.footer_sha256.encode() and parquet.metadata.num_rows == file.num_rows
    except DAMAGED as error:
        if not is_damaged(location, error):
            raise
        return False


def _write_copy(tables: Iterator[pa.Table], file: InputFile, path: str, checkpoint: Callable[[], object]) -> None:
    first = next(tables)
    schema = first.schema.with_metadata({_ORIGIN: file.footer_sha256.encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in chain([first], tables):
            checkpoint()
            writer.write_table(table.cast(schema), row_group_size=len(table))


def _grouped(batches: Iterator[pa.Table], group_bytes: int) -> Iterator[pa.Table]:
    """Join neighbouring rows to groups of at most `group_bytes`; a larger row is a group of its own."""
    waiting: list[pa.Table] = []
    num_bytes = 0
    for piece in (piece for batch in batches for piece in halved(_plain(batch), group_bytes)):
        if waiting and num_bytes + piece.nbytes > group_bytes:
            yield pa.concat_tables(waiting)
            waiting, num_bytes = [], 0
        waiting.append(piece)
        num_bytes += piece.nbytes
    if waiting:
        yield pa.concat_tables(waiting)


def _plain(table: pa.Table) -> pa.Table:
    """Cast text columns to large_string, byte for byte, so that the size of a slice is that of its text."""
    for position, field in enumerate(table.schema):
        if is_text(field.type):
            text = as_bytes(table[field.name]).cast(pa.large_string(), safe=False)
            table = table.set_column(position, field.name, text)
    return table

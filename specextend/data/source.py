"""The input of a run: checked once, then streamed by column or read by row."""

import threading
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import DocumentKey, ReadOnly, counted, one_line
from specextend.data.check import ask, check_input, partition_column, partition_types
from specextend.data.inputs import (
    MOST_AHEAD_BYTES,
    DocumentError,
    InputChangedError,
    InputError,
    InputFile,
    InputOptions,
    InputUnreachableError,
    OutputOptions,
    unreachable,
    unreadable,
)
from specextend.data.instructions import Instruction
from specextend.data.listing import (
    PAGE_STARTS,
    check_apart,
    describe_skipped,
    is_data_set,
    list_input,
)
from specextend.data.parquet import (
    DAMAGED,
    Ints,
    is_text,
    open_parquet,
    plain_rows,
    plain_text,
    read_file,
    read_stream,
    rows_where,
    stream,
)
from specextend.data.rows import Row, RowReader, check_max_new_tokens, decode_text
from specextend.data.storage import Location, check_writable, in_order, is_away

_CACHED_GROUPS = 2


class ChosenRows(NamedTuple):
    """The chosen rows of a run with a selection."""

    rows: Sequence[Ints]
    """Sorted row numbers of each file."""
    counts: Mapping[str, int]
    """Number of input rows by outcome."""
    notes: tuple[str, ...] = ()
    """Notes for the user about earlier runs."""


class ScannedRow(NamedTuple):
    """Facts about a row for planning."""

    key: DocumentKey
    text: bytes | None
    max_new_tokens: int | None
    """Limit of the row; None if absent or invalid."""
    error_class: str | None
    """Error that `Source.read` will raise, as far as the scanned columns tell."""


@dataclass(frozen=True, eq=False)
class Source:
    """The input of a run: lazy, thread-safe, and small when pickled (no data)."""

    reader: RowReader
    root: Location
    files: tuple[InputFile, ...]
    passthrough_fields: tuple[pa.Field, ...]
    filter_fields: tuple[pa.Field, ...] = ()
    """Filter columns with their joint types (driver only)."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of ignored files by extension."""
    num_repeated: int = 0
    """Number of paths to files that are already listed."""
    partitions: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Type of each column in the file paths."""
    selection: ChosenRows | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _groups: dict[Hashable, pa.Table] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.reader, self.root, self.files, self.passthrough_fields)

    @property
    def options(self) -> InputOptions:
        """Options of the input."""
        return self.reader.options

    @property
    def num_rows(self) -> int:
        """Number of rows in the run."""
        if self.selection is None:
            return sum(file.num_rows for file in self.files)
        return sum(map(len, self.selection.rows))

    def rows(self, number: int) -> Sequence[int]:
        """Return the sorted row numbers of a file in the run."""
        if self.selection is None:
            return range(self.files[number].num_rows)
        return list(self.selection.rows[number].tolist())

    def location(self, number: int) -> Location:
        """Return the location of an input file."""
        return self.root.child(self.files[number].relative_path)

    def read(self, key: DocumentKey) -> Row:
        """Read the row at `key`.

        Raises:
            DocumentError: Bad text, pages or option.
            OSError: The file is damaged at this row.
            InputError: The file is out of reach or was modified.
        """
        row = self._row(key, self.reader.document_columns)
        [values] = plain_rows(row, self.reader.value_columns)
        found = self.reader.read(key, self._id(key, row), values)
        return (
            replace(found, passed=self._for_rules(key, row)) if self.reader.rule_columns else found
        )

    def _for_rules(self, key: DocumentKey, row: pa.Table) -> pa.Table:
        names = [*self.reader.rule_columns]
        fields = [each for each in self.passthrough_fields if each.name in names]
        batch = self._with_partitions(row, key.file, names)
        columns = self._typed("input.passthrough", fields, batch, key.file)
        return pa.table(columns, schema=pa.schema(fields))

    @property
    def warning(self) -> str:
        """Surprises about the input in one line; empty if there are none."""
        said = (
            [f"ignored files in {self.root.path}: {describe_skipped(self.skipped)}"]
            if self.skipped
            else []
        )
        if self.num_repeated:
            said.append(f"{counted(self.num_repeated, 'symbolic link')} to files already listed")
        return "; ".join(said)

    def place(self, key: DocumentKey) -> str:
        """Return `<path relative to the root>:<row in file>`."""
        return f"{self.files[key.file].relative_path}:{key.row}"

    def doc_id(self, key: DocumentKey) -> str:
        """Read the id of a row for an error row; fall back to its place."""
        column = self.options.id_column
        try:
            return self._id(key, None if column is None else self._row(key, [column]))
        except (InputUnreachableError, *DAMAGED):
            return self.place(key)

    def check_unchanged(self, number: int) -> None:
        """Raise InputChangedError if a file is gone, or its size or time changed."""
        file = self.files[number]
        info = ask(self.location(number), file.relative_path)
        if info.is_file and (info.size, info.mtime_ns) == (file.size, file.modified_ns):
            return
        what = (
            f"was modified ({file.size} bytes, now {info.size})" if info.is_file else "was removed"
        )
        raise InputChangedError(
            f"{file.relative_path} {what} after the run began; restore it and run again, "
            "or start a new run in another output folder"
        )

    def scan(self) -> Iterator[ScannedRow]:
        """Stream facts about the rows of the run in key order."""
        tables = in_order(
            self._scanned_tables, self.files, cost=InputFile.bytes_ahead, most=MOST_AHEAD_BYTES
        )
        for file, batches in zip(self.files, tables, strict=True):
            keys = (DocumentKey(file.number, row) for row in self.rows(file.number))
            rows = (row for batch in batches for row in plain_rows(batch, batch.column_names))
            yield from (self._scanned(key, row) for row, key in zip(rows, keys, strict=False))

    def batches(self, number: int, columns: list[str]) -> Iterator[pa.Table]:
        """Stream columns of a file in small tables. Missing passthrough columns are null.

        Raises:
            InputError: The file is damaged, out of reach, or (after the last table) modified.
        """
        file = self.files[number]
        damaged = partial(unreadable, file.relative_path)
        read = partial(self._tables, number, columns)
        with self._reading(number):
            yield from read_stream(self.location(number), read, damaged, file.size, file.compact)

    def _tables(
        self, number: int, columns: list[str], parquet: pq.ParquetFile
    ) -> Iterator[pa.Table]:
        num_rows = 0
        expected = self.files[number].num_rows
        for batch in stream(parquet, columns):  # pyarrow skips missing columns
            num_rows += len(batch)
            yield self._with_partitions(batch, number, columns)
        if num_rows != expected:
            raise pa.ArrowInvalid(
                f"it holds {counted(num_rows, 'row')}, its footer says {expected:,}"
            )

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Report a modified file before any other error of the block."""
        try:
            yield
        except (InputError, OSError) as error:
            self.check_unchanged(number)
            if is_away(error):
                raise unreachable(self.files[number].relative_path, error) from error
            raise
        self.check_unchanged(number)

    def passthrough(self, batch: pa.Table, number: int) -> list[pa.ChunkedArray]:
        """Return the passthrough columns of a table with their joint types."""
        return self._typed("input.passthrough", self.passthrough_fields, batch, number)

    def filtered(self, number: int) -> Iterator[pa.Table]:
        """Stream the filter columns of a file with their joint types."""
        names = list(self.options.filter_columns)
        for batch in self.batches(number, names):
            columns = self._typed("input.filter", self.filter_fields, batch, number)
            yield pa.table(columns, names)

    def _typed(
        self, option: str, fields: Iterable[pa.Field], batch: pa.Table, number: int
    ) -> list[pa.ChunkedArray]:
        columns = []
        for wanted in fields:
            try:
                columns.append(_typed(batch[wanted.name], wanted.type))
            except pa.ArrowException as error:
                raise InputError(
                    f"{self.files[number].relative_path}: {option} {wanted.name!r} has a "
                    f"value that does not fit into {wanted.type}, the common type "
                    f"({one_line(error)}); use one type in all files"
                ) from error
        return columns

    def batches_of(
        self, number: int, columns: list[str], rows: Ints | None = None
    ) -> Iterator[pa.Table]:
        """Stream columns of some rows of a file (default: the rows of the run)."""
        if rows is None and self.selection is not None:
            rows = self.selection.rows[number]
        if rows is None:
            yield from self.batches(number, columns)
            return
        mask = np.zeros(self.files[number].num_rows, bool)
        mask[rows] = True
        begin = 0
        for batch in self.batches(number, columns):
            yield rows_where(batch, mask[begin : begin + len(batch)])
            begin += len(batch)

    def ids(self, number: int) -> pa.ChunkedArray:
        """Read the ids of a file as large_string."""
        column = self.options.id_column
        if column is None:
            rows = range(self.files[number].num_rows)
            places = [self.place(DocumentKey(number, row)) for row in rows]
            return pa.chunked_array([places], pa.large_string())
        batches = self.batches(number, [column])
        try:
            return pa.chunked_array(
                [chunk for batch in batches for chunk in plain_text(batch[column]).chunks],
                pa.large_string(),
            )
        except pa.ArrowInvalid as error:
            name = self.files[number].relative_path
            raise InputError(
                f"{name}: an id in column {column!r} (input.id_column) is not UTF-8; repair it"
            ) from error

    def _with_partitions(self, batch: pa.Table, number: int, columns: list[str]) -> pa.Table:
        path = self.files[number].relative_path
        fields = (*self.passthrough_fields, *self.filter_fields)
        kinds = {**self.partitions, **{field.name: field.type for field in fields}}
        for name in columns:
            if name not in batch.column_names:
                batch = batch.append_column(
                    name, partition_column(path, name, kinds[name], len(batch))
                )
        return batch.select(columns)

    def _scanned_tables(self, file: InputFile) -> Iterable[pa.Table]:
        """Read the columns needed for planning; those of a large file lazily.

        Columns used only at the end are read and dropped first, so that damage is found before
        decoding.
        """
        options = self.options
        unread = {
            *(field.name for field in self.passthrough_fields),
            *filter(None, (options.instruction_column, options.reference_column)),
            *self.reader.template_columns,
        }
        for batch in self.batches(file.number, sorted(unread)) if unread else ():
            self.passthrough(batch, file.number)
        wanted = (options.text_column, options.options_column, options.pages_column)
        batches = self.batches_of(file.number, list(dict.fromkeys(filter(None, wanted))))
        return list(batches) if file.is_small else batches

    def _scanned(self, key: DocumentKey, values: ReadOnly) -> ScannedRow:
        options = self.options
        error_class = None
        text = values[options.text_column]
        limit = self.reader.own(values).get("max_new_tokens")
        try:
            self.reader.page_starts(values, decode_text(text))
            check_max_new_tokens(limit)
        except DocumentError as error:
            error_class = error.error_class
            limit = None
        return ScannedRow(key, text, limit, error_class)

    def _row(self, key: DocumentKey, columns: list[str]) -> pa.Table:
        group_rows = self.files[key.file].group_rows
        ends = list(accumulate(group_rows))
        group = bisect_right(ends, key.row)
        name = (key.file, group, *columns)
        with self._lock:
            table = self._groups.get(name)
            if table is None:
                while len(self._groups) >= _CACHED_GROUPS:
                    self._groups.pop(next(iter(self._groups)))
                table = self._groups[name] = self._read_group(key.file, group, columns)
        return table.slice(key.row - (ends[group] - group_rows[group]), 1)

    def _read_group(self, number: int, group: int, columns: list[str]) -> pa.Table:
        file = self.files[number]
        num_rows = file.group_rows[group]

        def read(opened: pa.NativeFile) -> pa.Table:
            parquet = open_parquet(opened, file.compact)
            table = parquet.read_row_group(group, columns, use_threads=False)
            if len(table) != num_rows:
                held = counted(len(table), "row")
                raise pa.ArrowInvalid(
                    f"row group {group} holds {held}, the footer says {num_rows:,}"
                )
            return table

        with self._reading(number):
            return read_file(
                self.location(number),
                read,
                lambda error: OSError(str(unreadable(file.relative_path, error))),
                file.size,
            )

    def _id(self, key: DocumentKey, values: pa.Table | None) -> str:
        if values is None or self.options.id_column is None:
            return self.place(key)
        return str(plain_text(values[self.options.id_column])[0].as_py())


def open_source(
    options: InputOptions,
    output: OutputOptions | None = None,
    only: Collection[str] | None = None,
    templates: Iterable[Instruction] = (),
    rule_columns: Collection[str] = (),
) -> Source:
    """List and check the input; reads footers only. `select_rows` checks ids and chooses rows.

    Args:
        options: Options of the input. A data set of `specextend prepare` brings its ids and pages.
        output: If given, it must be writable and outside the input.
        only: Relative paths of the files to keep.

    Raises:
        InputError: The input cannot be used.
    """
    listing = list_input(options.path)
    if is_data_set(listing.relative_paths):
        starts = PAGE_STARTS if options.text_column == "text" else None
        options = replace(
            options,
            id_column=options.id_column or "id",
            pages_column=options.pages_column or starts,
        )
    passed = tuple(name for name in options.copied_columns if name in rule_columns)
    reader = RowReader(options, tuple(templates), passed)
    if output is not None:
        folder = check_apart(listing, output.path)
        try:
            check_writable(folder)
        except ValueError as error:
            raise InputError(f"output.path {output.path}: {error}; give another folder") from None
    if only is not None:
        sizes = {name: size for name, size in listing.sizes.items() if name in only}
        listing = replace(listing, sizes=sizes)
    files, passthrough_fields, filter_fields = check_input(listing, reader, output)
    partitions = partition_types(listing.relative_paths)
    return Source(
        reader,
        listing.root,
        files,
        passthrough_fields,
        filter_fields,
        listing.skipped,
        listing.num_repeated,
        partitions,
    )


def _typed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    own = values.type
    if own == kind:
        return values
    if pa.types.is_null(own):
        return pa.chunked_array([pa.nulls(len(values), kind)])
    if pa.types.is_dictionary(own):
        return _typed(values.cast(own.value_type), kind)
    return values.cast(kind, safe=not is_text(own))

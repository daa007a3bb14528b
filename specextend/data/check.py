"""Check the files and columns of an input, guess its columns, and repartition files.

Begin at `check_input`, which reads footers before a model is loaded.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from specextend.core import counted, did_you_mean, one_line
from specextend.data.answers import answer_fields
from specextend.data.inputs import (
    InputError,
    InputFile,
    InputOptions,
    OutputOptions,
    unreachable,
    unreadable,
)
from specextend.data.listing import Listing, check_apart, describe_skipped, list_input
from specextend.data.parquet import (
    compact_columns,
    gathered,
    has_exact_int96,
    is_bytes,
    is_id,
    is_text,
    joint_type,
    largest_group_bytes,
    open_parquet,
    plain_leaves,
    plain_text,
    read_file,
    read_stream,
    stream,
    way_out,
    write_groups,
)
from specextend.data.rows import ROW_OPTIONS, RowReader, is_options, is_pages
from specextend.data.schema import COMMIT_SCHEMA, ERROR_SCHEMA, TextColumns, summary_fields
from specextend.data.storage import Location, atomic_output, in_order

MAX_GROUP_BYTES = 1 << 30
"""Largest memory for the document columns of a row group, which a worker holds."""
MOST_PROBLEMS = 5
_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def ask(location: Location, name: str) -> fs.FileInfo:
    """Return the info of a file. Raises InputUnreachableError."""
    try:
        return location.info
    except OSError as error:
        raise unreachable(name, error) from error


def check_input(
    listing: Listing, reader: RowReader, output: OutputOptions | None = None
) -> tuple[tuple[InputFile, ...], tuple[pa.Field, ...], tuple[pa.Field, ...]]:
    """Check all files in parallel.

    Returns:
        The files, the passthrough fields, and the filter fields.

    Raises:
        InputError: Some files are unusable; the message lists them.
    """
    options = reader.options
    check_names(options, output or OutputOptions(path="unused"))
    numbered = [(number, *each) for number, each in enumerate(listing.sizes.items())]
    found = [*in_order(partial(_check_file, listing.root, reader), numbered)]
    if problems := [each for each in found if isinstance(each, str)]:
        more = len(problems) - MOST_PROBLEMS
        said = [
            *problems[:MOST_PROBLEMS],
            *([f"and {counted(more, 'more file')}"] if more > 0 else []),
        ]
        raise InputError("; ".join(said))
    checked = [each for each in found if not isinstance(each, str)]
    schemas = {file.relative_path: schema for file, schema in checked}
    in_paths = partition_types(schemas)
    passed, filtered = (
        tuple(pa.field(name, _joint_type(option, name, schemas, in_paths)) for name in columns)
        for option, columns in (
            ("input.passthrough", options.copied_columns),
            ("input.filter", options.filter_columns),
        )
    )
    for each in filtered:
        _check_case(each.name, each.type)
    return tuple(file for file, _ in checked), passed, filtered


def _check_case(name: str, kind: pa.DataType) -> None:
    """Raise InputError for nested fields that differ only in case, which SQL cannot tell apart."""
    seen: dict[str, str] = {}
    for each in map(kind.field, range(kind.num_fields)):
        key = each.name.lower()
        if key in seen:
            raise InputError(
                f"input.filter: {name} has the fields {seen[key]!r} and {each.name!r}, which SQL "
                "does not tell apart; rename one of them"
            )
        seen[key] = each.name
        _check_case(f"{name}.{each.name}", each.type)


def _check_file(
    root: Location, reader: RowReader, numbered: tuple[int, str, int]
) -> tuple[InputFile, pa.Schema] | str:
    options = reader.options
    number, name, size = numbered
    location = root.child(name)
    modified_ns = ask(location, name).mtime_ns

    def read(file: pa.NativeFile) -> tuple[InputFile, pa.Schema]:
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
            check_columns(name, schema, reader, others_may_have=options.copied_columns)
            rows = _group_rows(parquet.metadata)
            wanted = dict.fromkeys(
                [*reader.document_columns, *options.copied_columns, *options.filter_columns]
            )
            stored = [column for column in wanted if column in schema.names]
            compact = tuple(sorted(compact_columns(parquet, stored) - {options.id_column}))
            if not has_exact_int96(parquet, file, stored):
                raise InputError(
                    f"{name} has INT96 times with fractions of microseconds; cast them when you "
                    "write the Parquet, to TIMESTAMP in micro- or nanoseconds"
                )
            largest = largest_group_bytes(parquet, reader.document_columns)
            if largest > MAX_GROUP_BYTES:  # a worker reads the whole group for a document
                raise InputError(
                    f"{name} has a row group that takes {largest / (1 << 30):.1f} GiB to read; "
                    "write it in smaller ones: specextend prepare repartition INPUT --output FOLDER"
                )
            return InputFile(
                number, name, size, rows, largest, footer_sha256(file), modified_ns, compact
            ), schema

    try:
        return read_file(location, read, partial(unreadable, name), size)
    except InputError as error:
        return str(error)
    except OSError as error:
        raise unreachable(name, error) from error


def _group_rows(metadata: pq.FileMetaData) -> tuple[int, ...]:
    rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise pa.ArrowInvalid(
            f"its row groups hold {counted(sum(rows), 'row')}, its footer says "
            f"{metadata.num_rows:,}"
        )
    return rows


def footer_sha256(file: pa.NativeFile) -> str:
    """Return the SHA-256 of a Parquet footer."""
    size = file.size()
    length = int.from_bytes(file.read_at(8, size - 8)[:4], "little") + 8
    return hashlib.sha256(file.read_at(length, size - length)).hexdigest()


def check_names(options: InputOptions, output: OutputOptions) -> None:
    """Raise InputError for two result columns with the same name."""
    fields = [field.name for field in answer_fields(output.json_schema)]
    passthrough = options.copied_columns
    columns = TextColumns(
        output.column,
        output.json_schema,
        has_confidence=output.confidence,
        has_verdicts=output.verify,
    )
    ours = {field.name for field in summary_fields(columns)}
    internal = {"summary", "tasks", "words", "confidence", "verdicts"} - ours
    taken = {*COMMIT_SCHEMA.names} - internal - {"summary"}
    in_lower_case = {name.lower() for name in (*taken, output.column)}
    clashes = {
        "output.schema and output.column both name {}; rename the field": {output.column}
        & {*fields},
        "output.column and input.passthrough both name {}; rename one": {output.column}
        & {*passthrough},
        "input.passthrough and output.schema both name {}; rename the field": {*passthrough}
        & {*fields},
        "output.column names {}, already a column of the results; rename it": {output.column}
        & (taken | {*ERROR_SCHEMA.names} - {"summary"}),
        "input.passthrough names {}, already a column of error rows; rename it": {*passthrough}
        & {f"{name}_" for name in ERROR_SCHEMA.names if name in passthrough},
        "output.schema names {}, already a column of the results; rename the field": [
            name for name in fields if name.lower() in in_lower_case
        ],
        "input.passthrough names {}, already a column of summaries; rename it": ours
        & {*passthrough},
    }
    for what, names in clashes.items():
        if names:
            raise InputError(what.format(", ".join(sorted(names))))


def check_task_columns(passthrough: Collection[str], columns: TextColumns) -> None:
    """Raise InputError if tasks or passthrough columns share a column name."""
    names = [field.name.lower() for field in summary_fields(columns)] if columns.others else []
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(
            f"tasks: the column {twice[0]} would be made twice; set output.column of a task, or "
            "rename a field of its output.schema"
        )
    if passed := [name for name in passthrough if name.lower() in names]:
        raise InputError(f"input.passthrough and tasks both name {passed[0]}; rename one of them")


_OF_INPUT = {
    "text_column": (is_text, "a string column"),
    "id_column": (is_id, "a string, integer or UUID column"),
    "pages_column": (is_pages, "a list of integers"),
    "options_column": (is_options, f"an integer column, or a struct of {', '.join(ROW_OPTIONS)}"),
    "reference_column": (is_text, "a string column"),
    "instruction_column": (is_text, "a string column"),
}


def check_columns(
    file: str, schema: pa.Schema, reader: RowReader, *, others_may_have: Collection[str] = ()
) -> None:
    """Raise InputError for a configured column that is missing or has a wrong type.

    Args:
        others_may_have: Passthrough columns that may be missing.
    """
    options = reader.options
    for name, (is_right, what) in _OF_INPUT.items():
        if (column := getattr(options, name)) is None:
            continue
        kind = _field(file, schema, column, f"input.{name}").type
        if not is_right(kind):
            wanted = "BIGINT" if name == "options_column" else "VARCHAR"
            cast = "" if name == "pages_column" else way_out(column, kind, wanted)
            raise InputError(
                f"{file}: column {column!r} (input.{name}) is {kind}, but must be {what}{cast}"
            )
    in_path = {*partition_values(file)}
    for option, columns, elsewhere in (
        ("input.passthrough", options.copied_columns, in_path.union(others_may_have)),
        ("input.filter", options.filter_columns, in_path),
        ("prompt.instruction", reader.template_columns, set[str]()),
    ):
        for column in columns:
            if column in schema.names or column not in elsewhere:
                _field(file, schema, column, option)
    for column, *path in (path for template in reader.templates for path in template.fields):
        _check_fields(
            f"{file}: column {column!r} (prompt.instruction)", schema.field(column).type, path
        )


def _field(file: str, schema: pa.Schema, column: str, option: str) -> pa.Field:
    found = schema.get_all_field_indices(column)
    if not found:
        raise _no_column(file, schema, column, option)
    if len(found) > 1:
        raise InputError(
            f"{file} has {len(found)} columns named {column!r} ({option}); rename all but one"
        )
    return schema.field(found[0])


def _no_column(file: str, schema: pa.Schema, column: str, option: str) -> InputError:
    names = ", ".join(schema.names[:12]) + (", ..." if len(schema.names) > 12 else "")
    near = did_you_mean(column, schema.names)
    if option == "input.filter":
        near += "; put text in single quotes"
    return InputError(f"{file} has no column {column!r} ({option}); it has {names or 'none'}{near}")


def _check_fields(what: str, kind: pa.DataType, names: Iterable[str]) -> None:
    for name in names:
        if not pa.types.is_struct(kind) or hasattr(dict, name):
            return
        known = [field.name for field in kind]
        if name not in known:
            raise InputError(
                f"{what} has no field {name!r}; it has "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
        kind = kind.field(name).type


def _joint_type(
    option: str, column: str, schemas: Mapping[str, pa.Schema], in_paths: Mapping[str, pa.DataType]
) -> pa.DataType:
    own = {
        name: schema.field(column).type
        for name, schema in schemas.items()
        if column in schema.names
    }
    if schemas and not own and column not in in_paths:
        raise _no_column(*next(iter(schemas.items())), column, option)
    typed = {name: kind for name, kind in own.items() if not pa.types.is_null(kind)}
    # Without any values, choose a type known to every reader.
    first, kind = next(iter(typed.items()), ("", in_paths.get(column, pa.string())))
    for name, other in typed.items():
        try:
            kind = joint_type(kind, other)
        except pa.ArrowException:
            raise InputError(
                f"{option} {column!r} is {kind} in {first} but {other} in {name}; use one "
                "type in all files"
            ) from None
    for name in (name for name in schemas if name not in own):
        try:
            partition_column(name, column, kind, 1)
        except pa.ArrowException as error:
            raise InputError(
                f"{option} {column!r} is {kind} in {first}, but {name} has "
                f"{partition_values(name)[column]!r} in its path ({one_line(error)}); use one "
                "type in all files"
            ) from error
    return kind


def partition_values(relative_path: str) -> dict[str, str | None]:
    """Return the columns in a path: `year=2026/a.parquet` has `{"year": "2026"}`."""
    pairs = (folder.partition("=") for folder in relative_path.split("/")[:-1] if "=" in folder)
    return {
        unquote(name): None if value == _NULL else unquote(value)
        for name, _, value in pairs
        if name
    }


def partition_types(relative_paths: Iterable[str]) -> dict[str, pa.DataType]:
    """Return the type of each column in the paths, as pyarrow does: int32 or string."""
    values: dict[str, set[str]] = {}
    for path in relative_paths:
        for name, value in partition_values(path).items():
            values.setdefault(name, set()).update([] if value is None else [value])
    return {
        name: pa.int32() if found and all(map(_INTEGER.fullmatch, found)) else pa.string()
        for name, found in values.items()
    }


def partition_column(relative_path: str, column: str, kind: pa.DataType, num_rows: int) -> pa.Array:
    """Return a path's value of a column for each row, or nulls. Raises ArrowException."""
    value = partition_values(relative_path).get(column)
    if value is None:
        return pa.nulls(num_rows, kind)
    return pa.repeat(pa.array([value], "string").cast(kind)[0], num_rows)


def repartition(path: str, output: str) -> int:
    """Rewrite Parquet files under the same names in row groups of about 16 MiB; return their
    number.

    Raises:
        InputError: A file cannot be read.
    """
    listing = list_input(path)
    folder = check_apart(listing, output)
    for name, size in listing.sizes.items():
        source = listing.root.child(name)
        damaged = partial(unreadable, name)
        schema: pa.Schema = read_file(
            source, lambda file: open_parquet(file).schema_arrow, damaged, size
        )
        tables = read_stream(source, partial(stream, columns=schema.names), damaged, size)
        with atomic_output(folder.child(name)) as written:
            write_groups(written, schema, tables)
    return len(listing.sizes)


# Guess the columns of text and id for a new configuration


SAMPLE_ROWS = 200
_MOST_FILES = 8
_ID_CHARACTERS = 64
_ID_ROWS = 10
_TEXT_NAMES = re.compile(
    r"((full|raw|plain)_?)?(text|content|body|document|doc|article|report|html|page|passage|transcript|story)s?",
    re.I,
)
_ID_NAMES = re.compile(
    r"(^|_)(id|uuid|guid|key|doi|url|path|file|filename|name|number|no)$|Id$|ID$"
)


class Guess(NamedTuple):
    """Columns of an input by use, with reasons."""

    text: str
    why_text: str
    id: str | None
    why_id: str
    others: tuple[str, ...]
    differs: str
    """Difference between the columns of two files; empty if there is none."""
    skipped: str


def guess_columns(path: str) -> Guess:
    """Guess columns from the first rows of a file, and the footers of a few more.

    Raises:
        InputError: There is no file or no column of strings with texts.
    """
    listing = list_input(path)
    name = listing.relative_paths[0]
    table = read_file(
        listing.root.child(name),
        lambda file: _first_rows(open_parquet(file)),
        partial(unreadable, name),
        listing.sizes[name],
    )
    rows = f"the first {counted(len(table), 'row')} of {name}"
    columns = dict(zip(table.column_names, table.columns, strict=True))
    lengths = {column: _mean_length(values) for column, values in columns.items()}
    text = _guess_text(name, columns, lengths)
    del columns[text]
    found, why = _guess_id(columns, lengths, rows)
    others = tuple(column for column in table.column_names if column not in (text, found))
    why_text = f"the longest texts: {lengths[text]:,.0f} characters on average in {rows}"
    return Guess(
        text,
        why_text,
        found,
        why,
        others,
        _difference(listing, table.schema),
        describe_skipped(listing.skipped),
    )


def _guess_text(name: str, columns: dict[str, pa.ChunkedArray], lengths: dict[str, float]) -> str:
    text = max(lengths, key=lengths.__getitem__, default="")
    if not lengths.get(text):
        raise InputError(f"{name} has no column of texts; it has {', '.join(lengths)}")
    for column in [text, *filter(_TEXT_NAMES.fullmatch, columns)]:
        kind = columns[column].type
        if is_bytes(kind) or kind.num_fields:
            cast = (
                way_out(column, kind, "VARCHAR")
                or "; join its parts to one string when you write the Parquet"
            )
            raise InputError(
                f"{name}: column {column!r} looks like the text, but is {kind}, not a string{cast}"
            )
    return text


def _guess_id(
    columns: dict[str, pa.ChunkedArray], lengths: dict[str, float], rows: str
) -> tuple[str | None, str]:
    values = {
        # Text as bytes, because it may not be UTF-8.
        column: (each.cast("large_binary") if is_text(each.type) else plain_text(each)).to_pylist()
        for column, each in columns.items()
        if is_id(each.type)
    }
    unique = [column for column, ids in values.items() if len({*ids} - {None, b""}) == len(ids)]
    if named := [*filter(_ID_NAMES.search, unique)]:
        best = min(named, key=lambda name: (name.lower() != "id", not name.lower().endswith("id")))
        return best, f"named as an id, unique and never null in {rows}"
    # Integers have length 0 and come first.
    found = min(unique, key=lengths.__getitem__, default=None)
    why = f"unique in {rows}"
    if not found or lengths[found] > _ID_CHARACTERS or len(values[found]) < _ID_ROWS:
        found = None
        why = "no column is named as an id and unique"
    if spoilt := next(filter(_ID_NAMES.search, values), None):
        why += f"; {spoilt} is named as one, but has nulls or repeats"
    return found, why


def _first_rows(parquet: pq.ParquetFile) -> pa.Table:
    schema = parquet.schema_arrow
    tables = gathered(stream(parquet, schema.names))
    return next(tables, schema.empty_table()).slice(0, SAMPLE_ROWS)


def _difference(listing: Listing, schema: pa.Schema) -> str:
    first = {*zip(schema.names, schema.types, strict=True)}
    for name, size in [*listing.sizes.items()][1:_MOST_FILES]:
        found: pa.Schema = read_file(
            listing.root.child(name), pq.read_schema, partial(unreadable, name), size
        )
        differing = first.symmetric_difference(zip(found.names, found.types, strict=True))
        if names := ", ".join(sorted({name for name, _ in differing})):
            return (
                f"{name} and {listing.relative_paths[0]} differ in {names}; "
                "a run needs the columns it uses in all"
            )
    return ""


def _mean_length(values: pa.ChunkedArray) -> float:
    """Return the mean characters per row. Bytes count only if they are UTF-8, unlike images."""
    total = 0
    for leaf in (leaf for chunk in values.chunks for leaf in plain_leaves(chunk)):
        if not is_bytes(leaf.type) and not is_text(leaf.type):
            continue
        stored = leaf.cast("large_binary")
        try:
            lengths = pc.utf8_length(stored.cast("large_string"))
        except pa.ArrowInvalid:
            if is_bytes(leaf.type):
                continue
            lengths = pc.binary_length(stored)
        total += pc.sum(lengths).as_py() or 0
    return total / max(1, len(values))

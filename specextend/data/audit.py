"""The audit of the input before a model is loaded: its files, and whether their columns and ids are usable."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from specextend.core import counted, one_line
from specextend.data.in_order import in_order
from specextend.data.inputs import InputError, InputFile, InputOptions, InputUnreachableError, unreadable
from specextend.data.parquet import DAMAGED, is_text, largest_group_bytes, open_parquet, plain_text
from specextend.data.partitions import partition_column, partition_types, partition_values
from specextend.data.run_folder import SUMMARIES, result_name
from specextend.data.schema import SUMMARY_SCHEMA
from specextend.data.storage import Location, is_uri, resolve

_SUFFIXES = (".parquet", ".pq", ".parq")
"""Extensions of Parquet files in a folder, in upper or lower case."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy", ".zip")
MOST_PROBLEMS = 5
"""Most files that one message describes; the others are counted."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of an input path, in path order."""

    root: Location
    """The folder, the glob before its first component with a wildcard, or the file's folder."""
    pattern: tuple[str, ...]
    """The glob's components below the root; empty for a folder or a file."""
    is_folder: bool
    relative_paths: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each file."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of files in a folder that are not read, by extension; hidden files (`_`, `.`) are not counted."""
    num_repeated: int = 0
    """Paths that symbolic links give to files which are in `relative_paths` already."""

    def only(self, wanted: Collection[str]) -> Listing:
        """Return the listing without the files that are not wanted."""
        kept = [(name, size) for name, size in zip(self.relative_paths, self.sizes, strict=True) if name in wanted]
        return replace(self, relative_paths=tuple(name for name, _ in kept), sizes=tuple(size for _, size in kept))


def list_input(path: str) -> Listing:
    """Find the files of `input.path`. Raises InputError if there are none, InputUnreachableError without an answer."""
    try:
        location = resolve(path)
        info = location.filesystem.get_file_info(location.path)
        if info.type == fs.FileType.File:
            return Listing(location.parent, (), False, (location.name,), (info.size,))
        if info.type == fs.FileType.Directory:
            return _list_folder(path, location)
        if not _has_wildcard(location.path):
            raise InputError(f"input.path {path} does not exist; give a Parquet file, a folder or a glob")
        return _list_glob(path, location)
    except InputError:
        raise
    except UnicodeError as error:
        raise InputError(f"input.path {path} contains a name that is not UTF-8; rename it") from error
    except (OSError, ValueError) as error:
        is_away = isinstance(error, OSError) and is_uri(path)
        raise (InputUnreachableError if is_away else InputError)(
            f"input.path {path} cannot be listed ({one_line(error)}); "
            + ("run again" if is_away else "give a path that can be read")
        ) from error


def _list_folder(path: str, folder: Location) -> Listing:
    found = [
        file for file in _files_below(folder, recursive=True) if not any(map(_is_hidden, file.relative_path.split("/")))
    ]
    names = [file.relative_path for file in found]
    files = [file for file in found if file.relative_path.lower().endswith(_SUFFIXES)]
    skipped = Counter(_ending(name) for name in names if not name.lower().endswith(_SUFFIXES))
    if not files:
        there = f", only {describe_skipped(skipped)}" if skipped else ""
        raise InputError(
            f"input.path {path} has no file that ends in {', '.join(_SUFFIXES)}{there}; give a folder that holds some, "
            "or a glob (jobs/prepare.py makes Parquet of JSONL and text)"
        )
    return _listing(folder, (), True, files, skipped)


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Describe how many files of a folder are not read, by extension."""
    return ", ".join(f"{count:,} {ending}" for ending, count in sorted(skipped.items()))


def _ending(name: str) -> str:
    """Return a file's extension together with that of its compression: `.jsonl.gz`."""
    stem, ending = os.path.splitext(name.rsplit("/", 1)[-1])
    if ending.lower() in _COMPRESSED:
        ending = os.path.splitext(stem)[1] + ending
    return ending or "without an extension"


def _list_glob(path: str, location: Location) -> Listing:
    parts = location.path.split("/")
    first = next(i for i, part in enumerate(parts) if _has_wildcard(part))
    root, pattern = Location(location.filesystem, "/".join(parts[:first]) or "/"), tuple(parts[first:])
    files = [
        file
        for file in _files_below(root, recursive=len(pattern) > 1 or pattern == ("**",))
        if glob_matches(tuple(file.relative_path.split("/")), pattern)
    ]
    if not files:
        raise InputError(f"input.path {path} matches no file; check the pattern (`**` crosses folders, `*` does not)")
    return _listing(root, pattern, False, files, {})


def _listing(
    root: Location, pattern: tuple[str, ...], is_folder: bool, files: list[_Found], skipped: Mapping[str, int]
) -> Listing:
    """List each real file once: by its own path, or else by the first path that a symbolic link gives it."""
    once: dict[str, _Found] = {}
    for file in sorted(files, key=lambda file: (file.is_linked, file.relative_path)):
        once.setdefault(file.real_path, file)
    kept = sorted(once.values(), key=lambda file: file.relative_path)
    names, sizes = tuple(file.relative_path for file in kept), tuple(file.size for file in kept)
    return Listing(root, pattern, is_folder, names, sizes, skipped, len(files) - len(kept))


def glob_matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return True if path components match glob components.

    `**` stands for any number of components. A hidden name matches only a pattern that begins with `_` or `.` too.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        goes_on = bool(parts) and not _is_hidden(parts[0]) and glob_matches(parts[1:], pattern)
        return goes_on or glob_matches(parts, pattern[1:])
    if not parts or (_is_hidden(parts[0]) and not _is_hidden(pattern[0])):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and glob_matches(parts[1:], pattern[1:])


def check_apart(listing: Listing, output: str) -> None:
    """Raise InputError unless no file of the run would be input, and no input file is in the output folder."""
    try:
        folder = resolve(output)
    except ValueError as error:
        raise InputError(f"output.path: {error}") from error
    if folder.filesystem.get_file_info(folder.path).type == fs.FileType.File:
        raise InputError(f"output.path {output} is a file; give a folder")
    if not folder.filesystem.equals(listing.root.filesystem):
        return
    root, target = _real_parts(listing.root), _real_parts(folder)
    inside = target[: len(root)] == root
    if inside and listing.is_folder:
        raise InputError(f"output.path {output} is inside the input folder; give one beside it")
    written = (*target[len(root) :], SUMMARIES, result_name(0))
    if inside and listing.pattern and glob_matches(written, listing.pattern):
        raise InputError(f"output.path {output} would hold files that the input's glob matches; give a folder outside")
    for name in listing.relative_paths:
        if _real_parts(listing.root.child(name))[: len(target)] == target:
            raise InputError(f"the input file {name} is inside output.path {output}; give another output folder")


def _real_parts(location: Location) -> tuple[str, ...]:
    """Return the path's components, with symbolic links resolved on a local file system."""
    path = os.path.realpath(location.path) if location.is_local else location.path
    return tuple(part for part in path.split("/") if part)


@dataclass(frozen=True, slots=True)
class _Found:
    """A file below the root."""

    relative_path: str
    size: int
    real_path: str
    is_linked: bool = False


def _files_below(folder: Location, *, recursive: bool) -> list[_Found]:
    """List a folder's files, in path order."""
    if folder.is_local:
        real = os.path.realpath(folder.path)
        return sorted(_local_files(folder.path, "", (real,), recursive), key=lambda file: file.relative_path)
    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=recursive, allow_not_found=True))
    prefix = folder.path.rstrip("/") + "/"
    names = sorted((info.path.removeprefix(prefix), info.size) for info in infos if info.is_file)
    return [_Found(name, size, name) for name, size in names]


def _local_files(folder: str, prefix: str, real: tuple[str, ...], recursive: bool) -> Iterator[_Found]:
    """Yield a local folder's files. real: its real path behind those of the folders above, into which no link leads."""
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        name, is_link = prefix + entry.name, entry.is_symlink()
        name.encode()
        real_path = os.path.realpath(entry.path) if is_link else os.path.join(real[-1], entry.name)
        if entry.is_file():
            yield _Found(name, entry.stat().st_size, real_path, real_path != os.path.join(real[0], name))
        elif recursive and entry.is_dir() and real_path not in real:
            yield from _local_files(entry.path, f"{name}/", (*real, real_path), recursive)


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _has_wildcard(path: str) -> bool:
    return any(character in path for character in "*[?")


def ask(location: Location, name: str) -> fs.FileInfo:
    """Ask the store about a file, called `name` in messages. Raises InputUnreachableError if it does not answer."""
    try:
        return location.filesystem.get_file_info(location.path)
    except OSError as error:
        raise InputUnreachableError(f"{name} cannot be reached ({one_line(error)}); run again") from error


def audit(listing: Listing, options: InputOptions) -> tuple[tuple[InputFile, ...], tuple[pa.Field, ...]]:
    """Audit the files; return them with their row counts, and the fields of the passthrough columns.

    Several files are read at once, of which each takes the memory of a row and of its ids. The first file whose store
    does not answer ends the audit: it will not answer for the next one either.

    Raises InputError in one line, which tells of all unusable files, or else of repeated ids.
    """
    _check_passthrough_names(options)
    files, fields, ids, problems = [], [], [], []
    look = partial(_audit_or_problem, listing, options)
    for found in in_order(look, range(len(listing.relative_paths))):
        if isinstance(found, str):
            problems.append(found)
            continue
        files.append(found[0])
        fields.append(found[1])
        ids.append(found[2])
    if problems:
        more = len(problems) - MOST_PROBLEMS
        said = [*problems[:MOST_PROBLEMS], *([f"and {counted(more, 'more such file')}"] if more > 0 else [])]
        raise InputError("; ".join(said))
    _check_unique(ids, listing)
    return tuple(files), _unify(fields, options, listing)


def _audit_or_problem(
    listing: Listing, options: InputOptions, number: int
) -> tuple[InputFile, list[pa.Field], pa.ChunkedArray] | str:
    """Return what `_audit_file` does, or what is wrong with the file. Raises InputUnreachableError."""
    try:
        return _audit_file(listing, number, options)
    except InputUnreachableError:
        raise
    except InputError as error:
        return str(error)


def _audit_file(
    listing: Listing, number: int, options: InputOptions
) -> tuple[InputFile, list[pa.Field], pa.ChunkedArray]:
    """Audit one file; return it, its passthrough fields, and its ids if it has a column of them. Raises InputError."""
    name, size = listing.relative_paths[number], listing.sizes[number]
    location = listing.root.child(name)
    try:
        with open_parquet(location) as parquet:
            check_columns(name, parquet.schema_arrow, options)
            fields = [_passthrough_field(parquet.schema_arrow, column) for column in options.passthrough]
            ids = _read_ids(name, parquet, options.id_column)
            rows = _group_rows(parquet.metadata)
            largest = largest_group_bytes(parquet, options.document_columns)
        modified_ns = ask(location, name).mtime_ns
        return InputFile(number, name, size, rows, largest, footer_sha256(location), modified_ns), fields, ids
    except DAMAGED as error:
        if isinstance(error, OSError):
            ask(location, name)
        raise unreadable(name, error) from error


def _passthrough_field(schema: pa.Schema, column: str) -> pa.Field:
    """Return the field of a passthrough column; without a type if the file has it in its path alone."""
    return schema.field(column) if column in schema.names else pa.field(column, pa.null())


def _group_rows(metadata: pq.FileMetaData) -> tuple[int, ...]:
    """Return the rows of each row group. Raises ArrowInvalid if they are impossible or do not add up."""
    rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise pa.ArrowInvalid(f"its row groups hold {counted(sum(rows), 'row')}, its footer says {metadata.num_rows:,}")
    return rows


def footer_sha256(location: Location) -> str:
    """Hash a Parquet file's footer: its schema, its row groups and the places of their data."""
    with location.filesystem.open_input_file(location.path) as file:
        size = file.size()
        length = int.from_bytes(file.read_at(8, size - 8)[:4], "little") + 8
        return hashlib.sha256(file.read_at(length, size - length)).hexdigest()


def _is_count(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_null(kind)


def _is_id(kind: pa.DataType) -> bool:
    return is_text(kind) or _is_count(kind)


def _check_passthrough_names(options: InputOptions) -> None:
    ours = [name for name in options.passthrough if name in SUMMARY_SCHEMA.names]
    if ours:
        raise InputError(f"input.passthrough names {', '.join(ours)}, which summaries have already; rename it")


def check_columns(file: str, schema: pa.Schema, options: InputOptions) -> None:
    """Raise InputError for a configured column that a file, or a batch, does not have, or that has a wrong type."""
    wanted = [
        ("text_column", options.text_column, is_text, "a string column"),
        ("id_column", options.id_column, _is_id, "a string or integer column"),
        ("max_new_tokens_column", options.max_new_tokens_column, _is_count, "an integer column"),
        ("num_tokens_column", options.num_tokens_column, _is_count, "an integer column"),
        ("reference_column", options.reference_column, is_text, "a string column"),
        ("instruction_column", options.instruction_column, is_text, "a string column"),
    ]
    also_in_path = [("passthrough", name) for name in options.passthrough]
    also_in_path += [("filter", name) for name in options.filter_columns]
    wanted += [(option, name, lambda kind: True, "any column") for option, name in also_in_path]
    for option, column, is_right, what in wanted:
        if column is None:
            continue
        found = schema.get_all_field_indices(column)
        if not found and (option, column) in also_in_path and column in partition_values(file):
            continue
        if not found:
            names = ", ".join(schema.names[:12]) + (", ..." if len(schema.names) > 12 else "")
            raise InputError(f"{file} has no column {column!r} (input.{option}); it has {names or 'none'}")
        if len(found) > 1:
            raise InputError(f"{file} has {len(found)} columns named {column!r} (input.{option}); rename all but one")
        kind = schema.field(found[0]).type
        if not is_right(kind):
            raise InputError(f"{file}: column {column!r} (input.{option}) is {kind}, but must be {what}")


def _read_ids(file: str, parquet: pq.ParquetFile, column: str | None) -> pa.ChunkedArray:
    """Read a file's ids as strings; none without an id column. Raises InputError if one is null or not UTF-8."""
    if column is None:
        return pa.chunked_array([], pa.large_string())
    ids = parquet.read(columns=[column])[column]
    if ids.null_count:
        row = ids.is_null().to_numpy().argmax()
        raise InputError(
            f"{file}: nulls in column {column!r} (input.id_column): {ids.null_count:,}, the first in row {row}; "
            "every row needs an id"
        )
    try:
        return plain_text(ids)
    except pa.ArrowInvalid as error:
        raise InputError(f"{file}: an id in column {column!r} (input.id_column) is not UTF-8; repair it") from error


def _check_unique(ids: list[pa.ChunkedArray], listing: Listing) -> None:
    every = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.large_string())
    num_repeated = len(every) - len(every.unique())
    if not num_repeated:
        return
    counts = every.value_counts()
    repeated = counts.field("values")[int(np.argmax(counts.field("counts").to_numpy() > 1))].as_py()
    places = [
        f"{listing.relative_paths[number]} row {row}"
        for number, column in enumerate(ids)
        for row in _rows_with(column, repeated)
    ]
    raise InputError(
        f"ids must be unique over all files: {num_repeated:,} repeated, the first is {repeated!r} in "
        f"{' and '.join(places[:2])}; make them different, or leave out input.id_column"
    )


def _rows_with(column: pa.ChunkedArray, value: str) -> Iterator[int]:
    row = 0
    for chunk in column.chunks:
        for item in chunk:
            if item.as_py() == value:
                yield row
            row += 1


def _unify(fields: list[list[pa.Field]], options: InputOptions, listing: Listing) -> tuple[pa.Field, ...]:
    """Find one type for each passthrough column; a column without values in one file takes its type from the others."""
    unified, in_paths = [], partition_types(listing.relative_paths)
    for position, column in enumerate(options.passthrough):
        kinds = [
            (file_fields[position].type, name) for file_fields, name in zip(fields, listing.relative_paths, strict=True)
        ]
        typed = [(kind, name) for kind, name in kinds if not pa.types.is_null(kind)]
        # Without values anywhere: a type that every reader knows.
        kind, first = (typed or [(in_paths.get(column, pa.string()), "")])[0]
        for other, name in typed:
            if other != kind:
                raise InputError(
                    f"input.passthrough {column!r} is {kind} in {first} but {other} in {name}; make them one type"
                )
        for other, name in kinds:
            if pa.types.is_null(other) and column in partition_values(name):
                _check_value_in_path(name, column, kind, first)
        unified.append(pa.field(column, kind))
    return tuple(unified)


def _check_value_in_path(name: str, column: str, kind: pa.DataType, first: str) -> None:
    """Raise InputError unless the value in a file's path can stand in a column of the type that `first` has."""
    try:
        partition_column(name, column, kind, 1)
    except pa.ArrowException as error:
        raise InputError(
            f"input.passthrough {column!r} is {kind} in {first}, but {name} has "
            f"{partition_values(name)[column]!r} in its path ({one_line(error)}); make them one type"
        ) from error

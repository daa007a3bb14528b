"""List the files of the input path once each, and keep the output apart from them."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product, takewhile
from pathlib import PurePosixPath
from typing import NamedTuple

from pyarrow import fs

from specextend.core import one_line
from specextend.data.inputs import InputError, InputUnreachableError
from specextend.data.run_folder import SUMMARIES, result_name
from specextend.data.storage import Location, is_passing, is_uri, read_bytes, resolve

PARQUET = (".parquet", ".pq", ".parq")
_TABLES = {"_delta_log": "a Delta", ".hoodie": "a Hudi", "metadata": "an Iceberg"}
"""Folders with the logs of table formats, which say which files count."""
_COPY = """duckdb -c "COPY (FROM %s_scan('{}')) TO 'documents.parquet' (ROW_GROUP_SIZE 2048)\""""
_EXPORTS = {
    "a Delta": _COPY % "delta",
    "an Iceberg": _COPY % "iceberg",
    "a Hudi": """spark.read.format("hudi").load('{}').write.parquet("documents")""",
}
_ICEBERG = re.compile(r"(v\d+|\d+-[0-9a-f-]{36})(\.gz)?\.metadata\.json|version-hint\.text")
_DENIED = re.compile("denied|forbidden|permission|authoriz", re.IGNORECASE)
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy", ".zip")
_HIDDEN = ("_", ".")


@dataclass(frozen=True)
class Listing:
    """The files of an input path."""

    root: Location
    """The folder, the fixed part of the glob, or the file's folder."""
    pattern: tuple[str, ...]
    """Path components of the file or glob below the root; empty for a folder."""
    sizes: Mapping[str, int]
    """Bytes of each file by path below the root, in order."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of ignored files by extension, without hidden files."""
    num_repeated: int = 0
    """Number of symbolic links to files already listed."""

    @property
    def relative_paths(self) -> tuple[str, ...]:
        """Paths below the root."""
        return tuple(self.sizes)


def list_input(path: str) -> Listing:
    """List the files of `input.path`.

    Raises:
        InputError: There are no files, or they belong to a table format.
        InputUnreachableError: The store does not answer.
    """
    try:
        found = find(resolve(path), _HIDDEN)
        for file in found[2] if found else ():
            file.relative_path.encode()
        above = _tables_above(found[0], found[2]) if found else {}
    except UnicodeError as error:
        raise InputError(
            f"input.path {path} contains a name that is not UTF-8; rename it"
        ) from error
    except (OSError, ValueError) as error:
        is_away = isinstance(error, OSError) and is_passing(error)
        raise (InputUnreachableError if is_away else InputError)(
            f"input.path {path} cannot be listed ({one_line(error)}); "
            + ("run again" if is_away else "give a readable path")
        ) from error
    if found is None:
        raise InputError(
            f"input.path {path} does not exist; give a Parquet file, a folder or a glob"
        )
    root, pattern, files, below = found
    if pattern and not files:
        raise InputError(
            f"input.path {path} matches no file; check the pattern (`**` crosses folders, `*` "
            "does not)"
        )
    wanted = [file for file in files if pattern or file.relative_path.lower().endswith(PARQUET)]
    skipped = Counter(_ending(file.relative_path) for file in {*files}.difference(wanted))
    if not wanted:
        there = f", only {describe_skipped(skipped)}" if skipped else ""
        raise InputError(
            f"input.path {path} has no file ending in {', '.join(PARQUET)}{there}; give a "
            "folder with Parquet files, or a glob, or convert documents: specextend prepare "
            f"documents {shlex.quote(path)} --output FOLDER"
        )
    for folder, kind in below.items():
        if any(f"/{file.relative_path}".startswith(f"/{folder}/") for file in wanted):
            above[root.child(folder).path] = kind
    for folder, kind in above.items():
        table = path[: path.find("://") + 3] + folder if is_uri(path) else folder
        raise InputError(
            f"input.path {path} belongs to {kind} table ({folder}): rows in its files may be "
            "deleted or replaced; "
            f"export it and use the result: {_EXPORTS[kind].format(table)}"
        )
    kept = each_once(wanted)
    sizes = {file.relative_path: file.size for file in kept}
    return Listing(root, pattern, sizes, skipped, len(wanted) - len(kept))


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """Return ignored files as text: `2 .csv, 1 .txt`."""
    return ", ".join(f"{count:,} {ending}" for ending, count in sorted(skipped.items()))


def _ending(name: str) -> str:
    path = PurePosixPath(name)
    is_compressed = path.suffix.lower() in _COMPRESSED
    return "".join(path.suffixes[-1 - is_compressed :]) or "without an extension"


class FoundFile(NamedTuple):
    """A file below the searched folder."""

    relative_path: str
    size: int
    modified_ns: int
    real_path: str
    is_linked: bool = False


def find(
    location: Location, hidden: tuple[str, ...]
) -> tuple[Location, tuple[str, ...], list[FoundFile], dict[str, str]] | None:
    """Find a file, the files below a folder, or the matches of a glob.

    Args:
        hidden: Prefixes of names to ignore in a folder.

    Returns:
        The searched folder, the path components below it, the files sorted by path, and the kinds
        of table formats by folder. None if there is nothing.
    """
    info = location.info
    if info.is_file:
        name = location.name
        real = os.path.realpath(location.path) if location.is_local else name
        return (
            location.parent,
            (name,),
            [FoundFile(name, info.size, info.mtime_ns or 0, real, location.is_local)],
            {},
        )
    if info.type == fs.FileType.Directory:
        seen = _files_below(location, hidden)
        files = [file for file in seen if not is_hidden(file.relative_path, hidden)]
        return location, (), files, _tables(file.relative_path for file in seen)
    root, pattern = split_glob(location)
    if not pattern:
        return None
    seen = _files_below(root, recursive=len(pattern) > 1 or pattern == ("**",))
    files = [file for file in seen if glob_matches(tuple(file.relative_path.split("/")), pattern)]
    return root, pattern, files, _tables(file.relative_path for file in seen)


def _tables(paths: Iterable[str]) -> dict[str, str]:
    found = {}
    for path in paths:
        *folders, name = path.split("/")
        for place, folder in enumerate(folders):
            if folder in _TABLES and (folder != "metadata" or _ICEBERG.match(name)):
                found["/".join(folders[:place])] = _TABLES[folder]
    return found


def _tables_above(root: Location, files: Iterable[FoundFile]) -> dict[str, str]:
    """Return the tables that contain the root or a link target, as far as permissions allow."""
    inside = {root.path}
    if root.is_local:
        linked = (os.path.dirname(file.real_path) for file in files if file.is_linked)
        inside = {os.path.realpath(path) for path in (root.path, *linked)}
    found = {}
    above = {str(folder) for path in inside for folder in PurePosixPath(path).parents}
    for folder, sign in product(sorted(inside | above - {"."}), _TABLES):
        try:
            records = _files_below(Location(root.filesystem, folder).child(sign), recursive=False)
        except OSError as error:
            if folder in inside or not _DENIED.search(str(error)):
                raise
            continue
        if _tables(f"{sign}/{record.relative_path}" for record in records):
            found[folder] = _TABLES[sign]
    return found


def split_glob(location: Location) -> tuple[Location, tuple[str, ...]]:
    """Split a path before its first component with a wildcard."""
    parts = location.path.split("/")
    above = [*takewhile(lambda part: not set(part) & set("*?["), parts)]
    return Location(location.filesystem, "/".join(above) or "/"), tuple(parts[len(above) :])


def each_once(files: Iterable[FoundFile]) -> list[FoundFile]:
    """Keep each real file once, under its real path if listed, or else its first link."""
    once: dict[str, FoundFile] = {}
    for file in sorted(files, key=lambda file: (file.is_linked, file.relative_path)):
        once.setdefault(file.real_path, file)
    return sorted(once.values(), key=lambda file: file.relative_path)


def glob_matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Match path components against glob components.

    `**` matches any number of components. Hidden names need a pattern with the same prefix.
    """
    if not pattern:
        return not parts
    is_seen = bool(parts) and not parts[0].startswith(_HIDDEN)
    if pattern[0] == "**":
        goes_on = is_seen and glob_matches(parts[1:], pattern)
        return goes_on or glob_matches(parts, pattern[1:])
    if not parts or not (is_seen or pattern[0].startswith(_HIDDEN)):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and glob_matches(parts[1:], pattern[1:])


def check_apart(listing: Listing, output: str) -> Location:
    """Return the output folder. Raises InputError if input and output overlap."""
    try:
        folder = resolve(output)
    except ValueError as error:
        raise InputError(f"output.path: {error}") from error
    if folder.info.is_file:
        raise InputError(f"output.path {output} is a file; give a folder")
    if not folder.filesystem.equals(listing.root.filesystem):
        return folder
    root = _real_parts(listing.root)
    target = _real_parts(folder)
    if target[: len(root)] == root:
        if not listing.pattern:
            raise InputError(f"output.path {output} is inside the input folder; give one beside it")
        written = (*target[len(root) :], SUMMARIES, result_name(0))
        if glob_matches(written, listing.pattern):
            raise InputError(
                f"output.path {output} would contain files matched by the input's glob; give a "
                "folder outside"
            )
    for name in listing.relative_paths:
        if _real_parts(listing.root.child(name))[: len(target)] == target:
            raise InputError(
                f"the input file {name} is inside output.path {output}; give another output folder"
            )
    return folder


def _real_parts(location: Location) -> tuple[str, ...]:
    path = os.path.realpath(location.path) if location.is_local else location.path
    return tuple(part for part in path.split("/") if part)


def _files_below(
    folder: Location, hidden: tuple[str, ...] = (), *, recursive: bool = True
) -> list[FoundFile]:
    if folder.is_local:
        real = os.path.realpath(folder.path)
        files = _local_files(folder.path, "", (real,), recursive, hidden)
    else:
        files = _remote_files(folder, recursive)
    return sorted(files, key=lambda file: file.relative_path)


def _remote_files(folder: Location, recursive: bool) -> Iterator[FoundFile]:
    selector = fs.FileSelector(folder.path, recursive=recursive, allow_not_found=True)
    for info in folder.filesystem.get_file_info(selector):
        if info.is_file:
            path = info.path.removeprefix(folder.path.rstrip("/") + "/")
            yield FoundFile(path, info.size, info.mtime_ns or 0, path)


def _local_files(
    folder: str,
    prefix: str,
    real: tuple[str, ...],
    recursive: bool,
    hidden: tuple[str, ...],
) -> Iterator[FoundFile]:
    """Yield the files of a local folder, without following links into `real`, its real parents."""
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as found:
        entries = [
            entry for entry in found if entry.name in _TABLES or not entry.name.startswith(hidden)
        ]
    for entry in entries:
        name = prefix + entry.name
        is_link = entry.is_symlink()
        real_path = os.path.realpath(entry.path) if is_link else os.path.join(real[-1], entry.name)
        if entry.is_file():
            stat = entry.stat()
            is_linked = real_path != os.path.join(real[0], name)
            yield FoundFile(name, stat.st_size, stat.st_mtime_ns, real_path, is_linked)
        # Reading a dangling link reports it as out of reach.
        elif is_link and not os.path.exists(entry.path):
            yield FoundFile(name, 0, 0, real_path, is_linked=True)
        elif recursive and entry.is_dir() and real_path not in real:
            yield from _local_files(entry.path, f"{name}/", (*real, real_path), recursive, hidden)


def is_hidden(path: str, beginnings: tuple[str, ...]) -> bool:
    """Return True if any path component has one of the prefixes."""
    return any(name.startswith(beginnings) for name in path.split("/"))


# Data sets of `specextend prepare`


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

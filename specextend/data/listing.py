"""Which files the input is, and whether the output is apart from them."""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass

from pyarrow import fs

from specextend.data.inputs import InputError, InputUnreachableError
from specextend.data.storage import Location, is_uri, resolve


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


def list_input(path: str) -> Listing:
    """Find the files of `input.path`. Raises InputError where there is none, or InputUnreachableError."""
    try:
        location = resolve(path)
        info = location.filesystem.get_file_info(location.path)
        if info.type == fs.FileType.File:
            return Listing(location.parent, (), False, (location.name,), (info.size,))
        if info.type == fs.FileType.Directory:
            return _list_folder(path, location)
        if not _has_wildcard(location.path, uri=is_uri(path)):
            raise InputError(f"input.path {path} does not exist; give a Parquet file, a folder or a glob")
        return _list_glob(path, location)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"input.path {path} holds a name that is not UTF-8; rename it") from error
    except (OSError, ValueError) as error:
        is_away = isinstance(error, OSError) and is_uri(path)
        raise (InputUnreachableError if is_away else InputError)(
            f"input.path {path} cannot be listed: {_one_line(error)}"
        ) from error


def _list_folder(path: str, folder: Location) -> Listing:
    files = [
        (name, size)
        for name, size in _files_below(folder, recursive=True)
        if name.endswith(".parquet") and not any(_is_hidden(part) for part in name.split("/"))
    ]
    if not files:
        raise InputError(
            f"input.path {path} has no file that ends in .parquet; give a folder that holds some, or a glob"
        )
    names, sizes = zip(*files, strict=True)
    return Listing(folder, (), True, names, sizes)


def _list_glob(path: str, location: Location) -> Listing:
    parts = location.path.split("/")
    first = next(i for i, part in enumerate(parts) if _has_wildcard(part, uri=is_uri(path)))
    root, pattern = Location(location.filesystem, "/".join(parts[:first]) or "/"), tuple(parts[first:])
    files = [
        (name, size)
        for name, size in _files_below(root, recursive=len(pattern) > 1 or pattern == ("**",))
        if glob_matches(tuple(name.split("/")), pattern)
    ]
    if not files:
        raise InputError(f"input.path {path} matches no file; check the pattern (`**` crosses folders, `*` does not)")
    names, sizes = zip(*files, strict=True)
    return Listing(root, pattern, False, names, sizes)


def glob_matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether path components match glob components; `**` stands for any number of them, hidden names need naming."""
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
    written = (*target[len(root) :], "summaries", "part-00000.parquet")
    if inside and listing.pattern and glob_matches(written, listing.pattern):
        raise InputError(f"output.path {output} would hold files that the input's glob matches; give a folder outside")
    for name in listing.relative_paths:
        if _real_parts(listing.root.child(name))[: len(target)] == target:
            raise InputError(f"the input file {name} is inside output.path {output}; give another output folder")


def _real_parts(location: Location) -> tuple[str, ...]:
    """Path components, symbolic links resolved where there are such."""
    path = os.path.realpath(location.path) if location.is_local else location.path
    return tuple(part for part in path.split("/") if part)


def _files_below(folder: Location, *, recursive: bool) -> list[tuple[str, int]]:
    """(path relative to `folder`, bytes) of its files, in path order."""
    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=recursive, allow_not_found=True))
    prefix = folder.path.rstrip("/") + "/"
    return sorted((info.path.removeprefix(prefix), info.size) for info in infos if info.is_file)


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _has_wildcard(path: str, *, uri: bool) -> bool:
    """`?` is no wildcard in a URI: it begins the query."""
    return any(character in path for character in ("*[" if uri else "*[?"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def ask(location: Location, name: str) -> fs.FileInfo:
    """What the store knows of a file, called `name`. Raises InputUnreachableError where it does not answer."""
    try:
        return location.filesystem.get_file_info(location.path)
    except OSError as error:
        raise InputUnreachableError(f"{name} cannot be reached ({_one_line(error)}); run again") from error

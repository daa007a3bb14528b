"""Where files live: local paths and any `pyarrow.fs` URI, and writes that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyarrow import fs


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a file system. Pickles, so it can be sent to another process."""

    filesystem: fs.FileSystem
    path: str

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file system."""
        raise NotImplementedError

    def child(self, *names: str) -> Location:
        """The location of `names` below this one."""
        raise NotImplementedError


def resolve(uri: str) -> Location:
    """The location of a path or URI (`file://`, `s3://`, `gs://`, ...); a relative path is taken from the current folder.

    Raises ValueError, in one line, for a URI that names no file system we can open.
    """
    raise NotImplementedError


def exists(location: Location) -> bool:
    """Whether there is a file or folder."""
    raise NotImplementedError


def read_bytes(location: Location) -> bytes | None:
    """The content of a file, or None where there is none."""
    raise NotImplementedError


def write_bytes(location: Location, data: bytes) -> None:
    """Write a file whole or not at all, replacing what was there; makes its folder."""
    raise NotImplementedError


def create_bytes(location: Location, data: bytes) -> bool:
    """Write a file only if there is none; False if there is. Atomic locally, best effort on object stores."""
    raise NotImplementedError


def delete(location: Location) -> None:
    """Delete a file; nothing to do where there is none."""
    raise NotImplementedError


def list_files(folder: Location) -> list[str]:
    """Names of the files in a folder, sorted; empty where there is no folder. Temporary files are left out."""
    raise NotImplementedError


@contextmanager
def atomic_output(location: Location) -> Iterator[str]:
    """A local path to write to; its content appears at `location` when the block ends, and never if it raises."""
    raise NotImplementedError

"""Where files live: local paths and any `pyarrow.fs` URI, and writes that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

_OBJECT_STORES = ("s3", "gcs", "abfs")
_SECRET_QUERY = ("access_key", "secret_key", "session_token", "client_secret", "account_key", "sas_token", "sig")
"""Parameters of a URI that are secrets."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a file system. Pickles, so it can be sent to another process."""

    filesystem: fs.FileSystem
    path: str

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """The folder it is in."""
        return Location(self.filesystem, self.path.rsplit("/", 1)[0] or "/")

    def child(self, *names: str) -> Location:
        """The location of `names` below this one."""
        return Location(self.filesystem, "/".join([self.path.rstrip("/"), *names]))


def is_uri(path: str) -> bool:
    """Whether `path` names its file system (`s3://...`) rather than a local path."""
    return "://" in path


def holds_secret(uri: str) -> bool:
    """Whether a URI has a password, an access key or a client secret in it."""
    if not is_uri(uri):
        return False
    parts = urlsplit(uri)
    user, at, _ = parts.netloc.rpartition("@")
    is_secret = bool(at) and (":" in user or parts.scheme == "s3")
    return is_secret or any(name.lower() in _SECRET_QUERY for name, _ in parse_qsl(parts.query))


def resolve(uri: str) -> Location:
    """The location of a path or URI (`file://`, `s3://`, `gs://`, ...); relative paths start at the current folder.

    Raises ValueError, in one line, for a URI that names no file system we can open, or that holds a secret.
    """
    if not uri:
        raise ValueError("a path must not be empty")
    if holds_secret(uri):  # its text would be in messages, manifests and reports, so it is not repeated here either
        raise ValueError("a URI must not hold credentials; give them in the environment, as the store's own tools do")
    if uri.startswith("file://"):
        uri = unquote(uri.removeprefix("file://"))
    if not is_uri(uri):
        return Location(fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri)).replace(os.sep, "/"))
    try:
        filesystem, path = fs.FileSystem.from_uri(_one_put(uri))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"cannot open {uri}: {_first_line(error)}; use a local path or a URI of pyarrow.fs") from error
    return Location(filesystem, path.rstrip("/"))


def _one_put(uri: str) -> str:
    """The URI with spaces escaped and, on S3, uploads of small files in one request, so that none appears in halves."""
    uri = quote(uri, safe=":/?&=#%@+,;~*[]!$'()")
    parts = urlsplit(uri)
    if parts.scheme != "s3" or "allow_delayed_open" in parts.query:
        return uri
    return f"{uri}{'&' if parts.query else '?'}allow_delayed_open=true"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def exists(location: Location) -> bool:
    """Whether there is a file or folder."""
    return _file_type(location) != fs.FileType.NotFound


def is_folder(location: Location) -> bool:
    """Whether there is a folder."""
    return _file_type(location) == fs.FileType.Directory


def _file_type(location: Location) -> fs.FileType:
    return location.filesystem.get_file_info(location.path).type


def check_writable(folder: Location) -> None:
    """Raise ValueError, in one line, where a folder is not there and cannot be made, or takes no files.

    Of an object store it is asked whether the bucket is there; whether it takes files shows with the first one.
    """
    if not folder.is_local:
        _check_bucket(folder)
        return
    there = folder
    while not exists(there) and there.path != "/":
        there = there.parent
    if not is_folder(there):
        raise ValueError(f"{there.path} is not a folder")
    if not os.access(there.path, os.W_OK | os.X_OK):
        raise ValueError(f"{there.path} cannot be written to")


def _check_bucket(folder: Location) -> None:
    """Raise ValueError where there is certainly none; rights on a prefix need not hold for its bucket."""
    bucket = Location(folder.filesystem, folder.path.split("/", 1)[0])
    if folder.filesystem.type_name not in _OBJECT_STORES:
        return
    try:
        is_there = exists(bucket)
    except OSError:
        return
    if not is_there:
        raise ValueError(f"there is no bucket {bucket.path}")


def read_bytes(location: Location) -> bytes | None:
    """The content of a file, or None where there is none."""
    try:
        with location.filesystem.open_input_stream(location.path) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def write_bytes(location: Location, data: bytes) -> None:
    """Write a file whole or not at all, replacing what was there; makes its folder."""
    if not location.is_local:
        _put(location, data)
        return
    with atomic_output(location) as path, open(path, "wb") as file:
        file.write(data)


def create_bytes(location: Location, data: bytes) -> bool:
    """Write a file only if there is none; False if there is. Atomic locally, best effort on object stores."""
    if not location.is_local:
        if exists(location):
            return False
        _put(location, data)
        return True
    os.makedirs(location.parent.path, exist_ok=True)
    temporary = _temporary_path(location)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        _sync(temporary)
        os.link(temporary, location.path)
    except FileExistsError:
        return False
    finally:
        _unlink(temporary)
    _sync(location.parent.path)
    return True


def delete(location: Location) -> None:
    """Delete a file; nothing to do where there is none."""
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        return
    if location.is_local:
        _sync(location.parent.path)


def list_files(folder: Location) -> list[str]:
    """Names of the files in a folder, sorted; empty where there is no folder. Temporary files are left out."""
    selector = fs.FileSelector(folder.path, allow_not_found=True)
    infos = folder.filesystem.get_file_info(selector)
    return sorted(info.base_name for info in infos if info.is_file and not info.base_name.startswith("."))


@contextmanager
def atomic_output(location: Location) -> Iterator[str]:
    """A local path to write to; its content appears at `location` when the block ends, and never if it raises."""
    if not location.is_local:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = os.path.join(folder, "output")
            yield path
            _upload(path, location)
        return
    os.makedirs(location.parent.path, exist_ok=True)
    temporary = _temporary_path(location)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, location.path)
    except BaseException:
        _unlink(temporary)
        raise
    _sync(location.parent.path)


def remove_temporary_files(folder: Location) -> None:
    """Remove what writers that were killed left in a local folder; only its one writer may call it."""
    if not folder.is_local or not os.path.isdir(folder.path):
        return
    for name in os.listdir(folder.path):
        if name.startswith(".") and name.endswith(".tmp"):
            os.unlink(os.path.join(folder.path, name))


def _temporary_path(location: Location) -> str:
    """Beside the target, so that renaming is atomic; hidden, so that no reader of the folder takes it for data."""
    return location.parent.child(f".{location.name}.{secrets.token_hex(4)}.tmp").path


def _sync(path: str) -> None:
    """Make a file or a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def _make_folder(folder: Location) -> None:
    """Object stores have no folders to make."""
    if folder.filesystem.type_name not in _OBJECT_STORES:
        folder.filesystem.create_dir(folder.path, recursive=True)


def _put(location: Location, data: bytes) -> None:
    """One write of the whole content; an object store shows the object when its upload is complete."""
    _make_folder(location.parent)
    with location.filesystem.open_output_stream(location.path, compression=None) as stream:
        stream.write(data)


def _upload(path: str, location: Location) -> None:
    """Copy a local file to another file system in blocks. Closing a stream publishes it, so a broken one is deleted."""
    _make_folder(location.parent)
    try:
        with open(path, "rb") as file, location.filesystem.open_output_stream(location.path, compression=None) as out:
            shutil.copyfileobj(file, out, 16 << 20)
    except BaseException:
        delete(location)
        raise

"""Read and write files on local paths and `pyarrow.fs` URIs; writes are atomic."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar
from urllib.parse import parse_qsl, quote, unquote

import pyarrow as pa
from pyarrow import fs

from specextend.core import Checkpoint, first_line, one_line
from specextend.folders import temporary_folder

NUM_THREADS = 32
"""Concurrent requests to a store. Threads only wait, so the number of cores does not matter."""
_OBJECT_STORES = ("s3", "gcs", "abfs")
_PARAMETERS = {
    "scheme", "endpoint_override", "region", "tls_ca_file_path", "allow_bucket_creation",
    "allow_bucket_deletion", "allow_delayed_open", "check_directory_existence_before_creation",
    "retry_limit_seconds", "enable_tls", "blob_storage_authority", "dfs_storage_authority",
    "blob_storage_scheme", "dfs_storage_scheme", "tenant_id", "client_id", "user", "replication",
    "buffer_size", "default_block_size",
}  # fmt: skip
"""Harmless URI parameters. Any other parameter may be a secret."""
NO_CREDENTIALS = (
    "must not contain credentials; set them in the environment (unknown parameters count as "
    "credentials)"
)
"""End of a message about an address with a secret, which must not repeat the address."""
_QUERY = re.compile(r"\?[\w.-]+=[^&]*(&[\w.-]+=[^&]*)*$")
"""Parameters at the end of a URI. Any other `?` is part of the path."""
_GCS_RETRY_S = 60
"""Retry limit of Google's client in seconds, 15 minutes by default."""
_BLOCK_BYTES = 16 << 20
_S3_COPY_BYTES = 5 << 30
"""Largest object that S3 copies in one request."""


Item = TypeVar("Item")
Value = TypeVar("Value")
_MISTAKES = (
    errno.ENOENT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Errors of a wrong path."""


def is_passing(error: OSError) -> bool:
    """Return False for an error about the path itself, where a retry is useless."""
    return error.errno not in _MISTAKES


class OutOfReachError(OSError):
    """The file cannot be read now; its content is unknown."""


def is_away(error: BaseException) -> bool:
    """Return True if the system or the store failed, False if the content does not parse.

    pyarrow raises a plain OSError without errno in both cases.
    """
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError)
    return type(error) is not OSError or error.errno not in (None, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a file system. The gate is not pickled."""

    filesystem: fs.FileSystem
    path: str
    gate: Checkpoint | None = field(default=None, compare=False, repr=False)
    """Called before every write at or below this path; may raise."""

    def __reduce__(self) -> tuple[type[Location], tuple[fs.FileSystem, str]]:
        return Location, (self.filesystem, self.path)

    @property
    def info(self) -> fs.FileInfo:
        """File info."""
        return self.filesystem.get_file_info(self.path)

    @property
    def is_local(self) -> bool:
        """True on the local file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """Parent folder."""
        return replace(self, path=self.path.rsplit("/", 1)[0] or "/")

    def child(self, *names: str) -> Location:
        """Return the location of `names` below this path."""
        return replace(self, path="/".join([self.path.rstrip("/"), *names]))

    def behind(self, gate: Checkpoint) -> Location:
        """Return the same location with a gate."""
        return replace(self, gate=gate)

    def check(self) -> None:
        """Call the gate."""
        if self.gate is not None:
            self.gate()


def is_uri(path: str) -> bool:
    """Return True if `path` names its file system."""
    return "://" in path


def holds_secret(uri: str) -> bool:
    """Return True if a URI may contain a password, key or token.

    Unknown parameters and users count as secrets, except the container in
    `abfs://container@account`, `gs://anonymous@bucket` and HDFS users.
    """
    if not is_uri(uri):
        return False
    scheme, authority, _, _ = _split(uri)
    user, at, host = unquote(authority).rpartition("@")
    is_name = ":" not in user and (
        scheme in ("abfs", "abfss", "hdfs", "viewfs") or (scheme, user) == ("gs", "anonymous")
    )
    if (at and not is_name) or (scheme == "s3" and ":" in host):
        return True
    parameters = parse_qsl(uri.partition("?")[2])
    named = ((name, value) for name, value in parameters if re.fullmatch(r"[\w.-]+", name))
    return any(name not in _PARAMETERS or re.search("[@;=]", value) for name, value in named)


def resolve(uri: str) -> Location:
    """Locate a path or URI.

    The path of a URI is taken literally: `s3://bucket/a b#1%20c` is the key `a b#1%20c`, and
    parameters may follow (`?region=eu-west-1`). Only `file://` URIs are percent-encoded.

    Raises:
        ValueError: The URI contains a secret, or its file system cannot be opened.
        OSError: The store does not answer.
    """
    if not uri:
        raise ValueError("a path must not be empty")
    # The text would end up in messages, manifests and reports.
    if holds_secret(uri):
        raise ValueError(f"a URI {NO_CREDENTIALS}")
    if uri.startswith("file://"):
        uri = _local_path(uri)
    if not is_uri(uri):
        return Location(
            fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri)).replace(os.sep, "/")
        )
    try:
        filesystem, path = fs.FileSystem.from_uri(_encoded(uri))
    except OSError as error:
        # Arrow reports a missing bucket only in the message.
        if not re.search("Bucket '.*' not found", str(error)):
            raise OSError(f"{uri} cannot be reached: {first_line(error)}; run again") from error
        raise ValueError(f"cannot open {uri}: {first_line(error)}") from error
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"cannot open {uri}: {first_line(error)}; use a local path or a URI of pyarrow.fs"
        ) from error
    return Location(filesystem, path.rstrip("/"))


def path_below(uri: str, name: str) -> str:
    """Append `name` to the path of a URI, before its parameters."""
    place = uri[: found.start()] if is_uri(uri) and (found := _QUERY.search(uri)) else uri
    return f"{place.rstrip('/')}/{name}{uri[len(place) :]}"


def _split(uri: str) -> tuple[str, str, str, str]:
    scheme, _, rest = uri.partition("://")
    found = _QUERY.search(rest)
    rest, query = (rest[: found.start()], found[0][1:]) if found else (rest, "")
    authority, slash, path = rest.partition("/")
    return scheme.lower(), authority, slash + path, query


def _local_path(uri: str) -> str:
    path = unquote(uri.removeprefix("file://").removeprefix("localhost"))
    if not path.startswith("/"):
        raise ValueError(
            f"cannot open {uri}: a file:// URI needs an absolute path, as in file:///data"
        )
    return path


def _encoded(uri: str) -> str:
    """Percent-encode a URI, with parameters for uploads of small files in one request on S3."""
    scheme, authority, path, query = _split(uri)
    wanted = {"s3": "allow_delayed_open=true", "gs": f"retry_limit_seconds={_GCS_RETRY_S}"}.get(
        scheme
    )
    if wanted is not None and wanted.split("=")[0] not in query:
        query += f"{'&' if query else ''}{wanted}"
    parameters = f"?{quote(query, safe=':/&=%@+,;~*[]$()')}" if query else ""
    return f"{scheme}://{quote(authority, safe=':@%[]')}{quote(path)}{parameters}"


def exists(location: Location) -> bool:
    """Return True if a file or folder exists."""
    return location.info.type != fs.FileType.NotFound


def is_folder(location: Location) -> bool:
    """Return True if a folder exists."""
    return location.info.type == fs.FileType.Directory


def check_writable(folder: Location) -> None:
    """Raise ValueError if a folder cannot be written to. Of an object store only the bucket is
    checked.
    """
    if folder.is_local:
        there = folder
        while not exists(there):
            there = there.parent
        if not is_folder(there):
            raise ValueError(f"{there.path} is not a folder")
        if not os.access(there.path, os.W_OK | os.X_OK):
            raise ValueError(f"{there.path} cannot be written to")
    elif folder.filesystem.type_name in _OBJECT_STORES:
        bucket = Location(folder.filesystem, folder.path.split("/", 1)[0])
        with suppress(OSError):  # A key may have rights on a prefix only.
            if not exists(bucket):
                raise ValueError(f"bucket {bucket.path} does not exist")


def read_bytes(location: Location) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    try:
        with location.filesystem.open_input_stream(location.path) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def read_parsed(location: Location, parse: Callable[[bytes], Value]) -> Value | None:
    """Parse a file; None if it does not exist. Bad content is read twice before `parse` raises."""
    data = read_bytes(location)
    if data is None:
        return None
    try:
        return parse(data)
    except ValueError:
        return read_again(location, lambda file: parse(file.read()))


def read_again(
    location: Location, read: Callable[[pa.NativeFile], Value], num_bytes: int | None = None
) -> Value:
    """Read a file again after its content did not parse.

    Args:
        num_bytes: Size of the file in the listing.

    Raises:
        OutOfReachError: The store failed or sent too few bytes.
    """
    try:
        witness = _Witness(location.filesystem.open_input_file(location.path), num_bytes)
    except OSError as error:
        raise out_of_reach(location, error) from error
    with pa.PythonFile(witness, mode="r") as file:
        try:
            return read(file)
        except Exception as error:
            if witness.trouble:
                raise out_of_reach(location, OSError(witness.trouble)) from error
            raise


def out_of_reach(location: Location, error: Exception) -> OutOfReachError:
    """Return the error for a file that cannot be read now."""
    return OutOfReachError(f"{location.path} is out of reach ({one_line(error)}); run again")


class _Witness:
    """A file that records read failures, which pyarrow's errors hide."""

    def __init__(self, file: pa.NativeFile, num_bytes: int | None):
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.close = file.close
        self._num_bytes = file.size() if num_bytes is None else num_bytes
        self.trouble = ""
        if file.size() != self._num_bytes:
            raise OSError(f"it has {file.size():,} bytes, but the listing says {self._num_bytes:,}")

    def read(self, size: int) -> bytearray:
        """Read up to `size` bytes. Raises OSError if the store sends too few."""
        begin = self._file.tell()
        wanted = min(size, max(0, self._num_bytes - begin))
        try:
            # For an empty response pyarrow leaves the buffer as it was and reports success. The
            # last byte cannot equal both fillers.
            for filler in (b"\x00", b"\xff"):
                data = bytearray(filler * wanted)
                self._file.seek(begin)
                if self._file.readinto(data) == wanted and not data.endswith(filler):
                    return data
            raise OSError(f"got fewer than the {wanted:,} bytes requested")
        except OSError as error:
            self.trouble = first_line(error)
            raise

    @property
    def closed(self) -> bool:
        """True once closed."""
        return bool(self._file.closed)


def write_bytes(location: Location, data: bytes) -> None:
    """Write a file atomically; create its folder."""
    if not location.is_local:
        _upload(location, pa.py_buffer(data), is_small=True)
        return
    with atomic_output(location) as path, open(path, "wb") as file:
        file.write(data)


def delete(location: Location) -> None:
    """Delete a file if it exists."""
    location.check()
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        return
    if location.is_local:
        _sync(location.parent.path)


def list_files(folder: Location) -> list[str]:
    """List the files of a folder, sorted, without hidden files."""
    return sorted(file_sizes(folder))


def file_sizes(folder: Location) -> dict[str, int]:
    """Return the bytes of each file of a folder, without hidden files."""
    return {
        info.base_name: info.size
        for info in _infos(folder)
        if info.is_file and not info.base_name.startswith(".")
    }


def list_folders(folder: Location) -> list[str]:
    """List the folders in a folder, sorted, without hidden folders."""
    names = (info.base_name for info in _infos(folder) if info.type == fs.FileType.Directory)
    return sorted(name for name in names if not name.startswith("."))


def _infos(folder: Location) -> list[fs.FileInfo]:
    return folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))


@contextmanager
def atomic_output(location: Location) -> Iterator[str]:
    """Yield a local path to write to; the file appears at `location` if the block succeeds."""
    if not location.is_local:
        with temporary_folder() as folder:
            path = os.path.join(folder, "output")
            yield path
            data = pa.memory_map(path).read_buffer() if os.path.getsize(path) else pa.py_buffer(b"")
            _upload(location, data, is_small=not len(data))
        return
    location.check()
    os.makedirs(location.parent.path, exist_ok=True)
    temporary = _temporary(location).path
    try:
        yield temporary
        _sync(temporary)
        location.check()
        os.replace(temporary, location.path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    _sync(location.parent.path)


def remove_temporary_files(folder: Location) -> None:
    """Delete leftovers of killed writers. Only the folder's single writer may call it."""
    for info in _infos(folder):
        if info.is_file and re.fullmatch(r"\..*\.tmp", info.base_name):
            delete(folder.child(info.base_name))


def _temporary(location: Location) -> Location:
    return location.parent.child(f".{location.name}.{secrets.token_hex(4)}.tmp")


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _upload(location: Location, data: pa.Buffer, *, is_small: bool) -> None:
    """Upload a file; readers see the previous file until the upload is complete.

    Data of several requests goes to a hidden name first if the store renames in one request.
    """
    kind = location.filesystem.type_name
    is_store = kind in _OBJECT_STORES
    moves = not is_store or not (
        is_small or kind == "abfs" or (kind == "s3" and len(data) > _S3_COPY_BYTES)
    )
    location.check()
    if not is_store:
        location.filesystem.create_dir(location.parent.path, recursive=True)
    target = _temporary(location) if moves else location
    try:
        # Closing the stream publishes the bytes, so nothing else may fail inside the block.
        with target.filesystem.open_output_stream(target.path, compression=None) as stream:
            for begin in range(0, len(data), _BLOCK_BYTES):
                stream.write(data[begin : begin + _BLOCK_BYTES])
        if moves:
            location.check()
            location.filesystem.move(target.path, location.path)
    except BaseException:
        if moves:
            with suppress(OSError):  # The next start removes it.
                location.filesystem.delete_file(target.path)
        raise


def in_order(
    function: Callable[[Item], Value],
    items: Iterable[Item],
    *,
    cost: Callable[[Item], int] = lambda item: 0,
    most: int = 0,
) -> Iterator[Value]:
    """Call `function` for each item in a thread pool; yield the results in order.

    Args:
        cost: Cost of an item.
        most: Limit for the summed cost of items in progress or not yet consumed. A single item may
            exceed it.

    Raises:
        Exception: An exception of `function`, in its place. No further call is started.
    """
    started: deque[tuple[Future[Value], int]] = deque()
    total = 0
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            for item in items:
                price = cost(item)
                while started and (len(started) >= NUM_THREADS or total + price > most > 0):
                    yield started[0][0].result()
                    total -= started.popleft()[1]
                started.append((pool.submit(function, item), price))
                total += price
            while started:
                yield started.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)

"""Files on local paths and on any `pyarrow.fs` URI: read many at once, written whole or not at
all.
"""

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
"""Requests to a store that are under way at once: each waits for milliseconds and needs no
processor meanwhile.
"""
_OBJECT_STORES = ("s3", "gcs", "abfs")
_PARAMETERS = {
    "scheme", "endpoint_override", "region", "tls_ca_file_path", "allow_bucket_creation",
    "allow_bucket_deletion", "allow_delayed_open", "check_directory_existence_before_creation",
    "retry_limit_seconds", "enable_tls", "blob_storage_authority", "dfs_storage_authority",
    "blob_storage_scheme", "dfs_storage_scheme", "tenant_id", "client_id", "user", "replication",
    "buffer_size", "default_block_size",
}  # fmt: skip
"""Parameters of a URI that are no secrets; any other may be one."""
NO_CREDENTIALS = (
    "must not hold credentials; give them in the environment (an unknown parameter counts as one)"
)
"""What is wrong with an address that `holds_secret` finds. The address itself is not repeated."""
_QUERY = re.compile(r"\?[\w.-]+=[^&]*(&[\w.-]+=[^&]*)*$")
"""The parameters at the end of a URI; any other `?` belongs to the path."""
_GCS_RETRY_S = 60
"""Seconds for which Google's client repeats a request; its own default is 15 minutes."""
_BLOCK_BYTES = 16 << 20
_S3_COPY_BYTES = 5 << 30
"""Most bytes that S3 copies in one request."""


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
"""Errors about a path that somebody gave."""


def is_passing(error: OSError) -> bool:
    """Return True unless it is an error about a path, which no later try mends by itself."""
    return error.errno not in _MISTAKES


class OutOfReachError(OSError):
    """A file that cannot be read now, which says nothing about what it holds."""


def is_away(error: BaseException) -> bool:
    """Return True for an error of the system or of a store, or for a lack of memory, and False for
    what does not parse.

    pyarrow raises a plain OSError without a number for what does not parse, and for some errors of
    stores.
    """
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError)
    return type(error) is not OSError or error.errno not in (None, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a file system. Pickles, without its gate, so it can be sent to another process."""

    filesystem: fs.FileSystem
    path: str
    gate: Checkpoint | None = field(default=None, compare=False, repr=False)
    """Called before every write here and below; may raise. None allows everything."""

    def __reduce__(self) -> tuple[type[Location], tuple[fs.FileSystem, str]]:
        return Location, (self.filesystem, self.path)

    @property
    def info(self) -> fs.FileInfo:
        """Ask what there is."""
        return self.filesystem.get_file_info(self.path)

    @property
    def is_local(self) -> bool:
        """Return True if it is on this machine's file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """Return the last component of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """Return the folder it is in."""
        return replace(self, path=self.path.rsplit("/", 1)[0] or "/")

    def child(self, *names: str) -> Location:
        """Return the location of `names` below this one."""
        return replace(self, path="/".join([self.path.rstrip("/"), *names]))

    def behind(self, gate: Checkpoint) -> Location:
        """Return the same place with a gate that is called before its writes, such as a lock's."""
        return replace(self, gate=gate)

    def check(self) -> None:
        """Ask the gate before something here changes; it may raise."""
        if self.gate is not None:
            self.gate()


def is_uri(path: str) -> bool:
    """Return True if `path` names its file system (`s3://...`), False for a local path."""
    return "://" in path


def holds_secret(uri: str) -> bool:
    """Return True if a URI may contain a password, a key or a token: as its user, or as a parameter
    that is not known.

    Users that are none: a container (`abfs://container@account`), `gs://anonymous@bucket`, and the
    user of HDFS.
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
    """Locate a path or URI (`file://`, `s3://`, `gs://`, ...); a relative path starts at the
    current folder.

    The path of a URI is taken as it is written, as the stores' own tools take it: `s3://bucket/a
    b#1%20c` is the key `a b#1%20c`. Parameters may follow it (`?region=eu-west-1`). A `file://` URI
    is percent-encoded and has none. Raises ValueError, in one line, for a URI that contains a
    secret or whose file system cannot be opened; OSError if its store does not answer (S3 is asked
    for the bucket's region).
    """
    if not uri:
        raise ValueError("a path must not be empty")
    # its text would be in messages, manifests and reports, so it is not repeated here either
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
        # Arrow says only in words that S3 has answered so
        if not re.search("Bucket '.*' not found", str(error)):
            raise OSError(f"{uri} cannot be reached: {first_line(error)}; run again") from error
        raise ValueError(f"cannot open {uri}: {first_line(error)}") from error
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"cannot open {uri}: {first_line(error)}; use a local path or a URI of pyarrow.fs"
        ) from error
    return Location(filesystem, path.rstrip("/"))


def path_below(uri: str, name: str) -> str:
    """Return a path or URI with a name behind its path, before its parameters."""
    place = uri[: found.start()] if is_uri(uri) and (found := _QUERY.search(uri)) else uri
    return f"{place.rstrip('/')}/{name}{uri[len(place) :]}"


def _split(uri: str) -> tuple[str, str, str, str]:
    """Split a URI into scheme, authority, path with its first slash, and parameters without their
    question mark.
    """
    scheme, _, rest = uri.partition("://")
    found = _QUERY.search(rest)
    rest, query = (rest[: found.start()], found[0][1:]) if found else (rest, "")
    authority, slash, path = rest.partition("/")
    return scheme.lower(), authority, slash + path, query


def _local_path(uri: str) -> str:
    """Return the path of a `file://` URI. Raises ValueError if it has none."""
    path = unquote(uri.removeprefix("file://").removeprefix("localhost"))
    if not path.startswith("/"):
        raise ValueError(
            f"cannot open {uri}: a file:// URI needs an absolute path, as in file:///data"
        )
    return path


def _encoded(uri: str) -> str:
    """Percent-encode a URI, and add parameters: on S3 small files are uploaded in one request, so
    that none appears in halves, and Google's store is given up after a minute.
    """
    scheme, authority, path, query = _split(uri)
    wanted = {"s3": "allow_delayed_open=true", "gs": f"retry_limit_seconds={_GCS_RETRY_S}"}.get(
        scheme
    )
    if wanted is not None and wanted.split("=")[0] not in query:
        query += f"{'&' if query else ''}{wanted}"
    parameters = f"?{quote(query, safe=':/&=%@+,;~*[]$()')}" if query else ""
    return f"{scheme}://{quote(authority, safe=':@%[]')}{quote(path)}{parameters}"


def exists(location: Location) -> bool:
    """Return True if there is a file or folder."""
    return location.info.type != fs.FileType.NotFound


def is_folder(location: Location) -> bool:
    """Return True if there is a folder."""
    return location.info.type == fs.FileType.Directory


def check_writable(folder: Location) -> None:
    """Raise ValueError, in one line, if a folder is missing and cannot be made, or cannot be
    written to.

    On an object store only the bucket is looked for; whether it accepts files shows with the first
    one.
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
        with suppress(OSError):  # rights on a prefix need not hold for its bucket
            if not exists(bucket):
                raise ValueError(f"there is no bucket {bucket.path}")


def read_bytes(location: Location) -> bytes | None:
    """Read the content of a file; None if there is none."""
    try:
        with location.filesystem.open_input_stream(location.path) as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def read_parsed(location: Location, parse: Callable[[bytes], Value]) -> Value | None:
    """Parse the content of a file; None if there is none. What does not parse is read once more.

    Raises the ValueError of `parse` for what a file holds, and OSError for a file that is out of
    reach.
    """
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
    """Read a file that did not parse once more. num_bytes: its size, as a listing names it.

    Raises OutOfReachError if the store fails or sends less than there is. What `read` raises is
    then about what the file holds.
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
    """A file that remembers what was wrong with reading it: pyarrow's errors do not tell that from
    what it holds.
    """

    def __init__(self, file: pa.NativeFile, num_bytes: int | None):
        self._file = file
        # and no other way to its bytes
        self.seek = file.seek
        self.tell = file.tell
        self.close = file.close
        self._num_bytes = file.size() if num_bytes is None else num_bytes
        self.trouble = ""
        if file.size() != self._num_bytes:
            raise OSError(
                f"it has {file.size():,} bytes, where the listing says {self._num_bytes:,}"
            )

    def read(self, size: int) -> bytearray:
        """Read as a file does. Raises OSError if less comes than there is."""
        begin = self._file.tell()
        wanted = min(size, max(0, self._num_bytes - begin))
        try:
            # of an empty body pyarrow says that it filled the buffer: no last byte is equal to both
            for filler in (b"\x00", b"\xff"):
                data = bytearray(filler * wanted)
                self._file.seek(begin)
                if self._file.readinto(data) == wanted and not data.endswith(filler):
                    return data
            raise OSError(f"less came than the {wanted:,} bytes that were asked for")
        except OSError as error:
            self.trouble = first_line(error)
            raise

    @property
    def closed(self) -> bool:
        """Return True once the file is closed."""
        return bool(self._file.closed)


def write_bytes(location: Location, data: bytes) -> None:
    """Write a file whole or not at all, in place of one that may be there; make its folder."""
    if not location.is_local:
        _upload(location, pa.py_buffer(data), is_small=True)
        return
    with atomic_output(location) as path, open(path, "wb") as file:
        file.write(data)


def delete(location: Location) -> None:
    """Delete a file if there is one."""
    location.check()
    try:
        location.filesystem.delete_file(location.path)
    except FileNotFoundError:
        return
    if location.is_local:
        _sync(location.parent.path)


def list_files(folder: Location) -> list[str]:
    """List a folder's files, sorted and without temporary files; none if there is no folder."""
    return sorted(file_sizes(folder))


def file_sizes(folder: Location) -> dict[str, int]:
    """Return the bytes of the files that `list_files` lists, by name."""
    return {
        info.base_name: info.size
        for info in _infos(folder)
        if info.is_file and not info.base_name.startswith(".")
    }


def list_folders(folder: Location) -> list[str]:
    """List a folder's folders, sorted and without hidden ones; none if there is no folder."""
    names = (info.base_name for info in _infos(folder) if info.type == fs.FileType.Directory)
    return sorted(name for name in names if not name.startswith("."))


def _infos(folder: Location) -> list[fs.FileInfo]:
    return folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))


@contextmanager
def atomic_output(location: Location) -> Iterator[str]:
    """Yield a local path to write to; its content appears at `location` when the block ends, never
    if it raises.
    """
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
    """Remove what killed writers have left in a folder; only its one writer may call it."""
    for info in _infos(folder):
        if info.is_file and re.fullmatch(r"\..*\.tmp", info.base_name):
            delete(folder.child(info.base_name))


def _temporary(location: Location) -> Location:
    """Choose a place beside the target, so that renaming is atomic; hidden, so that no reader takes
    it for data.
    """
    return location.parent.child(f".{location.name}.{secrets.token_hex(4)}.tmp")


def _sync(path: str) -> None:
    """Make a file or a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _upload(location: Location, data: pa.Buffer, *, is_small: bool) -> None:
    """Write a whole file to another file system; what is there remains as it was until all of it
    has arrived.

    is_small: an object store takes it in one request. Other data is written under a hidden name,
    then renamed, if the store renames such a file in one request.
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
        # closing the stream shows the bytes, so nothing but the store may fail in between
        with target.filesystem.open_output_stream(target.path, compression=None) as stream:
            for begin in range(0, len(data), _BLOCK_BYTES):
                stream.write(data[begin : begin + _BLOCK_BYTES])
        if moves:
            location.check()
            location.filesystem.move(target.path, location.path)
    except BaseException:
        if moves:
            with suppress(OSError):  # it is no data to anybody, and the next start removes it
                location.filesystem.delete_file(target.path)
        raise


def in_order(
    function: Callable[[Item], Value],
    items: Iterable[Item],
    *,
    cost: Callable[[Item], int] = lambda item: 0,
    most: int = 0,
) -> Iterator[Value]:
    """Yield what `function` returns for each item, in their order; it is called in a bounded pool
    of threads.

    cost: of an item; those that are under way, or whose results were not taken yet, cost at most
    `most` together, or are a single one. An exception is raised where the result would be; what has
    not begun by then never does.
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

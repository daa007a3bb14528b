"""Files that are read in processes of their own: one that hangs its reader, or ends it, fails alone."""

import errno
import io
import multiprocessing
import resource
import secrets
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import PurePath
from queue import LifoQueue
from typing import Any, NamedTuple

import pyarrow as pa

from specextend.core import Values, one_line
from specextend.data.document_kinds import DocumentOptions, NumberedRow, UnreadableError, as_row, read_document, rows_of
from specextend.data.document_set import Failure, write_rows
from specextend.data.storage import Location, is_away, is_readable

PENDING = "_pending-"
"""Begins the name of a part that is whole, but whose failures are not written yet."""
_AHEAD = 64
"""Most files, for each process, that are read or wait in memory before the first of them is done."""
_COMPRESSED = (".bz2", ".gz", ".lz4", ".zst")
"""Ends of paths whose content pyarrow decompresses."""
_HOPELESS = 1000
"""Bad rows at the beginning of a file after which it is given up."""


class SourceFile(NamedTuple):
    """A file that may become documents."""

    location: Location
    path: str
    """Names it in the data set: an absolute path, or a URI."""
    doc_id: str
    kind: str
    size: int
    modified: datetime


class Reading(NamedTuple):
    """Hold what a file has: a document, or a part that is pending; and what is wrong with it."""

    rows: tuple[Values, ...] = ()
    pending: str | None = None
    failures: tuple[Failure, ...] = ()


def _read_file(file: SourceFile, folder: Location, options: DocumentOptions, *, is_again: bool = False) -> Reading:
    """Return what a file holds; one that cannot be read is read once more before anything is said of it."""
    try:
        with file.location.filesystem.open_input_stream(file.location.path) as opened:
            stream = _Counted(opened)
            if file.kind in ("jsonl", "csv"):
                lines = rows_of(file.kind, io.BufferedReader(stream), options)
                return read_table(file, _whole(lines, stream, file), folder, options)
            content = stream.readall()
            stream.check(file)
            row = read_document(file.kind, content, options)
    except UnreadableError as error:
        return _failed(file, error.reason, error.message)
    except MemoryError:
        return _failed(file, "too large", "needs more memory than a file may take (--memory-limit)")
    except OSError as error:
        if not is_again:
            return _read_file(file, folder, options, is_again=True)
        reason = "unreachable" if is_away(error) or not is_readable(file.location) else "damaged"
        return _failed(file, reason, f"cannot be read: {one_line(error)}")
    except Exception as error:  # noqa: BLE001  # one line for what nobody foresaw; the other files go on
        return _failed(file, "damaged", f"cannot be read: {type(error).__name__}: {one_line(error)}")
    row["title"] = row["title"] or PurePath(file.location.name).stem
    return Reading(rows=(row | {"id": file.doc_id} | _columns(file),))


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted: a store may end one early without an error."""

    def __init__(self, stream: pa.NativeFile):
        self._stream, self._num_bytes = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._stream.readinto(buffer)
        self._num_bytes += num_bytes
        return num_bytes

    def readall(self) -> bytes:
        content = self._stream.read()
        self._num_bytes += len(content)
        return content

    def check(self, file: SourceFile) -> None:
        """Raise OSError if fewer bytes came than the file has."""
        is_compressed = file.location.path.endswith(_COMPRESSED)  # then its own end says so
        if not is_compressed and self._num_bytes != file.size:
            raise OSError(errno.EIO, f"{self._num_bytes:,} of {file.size:,} bytes came")


def _whole(lines: Iterator[NumberedRow], stream: _Counted, file: SourceFile) -> Iterator[NumberedRow]:
    try:
        yield from lines
    except UnreadableError:
        stream.check(file)
        raise
    stream.check(file)


def _columns(file: SourceFile) -> Values:
    return {"source_path": file.path, "source_size": file.size, "source_modified": file.modified}


def _failed(file: SourceFile, reason: str, message: str) -> Reading:
    return Reading(failures=(Failure(file.path, None, reason, message),))


def read_table(file: SourceFile, lines: Iterable[NumberedRow], folder: Location, options: DocumentOptions) -> Reading:
    """Write the rows of a table as a part that is pending. Raises UnreadableError if the first thousand are bad."""
    failures: list[Failure] = []
    pending = f"{PENDING}{secrets.token_hex(8)}.parquet"
    num_rows = write_rows(_good_rows(file, lines, options, failures), folder.child(pending))
    if not num_rows and not failures:
        raise UnreadableError("no text", "has no rows")
    return Reading(pending=pending if num_rows else None, failures=tuple(failures))


def _good_rows(
    file: SourceFile, lines: Iterable[NumberedRow], options: DocumentOptions, failures: list[Failure]
) -> Iterator[Values]:
    for number, (line, values) in enumerate(lines, start=1):
        try:
            yield as_row(values, f"{file.doc_id}:{line}", line, options) | _columns(file)
        except UnreadableError as error:
            failures.append(Failure(file.path, line, error.reason, error.message))
            if len(failures) == number == _HOPELESS:
                raise UnreadableError(error.reason, f"has no good row; one of them {error.message}") from error


class _Reader:
    """A process that reads files, and that is replaced when it hangs or ends."""

    def __init__(self, folder: Location, options: DocumentOptions):
        self._folder, self._options = folder, options
        self._process: SpawnProcess | None = None

    def read(self, file: SourceFile) -> Reading:
        """Return what a file holds, or that it takes too long or ends the process."""
        try:
            if self._process is None:
                self._start()
            self._connection.send(file)
            if self._connection.poll(self._options.time_limit_s + file.size / (1 << 20)):
                return self._connection.recv()
            reason, message = "too slow", "was not read in the time that a file may take (--time-limit)"
        except (EOFError, OSError):
            reason = "crashed"
            message = "ended its reader: it is damaged, or needs more memory than a reader has (--memory-limit)"
        self.stop()
        return _failed(file, reason, message)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of pyarrow's threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._folder, self._options), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # the time of a file begins when the process is ready

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()


def read_files(
    files: Iterable[SourceFile], folder: Location, options: DocumentOptions
) -> Generator[Reading, None, None]:
    """Read files in several processes, each driven by a thread; yield what they hold, in order of the files.

    folder: where the parts of tables are written.
    """
    idle: LifoQueue[_Reader] = LifoQueue()
    readers = [_Reader(folder, options) for _ in range(options.workers)]
    for reader in readers:
        idle.put(reader)

    def read(file: SourceFile) -> Reading:
        reader = idle.get()
        try:
            return reader.read(file)
        finally:
            idle.put(reader)

    with ThreadPoolExecutor(options.workers) as threads:
        reading: deque[Future[Reading]] = deque()
        try:
            for file in files:
                reading.append(threads.submit(read, file))
                if len(reading) >= _AHEAD * options.workers:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for reader in readers:
                reader.stop()


def _serve(connection: Connection, folder: Location, options: DocumentOptions) -> None:
    """Read files, one after the other, until nobody asks for more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asks hears it too, and ends this process
    resource.setrlimit(resource.RLIMIT_AS, (int(options.memory_gib * (1 << 30)), resource.RLIM_INFINITY))
    connection.send(None)
    while True:
        try:
            file = connection.recv()
        except EOFError:
            return
        connection.send(_read_file(file, folder, options))

"""A file system with the latency and request counts of an object store."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs


@dataclass
class Tally:
    """Counts of requests and bytes."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, requests: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Add to the counts, from any thread."""
        with self._lock:
            self.requests += requests
            self.bytes_read += bytes_read
            self.bytes_written += bytes_written


class _Reader:
    def __init__(self, store: SimulatedStore, path: str) -> None:
        self._store, self._file = store, open(path, "rb")  # noqa: SIM115  pyarrow closes it

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self._store.request(bytes_read=len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Writer:
    def __init__(self, store: SimulatedStore, path: str) -> None:
        self._store, self._file = store, open(path, "wb")  # noqa: SIM115  pyarrow closes it

    def close(self) -> None:
        """Send the file."""
        if not self._file.closed:
            self._store.request(bytes_written=self._file.tell())
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SimulatedStore(fs.FileSystemHandler):
    """The local file system with the requests of S3.

    Opening a file asks for its size, each read is a request, and so is listing 1,000 files.
    Renaming is free, because S3 shows a file under its final name.
    """

    def __init__(self, latency_s: float) -> None:
        self.latency_s, self.tally = latency_s, Tally()
        self._local = fs.LocalFileSystem()

    def request(self, bytes_read: int = 0, bytes_written: int = 0, requests: int = 1) -> None:
        """Wait for some requests."""
        self.tally.add(requests, bytes_read, bytes_written)
        if self.latency_s:
            time.sleep(self.latency_s * requests)

    def get_type_name(self) -> str:
        """Return the file system's type."""
        return "simulated"

    def normalize_path(self, path: str) -> str:
        """Return the path unchanged."""
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Ask about files."""
        self.request(requests=len(paths))
        return list(self._local.get_file_info(paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """List a folder."""
        infos = self._local.get_file_info(selector)
        self.request(requests=1 + len(infos) // 1000)
        return list(infos)

    def create_dir(self, path: str, recursive: bool) -> None:
        """Make a folder, free on an object store."""
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder."""
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Delete a folder's files."""
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Refuse, because the disk is real."""
        raise PermissionError("the simulated store is a whole disk; delete a folder of it")

    def delete_file(self, path: str) -> None:
        """Delete a file; pyarrow first asks about it."""
        self.request(requests=2)
        self._local.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Show a file under its final name."""
        self._local.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file within the store."""
        self.request()
        self._local.copy_file(src, dest)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for sequential reading."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for random reading."""
        self.request()
        return pa.PythonFile(_Reader(self, path), mode="r")

    def open_output_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:
        """Open a file for writing."""
        return pa.PythonFile(_Writer(self, path), mode="w")

    def open_append_stream(self, path: str, metadata: dict[str, str]) -> pa.NativeFile:
        """Refuse, because objects are written once."""
        raise PermissionError(f"an object store cannot append to {path}; write a new object")

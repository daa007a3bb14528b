"""A file system whose reads fail, or bring less than there is, as a network disk's or an object store's do."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from scripts.simulated_store import SimulatedStore
from specextend.data.storage import Location

FAULTS = {name: getattr(errno, name) for name in ("EIO", "EMFILE", "ESTALE", "EACCES")}
FAULTS |= {"nothing": 0.0, "a half": 0.5}
"""What a read comes to: an error of the system, or a share of the bytes."""


@dataclass
class _Reader:
    store: FaultyStore
    file: Any

    def read(self, size=-1):
        """Read up to `size` bytes."""
        data = self.file.read(size)
        fault = self.store.take_fault()
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return data[: int(len(data) * fault)]

    def __getattr__(self, name):
        return getattr(self.file, name)


class FaultyStore(SimulatedStore):
    """A disk whose next `num_faults` reads fail."""

    def __init__(self):
        super().__init__(0)
        self.fault = 1.0
        self.num_faults = 0.0

    def __getstate__(self):
        return {"fault": self.fault, "num_faults": self.num_faults}

    def take_fault(self):
        """What the read that begins comes to."""
        self.num_faults -= 1
        return self.fault if self.num_faults >= 0 else 1.0

    def at(self, path):
        """A place on it."""
        return Location(fs.PyFileSystem(self), str(path))

    def open_input_file(self, path):
        """Open a file to read it anywhere."""
        return pa.PythonFile(_Reader(self, io.BytesIO(Path(path).read_bytes())), mode="r")

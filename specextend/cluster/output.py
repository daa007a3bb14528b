"""An output folder that takes no more files ends the run, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specextend.cluster.exits import OutputError
from specextend.cluster.messages import first_line
from specextend.data.storage import Location


@contextmanager
def writing(output: Location) -> Iterator[None]:
    """A block that writes to an output folder. Raises OutputError for what the file system has against it."""
    try:
        yield
    except OSError as error:
        message = f"{output.path} cannot be written to: {first_line(error)}"
        raise OutputError(f"{message}; what was committed is there, run again to resume") from error

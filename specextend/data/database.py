"""DuckDB under tables of many narrow rows: in bounded memory, and without a way to anything but its temporary files."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import Values, first_line

_FETCHED_ROWS = 2048
_LOCK = "SET GLOBAL TimeZone = 'UTC'; SET enable_external_access = false; SET lock_configuration = true"


def connect(memory_limit: str, temp_directory: str = "") -> duckdb.DuckDBPyConnection:
    """Return a database in memory that opens no file but temporary ones, and loads no extension."""
    limits = {"memory_limit": memory_limit, "temp_directory": temp_directory, "threads": "1"}
    connection = duckdb.connect(config={**limits, "python_enable_replacements": "false"})
    connection.execute(_LOCK)
    return connection


class Database:
    """A database that is gone with this object. What does not fit into its memory goes to temporary files.

    Of one thread, and deterministic. Not for texts: rows are handled 2,048 at a time, whatever their size. All methods
    raise OSError if the temporary folder has no room.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="specextend-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._connection = connect(memory_limit="128MB", temp_directory=folder)

    def add(self, given: pa.Table, *statements: str) -> None:
        """Execute statements in which a table goes by the name `given`."""
        self._connection.register("given", given)
        for statement in statements:
            self.select(statement)
        self._connection.unregister("given")

    def select(self, query: str, *values: Any) -> list[Values]:
        """Return the rows that a query finds. values: of the query's parameters."""
        return list(self.stream(query, *values))

    def stream(self, query: str, *values: Any) -> Iterator[Values]:
        """Yield the rows that a query finds; nothing else may be asked meanwhile."""
        with temporary_room():
            found = self._connection.execute(query, values)
            names = [name for name, *_ in found.description or ()]
            while rows := found.fetchmany(_FETCHED_ROWS):
                yield from (dict(zip(names, row, strict=True)) for row in rows)

    def arrays(self, query: str) -> list[NDArray[Any]]:
        """Return the columns of the rows that a query finds; none of them may be null."""
        with temporary_room():
            return [*self._connection.execute(query).fetchnumpy().values()]


@contextmanager
def temporary_room() -> Iterator[None]:
    """Raise OSError with a way out if a `with` block finds no room for temporary files."""
    try:
        yield
    except (OSError, duckdb.IOException, duckdb.FatalException, duckdb.OutOfMemoryException) as error:
        folder = tempfile.gettempdir()
        raise OSError(f"{folder} takes no more temporary rows ({first_line(error)}); set TMPDIR to another") from error

"""DuckDB under tables of many narrow rows: in bounded memory, and without a way to anything but its temporary files."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import duckdb
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import Values, first_line

_LIMITS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,
    "memory_limit": "256MB",
    "python_enable_replacements": False,
}
_LOCK = "SET GLOBAL TimeZone = 'UTC'; SET enable_external_access = false; SET lock_configuration = true"


class Database:
    """A database that is gone with this object. What does not fit into its memory goes to temporary files.

    Of one thread, and deterministic. Not for texts: rows are handled 2,048 at a time, whatever their size.
    """

    def __init__(self) -> None:
        folder = os.path.join(tempfile.gettempdir(), f"specextend-{uuid4().hex}")  # made and removed by DuckDB
        self._connection = duckdb.connect(config={**_LIMITS, "temp_directory": folder})
        self._connection.execute(_LOCK)

    def add(self, given: pa.Table, *statements: str) -> None:
        """Execute statements in which a table goes by the name `given`.

        Raises OSError if the temporary folder has no room.
        """
        self._connection.register("given", given)
        for statement in statements:
            self._execute(statement)
        self._connection.unregister("given")

    def select(self, query: str, *values: Any) -> list[Values]:
        """Return the rows that a query finds. values: of the query's parameters."""
        return list(self.stream(query, *values))

    def stream(self, query: str, *values: Any) -> Iterator[Values]:
        """Yield the rows that a query finds; nothing else may be asked meanwhile."""
        found = self._execute(query, values)
        names = [name for name, *_ in found.description or ()]
        while rows := found.fetchmany(2048):
            yield from (dict(zip(names, row, strict=True)) for row in rows)

    def arrays(self, query: str) -> list[NDArray[Any]]:
        """Return the columns of the rows that a query finds; none of them may be null."""
        return [*self._execute(query).fetchnumpy().values()]

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> duckdb.DuckDBPyConnection:
        try:
            return self._connection.execute(statement, values)
        except duckdb.IOException as error:
            folder = tempfile.gettempdir()
            raise OSError(
                f"{folder} takes no more temporary rows ({first_line(error)}); set TMPDIR to another"
            ) from error

"""DuckDB under tables of many narrow rows, and under the filter of rows, which is a condition of
SQL.

It works in bounded memory, and has no way to anything but its temporary files.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import Values, first_line, one_line

_FETCHED_ROWS = 2048
_LOCK = (
    "SET GLOBAL TimeZone = 'UTC'; SET enable_external_access = false; SET lock_configuration = true"
)


def connect(memory_limit: str, temp_directory: str = "") -> duckdb.DuckDBPyConnection:
    """Return a database in memory that opens no file but temporary ones, and loads no extension."""
    limits = {"memory_limit": memory_limit, "temp_directory": temp_directory, "threads": "1"}
    connection = duckdb.connect(config={**limits, "python_enable_replacements": "false"})
    connection.execute(_LOCK)
    return connection


class Database:
    """A database that is gone with this object. What does not fit into its memory goes to temporary
    files.

    Of one thread, and deterministic. Texts must come in small tables: rows are handled 2,048 at a
    time, whatever their size. All methods raise OSError if the temporary folder has no room.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="specextend-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._connection = connect(memory_limit="128MB", temp_directory=folder)

    def add(self, given: pa.Table, *statements: str) -> list[Values]:
        """Execute statements in which a table goes by the name `given`; return the rows that the
        last one finds.
        """
        self._connection.register("given", given)
        [*_, rows] = map(self.select, statements)
        self._connection.unregister("given")
        return rows

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
    except (
        OSError,
        duckdb.IOException,
        duckdb.FatalException,
        duckdb.OutOfMemoryException,
    ) as error:
        folder = tempfile.gettempdir()
        raise OSError(
            f"{folder} takes no more temporary rows ({first_line(error)}); set TMPDIR to another"
        ) from error


# The filter


_EXAMPLE = """it is a condition of SQL, as in lang = 'en' AND pages > 2 AND "a b" IS NOT NULL"""
_PARSE = """
WITH parsed AS MATERIALIZED (SELECT json_serialize_sql(?) AS tree),
used AS MATERIALIZED (
    SELECT tree->>'error_message' AS error,
        json_extract_string(tree, '$..class') AS kinds,
        json_extract_string(tree, '$..function_name') AS functions,
        list_sort(list_distinct(json_extract_string(tree, '$..column_names[0]'))) AS columns
    FROM parsed
),
refused AS (
    SELECT lower(kind) AS name FROM (SELECT unnest(kinds) AS kind FROM used)
    WHERE kind NOT IN ('BETWEEN', 'CASE', 'CAST', 'COLLATE', 'COLUMN_REF', 'COMPARISON',
        'CONJUNCTION', 'CONSTANT',
        'FUNCTION', 'OPERATOR', 'TYPE')
    UNION ALL
    SELECT function_name || '()' FROM duckdb_functions()
    WHERE function_name IN (SELECT unnest(functions) FROM used) AND CASE function_type
        WHEN 'scalar' THEN stability != 'CONSISTENT'
            OR function_name IN ('age', 'array_resize', 'current_localtime',
            'current_localtimestamp', 'format', 'generate_series', 'list_resize', 'lpad', 'printf',
            'range', 'repeat',
            'rpad')
        WHEN 'table' THEN function_name = 'unnest'
        ELSE NOT regexp_full_match(
            function_name, '(array|list|map)_.*|date_add|days_in_month|fdiv|fmod|nullif|split_part')
        END
)
SELECT CASE
        WHEN error IS NOT NULL THEN error
        WHEN EXISTS (FROM refused) THEN (SELECT max(name) FROM refused) || ' is not allowed'
        WHEN len(columns) = 0 THEN 'it names no column'
        WHEN len(columns) > (SELECT count(DISTINCT lower(name))
            FROM (SELECT unnest(columns) AS name))
            THEN 'it names columns that differ in case alone'
    END, columns
FROM used
"""
"""What is wrong with a statement, and the columns that it names.

Refused are subqueries, and functions that see more than one row, have another value at another
time, or make much of little: the database's limit does not count values that wait to be compared.
"""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    return connect("512MB")


@cache
def filter_columns(text: str) -> tuple[str, ...]:
    """Return the columns that a filter reads. Raises ValueError, in one line, for what is no
    condition of a row.
    """
    [(wrong, columns)] = _database().cursor().execute(_PARSE, [f"SELECT (\n{text}\n)"]).fetchall()
    if wrong is not None:
        raise ValueError(f"input.filter {text!r} cannot be used ({wrong}); {_EXAMPLE}")
    return tuple(columns)


def matches(text: str, table: pa.Table) -> NDArray[np.bool_]:
    """Return [N] bool: True where a row of a table of `filter_columns` matches; a condition that is
    null does not.

    Raises ValueError for values that do not fit it.
    """
    cursor = _database().cursor()
    try:
        table.validate(full=True)  # DuckDB believes that text is UTF-8
        cursor.register("the rows", table)
        # Text that closes a parenthesis it did not open passes `_PARSE`, but not this.
        found = cursor.sql(
            f'SELECT CASE WHEN\n{text}\nTHEN true ELSE false END FROM "the rows"'
        ).fetchnumpy()
    except (duckdb.Error, pa.ArrowException) as error:
        types = ", ".join(f"{field.name} is {field.type}" for field in table.schema)
        raise ValueError(
            f"input.filter {text!r} does not fit its columns ({one_line(error)}); {types}: "
            f"{_EXAMPLE}"
        ) from error
    [mask] = found.values()
    return np.asarray(mask, bool)

"""DuckDB for tables of many narrow rows, and for SQL conditions on rows.

Memory is bounded, and nothing but temporary files can be opened.
"""

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

from specextend.core import Values, did_you_mean, first_line, one_line
from specextend.folders import make_temporary, remove

_FETCHED_ROWS = 2048
_LOCK = (
    "SET GLOBAL TimeZone = 'UTC'; SET enable_external_access = false; SET lock_configuration = true"
)


def connect(memory_limit: str, temp_directory: str = "") -> duckdb.DuckDBPyConnection:
    """Open a database in memory that can open no extensions and only temporary files."""
    limits = {"memory_limit": memory_limit, "temp_directory": temp_directory, "threads": "1"}
    connection = duckdb.connect(config={**limits, "python_enable_replacements": "false"})
    connection.execute(_LOCK)
    return connection


class Database:
    """A temporary database for one thread, with deterministic results.

    Texts must come in small tables, since rows are processed 2,048 at a time. All methods raise
    OSError if the temporary folder is full.
    """

    def __init__(self) -> None:
        with temporary_room():
            folder = make_temporary()
        weakref.finalize(self, remove, folder)
        self._connection = connect(memory_limit="128MB", temp_directory=folder)

    def add(self, given: pa.Table, *statements: str) -> list[Values]:
        """Execute statements on a table called `given`; return the rows of the last."""
        self._connection.register("given", given)
        [*_, rows] = map(self.select, statements)
        self._connection.unregister("given")
        return rows

    def select(self, query: str, *values: Any) -> list[Values]:
        """Return the rows of a query with parameters `values`."""
        return list(self.stream(query, *values))

    def stream(self, query: str, *values: Any) -> Iterator[Values]:
        """Yield the rows of a query. Run no other query meanwhile."""
        with temporary_room():
            found = self._connection.execute(query, values)
            names = [name for name, *_ in found.description or ()]
            while rows := found.fetchmany(_FETCHED_ROWS):
                yield from (dict(zip(names, row, strict=True)) for row in rows)

    def arrays(self, query: str) -> list[NDArray[Any]]:
        """Return the columns of a query as arrays without nulls."""
        with temporary_room():
            return [*self._connection.execute(query).fetchnumpy().values()]


@contextmanager
def temporary_room() -> Iterator[None]:
    """Raise OSError with advice if there is no room for temporary files."""
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
            f"{folder} has no room for temporary rows ({first_line(error)}); set TMPDIR to another "
            "folder"
        ) from error


# The filter


_EXAMPLE = """it is a condition of SQL, as in lang = 'en' AND pages > 2 AND "a b" IS NOT NULL"""
_PARSE = """
WITH parsed AS MATERIALIZED (SELECT json_serialize_sql(?) AS tree)
SELECT tree->>'error_message' AS error,
    json_extract_string(tree, '$..class') AS kinds,
    json_extract_string(tree, '$..function_name') AS functions,
    json_extract_string(tree, '$..type_name') AS types,
    list_sort(list_distinct(json_extract_string(tree, '$..column_names[0]'))) AS columns
FROM parsed
"""
_KINDS = {
    "BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT",
    "FUNCTION", "OPERATOR", "TYPE",
}  # fmt: skip
_FUNCTIONS = """
+ - * / // % ^ ** & | ~ << >> @ abs add bit_count cbrt ceil ceiling even exp fdiv floor fmod gcd
greatest isfinite isinf isnan lcm least ln log log10 log2 mod pow power round sign sqrt trunc xor ||
^@ ~~ !~~ ~~* !~~* ~~~ ascii bit_length char_length character_length concat contains ends_with
ilike_escape instr lcase left length like_escape lower ltrim md5 nfc_normalize not_ilike_escape
not_like_escape octet_length position prefix regexp_extract regexp_full_match regexp_matches reverse
right rtrim sha1 sha256 split_part starts_with string_split strip_accents strlen strpos substr
substring suffix trim ucase unicode upper ->> json_array_length json_extract_string json_type
json_valid json_value century date_add date_diff date_part date_sub date_trunc datediff datepart
datesub datetrunc day dayname dayofmonth dayofweek dayofyear days_in_month decade epoch epoch_ms
epoch_ns epoch_us hour isodow isoyear last_day make_date make_time make_timestamp microsecond
millisecond minute month monthname quarter second strftime strptime time_bucket timezone to_days
to_hours to_microseconds to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp
to_weeks to_years try_strptime week weekday weekofyear year yearweek && @> <@ array_contains
array_extract array_has array_has_all array_has_any array_length array_position cardinality
element_at len list_any_value list_avg list_contains list_count list_distinct list_extract
list_first list_has list_has_all list_has_any list_last list_max list_min list_position list_sort
list_sum list_unique list_value map_contains map_extract map_extract_value map_keys map_values row
struct_extract struct_pack if nullif
"""
"""Deterministic functions with small results: the memory limit does not cover values in
comparisons.
"""
_SCALARS = """
SELECT type_name FROM duckdb_types()
WHERE type_category IN ('BOOLEAN', 'DATETIME', 'NUMERIC', 'STRING') OR type_name IN ('blob', 'uuid')
"""
"""Types allowed in casts. Arrays could have any size."""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    return connect("512MB")


@cache
def filter_columns(text: str, option: str = "input.filter") -> tuple[str, ...]:
    """Return the columns of a condition, called `option` in messages. Raises ValueError."""
    cursor = _database().cursor()
    [parsed] = cursor.execute(_PARSE, [f"SELECT (\n{text}\n)"]).fetchall()
    error, kinds, functions, types, columns = parsed
    wrong = error or _refused(kinds, functions, types)
    if not wrong and not columns:
        wrong = "it names no column"
    if not wrong and len({name.lower() for name in columns}) < len(columns):
        wrong = "its columns differ only in case"
    if wrong:
        raise ValueError(f"{option} {text!r} cannot be used ({wrong}); {_EXAMPLE}")
    return tuple(columns)


def _refused(kinds: list[str], functions: list[str], types: list[str]) -> str | None:
    for kind in kinds:
        if kind not in _KINDS:
            return f"{kind.lower()} is not allowed"
    allowed = _FUNCTIONS.split()
    for name in functions:
        if name.lower() not in allowed:
            return f"{name}() is not allowed{did_you_mean(name, allowed)}"
    scalars = {name.lower() for [name] in _database().cursor().execute(_SCALARS).fetchall()}
    for name in types:
        if name.lower() not in scalars:
            return f"a cast to {name} is not allowed"
    return None


def matches(text: str, table: pa.Table, option: str = "input.filter") -> NDArray[np.bool_]:
    """Return a mask [N] of the rows that match; null does not match.

    Raises:
        ValueError: A value does not fit the condition.
    """
    cursor = _database().cursor()
    try:
        table.validate(full=True)  # DuckDB does not check UTF-8
        cursor.register("the rows", table)
        # This fails for a parenthesis closed too early, which `_PARSE` accepts.
        found = cursor.sql(
            f'SELECT CASE WHEN\n{text}\nTHEN true ELSE false END FROM "the rows"'
        ).fetchnumpy()
    except (duckdb.Error, pa.ArrowException) as error:
        types = ", ".join(f"{field.name} is {field.type}" for field in table.schema)
        raise ValueError(
            f"{option} {text!r} does not fit its columns ({one_line(error)}); {types}: {_EXAMPLE}"
        ) from error
    [mask] = found.values()
    return np.asarray(mask, bool)

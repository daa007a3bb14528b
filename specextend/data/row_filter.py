"""A filter of rows: a condition of SQL over their columns, which DuckDB evaluates and which can reach nothing else."""

from functools import cache

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import one_line
from specextend.data.database import connect

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
    WHERE kind NOT IN ('BETWEEN', 'CASE', 'CAST', 'COLLATE', 'COLUMN_REF', 'COMPARISON', 'CONJUNCTION', 'CONSTANT',
        'FUNCTION', 'OPERATOR', 'TYPE')
    UNION ALL
    SELECT function_name || '()' FROM duckdb_functions()
    WHERE function_name IN (SELECT unnest(functions) FROM used) AND CASE function_type
        WHEN 'scalar' THEN stability != 'CONSISTENT' OR function_name IN ('age', 'array_resize', 'current_localtime',
            'current_localtimestamp', 'format', 'generate_series', 'list_resize', 'lpad', 'printf', 'range', 'repeat',
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
        WHEN len(columns) > (SELECT count(DISTINCT lower(name)) FROM (SELECT unnest(columns) AS name))
            THEN 'it names columns that differ in case alone'
    END, columns
FROM used
"""
"""What is wrong with a statement, and the columns that it names.

Refused are subqueries, and functions that see more than one row, have another value at another time, or make
much of little: the database's limit does not count values that wait to be compared.
"""


@cache
def _database() -> duckdb.DuckDBPyConnection:
    return connect("512MB")


@cache
def filter_columns(text: str) -> tuple[str, ...]:
    """Return the columns that a filter reads. Raises ValueError, in one line, for what is no condition of a row."""
    [(wrong, columns)] = _database().cursor().execute(_PARSE, [f"SELECT (\n{text}\n)"]).fetchall()
    if wrong is not None:
        raise ValueError(f"input.filter {text!r} cannot be used ({wrong}); {_EXAMPLE}")
    return tuple(columns)


def matches(text: str, table: pa.Table) -> NDArray[np.bool_]:
    """Return [N] bool: True where a row of a table of `filter_columns` matches; a condition that is null does not.

    Raises ValueError for values that do not fit it.
    """
    cursor = _database().cursor()
    try:
        table.validate(full=True)  # DuckDB believes that text is UTF-8
        cursor.register("the rows", table)
        # Text that closes a parenthesis it did not open passes `_PARSE`, but not this.
        found = cursor.sql(f'SELECT CASE WHEN\n{text}\nTHEN true ELSE false END FROM "the rows"').fetchnumpy()
    except (duckdb.Error, pa.ArrowException) as error:
        types = ", ".join(f"{field.name} is {field.type}" for field in table.schema)
        raise ValueError(
            f"input.filter {text!r} does not fit its columns ({one_line(error)}); {types}: {_EXAMPLE}"
        ) from error
    [mask] = found.values()
    return np.asarray(mask, bool)

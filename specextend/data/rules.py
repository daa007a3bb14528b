"""Rules for answers (`output.rules`): SQL conditions."""

from collections.abc import Iterable

import pyarrow as pa

from specextend.core import ReadOnly, did_you_mean
from specextend.data.database import filter_columns, matches
from specextend.data.inputs import OutputOptions
from specextend.data.schema import (
    COMMIT_SCHEMA,
    OF_DOCUMENT,
    TextColumns,
    rows_table,
    summary_columns,
    summary_fields,
)


def check_rules(output: OutputOptions, passthrough: Iterable[pa.Field]) -> None:
    """Raise ValueError for a rule that does not fit answers and passthrough columns."""
    fields = [field for field in _fields(output) if field.name not in OF_DOCUMENT]
    schema = pa.schema([*fields, *passthrough])
    # Without any row, constants are not cast.
    table = pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)
    for name, condition in output.rules.items():
        columns = filter_columns(condition, f"output.rules.{name}")
        for column in columns:
            if column not in table.column_names:
                raise ValueError(
                    f"output.rules.{name}: there is no column {column!r} in the answers or "
                    f"input.passthrough{did_you_mean(column, table.column_names)}; put text in "
                    "single quotes"
                )
        matches(condition, table.select(columns), f"output.rules.{name}")


def broken_rules(output: OutputOptions, made: ReadOnly, passed: pa.Table | None) -> list[str]:
    """Return the flags of rules that fail.

    Args:
        made: Columns of the document's row.
        passed: Passthrough columns named by rules, in one row.
    """
    if not output.rules:
        return []
    own = summary_columns(rows_table([made], COMMIT_SCHEMA), _columns(output))
    table = pa.table(own, schema=pa.schema(_fields(output)))
    if passed is not None:
        table = pa.table(
            [*table.columns, *passed.columns], [*table.column_names, *passed.column_names]
        )
    return [
        f"rule:{name}" for name, condition in output.rules.items() if not _holds(condition, table)
    ]


def _holds(condition: str, table: pa.Table) -> bool:
    try:
        return bool(matches(condition, table.select(filter_columns(condition)))[0])
    except ValueError:
        return False


def _columns(output: OutputOptions) -> TextColumns:
    return TextColumns(
        output.column,
        output.json_schema,
        has_confidence=output.confidence,
        has_verdicts=output.verify,
        has_pages=True,
    )


def _fields(output: OutputOptions) -> list[pa.Field]:
    return summary_fields(_columns(output))

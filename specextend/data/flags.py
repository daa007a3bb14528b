"""Flags set by SQL: `rule:NAME` for an answer that fails a rule, `generic` for one that fits any
document.

Few words of a generic answer are both rare in the run and present in the document. Workers store
the content words of each answer (`answer_words`); `RunWords` compares them at the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from specextend.core import ReadOnly, Values, did_you_mean
from specextend.data.database import Database, filter_columns, matches
from specextend.data.inputs import OutputOptions
from specextend.data.schema import (
    COMMIT_SCHEMA,
    OF_DOCUMENT,
    WORDS,
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


# Generic answers


GENERIC = "generic"
LEAST_ANSWERS = 5
MOST_OTHERS = 0.1
"""Largest share of other answers that have a rare word."""
LEAST_RARE = 0.15
"""Share of rare words from the document, below which an answer is generic."""
LEAST_HELD = 0.5
"""Share of content words found in their documents, below which a task has no flags. Labels and
translations differ from their documents.
"""
WORD_COLUMNS = ("file", "row", "doc_id", "words", "tasks")
_WORDS_OF_TASKS = pa.list_(pa.struct([("name", "string"), ("words", WORDS)]))
_MOST_WAITING = 4 << 20
_TABLE = """
    CREATE TABLE answers
        (file INT, "row" BIGINT, doc_id TEXT, task TEXT, held TEXT[], other TEXT[])
"""
_ADD = """
    INSERT INTO answers
    SELECT file, "row", doc_id, each.name, each.words.held, each.words.other
    FROM (
        SELECT file, "row", doc_id,
            unnest(coalesce(tasks, [{'name': '', 'words': words}])) AS each
        FROM given
    )
    WHERE each.words IS NOT NULL
"""
_FLAGGED = f"""
    WITH tasks AS (
        SELECT task, count(*) AS answers FROM answers GROUP BY task
        HAVING answers >= {LEAST_ANSWERS}
            AND sum(len(held)) >= {LEAST_HELD} * sum(len(held) + len(other))
    ), common AS (
        SELECT task, word
        FROM (SELECT task, unnest(held || other) AS word FROM answers) JOIN tasks USING (task)
        GROUP BY task, word HAVING count(*) - 1 > {MOST_OTHERS} * (min(answers) - 1)
    ), rare AS (
        SELECT place, count(*) AS num_rare
        FROM (SELECT rowid AS place, task, unnest(held) AS word FROM answers)
        ANTI JOIN common USING (task, word)
        GROUP BY place
    )
    SELECT file, "row", doc_id, list(task ORDER BY task) AS tasks
    FROM answers JOIN tasks USING (task) LEFT JOIN rare ON answers.rowid = rare.place
    WHERE coalesce(num_rare, 0) < {LEAST_RARE} * (len(held) + len(other))
    GROUP BY file, "row", doc_id
"""


class RunWords:
    """Content words of all answers of a run, in bounded memory."""

    def __init__(self) -> None:
        self._database = Database()
        self._database.select(_TABLE)
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0

    def add(self, results: pa.Table) -> None:
        """Add results with the WORD_COLUMNS."""
        names = [name for name in WORD_COLUMNS if name != "tasks"]
        tasks = results["tasks"].cast(_WORDS_OF_TASKS)
        self._waiting.append(results.select(names).append_column("tasks", tasks))
        self._num_bytes += self._waiting[-1].nbytes
        if self._num_bytes >= _MOST_WAITING:
            self._insert()

    def flagged(self) -> Iterator[Values]:
        """Yield `file`, `row`, `doc_id` and `tasks` (`[""]` for one task) of generic answers."""
        self._insert()
        return self._database.stream(_FLAGGED)

    def _insert(self) -> None:
        if self._waiting:
            self._database.add(pa.concat_tables(self._waiting), _ADD)
            self._waiting = []
            self._num_bytes = 0


def with_flags(results: pa.Table, flagged: Mapping[int, Sequence[str]]) -> pa.Table:
    """Add the flag to results of an input file, of which `flagged` has the tasks by row number."""
    if flagged.keys().isdisjoint(results["row"].to_pylist()):
        return results
    rows = results.to_pylist()
    for row in rows:
        if names := flagged.get(row["row"]):
            tasks = (task for task in row["tasks"] or () if task["name"] in names)
            for each in (row, *tasks):
                each["quality_flags"] = [*(each["quality_flags"] or ()), GENERIC]
    return pa.Table.from_pylist(rows, results.schema)

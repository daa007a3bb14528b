"""Accuracy by right answers (`input.gold`), of one run and of two. Begin at `gold_figures`."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.core import ReadOnly, Values, did_you_mean
from specextend.data.answers import answer_fields, free_fields
from specextend.data.database import Database
from specextend.data.parquet import is_id, is_text, plain_text, read_stream, stream
from specextend.data.quality import token_f1
from specextend.data.results import damaged_results, result_files
from specextend.data.schema import TextColumns, text_columns
from specextend.data.storage import Location
from specextend.stats import ratio

MOST_LABELS = 50
"""Most values of a field with a confusion matrix."""
MOST_GROUPS = 10
LEAST_ROWS = 10
"""Limits of groups by confidence."""
NONE = "(none)"
"""Label of a null answer."""
_MIDNIGHT = re.compile(r" 00:00:00(?:\.0+)?(?:Z|[+-][0-9]{4})?\Z")
_SAMPLES = 10_000
_Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95%."""


_JUDGED = """
    CREATE TABLE {} (
        field TEXT, doc_id TEXT, gold TEXT, answer TEXT, is_label BOOL, f1 DOUBLE,
        confidence DOUBLE,
        is_right BOOL AS (gold IS NOT DISTINCT FROM answer)
    )
"""
"""Answers of a run with right answers."""
_ADD = "INSERT INTO {} SELECT * FROM given WHERE gold IS NOT NULL"
_ACCURACY = """
    SELECT field, count(*) AS rows, count(*) FILTER (is_right) AS num_right, avg(f1) AS f1
    FROM judged GROUP BY field ORDER BY min(rowid)
"""
_PAIRS = f"""
    CREATE TABLE pairs AS
    SELECT field, gold, coalesce(answer, '{NONE}') AS answer, count(*) AS n, min(rowid) AS place
    FROM judged WHERE is_label GROUP BY ALL
"""
_LABELS = """
    SELECT label, sum(gold)::BIGINT AS gold, sum(answers)::BIGINT AS answers,
        sum(hits) / nullif(sum(answers), 0) AS precision, sum(hits) / nullif(sum(gold), 0) AS recall
    FROM (
        SELECT gold AS label, n AS gold, 0 AS answers, if(gold = answer, n, 0) AS hits
        FROM pairs WHERE field = $1
        UNION ALL SELECT answer, 0, n, 0 FROM pairs WHERE field = $1
    )
    GROUP BY label ORDER BY label
"""
_CONFUSION = "SELECT gold, answer, n FROM pairs WHERE field = ? ORDER BY n DESC, place"
_CALIBRATION = f"""
    SELECT count(*) AS rows, avg(probability) AS probability, avg(is_right::INT) AS accuracy
    FROM (
        SELECT exp(confidence) AS probability, is_right, count(*) OVER () AS n,
            least({MOST_GROUPS}, n // {LEAST_ROWS}) AS groups,
            (row_number() OVER (ORDER BY confidence, rowid) - 1) * groups // n AS place
        FROM judged WHERE field = ? AND confidence IS NOT NULL
    )
    WHERE groups > 1 GROUP BY place ORDER BY place
"""
"""Groups of equal size, the least certain first."""
_COMPARED = """
    SELECT field, count(*) AS rows,
        [avg(here.is_right::INT), avg(there.is_right::INT)] AS accuracy,
        list(doc_id ORDER BY here.rowid) FILTER (here.is_right AND NOT there.is_right)
            AS right_only_here,
        list(doc_id ORDER BY here.rowid) FILTER (there.is_right AND NOT here.is_right)
            AS right_only_there
    FROM here JOIN there USING (field, doc_id) GROUP BY field ORDER BY min(here.rowid)
"""


def check_gold(
    gold: Mapping[str, str], passthrough: Iterable[pa.Field], columns: TextColumns
) -> None:
    """Raise ValueError for an unknown field of `input.gold`, or a type without a comparison."""
    kinds = {name: kind for name, (kind, _) in _fields(columns).items()}
    given = {field.name: field.type for field in passthrough}
    for field, column in gold.items():
        if field not in kinds:
            raise ValueError(
                f"input.gold: answers have no field {field!r}{did_you_mean(field, kinds)}; there "
                f"are {', '.join(kinds)}"
            )
        for name, kind in ((field, kinds[field]), (column, given[column])):
            if not _is_compared(kind):
                raise ValueError(
                    f"input.gold: {name} is {kind}, but only texts, numbers, booleans, dates and "
                    "timestamps are compared"
                )


def _judge(database: Database, name: str, output: Location, manifest: ReadOnly | None) -> None:
    """Create a table of the answers that have a right answer."""
    database.select(_JUDGED.format(name))
    if manifest is None or not (gold := manifest["config"]["input"].get("gold")):
        return
    columns = text_columns(manifest["config"])
    kinds = _fields(columns)
    names = ["doc_id", *dict.fromkeys([*gold, *gold.values()])]
    names += ["confidence"] if columns.has_confidence else []

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        return stream(parquet, names)

    for file, is_answer in result_files(output):
        for table in read_stream(file, read, damaged_results(file)) if is_answer else ():
            for field, column in gold.items():
                right, answers = _spelled(table[column]), _spelled(table[field])
                kind, is_free = kinds[field]
                is_label = not is_free and not pa.types.is_floating(kind)
                scores = [
                    token_f1(answer or "", known) if is_free and known is not None else None
                    for known, answer in zip(right, answers, strict=True)
                ]
                given = {
                    "field": pa.repeat(field, len(table)),
                    "doc_id": table["doc_id"],
                    "gold": pa.array(right, pa.string()),
                    "answer": pa.array(answers, pa.string()),
                    "is_label": pa.repeat(is_label, len(table)),
                    "f1": pa.array(scores, pa.float64()),
                    "confidence": _confidences(table, field, columns),
                }
                database.add(pa.table(given), _ADD.format(name))


def _confidences(table: pa.Table, field: str, columns: TextColumns) -> pa.ChunkedArray | pa.Array:
    """Return confidences; null for a field of another task than the first."""
    name = "whole" if field == columns.text and columns.answers is None else field
    if columns.has_confidence:
        entries = table["confidence"]
        if name in [each.name for each in entries.type]:
            return pc.struct_field(entries, name)
    return pa.nulls(len(table), pa.float64())


def gold_figures(output: Location, manifest: ReadOnly | None) -> Values:
    """Compute the accuracy of a run by field."""
    database = Database()
    _judge(database, "judged", output, manifest)
    database.select(_PAIRS)
    found: Values = {}
    for of in database.select(_ACCURACY):
        field, rows, right = of["field"], of["rows"], of["num_right"]
        labels = {row.pop("label"): row for row in database.select(_LABELS, field)}
        has_labels = 0 < len(labels) <= MOST_LABELS
        groups = [
            group | {"interval": wilson(group["accuracy"], group["rows"])}
            for group in database.select(_CALIBRATION, field)
        ]
        found[field] = {
            "rows": rows,
            "right": right,
            "accuracy": right / rows,
            "interval": wilson(right / rows, rows),
            "f1": of["f1"],
            "kappa": _kappa(labels, right / rows, rows) if has_labels else None,
            "labels": labels if has_labels else {},
            "confusion": [[*row.values()] for row in database.select(_CONFUSION, field)]
            if has_labels
            else [],
            "calibration": groups,
        }
    return found


def _kappa(labels: Mapping[str, ReadOnly], agreed: float, rows: int) -> float | None:
    """Return Cohen's kappa of labels; None if all labels are equal."""
    by_chance = sum(of["gold"] * of["answers"] for of in labels.values()) / rows**2
    return ratio(agreed - by_chance, 1 - by_chance)


def compare_gold(
    here: tuple[Location, ReadOnly | None], there: tuple[Location, ReadOnly | None]
) -> Values:
    """Compare the accuracy of two runs over their common documents.

    Returns:
        By field `rows`, `accuracy` as [here, there], `difference` with its bootstrap `interval`,
        `p` of McNemar's exact test, and ids.
    """
    database = Database()
    _judge(database, "here", *here)
    _judge(database, "there", *there)
    found: Values = {}
    for of in database.select(_COMPARED):
        sides = {name: of.pop(name) or [] for name in ("right_only_here", "right_only_there")}
        gained, lost = map(len, sides.values())
        found[of.pop("field")] = {
            **of,
            "difference": (gained - lost) / of["rows"],
            "interval": bootstrap(gained, lost, of["rows"]),
            "p": mcnemar(gained, lost),
            **sides,
        }
    return found


def wilson(share: float, rows: float) -> list[float]:
    """Return Wilson's interval for the share of `rows` independent rows (may be infinite)."""
    spread = _Z * math.sqrt(share * (1 - share) / rows + _Z**2 / (4 * rows**2))
    middle = share + _Z**2 / (2 * rows)
    return [
        max(0.0, (middle - spread) / (1 + _Z**2 / rows)),
        min(1.0, (middle + spread) / (1 + _Z**2 / rows)),
    ]


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test."""
    total = gained + lost
    log_all = math.lgamma(total + 1) - total * math.log(2)
    tail = sum(
        math.exp(log_all - math.lgamma(number + 1) - math.lgamma(total - number + 1))
        for number in range(min(gained, lost) + 1)
    )
    return min(1.0, 2 * tail)


def bootstrap(gained: int, lost: int, rows: int) -> list[float]:
    """Return the bootstrap interval (95%) of a difference of accuracies."""
    shares = [gained / rows, lost / rows, (rows - gained - lost) / rows]
    drawn = np.random.default_rng(0).multinomial(rows, shares, _SAMPLES)
    low, high = np.percentile((drawn[:, 0] - drawn[:, 1]) / rows, [2.5, 97.5])
    return [float(low), float(high)]


def _fields(columns: TextColumns) -> dict[str, tuple[pa.DataType, bool]]:
    """Return type, and True for free text, of each field of answers."""
    found: dict[str, tuple[pa.DataType, bool]] = {}
    for text, schema in (columns[:2], *(each[1:] for each in columns.others)):
        free = free_fields(schema, "string") if schema else frozenset[str]()
        found |= {each.name: (each.type, each.name in free) for each in answer_fields(schema)}
        found[text] = (pa.string(), True)
    return found


def _is_compared(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_compared(kind.value_type)
    types = pa.types
    is_other = types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    return is_id(kind) or _is_number(kind) or is_other


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _spelled(column: pa.ChunkedArray) -> list[str | None]:
    """Write values of any type as comparable texts."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _spelled(column.cast(kind.value_type))
    if is_text(kind):
        column = column.cast("large_binary")
        spell: Callable[[Any], str | None] = partial(bytes.decode, errors="replace")
    else:
        column = plain_text(column)
        spell = _number if _is_number(kind) else partial(_MIDNIGHT.sub, "")
    spelled = (None if value is None else spell(value) for value in column.to_pylist())
    return [text and text.strip().casefold() for text in spelled]


def _number(text: str) -> str | None:
    """Return the shortest digits; None for NaN."""
    value = Decimal(text) or Decimal(0)  # which has no sign
    digits = f"{value:f}"
    if value.is_nan():
        return None
    return digits.rstrip("0").rstrip(".") if "." in digits else digits

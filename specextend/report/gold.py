"""Accuracy by right answers (`input.gold`), of one run and of two. Begin at `gold_figures`."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.core import ReadOnly, Values, did_you_mean
from specextend.data.answers import answer_fields, free_fields
from specextend.data.parquet import is_id, is_text, plain_text, read_stream, stream
from specextend.data.quality import token_f1
from specextend.data.results import damaged_results, result_files
from specextend.data.schema import TextColumns, text_columns
from specextend.data.storage import Location
from specextend.report.intervals import wilson
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


class Judged(NamedTuple):
    """A field of an answer, and the right answer."""

    field: str
    doc_id: str
    gold: str
    answer: str | None
    confidence: float | None = None
    """Mean log probability of a token, if the run has `output.confidence`."""

    @property
    def is_right(self) -> bool:
        """Return True if both are equal, without case and outer space."""
        return self.gold == self.answer


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


def judged(output: Location, manifest: ReadOnly | None) -> Iterator[Judged]:
    """Yield the fields of a finished run with a right answer."""
    gold: Mapping[str, str] = (manifest["config"]["input"].get("gold") or {}) if manifest else {}
    columns = text_columns(manifest["config"] if manifest else {})
    sure = ["confidence"] if columns.has_confidence else []
    names = ["doc_id", *dict.fromkeys([*gold, *gold.values()]), *sure]

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        return stream(parquet, names)

    for file, is_answer in result_files(output) if gold else ():
        for table in read_stream(file, read, damaged_results(file)) if is_answer else ():
            ids = table["doc_id"].to_pylist()
            for field, column in gold.items():
                spelled = (_spelled(table[name]) for name in (column, field))
                confidences = _confidences(table, field, columns)
                for doc_id, right, answer, sure in zip(ids, *spelled, confidences, strict=True):
                    if right is not None:
                        yield Judged(field, doc_id, right, answer, sure)


def _confidences(table: pa.Table, field: str, columns: TextColumns) -> list[float | None]:
    """Return the confidence of each answer; None for a field of another task than the first."""
    name = "whole" if field == columns.text and columns.answers is None else field
    if columns.has_confidence:
        entries = table["confidence"]
        if name in [each.name for each in entries.type]:
            return pc.struct_field(entries, name).to_pylist()
    return [None] * len(table)


def gold_figures(output: Location, manifest: ReadOnly | None) -> Values:
    """Compute the accuracy of a run by field, as docs/planning-and-report.md describes."""
    sure: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    pairs: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    scores = defaultdict[str, list[float]](list)
    counts: defaultdict[str, Counter[bool]] = defaultdict(Counter)
    kinds = _fields(text_columns(manifest["config"])) if manifest else {}
    for each in judged(output, manifest):
        kind, is_free = kinds[each.field]
        counts[each.field][each.is_right] += 1
        if each.confidence is not None:
            sure[each.field].append((each.confidence, each.is_right))
        if is_free:
            scores[each.field].append(token_f1(each.answer or "", each.gold))
        elif not pa.types.is_floating(kind):
            pairs[each.field][each.gold, each.answer or NONE] += 1
    return {
        field: {
            "rows": of.total(),
            "right": of[True],
            "accuracy": of[True] / of.total(),
            "interval": wilson(of[True] / of.total(), of.total()),
            "f1": sum(scores[field]) / of.total() if scores[field] else None,
            **_of_labels(pairs[field]),
            "calibration": calibration(sure[field]),
        }
        for field, of in counts.items()
    }


def calibration(judged: Sequence[tuple[float, bool]]) -> list[Values]:
    """Divide answers into groups of equal size by confidence, the least certain first.

    Args:
        judged: Log probability of a token, and True for a right answer.

    Returns:
        For each of at most MOST_GROUPS groups `rows`, `probability` (mean of a token), `accuracy`
        and its `interval`; nothing for fewer than two groups of LEAST_ROWS.
    """
    num_groups = min(MOST_GROUPS, len(judged) // LEAST_ROWS)
    if num_groups < 2:
        return []
    groups = []
    for group in np.array_split(np.array(sorted(judged)), num_groups):
        accuracy = float(group[:, 1].mean())
        groups.append(
            {
                "rows": len(group),
                "probability": float(np.exp(group[:, 0]).mean()),
                "accuracy": accuracy,
                "interval": wilson(accuracy, len(group)),
            }
        )
    return groups


def compare_gold(
    here: tuple[Location, ReadOnly | None], there: tuple[Location, ReadOnly | None]
) -> Values:
    """Compare the accuracy of two runs over their common documents.

    Returns:
        By field `rows`, `accuracy` as [here, there], `difference`, its bootstrap `interval`, `p` of
        McNemar's exact test, and ids in `right_only_here` and `right_only_there`.
    """
    right = [
        {(each.field, each.doc_id): each.is_right for each in judged(*side)}
        for side in (here, there)
    ]
    common = defaultdict[str, list[str]](list)
    for field, doc_id in right[0]:
        if (field, doc_id) in right[1]:
            common[field].append(doc_id)
    found: Values = {}
    for field, ids in common.items():
        ours, theirs = ([side[field, doc_id] for doc_id in ids] for side in right)
        pairs = [*zip(ids, ours, theirs, strict=True)]
        gained = [doc_id for doc_id, one, other in pairs if one and not other]
        lost = [doc_id for doc_id, one, other in pairs if other and not one]
        found[field] = {
            "rows": len(ids),
            "accuracy": [sum(ours) / len(ids), sum(theirs) / len(ids)],
            "difference": (len(gained) - len(lost)) / len(ids),
            "interval": bootstrap(len(gained), len(lost), len(ids)),
            "p": mcnemar(len(gained), len(lost)),
            "right_only_here": gained,
            "right_only_there": lost,
        }
    return found


def kappa(pairs: Mapping[tuple[str, str], int]) -> float | None:
    """Return Cohen's kappa of counted pairs of labels; None if all labels are equal."""
    rows = sum(pairs.values())
    sides = [Counter[str](), Counter[str]()]
    for pair, count in pairs.items():
        for side, label in zip(sides, pair, strict=True):
            side[label] += count
    by_chance = sum(sides[0][label] * sides[1][label] for label in sides[0]) / rows**2
    agreed = sum(count for (one, other), count in pairs.items() if one == other) / rows
    return ratio(agreed - by_chance, 1 - by_chance)


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


def _of_labels(pairs: Counter[tuple[str, str]]) -> Values:
    golds = Counter[str]()
    answers = Counter[str]()
    for (gold, answer), count in pairs.items():
        golds[gold] += count
        answers[answer] += count
    labels = sorted(golds | answers)
    if not labels or len(labels) > MOST_LABELS:
        return {"kappa": None, "labels": {}, "confusion": []}
    return {
        "kappa": kappa(pairs),
        "labels": {
            label: {
                "gold": golds[label],
                "answers": answers[label],
                "precision": ratio(pairs[label, label], answers[label]),
                "recall": ratio(pairs[label, label], golds[label]),
            }
            for label in labels
        },
        "confusion": [[*pair, count] for pair, count in pairs.most_common()],
    }


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
    """Return the shortest digits of a number; None for NaN."""
    value = Decimal(text) or Decimal(0)  # which has no sign
    digits = f"{value:f}"
    if value.is_nan():
        return None
    return digits.rstrip("0").rstrip(".") if "." in digits else digits

"""Answers beside the right answers that the input holds (`input.gold`): how good a run is, and
whether another run is better.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import ReadOnly, Values, did_you_mean
from specextend.data.answers import answer_fields, free_fields
from specextend.data.parquet import is_id, is_text, plain_text, read_stream, stream
from specextend.data.quality import token_f1
from specextend.data.results import damaged_results, result_files
from specextend.data.schema import TextColumns, text_columns
from specextend.data.storage import Location
from specextend.stats import ratio

MOST_LABELS = 50
"""Different values of a field, from which on it has no confusion matrix."""
NONE = "(none)"
"""The label of an answer that is null."""
_MIDNIGHT = re.compile(r" 00:00:00(?:\.0+)?(?:Z|[+-][0-9]{4})?\Z")
_Z = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95%."""
_SAMPLES = 10_000


class Judged(NamedTuple):
    """A field of an answer beside the right answer."""

    field: str
    doc_id: str
    gold: str
    answer: str | None

    @property
    def is_right(self) -> bool:
        """Return True if both are equal but for case and space around them."""
        return self.gold == self.answer


def check_gold(
    gold: Mapping[str, str], passthrough: Iterable[pa.Field], columns: TextColumns
) -> None:
    """Raise ValueError for a field that answers do not have, and for types that are not
    compared.
    """
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
    """Yield each field of each answer of a run that has a right answer. A run that has not ended
    has none.
    """
    gold: Mapping[str, str] = (manifest["config"]["input"].get("gold") or {}) if manifest else {}
    names = ["doc_id", *dict.fromkeys([*gold, *gold.values()])]

    def read(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
        return stream(parquet, names)

    for file, is_answer in result_files(output) if gold else ():
        for table in read_stream(file, read, damaged_results(file)) if is_answer else ():
            ids = table["doc_id"].to_pylist()
            for field, column in gold.items():
                spelled = (_spelled(table[name]) for name in (column, field))
                for doc_id, right, answer in zip(ids, *spelled, strict=True):
                    if right is not None:
                        yield Judged(field, doc_id, right, answer)


def gold_figures(output: Location, manifest: ReadOnly | None) -> Values:
    """Compute by field the rows with a right answer, how many are right, the accuracy and its
    interval; of labels Cohen's kappa, the confusion matrix, precision and recall; of texts the F1
    of their words.
    """
    pairs: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    scores = defaultdict[str, list[float]](list)
    counts: defaultdict[str, Counter[bool]] = defaultdict(Counter)
    kinds = _fields(text_columns(manifest["config"])) if manifest else {}
    for each in judged(output, manifest):
        kind, is_free = kinds[each.field]
        counts[each.field][each.is_right] += 1
        if is_free:
            scores[each.field].append(token_f1(each.answer or "", each.gold))
        elif not pa.types.is_floating(kind):
            pairs[each.field][each.gold, each.answer or NONE] += 1
    return {
        field: {
            "rows": of.total(),
            "right": of[True],
            "accuracy": of[True] / of.total(),
            "interval": wilson(of[True], of.total()),
            "f1": sum(scores[field]) / of.total() if scores[field] else None,
            **_of_labels(pairs[field]),
        }
        for field, of in counts.items()
    }


def compare_gold(
    here: tuple[Location, ReadOnly | None], there: tuple[Location, ReadOnly | None]
) -> Values:
    """Compare by field the accuracy of two runs over the documents that both have answered.

    Returns `rows`, `accuracy` as [here, there], their `difference` with the bootstrap's `interval`,
    `p` of McNemar's exact test, and the ids of documents that are right on one side alone.
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


def wilson(right: int, rows: int) -> list[float]:
    """Return Wilson's interval of 95% for a share."""
    share = right / rows
    spread = _Z * math.sqrt(share * (1 - share) / rows + _Z**2 / (4 * rows**2))
    middle = share + _Z**2 / (2 * rows)
    return [
        max(0.0, (middle - spread) / (1 + _Z**2 / rows)),
        min(1.0, (middle + spread) / (1 + _Z**2 / rows)),
    ]


def kappa(pairs: Mapping[tuple[str, str], int]) -> float | None:
    """Return Cohen's kappa of pairs of labels with their counts; None if both sides always have the
    same one.
    """
    rows = sum(pairs.values())
    sides = [Counter[str](), Counter[str]()]
    for pair, count in pairs.items():
        for side, label in zip(sides, pair, strict=True):
            side[label] += count
    by_chance = sum(sides[0][label] * sides[1][label] for label in sides[0]) / rows**2
    agreed = sum(count for (one, other), count in pairs.items() if one == other) / rows
    return ratio(agreed - by_chance, 1 - by_chance)


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: how likely so uneven a split would be by
    chance.
    """
    total = gained + lost
    log_all = math.lgamma(total + 1) - total * math.log(2)
    tail = sum(
        math.exp(log_all - math.lgamma(number + 1) - math.lgamma(total - number + 1))
        for number in range(min(gained, lost) + 1)
    )
    return min(1.0, 2 * tail)


def bootstrap(gained: int, lost: int, rows: int) -> list[float]:
    """Return the interval of 95% of a difference of accuracies, by documents drawn again."""
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
    """Return the type of each field of answers by name, and whether it is free text."""
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
    """Write values as texts by which answers are compared, whatever their types are."""
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
    """Return the shortest digits of a number; None if it is NaN."""
    value = Decimal(text) or Decimal(0)  # which has no sign
    digits = f"{value:f}"
    if value.is_nan():
        return None
    return digits.rstrip("0").rstrip(".") if "." in digits else digits

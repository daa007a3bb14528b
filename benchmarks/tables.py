"""Tables and drawings of a benchmark's result.

A table is named `MEASURE`, `MEASURE over VARIANT` (every variant divided by VARIANT) or `MEASURE of
VARIANT` (VARIANT divided by every other). ` by COLUMN` replaces the prompt lengths as columns.
`conditions` is a sentence about machine, versions and options.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specextend.core import counted, how_to_install

Result = dict[str, Any]
CONDITIONS = "conditions"
_NAME = re.compile(r"(?P<measure>\S+)(?: (?P<how>over|of) (?P<variant>.+?))?(?: by (?P<by>\w+))?")


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row."""

    title: str
    compute: Callable[[pd.DataFrame], pd.Series]
    is_speed: bool = True
    """Speeds are medians with ranges; counts and shares are means over documents."""


MEASURES = {
    "decoding": Measure(
        "decoding, tokens/s",
        lambda rows: (rows["num_output_tokens"] - rows["num_first_tokens"]) / rows["decode_s"],
    ),
    "end-to-end": Measure(
        "end to end, tokens/s", lambda rows: rows["num_output_tokens"] / rows["total_s"]
    ),
    "draft-reading": Measure("seconds that the draft reads", lambda rows: rows["draft_prefill_s"]),
    "throughput": Measure(
        "documents an hour", lambda rows: 3600 * rows["num_documents"] / rows["wall_s"]
    ),
    "acceptance": Measure(
        "acceptance length", lambda rows: rows["mean_acceptance_length"], is_speed=False
    ),
    "coverage": Measure(
        "attention in view", lambda rows: rows["retrieval_coverage"], is_speed=False
    ),
    "equal": Measure(
        "share of outputs equal to the base's", lambda rows: rows["equals_base"], is_speed=False
    ),
    "first-token": Measure(
        "share of first tokens equal to the base's",
        lambda rows: rows["first_equals_base"],
        is_speed=False,
    ),
    "rouge-l": Measure(
        "ROUGE-L with the base's tokens", lambda rows: rows["rouge_l"], is_speed=False
    ),
    "in-view": Measure(
        "share of needle tokens in view", lambda rows: rows["in_view"], is_speed=False
    ),
    "from-tree": Measure(
        "share of needle tokens from a tree", lambda rows: rows["from_tree"], is_speed=False
    ),
    "auc": Measure("area under the curve", lambda rows: rows["auc"], is_speed=False),
    "cost": Measure(
        "time for the sentences of a summary by that of its prompt",
        lambda rows: rows["cost"],
        is_speed=False,
    ),
}
"""Figures by name. An output of a single token has no decoding speed."""


@dataclass(frozen=True, slots=True)
class Table:
    """The figures of a table, before formatting."""

    title: str
    values: pd.DataFrame
    """Columns `variant`, `column`, `value` and `weight`; a row per variant and round, without
    gaps.
    """
    variants: list[str]
    columns: list[str]
    is_speed: bool


def check_table(name: str, variants: Iterable[str]) -> re.Match[str]:
    """Parse a table's name. Raises ValueError if the variants have no such table."""
    found = _NAME.fullmatch(name)
    if found is None or found["measure"] not in MEASURES:
        raise ValueError(
            f"a table is {CONDITIONS}, or begins with one of {', '.join(MEASURES)}; got {name!r}"
        )
    if found["variant"] is not None and found["variant"] not in variants:
        raise ValueError(f"{found['variant']!r} is none of the variants {', '.join(variants)}")
    return found


def make_table(result: Result, name: str) -> Table:
    """Compute the figures of a table. Raises ValueError if the result has no such table."""
    variants = [*result["benchmark"]["variants"]]
    found = check_table(name, variants)
    measure, variant = MEASURES[found["measure"]], found["variant"]
    rows = _rows(result, found["by"] or "bucket")
    try:
        rows["value"] = measure.compute(rows).astype(float)
    except KeyError as error:
        raise ValueError(f"this result holds no {error} for {name!r}") from None
    title = measure.title
    if variant is not None:
        other = rows["round"].map(rows[rows["variant"] == variant].set_index("round")["value"])
        rows["value"] = rows["value"] / other if found["how"] == "over" else other / rows["value"]
        title = f"{title.partition(',')[0]}, {'over ' if found['how'] == 'over' else ''}{variant}"
        title += "" if found["how"] == "over" else " over"
        if found["how"] == "of":
            variants.remove(variant)
    values = (
        rows[["variant", "column", "value", "weight"]]
        .replace([float("inf")], float("nan"))
        .dropna()
    )
    columns = [each for each in dict.fromkeys(rows["column"]) if each in set(values["column"])]
    return Table(
        title,
        values,
        [each for each in variants if each in set(values["variant"])],
        columns,
        measure.is_speed,
    )


def _rows(result: Result, by: str) -> pd.DataFrame:
    rows = pd.DataFrame(result["rows"])
    if by not in rows:
        raise ValueError(f"the rows have no {by!r} by which columns could be made")
    rows["round"] = [
        f"{documents} {repeat}"
        for documents, repeat in zip(rows["documents"], rows["repeat"], strict=True)
    ]
    rows["column"] = rows[by].astype(str)
    if "loops" in rows:
        is_base = rows["variant"] == result["benchmark"]["base"]
        looping = rows["round"].isin(rows.loc[is_base & rows["loops"].eq(True), "round"])
        rows.loc[looping, "column"] += ", loops"
    is_pooled = "in_view" in rows or "auc" in rows
    rows["weight"] = rows["num_documents"] if is_pooled else 1
    return rows


def to_markdown(result: Result, name: str) -> str:
    """Format a table as Markdown: a row per variant, a column per group, then all but loops."""
    if name == CONDITIONS:
        return conditions(result)
    table = make_table(result, name)
    steady = [column for column in table.columns if not column.endswith(", loops")]
    groups = {column: [column] for column in table.columns}
    if len(steady) > 1:
        groups["all"] = steady
    last = [*groups][-1]
    sizes = {title: _num_measured(table, columns) for title, columns in groups.items()}
    lines = [
        [table.title, *(f"{title} (n={sizes[title]})" for title in groups)],
        ["---"] * (1 + len(groups)),
    ]
    for variant in table.variants:
        own = table.values[table.values["variant"] == variant]
        cells = [
            _cell(own[own["column"].isin(columns)], table, title == last)
            for title, columns in groups.items()
        ]
        lines.append([variant, *cells])
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _num_measured(table: Table, columns: list[str]) -> int:
    values = table.values[table.values["column"].isin(columns)]
    return int(values.groupby("variant")["weight"].sum().max())


def _cell(values: pd.DataFrame, table: Table, has_range: bool) -> str:
    if values.empty:
        return "-"
    value, weight = values["value"], values["weight"]
    if not table.is_speed:
        return f"{(value * weight).sum() / weight.sum():.2f}"
    digits = 0 if value.median() >= 1000 else 1 if value.median() >= 20 else 2
    text = f"{value.median():,.{digits}f}"
    if not has_range or len(value) == 1:
        return text
    return f"{text} ({value.min():,.{digits}f} to {value.max():,.{digits}f})"


def conditions(result: Result) -> str:
    """Describe the conditions of a measurement in a sentence."""
    benchmark = result["benchmark"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    commit = f", commit {result['commit'][:12]}" if result["commit"] else ""
    limit = f"at most {benchmark['max_new_tokens']:,} new tokens"
    sampling = benchmark["sampling"]
    how = ", ".join(f"{name} {value}" for name, value in sampling.items()) or "greedy"
    batch = (
        f"{counted(benchmark['together'], 'document')} at once"
        if benchmark["together"] > 1
        else "one document at a time"
    )
    threads = counted(result["threads"], "thread")
    machine = (
        f"{result['target']} in {result['dtype']} on {result['device']}, {threads}, "
        f"{result['time'][:10]}"
    )
    return f"{machine}; {limit}, {how}, {batch}; {versions}{commit}.\n"


def draw(result: Result, name: str) -> bytes:
    """Draw a table as SVG bars with ranges. Raises ValueError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"a drawing needs {error.name}: {how_to_install('bench')}") from None
    table = make_table(result, name)
    with mpl.rc_context({"svg.hashsalt": "specextend", "svg.fonttype": "none"}):
        figure = Figure(figsize=(2 + 1.6 * len(table.columns), 3.5), layout="constrained")
        axes = figure.add_subplot()
        width = 0.8 / len(table.variants)
        for number, variant in enumerate(table.variants):
            own = table.values[table.values["variant"] == variant]
            groups = [own[own["column"] == column]["value"] for column in table.columns]
            heights = [group.median() if table.is_speed else group.mean() for group in groups]
            errors = [
                [height - group.min() for height, group in zip(heights, groups, strict=True)],
                [group.max() - height for height, group in zip(heights, groups, strict=True)],
            ]
            places = [
                place + width * (number - (len(table.variants) - 1) / 2)
                for place in range(len(table.columns))
            ]
            axes.bar(
                places, heights, width, yerr=errors, label=variant, error_kw={"linewidth": 0.8}
            )
        axes.set_xticks(range(len(table.columns)), table.columns)
        axes.set_ylabel(table.title)
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        target = io.BytesIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    return target.getvalue()

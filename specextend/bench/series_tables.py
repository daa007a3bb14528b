"""The tables of series: `ablation`, `reasoning`, `sweep`, `retrieval-time` and `batch`.

A cell is the median of the measurements with their quartiles, or with their range if there are fewer than four. A ratio
divides two measurements of one round: the same document and repeat, in turns. Rounds that an interruption has cut short
are left out. Documents whose output ends in a loop on the base, where n-grams guess almost everything, are a column of
their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specextend.bench.series import Timing, measured_variants, read_timings, whole_rounds
from specextend.core import counted
from specextend.report.tables import Section, number, percent
from specextend.stats import DecodingStats, ratio

_WITH_LOOPS = ("batch", "retrieval-time")
"""Series in which a loop is a document like any other."""
_UNPOOLED = ("reasoning",)
"""Series whose columns are different workloads, so that no column holds all documents."""
_LEAST_FOR_QUARTILES = 4
Value = Callable[[Timing], float | None]


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median and quartiles of n values; of fewer than four values, the lowest and the highest."""

    n: int
    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """Format as `1.25 (1.10-1.48)`; a single value stands alone."""
        middle = number(self.median, digits)
        return middle if self.n == 1 else f"{middle} ({number(self.low, digits)}-{number(self.high, digits)})"


def quartiles(values: Iterable[float | None]) -> Quartiles | None:
    """Compute the quartiles of the values that are not None; None if there are none.

    Quartiles of two or three values would lie between them and hide how far apart they are.
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len(present) < _LEAST_FOR_QUARTILES:
        return Quartiles(len(present), statistics.median(present), min(present), max(present))
    low, middle, high = statistics.quantiles(present, n=4, method="inclusive")
    return Quartiles(len(present), middle, low, high)


class SeriesFigures:
    """The timings of a series by variant and column."""

    def __init__(self, result: dict[str, Any]) -> None:
        """Take the JSON values of a series. Raises KeyError if they are something else, ValueError if none is whole."""
        variants = measured_variants(result)
        self._samples = whole_rounds(read_timings(result), variants)
        self.num_rounds = len(self._samples) // len(variants)
        if not self._samples:
            raise ValueError("no prompt was measured on all variants yet; give the command of the series again")
        self.base: str = result["base"]
        loops = {timing.prompt_set for timing in self._samples if timing.variant == self.base and timing.loops}
        self._loops = set() if result["kind"] in _WITH_LOOPS else loops
        self._pooled = result["kind"] not in _UNPOOLED
        groups = dict.fromkeys(prompt_set["group"] for prompt_set in result["prompts"].values())
        names = [*groups, "loops"] if self._pooled else [each for name in groups for each in (name, f"{name}, loops")]
        self.columns = [name for name in names if self._in_column(self.base, name)]
        if self._pooled and len(set(self.columns) - {"loops"}) > 1:
            self.columns.insert(len(self.columns) - ("loops" in self.columns), "all")

    def _in_column(self, variant: str, column: str) -> list[Timing]:
        own = [timing for timing in self._samples if timing.variant == variant]
        if column == "all":
            return [timing for timing in own if timing.prompt_set not in self._loops]
        return [timing for timing in own if self._column_of(timing) == column]

    def _column_of(self, timing: Timing) -> str:
        if timing.prompt_set not in self._loops:
            return timing.group
        return "loops" if self._pooled else f"{timing.group}, loops"

    @property
    def headers(self) -> list[str]:
        """Name the columns with their number of measurements on the base."""
        return [f"{column} (n={len(self._in_column(self.base, column))})" for column in self.columns]

    @property
    def widest(self) -> list[str]:
        """Return the column of all documents that are no loops; every column if they are not to be pooled."""
        if not self._pooled:
            return self.columns
        return ["all"] if "all" in self.columns else self.columns[:1]

    def timings(self, variant: str, column: str | None = None) -> list[Timing]:
        """Return the timings of a variant in a column; without one, all of them."""
        if column is None:
            return [timing for timing in self._samples if timing.variant == variant]
        return self._in_column(variant, column)

    def ratios(self, variant: str, base: str, column: str, value: Value) -> Quartiles | None:
        """Compute the quartiles of a value over that of another variant, for each measurement."""
        others = {(timing.prompt_set, timing.repeat): value(timing) for timing in self._in_column(base, column)}
        pairs = [(value(each), others.get((each.prompt_set, each.repeat))) for each in self._in_column(variant, column)]
        return quartiles(ratio(a, b) for a, b in pairs if a is not None and b)

    def ratios_text(self, variant: str, base: str, column: str, value: Value) -> str:
        """Format `ratios`."""
        return _text(self.ratios(variant, base, column, value))

    def values(self, variant: str, column: str, value: Value) -> Quartiles | None:
        """Compute the quartiles of a value."""
        return quartiles(map(value, self._in_column(variant, column)))

    def total(self, variant: str, column: str | None = None) -> DecodingStats:
        """Sum the statistics of a variant's timings."""
        total = DecodingStats()
        for timing in self.timings(variant, column):
            total.add(timing.stats)
        return total

    def equal(self, variant: str, column: str) -> str:
        """Say how many outputs of a variant equal those of the base."""
        outputs = {(each.prompt_set, each.repeat): each.output_sha256 for each in self.timings(self.base, column)}
        own = [each for each in self.timings(variant, column) if (each.prompt_set, each.repeat) in outputs]
        return f"{sum(outputs[each.prompt_set, each.repeat] == each.output_sha256 for each in own)} of {len(own)}"


def _text(found: Quartiles | None, digits: int = 2) -> str:
    return "-" if found is None else found.text(digits)


def decode_speed(timing: Timing) -> float | None:
    """Return decode tokens per second."""
    return timing.decode_tokens_per_s


def _end_to_end(timing: Timing) -> float | None:
    return timing.stats.output_tokens_per_s


def _prefill_s(timing: Timing) -> float | None:
    return timing.stats.prefill_s + timing.stats.draft_prefill_s


def _decode_s(timing: Timing) -> float | None:
    return timing.stats.decode_s


def documents_per_hour(timing: Timing) -> float:
    """Return documents an hour by the wall clock."""
    return timing.documents_per_hour


def ms_per_step(timing: Timing) -> float | None:
    """Compute the mean milliseconds of a decoding step."""
    steps = timing.stats.num_spec_steps + timing.stats.num_plain_steps
    return ratio(1e3 * timing.stats.step_s, steps)


def ms_per_retrieval(timing: Timing) -> float | None:
    """Compute the mean milliseconds of a retrieval."""
    return ratio(1e3 * timing.stats.retrieval_s, timing.stats.num_retrievals)


def _retrieval_share(timing: Timing) -> float | None:
    share = ratio(timing.stats.retrieval_s, timing.stats.step_s)
    return None if share is None else 100 * share


def step_tables(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Build the tables of `ablation` and `reasoning`: a row for each step."""
    figures, about = SeriesFigures(result), result["variants"]
    measured = [name for name in about if figures.timings(name)]
    header = ["step", *figures.headers, *(f"over the step above, {column}" for column in figures.widest)]
    ratios = [
        Section(f"{title} over {figures.base}: median (quartiles)", header, _step_ratios(figures, measured, value))
        for title, value in (("Decoding", decode_speed), ("End to end", _end_to_end))
    ]
    changes = Section("The steps", ("step", "change", "kernels"), [*_changes(figures, about)], ("change", "kernels"))
    header = ["step", "acceptance length", "tokens/s", "prefill s", "decode s", "outputs equal to the first row's"]
    details = [
        Section(f"Medians of {column}", header, [_details(figures, name, column) for name in measured])
        for column in figures.widest
    ]
    return [*ratios, *details, changes], _notes(result, figures)


def _step_ratios(figures: SeriesFigures, names: Sequence[str], value: Value) -> list[list[str]]:
    rows = []
    for before, name in zip(["", *names], names, strict=False):
        over = [figures.ratios_text(name, before, column, value) if before else "-" for column in figures.widest]
        own = [figures.ratios_text(name, figures.base, column, value) for column in figures.columns]
        rows.append([name, *own, *over])
    return rows


def _changes(figures: SeriesFigures, about: dict[str, Any]) -> Iterator[list[str]]:
    for name, own in about.items():
        changes = ", ".join(f"{key} {old} → {new}" for key, (old, new) in own["changes"].items()) or "-"
        if reason := own.get("changes_nothing"):
            changes = f"changes nothing here: {reason}"
        yield [name, changes, ", ".join(dict.fromkeys(timing.kernels for timing in figures.timings(name))) or "-"]


def _details(figures: SeriesFigures, name: str, column: str) -> list[str]:
    timings = figures.timings(name, column)
    length = number(figures.total(name, column).mean_acceptance_length)
    seconds = (_median(timings, value, 2) for value in (_prefill_s, _decode_s))
    return [name, length, _median(timings, decode_speed, 1), *seconds, figures.equal(name, column)]


def _median(timings: Sequence[Timing], value: Value, digits: int) -> str:
    found = quartiles(map(value, timings))
    return "-" if found is None else number(found.median, digits)


def sweep_tables(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Build the table of `sweep`: a row for each point."""
    figures = SeriesFigures(result)
    [widest], rows = figures.widest, []
    for name, about in result["variants"].items():
        total = figures.total(name, widest)
        rows.append(
            [
                name,
                *(number(about[key]) for key in ("chunk_size", "top_k_chunks", "cache_tokens")),
                str(about["refresh"]),
                *(figures.ratios_text(name, figures.base, column, decode_speed) for column in figures.columns),
                number(total.mean_acceptance_length),
                percent(total.retrieval_coverage),
                percent(ratio(total.retrieval_s, total.step_s)),
            ]
        )
    names = ("chunk", "top-k", "tokens in view", "refresh")
    header = ["point", *names, *figures.headers, "acceptance length", "coverage", "retrieval"]
    title = "Decoding over the configuration as it is: median (quartiles)"
    return [Section(title, header, rows)], _notes(result, figures)


def retrieval_time_tables(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Build the table of `retrieval-time`: a row for each length."""
    figures = SeriesFigures(result)
    [(name, about)] = result["variants"].items()
    rows = [
        [
            header,
            *(_text(figures.values(name, column, value)) for value in (ms_per_step, ms_per_retrieval)),
            _text(figures.values(name, column, _retrieval_share), 1),
        ]
        for header, column in zip(figures.headers, figures.columns, strict=True)
        if column != "all"
    ]
    header = ["prompt", "a step, ms", "a retrieval, ms", "share of the steps' time, %"]
    title = f"Retrieval every {about['refresh']} steps: median of documents (quartiles)"
    return [Section(title, header, rows)], _notes(result, figures)


def batch_tables(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Build the table of `batch`: a row for each batch size, columns for each mode."""
    figures, variants = SeriesFigures(result), result["variants"]
    modes = list(dict.fromkeys(about["mode"] for about in variants.values()))
    by_size = {(about["mode"], about["batch_size"]): name for name, about in variants.items()}
    sizes = sorted({size for _, size in by_size})
    [column] = figures.columns
    rows = []
    for size in sizes:
        row = [str(size)]
        for mode in modes:
            name, alone = by_size[mode, size], by_size[mode, sizes[0]]
            row.append(_text(figures.values(name, column, documents_per_hour), 0))
            row.append(figures.ratios_text(name, alone, column, documents_per_hour))
        row += [
            figures.ratios_text(by_size[mode, size], by_size[modes[0], size], column, documents_per_hour)
            for mode in modes[1:]
        ]
        rows.append(row)
    titles = [title for mode in modes for title in (f"{mode}, documents an hour", f"over batch {sizes[0]}")]
    titles += [f"{mode} over {modes[0]}" for mode in modes[1:]]
    num_documents = sum(len(prompt_set["num_prompt_tokens"]) for prompt_set in result["prompts"].values())
    documents = counted(num_documents, "document")
    title = f"Batches of {documents} of {column}: median of repeats, n={figures.num_rounds}"
    return [Section(title, ["batch", *titles], rows)], _notes(result, figures)


def _notes(result: dict[str, Any], figures: SeriesFigures) -> list[str]:
    """Say what brackets and n mean, and what is not in the tables."""
    notes = ["In brackets are quartiles, or the range if n is below 4."]
    if result["repeats"] > 1 and result["kind"] != "batch":
        notes.append(f"n counts documents times {result['repeats']} repeats.")
    if any("loops" in column for column in figures.columns):
        notes.append(f"Documents whose output by {figures.base} ends in a loop are counted apart, as loops.")
    num_rounds = len(result["prompts"]) * result["repeats"]
    if figures.num_rounds < num_rounds:
        notes.append(
            f"The series was interrupted: of {num_rounds} rounds, each of which measures all variants, "
            f"{figures.num_rounds} are complete and shown."
        )
    return notes

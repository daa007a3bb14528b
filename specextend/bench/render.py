"""Benchmark figures as tables for a terminal."""

from __future__ import annotations

from typing import Any

from specextend.bench.compare_tables import DECODE, compare_tables, lengths, where
from specextend.bench.retrieval_tables import retrieval_tables
from specextend.report.tables import Section, number, to_text

MIB = 1024**2
WIDTH = 150
"""Characters of a line, for tables with a column for each length."""


def render_compare(result: dict[str, Any]) -> str:
    """Ratios, speeds, steps and agreement of `compare`."""
    return to_text(compare_tables(result), [lengths(result), where(result)], WIDTH)


def render_sweep(result: dict[str, Any]) -> str:
    """The trees of `sweep`, the fastest first."""
    header = ("nodes", "depth", "threshold", "acceptance length", "tokens/s", "speed-up", "step ms", "draft", "verify")
    rows = [
        (
            str(point["nodes"]),
            str(point["depth"]),
            f"{point['threshold']:g}",
            number(point["mean_acceptance_length"]),
            _median(point["decode_tokens_per_s"], 1),
            _spread(point["ratios"][DECODE]),
            *(number(point["step_ms"][phase], 1) for phase in ("whole", "draft", "verify")),
        )
        for point in result["points"]
    ]
    return to_text([Section("Trees (speed-up: decoding, over autoregressive)", header, rows)], [where(result)])


def render_retrieval(result: dict[str, Any]) -> str:
    """Acceptance, needles, divergence and the studies of `retrieval`."""
    return to_text(retrieval_tables(result), [where(result)], WIDTH)


def render_memory(result: dict[str, Any]) -> str:
    """The account of `memory`."""
    named = {
        "prompt tokens": number(result["num_tokens"]),
        "after loading": _mib(result["loaded_bytes"]),
        "peak in prefill": _mib(result["peak_bytes"]),
        "target's weights": _mib(result["weight_bytes"]),
        "its cache for the prompt": _mib(result["cache_bytes"]),
        "peak over weights and cache": _mib(result["over_bytes"]),
    }
    note = ["The peak holds that of loading: this system cannot reset it."] if result["peak_holds_loading"] else []
    return to_text([Section("Memory of a prefill", ("", "value"), [*named.items()])], [*note, where(result)])


def _spread(measured: dict[str, Any] | None, digits: int = 2) -> str:
    if measured is None:
        return "-"
    return f"{_median(measured, digits)} ({measured['min']:.{digits}f}-{measured['max']:.{digits}f})"


def _median(measured: dict[str, Any] | None, digits: int = 2) -> str:
    return number(None if measured is None else measured["median"], digits)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"

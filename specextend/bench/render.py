"""Benchmark figures as tables for a terminal."""

from __future__ import annotations

from typing import Any

from specextend.report.tables import Section, number, percent, to_text

MIB = 1024**2
_DECODE, _WHOLE = "decode_tokens_per_s", "end_to_end_tokens_per_s"


def render_compare(result: dict[str, Any]) -> str:
    """Speeds, ratios and agreement of `compare`."""
    groups = {**result["buckets"], "all": result["all"]}
    return to_text([_speeds(groups), _ratios(groups), _steps(result["all"]), _agreement(result)], [_where(result)])


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
            _spread(point["ratios"][_DECODE]),
            *(number(point["step_ms"][phase], 1) for phase in ("whole", "draft", "verify")),
        )
        for point in result["points"]
    ]
    return to_text([Section("Trees (speed-up: decoding, over autoregressive)", header, rows)], [_where(result)])


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
    return to_text([Section("Memory of a prefill", ("", "value"), [*named.items()])], [*note, _where(result)])


def _speeds(groups: dict[str, Any]) -> Section:
    header = ("prompt up to", "side", "documents", "decode tokens/s", "end-to-end tokens/s", "acceptance length")
    rows = [
        (
            name,
            side,
            number(group["documents"]),
            _spread(measured[_DECODE], 1),
            _spread(measured[_WHOLE], 1),
            number(measured.get("mean_acceptance_length")),
        )
        for name, group in groups.items()
        for side, measured in group["sides"].items()
    ]
    return Section("Speed: median (range) over documents", header, rows, ("side",))


def _ratios(groups: dict[str, Any]) -> Section:
    header = ("prompt up to", "ratio", "n", "decoding", "sd", "end to end", "sd")
    rows = [
        (
            name,
            pair,
            number(None if ratios[_DECODE] is None else ratios[_DECODE]["n"]),
            _spread(ratios[_DECODE]),
            _sd(ratios[_DECODE]),
            _spread(ratios[_WHOLE]),
            _sd(ratios[_WHOLE]),
        )
        for name, group in groups.items()
        for pair, ratios in group["ratios"].items()
    ]
    return Section("Ratios of tokens per second, document by document: median (range)", header, rows, ("ratio",))


def _steps(group: dict[str, Any]) -> Section:
    phases = ("whole", "draft", "verify", "retrieval")
    rows = [
        (
            side,
            *(number(measured["step_ms"][phase], 2) for phase in phases),
            percent(measured["time_shares"]["prefill"]),
            percent(measured["time_shares"]["draft_prefill"]),
        )
        for side, measured in group["sides"].items()
        if "step_ms" in measured
    ]
    header = ("side", *(f"{phase} ms" for phase in phases), "prefill", "draft prefill")
    return Section("A decoding step, and the shares of prefill in the whole", header, rows)


def _agreement(result: dict[str, Any]) -> Section:
    rows = [
        (
            pair,
            number(found["documents"]),
            number(found["equal"]),
            ", ".join(str(index) for index in found["first_differences"].values()) or "-",
        )
        for pair, found in result["agreement"].items()
    ]
    header = ("outputs", "documents", "equal", "first difference at token")
    return Section("Greedy tokens that agree", header, rows, header[3:])


def _where(result: dict[str, Any]) -> str:
    environment, config = result["environment"], result["config"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['device']}, {environment['threads']} threads, {config['target']['dtype']}; {versions}; "
        f"at most {result['max_new_tokens']} new tokens, greedy, one document at a time."
    )


def _spread(measured: dict[str, Any] | None, digits: int = 2) -> str:
    if measured is None:
        return "-"
    return f"{_median(measured, digits)} ({measured['min']:.{digits}f}-{measured['max']:.{digits}f})"


def _median(measured: dict[str, Any] | None, digits: int = 2) -> str:
    return number(None if measured is None else measured["median"], digits)


def _sd(measured: dict[str, Any] | None) -> str:
    return number(None if measured is None else measured["sd"])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"

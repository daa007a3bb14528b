"""The figures of `compare` as tables, a line for each side and a column for each length: terminal and Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specextend.bench.figures import BASES
from specextend.report.tables import Section, number, percent
from specextend.stats import ratio

DECODE, WHOLE = "decode_tokens_per_s", "end_to_end_tokens_per_s"


def compare_tables(result: dict[str, Any]) -> list[Section]:
    """Ratios over each base, speeds, steps and agreement."""
    bases = [base for base in BASES if base in result["sides"] and len(result["sides"]) > 1]
    return [
        *(_ratios(result, base, DECODE, f"Decoding over {base}") for base in bases),
        *(_ratios(result, base, WHOLE, f"End to end over {base}") for base in bases if base != "transformers-lookup"),
        _by_length(result, "Decoding, tokens/s: median", lambda side: _median(side[DECODE])),
        _by_length(result, "End to end, tokens/s: median", lambda side: _median(side[WHOLE])),
        _by_length(result, "Tokens a step of the target", lambda side: number(side["tokens_per_step"])),
        _by_length(result, "Acceptance length", lambda side: number(side.get("mean_acceptance_length"))),
        _steps(result),
        _agreement(result),
    ]


def side_label(result: dict[str, Any], name: str) -> str:
    """A side's name; `specextend` says which draft the configuration has."""
    draft = result["configured_draft"]
    return f"{name} ({draft})" if name == "specextend" and draft is not None else name


def where(result: dict[str, Any]) -> str:
    """Device, versions and workload in a sentence."""
    environment, config = result["environment"], result["config"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['device']}, {environment['threads']} threads, {config['target']['dtype']}; {versions}; "
        f"at most {result['max_new_tokens']} new tokens, greedy, one document at a time."
    )


def lengths(result: dict[str, Any]) -> str:
    """How long the prompts of each bucket are, in a sentence."""
    found: dict[str, list[int]] = {}
    for document in result["documents"]:
        found.setdefault(document["bucket"], []).append(document["num_prompt_tokens"])
    spans = [f"{name} {min(each):,} to {max(each):,}" for name, each in found.items()]
    return f"Prompt tokens, document and template: {'; '.join(spans)}. No document was shortened."


def _groups(result: dict[str, Any]) -> dict[str, Any]:
    return {**result["buckets"], "all": result["all"]}


def _lengths_header(result: dict[str, Any]) -> list[str]:
    return [f"{name} (n={group['documents']})" for name, group in _groups(result).items()]


def _ratios(result: dict[str, Any], base: str, speed: str, title: str) -> Section:
    rows = []
    for name in result["sides"]:
        if name == base:
            continue
        pair = f"{name}/{base}"
        cells = [_ratio(group["ratios"][pair][speed]) for group in _groups(result).values()]
        lowest = result["lowest_bucket"][pair][speed]
        rows.append([side_label(result, name), *cells, "-" if lowest is None else lowest["bucket"]])
    header = ["side", *_lengths_header(result), "lowest"]
    return Section(f"{title}: median of documents (range, sd)", header, rows, ["lowest"])


def _by_length(result: dict[str, Any], title: str, cell: Callable[[dict[str, Any]], str]) -> Section:
    """A line for each side that has a value."""
    rows = []
    for name in result["sides"]:
        cells = [cell(group["sides"][name]) for group in _groups(result).values()]
        if set(cells) != {"-"}:
            rows.append([side_label(result, name), *cells])
    return Section(title, ["side", *_lengths_header(result)], rows)


def _steps(result: dict[str, Any]) -> Section:
    phases = ("whole", "draft", "verify", "retrieval")
    rows = [
        (
            side_label(result, side),
            percent(_plain_share(measured)),
            *(number(measured["step_ms"][phase], 2) for phase in phases),
            percent(measured["time_shares"]["prefill"]),
            percent(measured["time_shares"]["draft_prefill"]),
        )
        for side, measured in result["all"]["sides"].items()
        if "step_ms" in measured
    ]
    header = ("side", "plain", *(f"{phase} ms" for phase in phases), "prefill", "draft prefill")
    return Section("A decoding step, and the shares of prefill in the whole", header, rows)


def _plain_share(measured: dict[str, Any]) -> float | None:
    """Share of steps without a tree."""
    return ratio(measured["num_plain_steps"], measured["num_plain_steps"] + measured["num_spec_steps"])


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


def _ratio(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "-"
    sd = "" if measured["sd"] is None else f", sd {measured['sd']:.2f}"
    return f"{measured['median']:.2f} ({measured['min']:.2f}-{measured['max']:.2f}{sd})"


def _median(measured: dict[str, Any] | None) -> str:
    return number(None if measured is None else measured["median"], 1)

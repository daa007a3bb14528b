"""Tables of written figures, for a terminal and as Markdown, so that no figure on a page is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specextend.bench.compare import BASES
from specextend.bench.kernel_tables import kernel_tables
from specextend.bench.retrieval_tables import retrieval_tables
from specextend.bench.series_tables import batch_tables, retrieval_time_tables, step_tables, sweep_tables
from specextend.core import counted
from specextend.report.tables import Section, markdown_table, number, percent, to_text
from specextend.stats import ratio

DECODE, WHOLE = "decode_tokens_per_s", "end_to_end_tokens_per_s"
_COMMIT_DIGITS, _WHOLE_COMMIT = 12, 40
"""Digits of a commit that are shown, and all that it has, behind which may stand `-dirty`."""
WIDTH = 150
"""Width of a terminal line in characters, for tables with a column for each length."""


def read_figures(path: str) -> dict[str, Any]:
    """Read a file that `jobs/bench.py` wrote. Raises OSError if it is missing, ValueError if it is something else."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("kind"), str):
        raise ValueError(
            f"{path} does not hold the figures of a benchmark: it names no kind; give a file that jobs/bench.py wrote"
        )
    return result


def to_terminal(result: dict[str, Any]) -> str:
    """Format figures as tables for a terminal."""
    sections, sentences = _tables(result)
    return to_text(sections, sentences, WIDTH)


def to_markdown(result: dict[str, Any]) -> str:
    """Format figures as Markdown tables. Raises ValueError if their kind is unknown."""
    sections, sentences = _tables(result)
    lines = []
    for section in sections:
        lines += [f"**{section.title}**", "", *markdown_table(section), ""]
    return "\n".join([*lines, *sentences, ""])


def _tables(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Build the tables of a section, and the sentences below them."""
    build = _BUILDERS.get(result["kind"])
    if build is None:
        raise ValueError(f"there are tables for the sections {', '.join(_BUILDERS)}, not for {result['kind']!r}")
    sections, sentences = build(result)
    return sections, [*sentences, where(result)]


def where(result: dict[str, Any]) -> str:
    """Describe device, versions and workload in one sentence. Files of the first versions name no commit."""
    environment, config = result["environment"], result["config"]
    versions = [f"{name} {version}" for name, version in environment["versions"].items()]
    if commit := environment.get("commit"):
        versions.append(f"commit {commit[:_COMMIT_DIGITS]}{commit[_WHOLE_COMMIT:]}")
    threads = counted(environment["threads"], "thread")
    return (
        f"{environment['device']}, {threads}, {config['target']['dtype']}; "
        f"{', '.join(versions)}; at most {result['max_new_tokens']:,} new tokens, "
        f"{result.get('how', 'greedy, one document at a time')}."
    )


def side_label(result: dict[str, Any], name: str) -> str:
    """Label a side; `specextend` names the draft of the configuration."""
    draft = result["configured_draft"]
    return f"{name} ({draft})" if name == "specextend" and draft is not None else name


def _compare(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Show ratios over each base, speeds, steps and agreement: a row for each side, a column for each length."""
    bases = [base for base in BASES if base in result["sides"] and len(result["sides"]) > 1]
    sections = [
        *(_ratios(result, base, DECODE, f"Decoding over {base}") for base in bases),
        *(_ratios(result, base, WHOLE, f"End to end over {base}") for base in bases if base != "transformers-lookup"),
        _by_length(result, "Decoding, tokens/s: median", lambda side: _median(side[DECODE])),
        _by_length(result, "End to end, tokens/s: median", lambda side: _median(side[WHOLE])),
        _by_length(result, "Tokens per target step", lambda side: number(side["tokens_per_step"])),
        _by_length(result, "Acceptance length", lambda side: number(side.get("mean_acceptance_length"))),
        *_shares(result),
        _steps(result),
        _agreement(result),
    ]
    return sections, [_lengths(result), *_limits(result), *_loops(result)]


def _shares(result: dict[str, Any]) -> list[Section]:
    """Show the shares of the machine's limits, unless an older version measured without them."""
    if "machine" not in result:
        return []
    return [
        _by_length(result, "Decoding: share of the memory bandwidth", lambda side: percent(side["read_share"])),
        _by_length(result, "Prefill: share of the matrix rate", lambda side: percent(side["matrix_share"])),
    ]


def _limits(result: dict[str, Any]) -> list[str]:
    """State the machine's limits in one sentence."""
    if "machine" not in result:
        return []
    limits = result["machine"]["limits"]
    read, rate = (f"{limits[name] / 1e9:,.1f}" for name in ("read_bytes_per_s", "flop_per_s"))
    return [f"The machine reads {read} GB/s and multiplies {rate} GFLOP/s in {result['config']['target']['dtype']}."]


def _loops(result: dict[str, Any]) -> list[str]:
    """Say what became of the documents whose output ends in a loop."""
    if not result.get("loops"):
        return []
    only = [name for name, group in result["buckets"].items() if group["documents"] == 0]
    note = [f"All documents of {', '.join(only)} are loops."] if only else []
    return ["Documents whose output ends in a loop are counted in the column loops only.", *note]


def _lengths(result: dict[str, Any]) -> str:
    """Describe the prompt lengths of each bucket in one sentence."""
    found: dict[str, list[int]] = {}
    for document in result["documents"]:
        found.setdefault(document["bucket"], []).append(document["num_prompt_tokens"])
    spans = [f"{name} {min(each):,} to {max(each):,}" for name, each in found.items()]
    return f"Prompt lengths in tokens, template included: {'; '.join(spans)}. No document was shortened."


def _groups(result: dict[str, Any]) -> dict[str, Any]:
    """Return the group of each column; older versions had none of loops."""
    loops = {"loops": result["loops"]} if result.get("loops") else {}
    return {**result["buckets"], "all": result["all"], **loops}


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
    """Show a row for each side that has a value."""
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
    return Section("A decoding step, and the share of prefill in the whole time", header, rows)


def _plain_share(measured: dict[str, Any]) -> float | None:
    """Compute the share of steps without a tree."""
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


def _trees(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Show the trees, the fastest first."""
    header = ("nodes", "depth", "threshold", "acceptance length", "tokens/s", "speed-up", "step ms", "draft", "verify")
    rows = [
        (
            str(point["nodes"]),
            str(point["depth"]),
            f"{point['threshold']:g}",
            number(point["mean_acceptance_length"]),
            _median(point[DECODE]),
            _ratio(point["ratios"][DECODE], with_sd=False),
            *(number(point["step_ms"][phase], 1) for phase in ("whole", "draft", "verify")),
        )
        for point in result["points"]
    ]
    return [Section("Trees (speed-up: decoding, over autoregressive)", header, rows)], []


def _memory(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    """Show the peak of a prefill and its parts."""
    named = {
        "prompt tokens": number(result["num_tokens"]),
        "after loading": _mib(result["loaded_bytes"]),
        "peak in prefill": _mib(result["peak_bytes"]),
        "target's weights": _mib(result["weight_bytes"]),
        "its cache for the prompt": _mib(result["cache_bytes"]),
        "peak over weights and cache": _mib(result["over_bytes"]),
    }
    note = ["The peak includes loading: this system cannot reset it."] if result["peak_holds_loading"] else []
    return [Section("Memory of a prefill", ("", "value"), [*named.items()])], note


def _retrieval(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    return retrieval_tables(result), []


def _kernels(result: dict[str, Any]) -> tuple[list[Section], list[str]]:
    return kernel_tables(result), _limits(result)


def _ratio(measured: dict[str, Any] | None, *, with_sd: bool = True) -> str:
    if measured is None:
        return "-"
    sd = f", sd {measured['sd']:.2f}" if with_sd and measured["sd"] is not None else ""
    return f"{measured['median']:.2f} ({measured['min']:.2f}-{measured['max']:.2f}{sd})"


def _median(measured: dict[str, Any] | None) -> str:
    return number(None if measured is None else measured["median"], 1)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:,.0f} MiB"


_BUILDERS: dict[str, Callable[[dict[str, Any]], tuple[list[Section], list[str]]]] = {
    "compare": _compare,
    "trees": _trees,
    "memory": _memory,
    "retrieval": _retrieval,
    "kernels": _kernels,
    "ablation": step_tables,
    "reasoning": step_tables,
    "sweep": sweep_tables,
    "retrieval-time": retrieval_time_tables,
    "batch": batch_tables,
}

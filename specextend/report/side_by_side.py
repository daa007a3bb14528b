"""Two runs side by side: their figures, how many of their texts differ, and what of their configuration does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from specextend.core import counted
from specextend.data.fingerprint import flattened, read_manifest
from specextend.data.storage import Location, resolve
from specextend.report.build import build_report
from specextend.report.rows import Rows
from specextend.report.tables import Section, duration, number, percent, shortened, to_text
from specextend.stats import ratio

NUM_EXAMPLES = 5
"""Documents with different texts that are named."""
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "documents done": ("rows.done", number),
    "documents failed": ("rows.errors", number),
    "time of all starts": ("wall_clock.seconds", duration),
    "documents an hour": ("wall_clock.documents_per_hour", number),
    "output tokens/s of the job": ("wall_clock.output_tokens_per_s", number),
    "worker hours": ("wall_clock.worker_hours", number),
    "cost of 1,000 documents": ("wall_clock.cost.per_thousand_documents", number),
    "prompt tokens": ("tokens.prompt", number),
    "output tokens": ("tokens.output", number),
    "mean acceptance length": ("acceptance.mean_acceptance_length", number),
    "draft acceptance rate": ("acceptance.draft_acceptance_rate", percent),
    "speculative steps": ("acceptance.num_spec_steps", number),
    "plain steps": ("acceptance.num_plain_steps", number),
    "decode tokens/s": ("speed.decode_tokens_per_s", number),
    "end-to-end tokens/s": ("speed.end_to_end_tokens_per_s", number),
    "output tokens per second of a worker": ("speed.tokens_per_busy_s", number),
    "prefill": ("time.shares.prefill", percent),
    "verification": ("time.shares.verify", percent),
    "retrieval coverage": ("retrieval.coverage", percent),
    "texts cut at max_new_tokens": ("quality_flags.truncated", number),
    "texts that end in a loop": ("quality_flags.repeated", number),
    "empty texts": ("quality_flags.empty", number),
}
"""Figures of a report that are compared: by the name that people read, where each is and how it is shown."""


def compare(output: str, other: str) -> dict[str, Any]:
    """Compare two run folders: `{"figures", "texts", "configuration"}`, each value as [here, there].

    Raises ValueError if either holds no run, or a damaged one.
    """
    reports, folders = (build_report(output), build_report(other)), (resolve(output), resolve(other))
    return {
        "outputs": [output, other],
        "figures": {name: [_look_up(report, path) for report in reports] for name, (path, _) in FIGURES.items()},
        "texts": _compare_texts(*folders),
        "configuration": _differing(
            *(_settings(folder, report) for folder, report in zip(folders, reports, strict=True))
        ),
    }


def _look_up(report: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    value: Any = report
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def _compare_texts(here: Location, there: Location) -> dict[str, Any]:
    """Compare the texts of equal ids, character by character."""
    ours, theirs = dict(_texts(here)), dict(_texts(there))
    common = [doc_id for doc_id in ours if doc_id in theirs]
    differing = [doc_id for doc_id in common if ours[doc_id] != theirs[doc_id]]
    return {
        "common": len(common),
        "differing": len(differing),
        "only_here": len(ours) - len(common),
        "only_there": len(theirs) - len(common),
        "examples": differing[:NUM_EXAMPLES],
    }


def _texts(folder: Location) -> Iterator[tuple[str, bytes]]:
    """Yield id and hash of each document's text: texts themselves may be more than fits into memory."""
    for table in Rows(folder).done(["doc_id", "summary"]):
        for doc_id, text in zip(table["doc_id"].to_pylist(), table["summary"].to_pylist(), strict=True):
            yield doc_id, blake2b((text or "").encode(errors="surrogatepass"), digest_size=16).digest()


def _settings(folder: Location, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run was made with, by dotted name: configuration, hashes of its models, versions and code."""
    manifest = read_manifest(folder)
    last = report["starts"][-1] if report["starts"] else {"versions": None, "git_commit": None}
    settings = {f"version of {name}": version for name, version in (last["versions"] or {}).items()}
    settings |= {"commit of the code": last["git_commit"]}
    if manifest is None:
        return settings
    hashes = {f"hash of {name}": sha256[:12] for name, sha256 in manifest["identity"]["hashes"].items()}
    return dict(flattened(manifest["config"])) | hashes | settings


def _differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*here, *there])
    return {name: [here.get(name), there.get(name)] for name in names if here.get(name) != there.get(name)}


def render_comparison(comparison: dict[str, Any]) -> str:
    """Render a comparison as tables for a terminal."""
    figures = [
        (name, *map(FIGURES[name][1], values), _relative(*values))
        for name, values in comparison["figures"].items()
        if values != [None, None]
    ]
    settings = [(name, *map(_setting, values)) for name, values in comparison["configuration"].items()]
    sides = ("here", "there")
    sections = [
        Section("Figures", ("", *sides, "here / there"), figures),
        Section("What differs in how they were made", ("key", *sides), settings, sides),
    ]
    where = [f"{side}: {output}" for side, output in zip(sides, comparison["outputs"], strict=True)]
    return to_text([section for section in sections if section.rows], [*where, *_text_lines(comparison["texts"])])


def _relative(here: float | None, there: float | None) -> str:
    both = None if here is None or there is None else ratio(here, there)
    return number(both)


def _setting(value: Any) -> str:
    return "-" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def _text_lines(texts: Mapping[str, Any]) -> list[str]:
    """Say in sentences how the texts differ."""
    differing, common = texts["differing"], texts["common"]
    of_all = f"{differing:,} of {counted(common, 'text')} ({percent(ratio(differing, common))})"
    lines = [f"Different where the ids are equal: {of_all}."]
    if texts["examples"]:
        lines.append(f"For example: {', '.join(map(shortened, texts['examples']))}")
    only = {"here": texts["only_here"], "there": texts["only_there"]}
    return lines + [f"Done only {side}: {counted(count, 'document')}." for side, count in only.items() if count]

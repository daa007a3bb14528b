"""Two runs side by side: their figures, how many of their texts differ, and what of their configuration does."""

import json
from hashlib import blake2b
from typing import Any

from specextend.core import ReadOnly, Values, counted
from specextend.data.fingerprint import flattened, read_manifest
from specextend.data.storage import Location, resolve
from specextend.report.build import build_report
from specextend.report.result_rows import read_rows
from specextend.report.sections import RUN, WALL_CLOCK, Figures, Section, look_up, number, percent, shortened, to_text
from specextend.stats import ratio

NUM_EXAMPLES = 5
"""Documents with different texts that are named."""
FIGURES: Figures = {
    **RUN,
    **WALL_CLOCK,
    "prefill": ("time.shares.prefill", percent),
    "verification": ("time.shares.verify", percent),
    "texts cut at max_new_tokens": ("quality_flags.truncated", number),
    "texts that end in a loop": ("quality_flags.repeated", number),
    "empty texts": ("quality_flags.empty", number),
}
"""Figures of a report that are compared."""


def compare(output: str, other: str) -> Values:
    """Compare two run folders: `{"figures", "texts", "configuration"}`, each value as [here, there].

    Raises ValueError if either holds no run, or a damaged one.
    """
    reports, folders = (build_report(output), build_report(other)), (resolve(output), resolve(other))
    here, there = (_settings(folder, report) for folder, report in zip(folders, reports, strict=True))
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    return {
        "outputs": [output, other],
        "figures": {name: [look_up(report, path) for report in reports] for name, (path, _) in FIGURES.items()},
        "texts": _compare_texts(*folders),
        "configuration": {name: [here.get(name), there.get(name)] for name in names},
    }


def _compare_texts(here: Location, there: Location) -> Values:
    """Compare the texts of equal ids, character by character."""
    ours, theirs = _hashes(here), _hashes(there)
    common = [doc_id for doc_id in ours if doc_id in theirs]
    differing = [doc_id for doc_id in common if ours[doc_id] != theirs[doc_id]]
    return {
        "common": len(common),
        "differing": len(differing),
        "only_here": len(ours) - len(common),
        "only_there": len(theirs) - len(common),
        "examples": differing[:NUM_EXAMPLES],
    }


def _hashes(folder: Location) -> dict[str, bytes]:
    """Return the hash of each document's text by its id: texts themselves may be more than fits into memory."""
    hashes = {}
    for is_done, table in read_rows(folder, ("doc_id", "summary"), ()):
        if is_done:
            for row in table.to_pylist():
                text = (row["summary"] or "").encode(errors="surrogatepass")
                hashes[row["doc_id"]] = blake2b(text, digest_size=16).digest()
    return hashes


def _settings(folder: Location, report: ReadOnly) -> Values:
    """Return what a run was made with, by dotted name: configuration, hashes of its models, versions and code."""
    manifest = read_manifest(folder)
    last = report["starts"][-1] if report["starts"] else {"versions": None, "git_commit": None}
    settings = {f"version of {name}": version for name, version in (last["versions"] or {}).items()}
    settings |= {"commit of the code": last["git_commit"]}
    if manifest is None:
        return settings
    hashes = {f"hash of {name}": sha256[:12] for name, sha256 in manifest["identity"]["hashes"].items()}
    return dict(flattened(manifest["config"])) | hashes | settings


def render_comparison(comparison: Values) -> str:
    """Render a comparison as tables for a terminal."""
    figures = [
        (name, *map(FIGURES[name][1], values), number(None if None in values else ratio(*values)))
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


def _setting(value: Any) -> str:
    return "-" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def _text_lines(texts: ReadOnly) -> list[str]:
    """Say in sentences how the texts differ."""
    differing, common = texts["differing"], texts["common"]
    of_all = f"{differing:,} of {counted(common, 'text')} ({percent(ratio(differing, common))})"
    lines = [f"Different where the ids are equal: {of_all}."]
    if texts["examples"]:
        lines.append(f"For example: {', '.join(map(shortened, texts['examples']))}")
    only = {"here": texts["only_here"], "there": texts["only_there"]}
    return lines + [f"Done only {side}: {counted(count, 'document')}." for side, count in only.items() if count]

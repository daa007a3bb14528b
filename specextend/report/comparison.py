"""Comparison of two runs: figures, texts, right answers and configuration."""

import json
from typing import Any

from specextend.core import ReadOnly, Values, counted
from specextend.data.database import Database
from specextend.data.fingerprint import check_one_task, flattened, read_manifest
from specextend.data.storage import Location, resolve
from specextend.report.build import build_report
from specextend.report.gold import compare_gold
from specextend.report.result_rows import read_rows
from specextend.report.sections import (
    INTERVAL,
    RUN,
    WALL_CLOCK,
    Figures,
    Section,
    listed,
    listed_ids,
    look_up,
    number,
    percent,
    shortened,
    shown,
    to_text,
)
from specextend.stats import ratio

NUM_EXAMPLES = 5
"""Examples of documents with different texts."""
_DIFFERENCES = f"""
    SELECT count(*) FILTER (ours.hash IS NOT NULL AND theirs.hash IS NOT NULL) AS common,
        count(*) FILTER (ours.hash != theirs.hash) AS differing,
        count(*) FILTER (theirs.hash IS NULL) AS only_here,
        count(*) FILTER (ours.hash IS NULL) AS only_there,
        coalesce(arg_min(ours.doc_id, ours.rowid, {NUM_EXAMPLES})
            FILTER (ours.hash != theirs.hash), []) AS examples
    FROM ours FULL JOIN theirs ON ours.doc_id = theirs.doc_id
"""
FIGURES: Figures = {
    **RUN,
    **WALL_CLOCK,
    "prefill": "time.shares.prefill",
    "verification": "time.shares.verify",
    "texts cut at max_new_tokens": "quality_flags.truncated",
    "texts that end in a loop": "quality_flags.repeated",
    "empty texts": "quality_flags.empty",
}
"""Compared figures by name."""
_GOLD: Figures = {
    "field": "field",
    "rows": "rows",
    "here": "accuracy.0",
    "there": "accuracy.1",
    "difference": "share",
    **INTERVAL,
    "p": "p",
    "right only here": "num_here",
    "right only there": "num_there",
}
_ABOUT_GOLD = "Accuracy; the bootstrap's interval of 95% of the difference; McNemar's exact test."


def compare(output: str, other: str) -> Values:
    """Compare two run folders.

    Returns:
        `outputs`, `figures`, `texts`, `gold` and `configuration`, with values as [here, there].
    """
    reports = (build_report(output), build_report(other))
    folders = (resolve(output), resolve(other))
    here, there = (
        _settings(folder, report) for folder, report in zip(folders, reports, strict=True)
    )
    runs = [(folder, read_manifest(folder)) for folder in folders]
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    return {
        "outputs": [output, other],
        "figures": {
            name: [look_up(report, path) for report in reports] for name, path in FIGURES.items()
        },
        "texts": _compare_texts(*folders),
        "gold": compare_gold(*runs),
        "configuration": {name: [here.get(name), there.get(name)] for name in names},
    }


def _compare_texts(here: Location, there: Location) -> Values:
    database = Database()
    for name, folder in (("ours", here), ("theirs", there)):
        check_one_task(read_manifest(folder), f"{folder.path}: a comparison of texts")
        database.select(f"CREATE TABLE {name} (doc_id TEXT, hash TEXT)")
        for is_done, rows in read_rows(folder, ("doc_id", "summary"), ()):
            if is_done:
                database.add(
                    rows,
                    f"INSERT INTO {name} SELECT doc_id, sha256(coalesce(summary, '')) FROM given",
                )
    [counts] = database.select(_DIFFERENCES)
    return counts


def _settings(folder: Location, report: ReadOnly) -> Values:
    manifest = read_manifest(folder)
    last = report["starts"][-1] if report["starts"] else {"versions": None, "git_commit": None}
    settings = {f"version of {name}": version for name, version in (last["versions"] or {}).items()}
    settings |= {"commit of the code": last["git_commit"]}
    if manifest is None:
        return settings
    hashes = {
        f"hash of {name}": sha256[:12] for name, sha256 in manifest["identity"]["hashes"].items()
    }
    return dict(flattened(manifest["config"])) | hashes | settings


def render_comparison(comparison: Values) -> str:
    """Render a comparison as tables for a terminal."""
    figures = [
        (
            name,
            *(shown(FIGURES[name], value) for value in values),
            number(None if None in values else ratio(*values)),
        )
        for name, values in comparison["figures"].items()
        if values != [None, None]
    ]
    settings = [
        (name, *map(_setting, values)) for name, values in comparison["configuration"].items()
    ]
    sides = ("here", "there")
    gold = [
        {
            "field": field,
            **of,
            "share": of["difference"],
            **{f"num_{side}": len(of[f"right_only_{side}"]) for side in sides},
        }
        for field, of in comparison["gold"].items()
    ]
    sections = [
        listed("Against the right answers", _GOLD, gold, about=_ABOUT_GOLD),
        Section("Figures", ("", *sides, "here / there"), figures),
        Section("What differs in how they were made", ("key", *sides), settings, sides),
    ]
    where = [f"{side}: {output}" for side, output in zip(sides, comparison["outputs"], strict=True)]
    tables = [section for section in sections if section.rows]
    changed = [
        f"{field}: right only {side}: {listed_ids(of[f'right_only_{side}'][:NUM_EXAMPLES])}"
        for field, of in comparison["gold"].items()
        for side in sides
        if of[f"right_only_{side}"]
    ]
    return to_text([*tables, *where, *changed, *_text_lines(comparison["texts"])])


def _setting(value: Any) -> str:
    return "-" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def _text_lines(texts: ReadOnly) -> list[str]:
    differing = texts["differing"]
    common = texts["common"]
    of_all = f"{differing:,} of {counted(common, 'text')} ({percent(ratio(differing, common))})"
    lines = [f"Different where the ids are equal: {of_all}."]
    if texts["examples"]:
        lines.append(f"For example: {', '.join(map(shortened, texts['examples']))}")
    only = {"here": texts["only_here"], "there": texts["only_there"]}
    return lines + [
        f"Done only {side}: {counted(count, 'document')}." for side, count in only.items() if count
    ]

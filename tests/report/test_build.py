"""The report of a run folder: what it is made from, what is written and printed, and folders that are damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.report import main
from specextend.core import Completion, DocumentKey, FinishReason
from specextend.data.fingerprint import fingerprint
from specextend.data.parts import PartWriter
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.data.schema import SUMMARY_SCHEMA, error_row, result_row
from specextend.data.storage import resolve
from specextend.report import build_report, render, render_outcome, write_report
from specextend.report.sections import Section, to_text
from specextend.stats import DecodingStats
from tests.damage import DAMAGES, damage

RUN_ID = "0123abcd"
SHORT = DecodingStats(
    num_prompt_tokens=1_000,
    num_output_tokens=21,
    num_spec_steps=10,
    num_draft_tokens=160,
    num_accepted_tokens=15,
    acceptance_histogram=[2, 3, 3, 2],
    num_retrievals=1,
    retrieval_coverage_sum=0.9,
    ttft_s=1.0,
    decode_s=2.0,
    prefill_s=1.0,
    draft_s=0.5,
    verify_s=1.5,
)
LONG = DecodingStats(
    num_prompt_tokens=4_000,
    num_output_tokens=11,
    num_spec_steps=5,
    num_plain_steps=2,
    num_draft_tokens=80,
    num_accepted_tokens=4,
    acceptance_histogram=[2, 2, 1],
    num_retrievals=3,
    retrieval_coverage_sum=1.5,
    retrieval_churn_sum=0.5,
    num_fallbacks=1,
    num_hybrid_steps=3,
    ttft_s=5.0,
    decode_s=2.0,
    prefill_s=4.5,
    draft_prefill_s=0.5,
    verify_s=1.0,
    retrieval_s=0.5,
    other_s=0.5,
)


def done(
    row: int, stats: DecodingStats, reason: FinishReason = "stop", dropped: int = 0, attempts: int = 1
) -> dict[str, Any]:
    completion = Completion(str(row), [1, 2], "summary", reason, stats)
    prompt = Prompt([1], dropped, "middle")
    quality = Quality(["truncated"] if reason == "length" else [], None)
    return result_row(
        DocumentKey(0, row),
        f"id-{row}",
        completion,
        prompt,
        quality,
        content_sha256="00",
        queue_s=0.25,
        started_at=0.0,
        worker="w0",
        attempts=attempts,
    )


def failed(row: int, message: str = "the text is null") -> dict[str, Any]:
    return error_row(
        DocumentKey(0, row),
        f"id-{row}",
        error_class="NullText",
        message=message,
        stage="read",
        retryable=False,
        attempts=1,
    )


def commit(folder: Path, *commits: list[dict[str, Any]]) -> str:
    writer = PartWriter(resolve(str(folder)), RUN_ID)
    for rows in commits:
        writer.commit(rows)
    return str(folder)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Two documents done in two commits, one given up."""
    return commit(tmp_path / "run", [done(0, SHORT), failed(2)], [done(1, LONG, "length", dropped=50)])


def test_a_document_committed_twice_counts_once(tmp_path):
    """After a crash a row may stand in two commits: done beats error, later beats earlier, wherever they stand."""
    run = commit(tmp_path / "run", [done(0, LONG), done(1, SHORT)], [failed(1), failed(2)], [done(0, SHORT), failed(2)])
    report = build_report(run)
    assert (report["rows"]["done"], report["rows"]["errors"]) == (2, 1)
    assert report["tokens"]["output"] == 2 * SHORT.num_output_tokens


def test_summaries_alone_give_the_same_figures(run, tmp_path):
    """What is left of a run when its commits have been cleared away."""
    folder = tmp_path / "copy"
    rows = [done(0, SHORT), done(1, LONG, "length", dropped=50)]
    (folder / "summaries").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(rows, schema=SUMMARY_SCHEMA.append(pa.field("title", pa.string()))),
        folder / "summaries" / "part-00000.parquet",
    )
    copied, original = build_report(str(folder)), build_report(run)
    assert (copied["source"], original["source"]) == ("summaries", "parts")
    for name in ("tokens", "acceptance", "speed", "time", "retrieval", "per_document", "buckets", "finish_reasons"):
        assert copied[name] == original[name], name


def test_a_run_without_speculation_has_no_acceptance(tmp_path):
    """Null, not zero and not one: there was no draft."""
    plain = DecodingStats(num_prompt_tokens=10, num_output_tokens=1, num_plain_steps=1)
    report = build_report(commit(tmp_path / "run", [done(0, plain)]))
    assert report["acceptance"]["mean_acceptance_length"] is None
    assert report["speed"] == dict.fromkeys(report["speed"])
    assert set(report["time"]["shares"].values()) == {None}
    assert "acceptance length" in render(report)


def test_a_run_that_did_nothing_but_fail_has_a_report(tmp_path):
    """It is the run whose report is read most."""
    report = build_report(commit(tmp_path / "run", [failed(0, "no [bold]such[/bold] | thing\nat all")]))
    assert report["rows"]["done"] == 0
    assert "no [bold]such[/bold] | thing at all" in " ".join(render(report, width=200).split())


def test_report_files_are_written_and_say_the_same(run):
    """JSON for programs, HTML for people."""
    report = write_report(run)
    assert json.loads(Path(run, "report.json").read_text()) == report
    page = Path(run, "report.html").read_text()
    for text in (page, " ".join(render(report).split())):
        assert "2.27" in text
        assert "60% of the work is prefill: with decoding for free the run would be 1.7 times as fast" in text


def test_the_end_of_a_run_is_shown_in_few_lines(report: dict[str, Any]):
    """Twelve tables had scrolled away what everybody asks first: how many failed, and why."""
    text = render_outcome(report, width=200)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert len(lines) <= 15
    assert "rows done 302 of 309" in lines
    assert "rows failed 7: 6 PromptTooLong, 1 <b>Bad</b>; for example doc-0292: it is too long" in lines
    assert "documents an hour 1,924.8" in lines
    assert len([line for line in lines if line.startswith("finding ")]) == 3
    assert re.search(r"\d+ more findings in the report", text)


def test_the_job_prints_the_tables_and_writes_the_files(run, capsys):
    """Its arguments and nothing else: the logic is tested above."""
    assert main([run]) == 0
    printed = capsys.readouterr().out
    assert "mean acceptance length" in printed
    assert "NullText" in printed
    assert {file.name for file in Path(run).iterdir()} == {"_run", "report.json", "report.html"}


def test_a_folder_that_holds_no_run_is_refused_in_one_line(tmp_path, capsys):
    """Nothing may be written into somebody else's folder."""
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_rows_to_do_come_from_the_manifest(run):
    """A run under way: its report says how much is left, which run it is, and when it was started."""
    file = {"rows": 5, "size": 1, "footer_sha256": "0" * 64}
    identity = {"files": {"a.parquet": file}, "hashes": {}, "config": {}}
    config = {"decoding": {"mode": "specextend"}, "input": {"path": "a.parquet"}}
    manifest = {"version": 1, "fingerprint": fingerprint(identity), "identity": identity, "config": config}
    Path(run, "_run", "manifest.json").write_text(json.dumps(manifest))
    attempts = Path(run, "_run", "attempts")
    attempts.mkdir()
    attempts.joinpath("b.json").write_text(json.dumps({"run_id": "b", "begin": "2025-01-02", "exit_code": None}))
    attempts.joinpath("a.json").write_text(json.dumps({"run_id": "a", "begin": "2025-01-01", "exit_code": 75}))
    report = build_report(run)
    assert report["rows"] == {"input": 5, "done": 2, "copied": 0, "errors": 1, "pending": 2}
    assert report["run"]["decoding"] == {"mode": "specextend"}
    assert [start["run_id"] for start in report["starts"]] == ["a", "b"]


def damaged(folder: Path, kind: str) -> None:
    """A summaries file as nobody of ours writes it."""
    path = folder / "summaries" / "part-00000.parquet"
    path.parent.mkdir(parents=True)
    row = {name: done(0, SHORT).get(name) for name in SUMMARY_SCHEMA.names}
    if kind == "garbage":
        path.write_bytes(b"PAR1 and nothing more")
    elif kind in DAMAGES:
        pq.write_table(pa.Table.from_pylist([row]), path)
        damage(path, kind)
    elif kind == "columns":
        pq.write_table(pa.table({"doc_id": ["a"]}), path)
    else:
        pq.write_table(pa.Table.from_pylist([row | {"num_prompt_tokens": "many\n", "decode_s": ["x"]}]), path)


@pytest.mark.parametrize("kind", ["garbage", "columns", "types", *DAMAGES])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, capsys, kind: str):
    """The report is what people run on folders that somebody sent them."""
    damaged(tmp_path, kind)
    assert main([str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "part-00000.parquet is damaged" in line


def test_a_part_without_keys_is_named(run: str):
    """Not a traceback about a column, which says nothing to anyone. Other columns may be missing: they are null."""
    [path, _] = sorted(Path(run, "_run", "parts").glob("*.parquet"))
    pq.write_table(pa.table({"file": [0], "error_class": ["x"]}), path)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged \(.+\); delete it"):
        build_report(run)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"7", b"[" * 100_000], ids=range(6))
def test_a_damaged_record_of_a_start_hides_no_figures(run: str, content: bytes):
    """A driver was killed on a full disk: what it did is in the parts."""
    path = Path(run, "_run", "attempts", "0a.json")
    path.parent.mkdir()
    path.write_bytes(content)
    report = build_report(run)
    assert report["rows"]["done"] == 2
    [start] = report["starts"]
    assert start == dict.fromkeys(start) | {"run_id": "0a", "documents": 0}


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_report_json_is_json_whatever_the_rows_hold(tmp_path: Path):
    """Numbers that are none and halves of characters: programs that read the report are stricter than Python."""
    bad = done(0, replace(SHORT, retrieval_coverage_sum=float("nan"), verify_s=float("inf")))
    run = commit(tmp_path / "run", [bad, failed(1, "half \u2028 \x1b \x00")])
    attempts = Path(run, "_run", "attempts")
    attempts.mkdir()
    attempts.joinpath("a.json").write_text(json.dumps({"run_id": "\ud800", "begin": "\udfff"}))
    write_report(run)
    report = json.loads(Path(run, "report.json").read_bytes().decode(), parse_constant=no_constant)
    assert report["time"]["busy_s"] == SHORT.prefill_s + SHORT.draft_s, "an infinite time is none"
    assert report["starts"][0]["run_id"] == "\ud800"
    assert report["errors"][0]["example_message"] == "half \u2028 \x1b \x00"


def test_long_ids_and_messages_are_cut_in_tables_and_whole_in_json(tmp_path: Path):
    """A row whose id is its text would fill the screen."""
    row = failed(0, "m" * 5_000) | {"doc_id": "d" * 5_000}
    report = build_report(commit(tmp_path / "run", [row]))
    assert len(report["errors"][0]["example_doc_id"]) == 5_000
    shown = render(report, width=1_000)
    assert f" {'d' * 199}… " in shown
    assert f" {'m' * 199}… " in shown


def test_a_table_on_a_terminal_shows_codes_and_no_markup():
    """Rich knows `[red]`, links and `:smile:`; a cell is text."""
    hostile = "[red]x[/red] :smile: [link=http://x]y[/link] \x1b[2J\u202e\nz"
    text = to_text([Section("T", ("a",), [(hostile,)])], ["\x1b[1m"])
    assert r"[red]x[/red] :smile: [link=http://x]y[/link] \x1b[2J\u202e\nz" in text
    assert "\x1b" not in text


def test_rows_without_values_are_counted(tmp_path: Path):
    """A part that somebody else wrote may lack what ours never lack."""
    empty = {"file": 0, "row": 0, "error_class": None}
    vague = {"file": 0, "row": 1, "error_class": "X"}
    report = build_report(commit(tmp_path / "run", [empty, vague]))
    assert (report["rows"]["done"], report["rows"]["errors"]) == (1, 1)
    assert "X" in render(report)

"""The report of a run folder: what it is made from, what is written and printed, and folders that are damaged."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from specextend.data.commits import CommitWriter
from specextend.data.schema import SUMMARY_SCHEMA
from specextend.data.storage import resolve
from specextend.report import build_report, render_outcome, write_report
from tests.job.conftest import specextend
from tests.report.made_up import (
    FIRST,
    NIGHT_S,
    begin_run,
    config_of,
    failed_row,
    rows_of_worker,
    write_manifest_file,
    write_part,
)

DONE = rows_of_worker(range(2), "host:1", NIGHT_S)


def commit(folder, rows):
    CommitWriter(resolve(str(folder)), FIRST).commit(rows)
    return str(folder)


@pytest.fixture
def run(tmp_path):
    """Two documents done, one given up."""
    return commit(tmp_path / "run", [*DONE, failed_row(2)])


def record(run, name, **start):
    """Write what a start has left."""
    path = Path(run, "_run", "attempts", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(start))


def test_summaries_alone_give_the_same_figures(run, tmp_path):
    """What is left of a run when its commits have been cleared away; which start did what is then unknown."""
    schema = SUMMARY_SCHEMA.append(pa.field("title", "string"))
    write_part(tmp_path / "copy" / "summaries", pa.Table.from_pylist(DONE, schema=schema))
    copied = build_report(f"{tmp_path}/copy")
    original = build_report(run)
    assert copied["source"] == "summaries"
    assert original["source"] == "parts"
    for name in ("tokens", "acceptance", "speed", "time", "retrieval", "per_document", "buckets", "finish_reasons"):
        assert copied[name] == original[name], name
    assert copied["wall_clock"] == dict.fromkeys(copied["wall_clock"]) | {"is_exact": False}


def test_the_end_of_a_run_is_shown_in_few_lines(report):
    """Twelve tables had scrolled away what everybody asks first: how many failed, and why."""
    text = render_outcome(report, width=200)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert len(lines) <= 15
    assert "rows done 293 of 300" in lines
    assert "rows failed 7: 6 PromptTooLong, 1 <b>Bad</b>; for example doc-0292: it is too long" in lines
    assert "documents an hour 1,924.8" in lines
    assert len([line for line in lines if line.startswith("finding ")]) == 3
    assert re.search(r"\d+ more findings in the report", text)


def test_rows_to_do_come_from_the_manifest(run):
    """A run under way: its report says how much is left, which run it is, and when it was started."""
    begin_run(run, 5)
    record(run, "b.json", run_id="b", begin="2025-01-02", exit_code=None)
    record(run, "a.json", run_id="a", begin="2025-01-01", exit_code=75)
    report = build_report(run)
    assert report["rows"]["input"] == 5
    assert report["rows"]["pending"] == 2
    assert report["run"]["decoding"]["mode"] == "autoregressive"
    assert report["run"]["input"] == {"text_column": "text"}, "of the columns, those that are named"
    assert [start["run_id"] for start in report["starts"]] == ["a", "b"]


@pytest.mark.parametrize("values", [None, {"num_prompt_tokens": "many\n", "decode_s": ["x"]}])
def test_a_damaged_file_is_named_in_one_line(tmp_path, values):
    """The report is what people run on folders that somebody sent them."""
    row = {name: DONE[0].get(name) for name in SUMMARY_SCHEMA.names}
    write_part(tmp_path / "summaries", pa.Table.from_pylist([row | (values or {})]))
    if values is None:
        (tmp_path / "summaries" / "part-00000.parquet").write_bytes(b"PAR1 and nothing more")
    assert "part-00000.parquet is damaged" in specextend(f"report {tmp_path}").line()


@pytest.mark.parametrize("is_away", [True, False])
def test_a_report_needs_neither_the_input_nor_what_others_have_left_there(run, tmp_path, is_away):
    """The store of the input may be away by the morning; then a run ended well, and its report did not."""
    (tmp_path / "_errors.jsonl").write_text('{"code": 3}\n')
    config = config_of(run)
    path = "s3://no-such-bucket/in" if is_away else tmp_path
    options = replace(config.input, path=str(path))
    write_manifest_file(resolve(run), config.model_copy(update={"input": options}), num_rows=5)
    assert build_report(run)["not_prepared"] == {}


def test_a_folder_that_takes_no_files_is_reported_all_the_same(run):
    """A full disk, or the run of somebody else: nobody is kept from reading. The tests of root need a folder."""
    Path(run, "report.json").mkdir()
    ended = specextend(f"report {run}")
    assert "PromptTooLong" in ended.stdout
    assert ended.line(0).startswith(f"note: report.json and report.html cannot be written into {run}: ")


def test_report_json_is_json_whatever_the_rows_hold(tmp_path):
    """Numbers that are none and halves of characters: programs that read the report are stricter than Python."""
    bad = DONE[0] | {"retrieval_coverage": math.nan, "verify_s": math.inf}
    run = commit(tmp_path / "run", [bad, failed_row(1) | {"message": "half \u2028 \x1b \x00"}])
    record(run, "a.json", run_id="\ud800", begin="\udfff")
    write_report(run)
    report = json.loads(Path(run, "report.json").read_bytes().decode(), parse_constant=pytest.fail)
    assert report["time"]["shares"]["verify"] == 0, "an infinite time is none"
    assert report["starts"][0]["run_id"] == "\ud800"
    assert report["errors"][0]["example_message"] == "half \u2028 \x1b \x00"

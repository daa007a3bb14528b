"""`specextend export`, of runs whose commits and records are made up: each answer once, and none that is older."""

import csv
import io
import json
from datetime import timedelta
from decimal import Decimal
from math import nan

import pyarrow as pa
import pytest

from specextend.cluster.records import StartRecord
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.schema import ERROR_SCHEMA, SUMMARY_SCHEMA
from tests.damage import damage
from tests.data.conftest import location
from tests.job.conftest import rows, specextend
from tests.properties.rows import done
from tests.report.made_up import NIGHT_S, SetClock, begin_run, config_of, failed_row, write_manifest_file, write_part


def answer(row, text, doc_id=""):
    return done(DocumentKey(0, row), text) | {"doc_id": doc_id or f"doc-{row}"}


def texts(folder):
    return sorted((row["doc_id"], row["summary"]) for row in rows(folder))


@pytest.fixture
def stopped(tmp_path):
    """A run of four documents whose driver is gone: two commits, in which one document is done twice."""
    begin_run(output := tmp_path / "run", 4)
    commit(output, "0000000a", answer(0, "a"), failed_row(1, doc_id="doc-1"))
    commit(output, "0000000a", answer(0, "a again"), answer(2, "c"))
    return output


def commit(output, run_id, *made):
    CommitWriter(location(output), run_id).commit(made)


def follow(output, to, more=""):
    return specextend(f"export {output} --follow --to {to} {more}")


def test_a_follower_that_was_stopped_goes_on_where_it_was(stopped, tmp_path):
    """A row that came twice would be counted twice; one that was left out is missed by nobody before the morning."""
    live = tmp_path / "live"
    before = sorted(stopped.rglob("*"))
    ended = follow(stopped, live, "--format jsonl").exits(75)
    assert ended.stdout == f"2 of 4 documents in {live}; 1 failed\n"
    assert ended.stderr == "the run has stopped before its end; run it again, then this command\n"
    assert sorted(stopped.rglob("*")) == before, "nothing is written into its folder"
    first = {path.name: path.stat().st_mtime_ns for path in live.iterdir()}
    commit(stopped, "0000000b", answer(1, "b"), answer(2, "c again"))  # a retry, and a driver that came too late
    commit(stopped, "0000000b", failed_row(3, doc_id="doc-3"))
    ended = follow(stopped, live, "--format jsonl").exits(0)
    assert ended.stderr == ""
    assert ended.stdout == f"3 of 4 documents in {live}; 1 failed\n"
    assert {path.name: path.stat().st_mtime_ns for path in live.iterdir()}.items() > first.items()
    lines = [json.loads(line) for path in live.iterdir() for line in path.read_text().splitlines()]
    answers = {line["doc_id"]: line["summary"] for line in lines}
    assert len(lines) == len(answers)
    assert answers == {"doc-0": "a", "doc-1": "b", "doc-2": "c"}
    follow(stopped, tmp_path / "two", "--columns summary,doc_id").exits(0)
    assert texts(tmp_path / "two") == sorted(answers.items())
    assert [*rows(tmp_path / "two")[0]] == ["summary", "doc_id"]


def test_a_folder_of_another_export_is_not_followed_into(stopped, tmp_path):
    """Two runs in one folder would look like one."""
    assert follow(stopped, tmp_path / "live").code == 75
    begin_run(other := tmp_path / "other", 1)
    assert "which is no commit of this run; name another folder" in follow(other, tmp_path / "live").line()


@pytest.fixture
def night(tmp_path):
    """Make the folder of a run that has ended: answers and failures by id, and when it began."""

    def night(day, answers, failed=(), column="summary", digest="f" * 64, **more):
        output = tmp_path / "nights" / f"{9 - day}"  # its name says nothing
        config = RunConfig.load(config_of(str(output)), ["input.id_column=id", f"output.column={column}"])
        write_manifest_file(location(output), config, len(answers) + len(failed), digest)
        StartRecord(location(output), f"0000000{day}", config, clock=SetClock(NIGHT_S + day * 86_400)).write()
        made = pa.Table.from_pylist([answer(0, text, name) for name, text in answers.items()], schema=SUMMARY_SCHEMA)
        made = made.rename_columns({"summary": column})
        for name, value in more.items():
            made = made.append_column(name, pa.repeat(value, len(made)))
        write_part(output / "summaries", made)
        if failed:
            rows = [{"doc_id": name, "error_class": "WorkerDied"} for name in failed]
            write_part(output / "errors", pa.Table.from_pylist(rows, schema=ERROR_SCHEMA))
        return output

    return night


def merge(to, *runs, more=""):
    return specextend(f"export --latest --to {to} {more}", *runs)


def test_the_newest_answer_to_each_id_is_that_of_the_run_that_began_last(night, tmp_path):
    """Whatever the order of the folders, by name or on the command line; a failure hides no answer, but is said."""
    nights = [
        night(1, {"a": "a1", "b": "b1", "c": "c1", "d": "d1"}, failed=("e",)),
        night(3, {"a": "a3"}, failed=("c", "f"), source="x"),
        night(2, {"a": "a2", "b": "b2", "e": "e2"}, failed=("d",)),
    ]
    to = tmp_path / "merged"
    ended = merge(to, *nights)
    assert ended.stderr == ""
    assert ended.stdout == (f"5 documents in {to}; 1 failed; 2 with an older answer, because a newer attempt failed\n")
    assert texts(to) == [("a", "a3"), ("b", "b2"), ("c", "c1"), ("d", "d1"), ("e", "e2")]
    assert {row["doc_id"]: row["source"] for row in rows(to)} == dict.fromkeys("bcde") | {"a": "x"}


def test_only_the_columns_that_are_named_are_exported_in_that_order(night, tmp_path):
    """What goes to a colleague has two columns, not those of the decoding; a wrong name is met by those there are."""
    run = night(1, {"a": "a1"}, title="A")
    to = tmp_path / "two.csv"
    assert merge(to, run, more="--columns title,doc_id").code == 0
    assert to.read_text().splitlines() == ['"title","doc_id"', '"A","a"']
    ended = merge(tmp_path / "no.csv", run, more="--columns doc_id,keywords")
    assert "there is no keywords; there are doc_id, summary," in ended.line()


ODD_VALUES = [
    ("a", None, "a"),
    (Decimal("1.50"), None, "1.50"),
    (b"\xff\x00", None, "/wA="),
    (b"\xff\x00", pa.binary(2), "/wA="),
    (b"\xff\x00", "binary_view", "/wA="),
    (b"\x12" * 16, pa.uuid(), "12121212-1212-1212-1212-121212121212"),
    ('{"a": 1}', pa.json_(), '{"a": 1}'),
    (90_061_500, pa.duration("ms"), "PT90061.500S"),
    (-1, pa.duration("ns"), "PT-0.000000001S"),
    (1, pa.timestamp("ns", "UTC"), "1970-01-01T00:00:00.000000001Z"),
    ("x", pa.dictionary("int8", "string"), "x"),
    (pa.array([b"a \xed\xa0\x80"]).cast("string", safe=False)[0], None, "a \ufffd\ufffd\ufffd"),
    ([nan, 0.5], None, [None, 0.5]),
    (
        {"d": Decimal("0.1"), "t": timedelta(seconds=1.5), "b": b"\xff"},
        None,
        {"d": "0.1", "t": "PT1.500000S", "b": "/w=="},
    ),
]


def test_every_value_is_written_without_quotes_inside_of_quotes(night, tmp_path):
    """A decimal was a quoted text inside of a cell, and NaN inside of a list made a line that is no JSON."""
    run = night(1, {"a": "a1"})
    spelled = [spelling for *_, spelling in ODD_VALUES]
    columns = {str(number): pa.array([value], kind) for number, (value, kind, _) in enumerate(ODD_VALUES)}
    write_part(run / "summaries", pa.table(columns).rename_columns({"0": "doc_id"}))
    for ending in ("csv", "jsonl"):
        specextend(f"export {run} --to {tmp_path}/to.{ending}").exits(0)
    [cells] = csv.DictReader((tmp_path / "to.csv").read_text(encoding="utf-8").splitlines())
    assert [*cells.values()] == [value if isinstance(value, str) else json.dumps(value) for value in spelled]
    [line] = (tmp_path / "to.jsonl").read_text(encoding="utf-8").splitlines()
    assert [*json.loads(line, parse_constant=pytest.fail).values()] == spelled


OLD_S = -2_600_000_000
"""In 1887 Berlin was 53 minutes and 28 seconds before Greenwich."""


@pytest.mark.parametrize(
    "value, kind, codes",
    [
        ([1], pa.list_(pa.time64("ns")), [2, 2, 0]),
        (OLD_S, pa.timestamp("s", "Europe/Berlin"), [2, 0, 0]),
        (OLD_S * 10**9, pa.timestamp("ns", "Europe/Berlin"), [2, 2, 0]),
        (None, pa.timestamp("ns", "Europe/Berlin"), [0, 0, 0]),
    ],
)
def test_times_that_a_format_would_round_are_refused(night, tmp_path, value, kind, codes):
    run = night(1, {"a": "a1"}, t=pa.scalar(value, kind))
    to = [tmp_path / f"to.{ending}" for ending in ("csv", "jsonl", "parquet")]
    assert [specextend(f"export {run} --to {each}").code for each in to] == codes
    if codes == [2, 0, 0]:
        assert '"1887-08-11T10:40:08+00:53:28"' in to[1].read_text()


def test_a_spreadsheet_executes_no_text_that_a_document_has_brought(night, stopped, tmp_path):
    """`=HYPERLINK(...)` in a summary sends a table to somebody once it is opened. Numbers stay numbers."""
    formulas = ["=1+1", "'=1", "+1", "-1", "@a", " \t=1", "\t1", "\r1", "\uff1d1"]
    texts = [*formulas, "a=1", "'a", "", "1-1"]
    run = night(1, {str(number): text for number, text in enumerate(texts)}, **{"=n": -1})
    for more, expected in ("", texts), ("--spreadsheet-safe", ["'" + text for text in formulas] + texts[-4:]):
        to = tmp_path / f"to{more}.csv"
        assert specextend(f"export {run} --to {to} --columns summary,=n {more}").code == 0
        header, *cells = csv.reader(io.StringIO(to.read_bytes().decode(), newline=""))
        assert header == ["summary", "'" * bool(more) + "=n"]
        assert cells == [[text, "-1"] for text in expected]
    commit(stopped, "0000000b", answer(3, "=1"))
    assert follow(stopped, tmp_path / "live", "--format csv --spreadsheet-safe").code == 0
    assert any('"\'=1"' in path.read_text() for path in (tmp_path / "live").iterdir())
    refused = specextend(f"export {run} --to {tmp_path}/a.jsonl --spreadsheet-safe")
    assert "--spreadsheet-safe is for CSV" in refused.line()


@pytest.mark.parametrize(
    "name, more", {"a.xlsx": "", "a.json": "--format jsonl", "a.csv.gz": "", "live.v2": "--follow"}.items()
)
def test_no_folder_gets_the_name_of_a_file(night, tmp_path, name, more):
    """`--to answers.xlsx` made a folder of that name with Parquet in it, said that all was there, and exited with 0."""
    run = night(1, {"a": "a1"})
    ended = specextend(f"export {run} {more} --to {tmp_path}/{name}")
    assert "only .csv, .jsonl and .parquet; let the name of a folder end in /" in ended.line()
    assert not (tmp_path / name).exists()
    assert specextend(f"export {run} --to {tmp_path / name}/").code == 0
    assert texts(tmp_path / name) == [("a", "a1")]


@pytest.mark.parametrize("more", ["", "--format openai", "--follow"])
def test_a_file_that_is_there_already_is_kept(night, tmp_path, more):
    """It was overwritten without a word: the export of another run, or what somebody had noted in it."""
    (to := tmp_path / "answers").write_text("mine")
    ended = specextend(f"export {more} --to {to}", night(1, {"a": "a1"}))
    assert f"{to} is there already; choose another name, or replace it with --replace" in ended.line()
    assert to.read_text() == "mine"


def test_the_second_night_replaces_the_export_of_the_first(night, tmp_path):
    """As cron does it, by a glob, which a store needs too: nobody is there at night to remove a file."""
    to = tmp_path / "answers.jsonl"
    every = tmp_path / "nights" / "*"
    notes = tmp_path / "nights" / "notes"
    write_part(notes, pa.table({"no run": []}))
    night(1, {"a": "a1", "b": "b1"})
    assert merge(to, every).code == 0
    night(2, {"a": "a2"})
    assert merge(to, every).code == 2
    assert merge(to, every, more="--replace").code == 0
    found = [json.loads(line) for line in to.read_text().splitlines()]
    assert sorted((line["doc_id"], line["summary"]) for line in found) == [("a", "a2"), ("b", "b1")]
    assert "is not empty; name another folder" in merge(notes, every, more="--replace").line()
    assert "there is no run in" in merge(to, tmp_path / "night" / "*").line()


def test_a_document_that_the_input_has_no_more_is_left_out(night, tmp_path):
    """It was deleted, and its summary must go with it."""
    nights = night(1, {"a": "a1", "b": "b1"}), night(2, {"c": "c2"}, failed=("d",))
    write_part(tmp_path / "in", pa.table({"id": ["b", "c", "new"], "text": ["x"] * 3}))
    ended = merge(tmp_path / "merged", *nights, more=f"--only-ids-in {tmp_path}/in")
    assert ended.stderr == ""
    assert ended.stdout == (f"2 documents in {tmp_path / 'merged'}; 1 left out, because the input has them no more\n")
    assert texts(tmp_path / "merged") == [("b", "b1"), ("c", "c2")]


@pytest.mark.parametrize("command, folder", [("export --to answers.csv", "summaries"), ("report", "_run/parts")])
def test_a_byte_that_the_disk_has_changed_is_not_read_as_an_answer(tmp_path, monkeypatch, stopped, command, folder):
    """It was exported with exit 0. Pages have checksums, which a reader compares only if it is asked to."""
    monkeypatch.chdir(tmp_path)
    commit(stopped, "0000000b", answer(3, "a summary"))
    if folder == "summaries":
        write_part(stopped / folder, pa.table({"doc_id": [*"abcd"], "summary": ["a summary"] * 4}))
    damage(max((stopped / folder).iterdir()), "byte")
    assert "is damaged (" in specextend(command, stopped).line()
    assert not (tmp_path / "answers.csv").exists()


def test_runs_that_do_not_belong_together_are_not_merged(night, tmp_path):
    """One line says why; other models or options are allowed, and said."""
    first = night(1, {"a": "a1"})
    keywords = night(2, {"a": "a2"}, column="keywords")
    number = night(3, {"a": "a3"}, source=1)
    text = night(4, {"a": "a4"}, source="x")
    begin_run(unfinished := tmp_path / "unfinished", 4)
    killed = night(6, {"a": "a6"}, failed=("b",))  # while it wrote its results
    (killed / "errors" / "part-00000.parquet").unlink()
    for run, other, said in (
        (first, keywords, "texts in keywords, "),
        (number, text, "the runs differ in their columns"),
        (first, unfinished, "has not ended: run it again"),
        (first, killed, "has not ended: run it again"),
        (first, tmp_path / "in", "holds no run"),
    ):
        assert said in merge(tmp_path / "merged", run, other).line()
        assert not (tmp_path / "merged").exists()
    assert specextend(f"export {first} {number} --to {tmp_path}/merged").code == 2
    said = merge(tmp_path / "merged", first, night(5, {"a": "a5"}, digest="e" * 64)).stdout
    assert '; the runs differ (weights of target: "ffffffffffff" there, "eeeeeeeeeeee" here)' in said

"""Documents from elsewhere, through the command that a user types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specextend.data.importers import DOCUMENT_SCHEMA, HUB_DATASETS, read_hub, write_documents
from specextend.data.inputs import InputError, InputOptions
from specextend.data.source import open_source
from specextend.data.storage import resolve

ROOT = Path(__file__).parents[2]


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "prepare.py"), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_json_lines_become_parquet(tmp_path: Path) -> None:
    lines = [{"body": "one", "n": 7}, {"body": "two", "n": 8, "reference": "2"}]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    done = prepare(
        tmp_path, "jsonl", "in.jsonl", "--text-field", "body", "--id-field", "n", "--output", "out/a.parquet"
    )
    assert (done.returncode, done.stdout) == (0, "2 documents in out/a.parquet\n"), done.stderr
    table = pq.read_table(tmp_path / "out" / "a.parquet")
    assert table.schema.equals(DOCUMENT_SCHEMA)
    assert table.to_pylist() == [
        {"id": "7", "text": "one", "reference": None},
        {"id": "8", "text": "two", "reference": "2"},
    ]
    assert open_source(InputOptions(path=str(tmp_path / "out"), id_column="id")).num_rows == 2


def test_a_folder_of_texts_becomes_parquet(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("bé", encoding="utf-8")
    (tmp_path / "in" / "sub" / "a.txt").write_text("a")
    (tmp_path / "in" / "c.md").write_text("not this")
    assert prepare(tmp_path, "text", "in", "--output", "a.parquet").returncode == 0
    table = pq.read_table(tmp_path / "a.parquet")
    assert dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)) == {
        "b.txt": "bé",
        "sub/a.txt": "a",
    }
    assert prepare(tmp_path, "text", "in", "--output", "b.parquet", "--limit", "1").returncode == 0
    assert pq.read_metadata(tmp_path / "b.parquet").num_rows == 1


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ("{", (), "in.jsonl:2 is not JSON"),
        ('{"body": "x"}', (), "in.jsonl:2 has no string 'text'; name the field that holds the text"),
        ("[]", (), "in.jsonl:2 has no string 'text'"),
        ('{"text": null}', (), "in.jsonl:2 has no string 'text'"),
        ('{"text": "x"}', ("--id-field", "id"), "in.jsonl:1 has no string or integer 'id'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(
    tmp_path: Path, line: str, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    done = prepare(tmp_path, "jsonl", "in.jsonl", *arguments, "--output", "out.parquet")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_output_that_cannot_be_written_is_exit_2_in_one_line(tmp_path: Path) -> None:
    """A file where a folder should be, say."""
    (tmp_path / "in.jsonl").write_text('{"text": "fine"}\n')
    done = prepare(tmp_path, "jsonl", "in.jsonl", "--output", "in.jsonl/out.parquet")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")


def test_missing_and_empty_input_is_exit_2_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for arguments in (("jsonl", "missing.jsonl"), ("text", "missing"), ("jsonl", "empty.jsonl")):
        done = prepare(tmp_path, *arguments, "--output", "out.parquet")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert prepare(tmp_path, "jsonl", "empty.jsonl", "--output", "x", "--limit", "0").returncode == 2


def test_without_the_hub_a_data_set_is_one_clear_line(tmp_path: Path) -> None:
    done = prepare(tmp_path, "govreport", "--output", "out.parquet")
    assert done.returncode == 2
    assert done.stderr == (
        "error: the Hugging Face Hub cannot be reached to fetch ccdv/govreport-summarization; run again\n"
    )  # fmt: skip


def test_an_unknown_data_set_is_refused_with_those_known() -> None:
    with pytest.raises(InputError, match=f"known are {', '.join(HUB_DATASETS)}"):
        next(read_hub("cnn", "test"))


def test_row_groups_are_small_so_that_one_document_reads_quickly(tmp_path: Path) -> None:
    documents = ({"id": str(i), "text": "x" * 300_000, "reference": None} for i in range(10))
    assert write_documents(documents, resolve(str(tmp_path / "a.parquet"))) == 10
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 2]

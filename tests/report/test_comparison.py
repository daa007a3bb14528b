"""Two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specextend.cli.command import call
from specextend.cli.report import report
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from specextend.report import compare
from tests.job.conftest import specextend
from tests.properties.rows import done
from tests.report.made_up import config_of, write_manifest_file


def run_of(folder: Path, texts: dict[int, str], digest: str = "a" * 64, **decoding: Any) -> str:
    output, config = resolve(str(folder)), config_of("/same")
    values = config.model_copy(update={"decoding": type(config.decoding)(mode="autoregressive", **decoding)})
    write_manifest_file(output, values, len(texts), digest)
    CommitWriter(output, "0000000a").commit([done(DocumentKey(0, row), text) for row, text in texts.items()])
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two runs that share three documents, one of whose texts differs by a space."""
    here = run_of(tmp_path / "here", {0: "a", 1: "b", 2: "c", 3: "only here"})
    there = run_of(tmp_path / "there", {0: "a", 1: "b ", 2: "c"}, digest="b" * 64, max_new_tokens=99)
    return here, there


def test_texts_are_compared_by_id_and_character_by_character(pair: tuple[str, str]):
    """Whether a change was lossless is this number; of the configuration nothing is named but what differs."""
    compared = compare(*pair)
    assert compared["texts"] == {
        "common": 3,
        "differing": 1,
        "only_here": 1,
        "only_there": 0,
        "examples": ["0.parquet:1"],
    }
    assert compared["configuration"] == {"decoding.max_new_tokens": [256, 99], "hash of target": ["a" * 12, "b" * 12]}


def test_figures_stand_side_by_side(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    """The command prints them and writes nothing."""
    here, there = pair
    before = sorted(Path(here).rglob("*")), sorted(Path(there).rglob("*"))
    assert call(report, [here, "--against", there], "report") == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "rows done" in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == ["rows done", "4", "3", "1.33"]
    assert "Different where the ids are equal: 1 of 3 texts (33.3%)." in printed
    assert "For example: 0.parquet:1" in printed
    assert "Done only here: 1 document." in printed
    assert "decoding.max_new_tokens" in printed
    assert (sorted(Path(here).rglob("*")), sorted(Path(there).rglob("*"))) == before


@pytest.mark.parametrize(
    ("limits", "code"),
    [((), 0), (("--max-differing", "0.34"), 0), (("--max-differing", "0.33"), 3), (("--max-slower", "0.1"), 3)],
)
def test_a_comparison_is_a_gate(pair: tuple[str, str], limits: tuple[str, ...], code: int):
    """For a pipeline that takes a new draft only if texts stay the same; a speed that is not known is none."""
    ended = specextend("compare", *pair, "--json", "-", *limits)
    assert ended.code == code, ended.stderr
    assert json.loads(ended.stdout)["texts"]["differing"] == 1

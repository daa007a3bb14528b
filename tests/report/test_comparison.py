"""Two runs side by side."""

import json

import pytest

from specextend.cli.report import over_limits
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.report import compare
from tests.data.conftest import location
from tests.job.conftest import specextend
from tests.properties.rows import done
from tests.report.made_up import begin_run, config_of, write_manifest_file


def run_of(folder, texts, digest="a" * 64, **decoding):
    output = location(folder)
    config = config_of("/same")
    values = config.model_copy(update={"decoding": type(config.decoding)(mode="autoregressive", **decoding)})
    write_manifest_file(output, values, len(texts), digest)
    CommitWriter(output, "0000000a").commit([done(DocumentKey(0, row), text) for row, text in texts.items()])
    return str(folder)


@pytest.fixture
def pair(tmp_path):
    """Two runs that share three documents, one of whose texts differs by a space."""
    here = run_of(tmp_path / "here", {0: "a", 1: "b", 2: "c", 3: "only here"})
    there = run_of(tmp_path / "there", {0: "a", 1: "b ", 2: "c"}, digest="b" * 64, max_new_tokens=99)
    return here, there


def test_texts_are_compared_by_id_and_character_by_character(pair):
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


def test_figures_stand_side_by_side(pair, tmp_path):
    """The command prints them and writes nothing."""
    before = sorted(tmp_path.rglob("*"))
    printed = specextend("compare", *pair).exits(0).stdout
    [line] = [line for line in printed.splitlines() if "rows done" in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == ["rows done", "4", "3", "1.33"]
    assert "Different where the ids are equal: 1 of 3 texts (33.3%)." in printed
    assert "For example: 0.parquet:1" in printed
    assert "Done only here: 1 document." in printed
    assert "decoding.max_new_tokens" in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "limits, code, said",
    [
        ("", 0, ""),
        ("--max-differing 0.34", 0, "note: 3 documents in both runs, 1 in only one"),
        (
            "--max-differing 0.33",
            3,
            "--max-differing 0.33: 0.33 of the texts of the candidate {} differ from those "
            "of the baseline {} (1 of the 3 documents that both have done)",
        ),
        ("--max-slower 0.1", 3, "--max-slower 0.1: the speed of {} is not known"),
    ],
)
def test_a_comparison_is_a_gate(pair, limits, code, said):
    """For a pipeline that takes a new draft only if texts stay the same; a speed that is not known is none."""
    ended = specextend(f"compare --json - {limits}", *pair)
    assert ended.code == code, ended.stderr
    assert json.loads(ended.stdout)["texts"]["differing"] == 1
    assert said.format(*pair) in ended.stderr


def test_a_slower_candidate_is_named_with_both_speeds():
    """The first run is the candidate: the same two the other way round keep the limit."""
    found = {
        "outputs": ["new", "old"],
        "texts": {"common": 2, "differing": 0},
        "figures": {"output tokens per second of a worker": [10.0, 20.0]},
    }
    assert over_limits(found, None, 0.2) == [
        "--max-slower 0.2: a worker of the candidate new is slower by 0.5 than one of the baseline old (10.0 and 20.0 "
        "output tokens a second at work)"
    ]
    assert over_limits(found, 0.0, 0.5) == []


def test_there_is_nothing_to_compare_without_a_common_document(tmp_path):
    """A gate that nothing has passed through is neither open nor closed."""
    here = run_of(tmp_path / "here", {0: "a"})
    there = run_of(tmp_path / "there", {1: "a"})
    assert "nothing to compare: " in specextend(f"compare {here} {there} --max-differing 1").line()


def test_a_run_that_has_nothing_done_is_a_run(tmp_path):
    """It was interrupted before its first commit."""
    begin_run(tmp_path, 3)
    with pytest.raises(ValueError, match="holds a run of which nothing is done yet"):
        compare(str(tmp_path), str(tmp_path))

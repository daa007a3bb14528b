"""The job as its users start it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specextend.cli.command import call
from specextend.cli.train import train
from tests.tiny_models import SECTIONS
from tests.training.conftest import document, write_texts

ROOT = Path(__file__).parents[2]
SMALL = ["--rounds", "1", "--answers", "6", "--min-tokens", "192", "--max-tokens", "200"]


@pytest.fixture
def arguments(workshop, tmp_path):
    """A configuration file for the tiny target, the text and an output."""
    sections = SECTIONS | {
        "target": {"model": workshop.target, "dtype": "float32"},
        "draft": {"kind": "ngram"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(sections))
    text = write_texts(tmp_path / "texts.parquet", [document(number, 50) for number in range(3)])
    output = str(tmp_path / "draft")
    return ["--config", str(config), "--text", str(text), "--output", output, *SMALL, "--vocabulary", "18"]


def test_it_trains_a_draft_and_prints_what_it_is_worth(arguments, tmp_path, capfd):
    """Nothing but the figures goes to stdout, nothing but progress to stderr, no third party's bars."""
    assert call(train, [*arguments, "--epochs", "1"], "train") == 0
    printed, progress = capfd.readouterr()
    assert printed.splitlines()[-1] == f"draft: {tmp_path / 'draft'}"
    assert (tmp_path / "draft" / "training.json").read_text().strip() in printed
    stages = {"round", "answers", "recordings", "training", "evaluation"}
    assert {line.partition(" ")[0] for line in progress.splitlines()} == stages


@pytest.mark.parametrize(
    "message, more",
    {
        "at least two texts must have the 900 tokens that": ["--min-tokens", "900", "--max-tokens", "900"],
        "num_epochs must be at least 1": ["--epochs", "0"],
        "tokens, fewer than min_tokens (192)": ["--set", "prompt.max_prompt_tokens=150"],
        "the prompt does not fit the target": ["--set", "prompt.max_prompt_tokens=1"],
    }.items(),
)
def test_what_cannot_be_is_refused_in_one_line(arguments, tmp_path, capsys, more, message):
    """With exit code 2, before the target has read anything."""
    assert call(train, [*arguments, *more], "train") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert not (tmp_path / "draft").exists()


def test_a_signal_ends_it_and_the_same_command_goes_on(arguments, tmp_path):
    """Exit code 75 says that there is more to do; what was recorded is kept."""
    command = [sys.executable, "-m", "specextend", "train", *arguments, "--epochs", "100000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "round 1/1\n"
        first = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert first.startswith("answers 1/6")
    assert process.returncode == 75
    assert rest.splitlines()[-1] == "interrupted; run the same command again to resume"
    assert "Traceback" not in rest
    assert list((tmp_path / "draft" / "work" / "answers").glob("*.parquet"))

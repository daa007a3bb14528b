"""The job as its users start it."""

import signal
import subprocess
import sys

import pytest
import yaml

from specextend.cli.command import call
from specextend.cli.train import train
from tests.job.conftest import ROOT, environment, specextend
from tests.tiny_models import SECTIONS
from tests.training.conftest import document, write_texts


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
    small = "--rounds 1 --answers 6 --min-tokens 192 --max-tokens 200 --vocabulary 18"
    return f"--config {config} --text {text} --output {tmp_path}/draft {small}"


@pytest.mark.slow
def test_it_trains_a_draft_and_prints_what_it_is_worth(arguments, tmp_path, capfd):
    """Nothing but the figures goes to stdout, nothing but progress to stderr, no third party's bars."""
    assert call(train, f"{arguments} --epochs 1".split(), "train") == 0
    printed, progress = capfd.readouterr()
    assert printed.splitlines()[-1] == f"draft: {tmp_path / 'draft'}"
    assert (tmp_path / "draft" / "training.json").read_text().strip() in printed
    stages = {"round", "answers", "recordings", "training", "evaluation"}
    assert {line.partition(" ")[0] for line in progress.splitlines()} == stages


@pytest.mark.parametrize(
    "message, more",
    {
        "at least two texts must have the 900 tokens that": "--min-tokens 900 --max-tokens 900",
        "num_epochs must be at least 1": "--epochs 0",
        "tokens, fewer than min_tokens (192)": "--set prompt.max_prompt_tokens=150",
        "the prompt does not fit the target": "--set prompt.max_prompt_tokens=1",
    }.items(),
)
def test_what_cannot_be_is_refused_in_one_line(arguments, tmp_path, more, message):
    """With exit code 2, before the target has read anything."""
    line = specextend(f"train {arguments} {more}").line()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "draft").exists()


def test_a_signal_ends_it_and_the_same_command_goes_on(arguments, tmp_path):
    """Exit code 75 says that there is more to do; what was recorded is kept."""
    command = [sys.executable, "-m", "specextend", "train", *arguments.split(), "--epochs", "100000"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True) as process:
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

"""The job as its users start it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from specextend.models import load_tokenizer, tokens_sha256
from tests.tiny_models import SECTIONS
from tests.training.conftest import Workshop, document, write_texts

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "train_draft.py"
SMALL = ("--samples", "6", "--min-tokens", "192", "--max-tokens", "200", "--vocabulary", "18", "--summary-tokens", "4")


@pytest.fixture(scope="session")
def job() -> ModuleType:
    """The script as a module: what ends in a refusal needs no process of its own."""
    spec = importlib.util.spec_from_file_location("train_draft", JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(workshop: Workshop, tmp_path) -> list[str]:
    """A configuration file for the tiny target, the text and an output."""
    sections = SECTIONS | {
        "target": {"model": workshop.target, "dtype": "float32", "device": "cpu"},
        "draft": {"kind": "ngram"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(sections))
    text = write_texts(tmp_path / "texts.parquet", [document(number, 50) for number in range(3)])
    return ["--config", str(config), "--text", str(text), "--output", str(tmp_path / "draft"), *SMALL]


def test_it_trains_a_draft_and_prints_what_it_is_worth(job, arguments, tmp_path, capfd):
    """Nothing but the figures goes to stdout, nothing but progress to stderr, no third party's bars."""
    assert job.main([*arguments, "--kind", "model", "--hidden-size", "128", "--layers", "1", "--passes", "1"]) == 0
    printed, progress = capfd.readouterr()
    assert printed.splitlines()[-1] == f"draft: {tmp_path / 'draft'}"
    assert (tmp_path / "draft" / "training.json").read_text().strip() in printed
    assert all(line.startswith(("recording ", "step ")) for line in progress.splitlines())


def test_a_draft_says_whose_tokens_it_speaks(job, arguments, workshop, tmp_path):
    """So that it is refused with a target of other tokens, as many as they may be."""
    small = ["--hidden-size", "128", "--layers", "1", "--passes", "1"]
    for kind, shape in (("eagle", ["--passes", "1"]), ("model", small)):
        folder = tmp_path / kind
        assert job.main([*arguments, "--output", str(folder), "--kind", kind, *shape]) == 0
        written = json.loads((folder / "config.json").read_text())["tokens_sha256"]
        assert written == tokens_sha256(load_tokenizer(workshop.target))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--min-tokens", "900", "--max-tokens", "900"], "0 of 3 texts have the 900 tokens that a sample needs"),
        (["--text-column", "body"], "body"),
        (["--start-from", "nowhere"], "EAGLE draft nowhere has no config.json"),
        (["--passes", "0"], "passes must be 1 or more"),
        (["--summary-tokens", "0"], "summaries must be 1 or more, of 1 token or more"),
        (["--text", "nowhere.parquet"], "nowhere.parquet"),
        (["--set", "target.model=nowhere"], "nowhere"),
        (["--set", "prompt.max_prompt_tokens=1"], "the prompt does not fit the target"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(job, arguments, tmp_path, capsys, more, message):
    """With exit code 2, before the target has read anything."""
    assert job.main([*arguments, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_same_command_goes_on(job, arguments, tmp_path, stop):
    """Exit code 75 says that there is more to do; what was recorded is kept."""
    command = [sys.executable, str(JOB), *arguments, "--passes", "100000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(stop)
        rest = process.stderr.read()
    assert first.startswith("recording 1/6")
    assert process.returncode == 75
    assert rest.splitlines()[-1] == "interrupted; run the same command again to go on"
    assert "Traceback" not in rest
    assert (tmp_path / "draft" / "work" / "recordings" / "00000.safetensors").is_file()

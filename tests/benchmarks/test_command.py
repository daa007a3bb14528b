"""Benchmarks run for real, on the tiny random pair and the example reports."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.benchmark import Benchmark
from benchmarks.command import main
from benchmarks.peers import PEERS, Output
from tests.job.conftest import ran

ROOT = Path(__file__).parents[2]
TINY = """
about: two documents of the tiny pair
config: configs/tiny-random.yaml
buckets: [1024]
per_bucket: 2
max_new_tokens: 6
base: plain
variants:
  plain: {decoding.mode: autoregressive}
  specextend:
  peer: transformers
tables: [decoding over plain, acceptance, equal]
"""


@pytest.fixture(autouse=True)
def _at_root_with_threads_kept(monkeypatch, restored_threads):
    """The shipped configuration names its models from the project's root; benchmarks set torch's threads."""
    monkeypatch.chdir(ROOT)


class Stutterer:
    """A peer that says the prompt's last token over and over, at two tokens a second."""

    def __init__(self, config):
        pass

    def generate(self, prompts, max_new_tokens):
        seconds = max_new_tokens / 2, max_new_tokens
        return [Output(prompt[-1:] * max_new_tokens, *seconds, max_new_tokens - 1) for prompt in prompts]


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_variants_and_peers_are_measured_on_the_same_documents(tiny, tmp_path, monkeypatch, capsys):
    """One row for each document and variant, in the file as it is shown; in fp32 every draft gives the same tokens."""
    monkeypatch.setitem(PEERS, "transformers", Stutterer)
    path = tmp_path / "result.json"
    assert main([tiny, "--json", str(path)]) == 0
    measured = capsys.readouterr().out
    result = json.loads(path.read_text())
    rows = {(row["variant"], *row["documents"]): row for row in result["rows"]}
    names = {name for name, _ in rows}
    assert names == {"plain", "specextend", "peer"}
    assert len(rows) == 6
    assert {row["bucket"] for row in rows.values()} == {"1K"}
    assert {name: {rows[key]["equals_base"] for key in rows if key[0] == name} for name in names} == {
        "plain": {True},
        "specextend": {True},
        "peer": {False},
    }
    assert all(row["total_s"] > row["decode_s"] > 0 for row in rows.values())
    assert all(row["num_output_tokens"] == 6 for row in rows.values())
    assert result["device"]
    assert result["versions"].keys() >= {"python", "torch", "transformers"}
    assert set(result["kernels"]) == {"plain", "specextend"}
    assert "| decoding, over plain | 1K (n=2) |" in measured
    assert result["versions"]["torch"] in measured
    assert main([str(path), "--draw", f"{tmp_path}/drawing.svg"]) == 0
    assert capsys.readouterr().out.startswith(measured)
    assert (tmp_path / "drawing.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_benchmark_can_be_read(path):
    """With its configurations: a key that has gone is found here, not after an hour."""
    benchmark = Benchmark.load(str(path))
    assert set(benchmark.configs()) == set(benchmark.variants)


@pytest.mark.parametrize(
    "override, message",
    {
        "bucket=[1024]": "bucket",
        "buckets=[1048576]": "0 of 2 documents of up to 1024K tokens",
        "base=nobody": "base 'nobody' is none of the variants plain, specextend",
        "variants={plain: vllm}": "variants.plain must be overrides or one of transformers, ",
        "sampling={temperature: 0.5}": "peer decodes greedily only",
        "documents=nowhere.parquet": "nowhere.parquet cannot be read",
        "tables=[speed]": "a table is conditions, or begins with one of decoding",
    }.items(),
)
def test_bad_input_ends_in_one_line_and_exit_code_2(override, message, tiny, capsys):
    """Before minutes of measuring, not after."""
    assert main([tiny, "--set", override]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.mark.slow
def test_steps_of_a_gpu_are_measured_with_and_without_a_draft():
    """Tried on a CPU with tiny shapes: combinations that it lacks say why."""
    done = ran(sys.executable, "-m", "benchmarks.gpu_steps", "--device", "cpu", "--shapes", "tiny").exits(0)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["backend"], row["draft"]) for row in rows if "step_ms" in row} == {("sdpa", False), ("sdpa", True)}
    assert all("GPU" in row["skipped"] or "flash" in row["skipped"] for row in rows if "step_ms" not in row)

"""Kernels one by one: their figures are there, an error shows, and what cannot run is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jobs.bench import main
from specextend import RunConfig
from specextend.attention.backends import attend_reference, cpu_kernels
from specextend.attention.plan import KeySpan
from specextend.bench.kernel_errors import PARTS, exact_logits, kernel_errors, stock_errors
from specextend.bench.kernel_times import take_turns
from specextend.bench.kernels import KernelOptions, available_kernels, cut_documents, forced_config, load_plain_target
from specextend.bench.result_tables import read_figures, to_markdown

ROOT = Path(__file__).parents[2]
DOCUMENTS = "examples/govreport.parquet"
CONFIG = "configs/tiny-random.yaml"
ACROSS = {"transformers sdpa", "transformers eager"}
DOCUMENT = [*range(3, 203)]
pytestmark = pytest.mark.usefixtures("at_root_with_threads_kept")


def in_bfloat16(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"target": replace(config.target, dtype="bfloat16")})


def test_every_kernel_has_times_errors_and_acceptance(tmp_path, capsys):
    """In float32 all of them are right, so that a figure that stands out is one of the benchmark's own."""
    path = tmp_path / "kernels.json"
    small = ["--tokens", "600", "--num-documents", "2", "--keys", "64,256", "--chunk-keys", "1024", "--rounds", "2"]
    assert main(["kernels", "--config", CONFIG, *small, "--max-new-tokens", "8", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    names = ["reference", *cpu_kernels(16, torch.float32)]
    cells = [(cell["keys"], cell["queries"]) for cell in result["attention"]]
    assert cells == [(keys, queries) for keys in (64, 256) for queries in (1, 4, 8, 16)]
    assert [(cell["keys"], cell["queries"]) for cell in result["steps"]] == [(64, 1), (64, 16), (256, 1), (256, 16)]
    for cell in (*result["attention"], *result["steps"]):
        assert [*cell["kernels"]] == names
        assert all(0 < each["min"] <= each["median"] and each["n"] == 2 for each in cell["kernels"].values())
    [chunk] = result["chunks"]
    assert [*chunk["kernels"]] == names[1:]
    assert [*result["errors"]["kernels"]] == [*result["acceptance"]] == names
    assert {*result["errors"]["transformers"]} == ACROSS
    for parts in (*result["errors"]["kernels"].values(), *result["errors"]["transformers"].values()):
        assert [parts[part]["positions"] for part in PARTS] == [2 * 67, 2 * 64, 2 * 64]
        assert all(parts[part]["largest"] < 1e-3 and parts[part]["same_token"] == 1 for part in PARTS)
    for accepted in result["acceptance"].values():
        assert accepted["mean_acceptance_length"] == result["acceptance"]["reference"]["mean_acceptance_length"] > 1
        assert accepted["same_outputs"] == len(accepted["by_document"]) == 2
    assert result["environment"]["threads"] == result["config"]["job"]["cpus_per_worker"]
    assert "Attention of a decoding step" in capsys.readouterr().out
    table = to_markdown(read_figures(str(path)))
    assert "| 256, 16 |" in table
    assert "| transformers eager |" in table
    assert "The machine reads" in table


def test_a_wrong_kernel_shows_in_the_part_that_it_gets_wrong(config):
    """This one ignores the mask of a tree, so it is right in prefill and in plain steps."""

    def unmasked(q: Tensor, k: Tensor, v: Tensor, span: KeySpan, scale: float) -> tuple[Tensor, Tensor]:
        return attend_reference(q, k, v, KeySpan(span.starts, span.lengths, causal=span.causal), scale)

    exact = exact_logits(config.target, [DOCUMENT])
    target = load_plain_target(config, len(DOCUMENT))
    found = kernel_errors(target, {"right": attend_reference, "wrong": unmasked}, [DOCUMENT], exact)
    assert max(found["right"][part]["largest"] for part in PARTS) < 1e-3
    assert found["wrong"]["prefill"] == found["right"]["prefill"]
    assert found["wrong"]["plain"] == found["right"]["plain"]
    assert found["wrong"]["tree"]["largest"] > 0.1
    assert found["wrong"]["tree"]["same_token"] < 1


def test_errors_of_bfloat16_are_told_from_those_of_float32(config):
    """The yardstick is float32 whatever the configuration says, and both of transformers' implementations run."""
    rounded = in_bfloat16(config)
    exact = exact_logits(rounded.target, [DOCUMENT])
    stock = stock_errors(rounded.target, [DOCUMENT], exact)
    own = kernel_errors(load_plain_target(rounded, 256), {"reference": attend_reference}, [DOCUMENT], exact)
    assert stock["transformers sdpa"] != stock["transformers eager"]
    for parts in (*stock.values(), *own.values()):
        assert all(1e-4 < parts[part]["mean"] < parts[part]["largest"] < 1 for part in PARTS)


def test_a_kernel_that_cannot_run_is_left_out(config):
    """The compiled one takes heads of 16 in float32 only; `reference` runs everywhere."""
    assert [*available_kernels(load_plain_target(config, 1))] == ["reference", *cpu_kernels(16, torch.float32)]
    names = [*available_kernels(load_plain_target(in_bfloat16(config), 1))]
    assert "compiled" not in names
    assert names[0] == "reference"


def test_no_measured_time_decides_what_acceptance_is(config):
    """Or two kernels would be compared with trees of different sizes."""
    automatic = config.model_copy(
        update={"tree": replace(config.tree, nodes="auto"), "attention": replace(config.attention, tree="auto")}
    )
    forced = forced_config(automatic, "matmul")
    assert (forced.attention.backend, forced.attention.tree, forced.tree.nodes) == ("matmul", "dense", 15)
    assert (forced.decoding.mode, forced.decoding.max_batch_size) == ("specextend", 1)
    assert forced_config(config, "matmul").attention.tree == "hybrid"


def test_documents_are_cut_to_the_same_length(config):
    """Those that are too short to be cut are passed over."""
    documents = cut_documents(config, KernelOptions(tokens=1500, num_documents=3))
    assert [len(document.prompt_token_ids) for document in documents] == [1500] * 3


def test_kernels_take_turns_in_going_first():
    """The first call of each builds what later ones use, and does not count."""
    diary: list[str] = []

    def call(name: str) -> float:
        diary.append(name)
        return len(diary)

    seconds = take_turns({"x": lambda: call("x"), "y": lambda: call("y")}, 3)
    assert "".join(diary) == "xyxyyxxy"
    assert seconds == {"x": [3, 6, 7], "y": [4, 5, 8]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--tokens", "64"], "tokens must be above 64"),
        (["--keys", "8"], "keys must be"),
        (["--chunk-keys", "256"], "chunk_keys must be"),
        (["--num-documents", "1000"], "not 1000"),
        (["--tokens", "100000"], "100000 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, message, capsys):
    """Before any weights are loaded."""
    assert main(["kernels", "--config", CONFIG, *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last

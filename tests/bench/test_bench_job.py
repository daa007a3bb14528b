"""Benchmarks run for real, on the tiny random pair and the example documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench import main
from specextend.bench.prefill_memory import weight_bytes
from specextend.bench.sides import load_side
from specextend.bench.workload import BenchOptions, bench_documents, choose_documents
from specextend.data.prompts import Prompts
from specextend.data.source import open_source
from specextend.models import TargetOptions, load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTS = str(ROOT / "examples" / "govreport.parquet")
CONFIG = str(ROOT / "configs" / "tiny-random.yaml")
SMALL = ["--config", CONFIG, "--documents", DOCUMENTS, "--buckets", "1024", "--per-bucket", "2"]
pytestmark = pytest.mark.usefixtures("at_root_with_threads_kept")


def test_all_sides_run_and_agree_in_fp32(tmp_path, capsys):
    """The same tokens from every mode, from transformers and from llama.cpp, or the speeds compare nothing."""
    path = tmp_path / "compare.json"
    assert main([*SMALL, "--max-new-tokens", "8", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    ours, others = ["autoregressive", "tree", "specextend", "ngram", "merged"], ["transformers", "transformers-lookup"]
    assert [*result["all"]["sides"]] == [*result["sides"]] == [*ours, *others, "llama.cpp"]
    assert result["configured_draft"] == result["sides"]["specextend"]["draft"] == "draft"
    for pair, found in result["agreement"].items():
        assert (found["documents"], found["equal"]) == (2, 2), pair
    ratios = result["buckets"]["1K"]["ratios"]
    assert ratios["specextend/transformers"]["decode_tokens_per_s"]["n"] == 2
    assert ratios["specextend/autoregressive"]["end_to_end_tokens_per_s"]["n"] == 2
    assert result["all"]["sides"]["specextend"]["mean_acceptance_length"] > 1
    assert result["all"]["sides"]["transformers"]["tokens_per_step"] == 1
    assert 0 < result["buckets"]["1K"]["sides"]["autoregressive"]["read_share"] < 1
    assert all(512 < each["num_prompt_tokens"] <= 1024 for each in result["documents"])
    assert result["environment"]["threads"] == result["config"]["job"]["cpus_per_worker"]
    printed = capsys.readouterr().out
    assert "Decoding over transformers-lookup" in printed
    assert "Decoding over llama.cpp" in printed
    assert "The machine reads" in printed
    assert result["environment"]["versions"]["torch"] in printed


def test_sides_can_be_chosen(tmp_path):
    """A model too large to load many times is compared two sides at a time."""
    path = tmp_path / "compare.json"
    chosen = ["--sides", "autoregressive,specextend", "--max-new-tokens", "4", "--json", str(path)]
    assert main([*SMALL, *chosen]) == 0
    assert [*json.loads(path.read_text())["agreement"]] == ["specextend/autoregressive"]


def test_a_sweep_ranks_trees_by_their_speed_up(tmp_path, capsys):
    """The shipped tree sizes come from such a file."""
    path = tmp_path / "sweep.json"
    grid = ["--nodes", "2,8", "--depths", "3", "--thresholds", "0.05", "--max-new-tokens", "6"]
    assert main(["trees", *SMALL, *grid, "--json", str(path)]) == 0
    points = json.loads(path.read_text())["points"]
    assert {(point["nodes"], point["depth"], point["threshold"]) for point in points} == {(2, 3, 0.05), (8, 3, 0.05)}
    medians = [point["ratios"]["decode_tokens_per_s"]["median"] for point in points]
    assert medians == sorted(medians, reverse=True)
    assert all(point["agreement"]["equal"] == 2 for point in points)
    assert "speed-up" in capsys.readouterr().out


def test_memory_is_accounted_for(tmp_path):
    """Peak = weights + cache + the rest, and the rest of a tiny model is the interpreter and its libraries."""
    path = tmp_path / "memory.json"
    assert main(["memory", *SMALL, "--tokens", "3000", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["peak_bytes"] == result["weight_bytes"] + result["cache_bytes"] + result["over_bytes"]
    assert 0 < result["loaded_bytes"] <= result["peak_bytes"] * 1.01
    assert result["over_bytes"] > 0
    assert result["num_tokens"] == 3000


def test_weights_are_counted_without_being_loaded(config):
    """As many bytes as the loaded model has, in the type it runs in."""
    target = config.target
    model = load_causal_lm(target.model, None, "float32", "cpu", "sdpa")
    loaded = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert weight_bytes(target) == loaded
    assert weight_bytes(TargetOptions(model=target.model, dtype="bfloat16")) == loaded // 2


def test_transformers_side_stops_where_the_others_stop(config):
    """EOS, length and the clock: the first token's time lies inside the whole."""
    [document, *_] = bench_documents(config, BenchOptions(buckets=(1024,), per_bucket=1))
    theirs = load_side("transformers", config).run(document.prompt_token_ids, 12)
    ours = load_side("autoregressive", config).run(document.prompt_token_ids, 12)
    assert theirs.token_ids == ours.token_ids
    assert 0 < theirs.decode_s < theirs.total_s
    assert theirs.stats is None


def test_documents_are_the_first_of_each_length_whole(config):
    """By the prompt's own tokens; a document that would be cut to fit is another document."""
    documents = bench_documents(config, BenchOptions(buckets=(2048, 1024), per_bucket=2))
    assert [document.bucket for document in documents] == [1024, 1024, 2048, 2048]
    assert all(document.bucket / 2 < len(document.prompt_token_ids) <= document.bucket for document in documents)


def test_a_document_that_must_be_shortened_is_not_taken(config):
    """Under a limit of 900 tokens, longer ones are left out rather than cut into the bucket."""
    tokenizer = load_tokenizer(config.target.model)
    prompts = Prompts(tokenizer, config.prompt, 964)
    source = open_source(config.input)
    documents = choose_documents(source, prompts, buckets=[1024], per_bucket=50, max_new_tokens=64)
    whole = Prompts(tokenizer, config.prompt, 100_000)
    all_documents = choose_documents(source, whole, buckets=[1024], per_bucket=50, max_new_tokens=64)
    fitting = [document for document in all_documents if len(document.prompt_token_ids) <= 900]
    assert documents == fitting
    assert 0 < len(fitting) < len(all_documents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--buckets", "1000"], "power of two"),
        (["--buckets", "1048576"], "no document"),
        (["--per-bucket", "0"], "per_bucket"),
        (["--set", "tree.noses=3"], "tree.noses"),
        (["memory", "--tokens", "100000"], "100000"),
        (["memory", "--tokens", "0"], "at least 1 token"),
        (["--json", "README.md/compare.json"], "--json README.md/compare.json: "),
        (["trees", "--json", "docs"], "--json docs is a folder"),
        (["trees", "--nodes", "0"], "tree.nodes"),
        (["ablation", "--repeats", "0"], "repeats must be at least 1"),
        (["ablation", "--set", "draft={kind: ngram}"], "set draft.kind and draft.model"),
        (["sweep", "--set", "cache.policy=full"], "set cache.policy to retrieval"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(arguments, message, capsys):
    """Before minutes of measuring, not after."""
    section = arguments[:1] if not arguments[0].startswith("-") else []
    assert main([*section, *SMALL, *arguments[len(section) :]]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.parametrize(
    ("more", "read"), [([], "by-set.parquet"), (["--documents", "by-option.parquet"], "by-option.parquet")]
)
def test_documents_that_are_named_are_read_and_not_the_examples(more, read, capsys):
    """Sections that read the examples by default have measured them for somebody who had set `input.path`."""
    assert main(["sweep", "--config", CONFIG, "--set", "input.path=by-set.parquet", *more]) == 2
    assert f"{read} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sides", "autoregressive,nobody"], "'nobody' is none of"),
        (["--buckets", "1024,x"], "expected numbers"),
        (["--json", "a.json", "b.json"], "unrecognized arguments: b.json"),
        (["swep", "--nodes", "8"], "invalid choice: 'swep'"),
        (["plot"], "required: --json"),
    ],
)
def test_mistyped_arguments_are_refused(arguments, message, capsys):
    """By argparse, which exits with 2 as well."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--nodes", "8"],
        ["trees", "--sides", "tree"],
        ["memory", "--max-new-tokens", "8"],
        ["ablation", "--sides", "tree"],
        ["retrieval", "--per-bucket", "3"],
        ["plot", "--json", "x.json", "--config", "x.yaml"],
        ["table", "--json", "x.json", "--output", "out"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_option_of_another_section_is_refused(arguments, capsys):
    """Options that were silently dropped have cost somebody a run: `memory --sides tree` measured `specextend`."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert f"unrecognized arguments: {arguments[-2]} {arguments[-1]}" in capsys.readouterr().err

"""Series: what is measured again after a stop, what is not measured at all, and the tables of both."""

from __future__ import annotations

import io
import json
import signal
from contextlib import redirect_stderr
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.bench import main
from specextend import RunConfig
from specextend.bench.ablation import ablation_configs, ablation_variants, differences
from specextend.bench.result_tables import to_markdown
from specextend.bench.retrieval_timing import cache_points
from specextend.bench.series import SeriesFile, Timing, Variant
from specextend.decoding.decoding_options import CacheOptions
from specextend.drafters.draft_options import DraftOptions
from specextend.stats import DecodingStats

TINY = [
    "--config",
    "configs/tiny-random.yaml",
    "--quick",
    "--buckets",
    "1024",
    "--per-bucket",
    "1",
    "--max-new-tokens",
    "8",
]
pytestmark = pytest.mark.usefixtures("at_root_with_threads_kept")


def timings(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["timings"]


def rows_of(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]


def test_an_interrupted_ablation_goes_on_where_it_stopped(tmp_path, capsys):
    """Hours of measurements must not be lost to a machine that goes away; what is there is not measured again.

    A prompt that was not measured on all variants is measured again on all: ratios divide measurements of one start.
    """
    path, documents = tmp_path / "new folder" / "ablation.json", tmp_path / "reports.parquet"
    texts = pq.read_table("examples/govreport.parquet", columns=["text"])["text"].to_pylist()[:2]
    pq.write_table(pa.table({"doc_id": ["a", "b"], "text": [text[:600] for text in texts]}), documents)
    chosen = ["--documents", str(documents), "--buckets", "512", "--per-bucket", "3"]
    command = ["ablation", *TINY, *chosen, "--set", "draft.ngram=true", "--json", str(path)]
    assert main(command) == 0
    assert "512: only 2 of 3 documents found" in capsys.readouterr().err
    whole = json.loads(path.read_text())
    steps = ["autoregressive", "tree", "+ flash", "+ hybrid", "+ streaming", "+ retrieval", "+ n-grams"]
    assert [*whole["variants"]] == [*steps, "as configured"]
    assert whole["variants"]["as configured"]["changes_nothing"] == "+ n-grams has the same configuration"
    assert whole["variants"]["tree"]["changes"]["decoding.mode"] == ["autoregressive", "specextend"]
    assert {each["variant"] for each in whole["timings"]} == set(steps)
    assert {each["kernels"] for each in whole["timings"] if each["variant"] == "tree"} == {"reference"}
    assert whole["environment"]["commit"]
    path.write_text(json.dumps({**whole, "timings": whole["timings"][:10]}))
    assert main(["table", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| step | 512 (n=1) |" in printed
    assert "of 2 rounds, each of which measures all variants, 1 are complete" in printed
    assert main(command) == 0
    resumed = timings(path)
    assert resumed[:7] == whole["timings"][:7]
    assert resumed[7:10] != whole["timings"][7:10]
    order = [(each["variant"], each["prompt_set"]) for each in resumed]
    assert order == [(each["variant"], each["prompt_set"]) for each in whole["timings"]]
    assert len({(each["prompt_set"], each["output_sha256"]) for each in resumed}) == 2
    finished = path.read_bytes()
    capsys.readouterr()
    assert main(command) == 0
    assert path.read_bytes() == finished
    assert "loading" not in capsys.readouterr().err


def test_measurements_of_another_series_are_not_mixed_into_a_file(tmp_path, capsys):
    """Two halves that were measured differently would make a table that nobody can trust."""
    path = tmp_path / "time.json"
    command = ["retrieval-time", *TINY, "--json", str(path)]
    assert main(command) == 0
    before = json.loads(path.read_text())
    for changed in (["--max-new-tokens", "9"], ["--set", "cache.sinks=0"], ["--per-bucket", "2"]):
        assert main([*command, *changed]) == 2
        assert "other options or another version (it differs in" in capsys.readouterr().err.splitlines()[-1]
    for place, key in (
        (["environment"], "code_sha256"),
        (["environment"], "cpu"),
        (["model_sha256"], "draft"),
        (["prompts", "govreport-512-00"], "sha256"),
    ):
        other = json.loads(json.dumps(before))
        reduce(getitem, place, other)[key] = "another"
        path.write_text(json.dumps(other))
        assert main(command) == 2, key
        assert (key if place == ["environment"] else place[0]) in capsys.readouterr().err.splitlines()[-1]
    path.write_text(json.dumps(before | {"environment": before["environment"] | {"commit": "a-dirty"}}))
    assert main(command) == 0
    for text in ("{}", "[]", '{"timings": []}', '{"timings": [{"variant"'):
        path.write_text(text)
        assert main(command) == 2
        assert "holds no series" in capsys.readouterr().err.splitlines()[-1]
    [[_, *cells]] = rows_of(to_markdown(before))[2:]
    assert all(float(cell) > 0 for cell in cells)


def test_two_processes_do_not_measure_into_one_file(tmp_path):
    """Each would drop what the other has written, and their times are those of a busy machine."""
    path = str(tmp_path / "time.json")
    header = {"environment": {}, "variants": {"a": {}}}
    first, second = SeriesFile(path, header), SeriesFile(path, header)
    first.add(timing("a", 0))
    with pytest.raises(ValueError, match=r"time\.json was changed by another process"):
        second.add(timing("a", 0))
    first.add(timing("a", 1))
    assert [each["repeat"] for each in timings(Path(path))] == [0, 1]


class InterruptedTerminal(io.StringIO):
    """A terminal at which somebody presses Ctrl-C when the first prompt has been measured."""

    def write(self, text: str) -> int:
        if text.startswith("1/2 "):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_in_one_line_that_says_what_is_kept(tmp_path):
    """Who stops a series at the end of the day must not have to guess from a traceback whether the day is lost."""
    path = tmp_path / "time.json"
    command = ["retrieval-time", *TINY, "--per-bucket", "2", "--json", str(path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    with redirect_stderr(InterruptedTerminal()) as terminal:
        code = main(command)
    signal.signal(signal.SIGINT, before)
    assert code == 75
    assert terminal.getvalue().splitlines()[-1] == f"interrupted; the same command goes on with what {path} holds"
    [kept] = timings(path)
    assert main(command) == 0
    assert timings(path)[0] == kept
    assert len(timings(path)) == 2


def timing(variant: str, repeat: int) -> Timing:
    return Timing(variant, "report", "1K", repeat, 1, 1.0, "compiled", False, "", DecodingStats())


def test_figures_of_an_interrupted_or_newer_series_end_in_one_line(tmp_path, capsys):
    """A file that nothing can be shown of says so, in words that name it; fields of newer versions are passed over."""
    path = tmp_path / "sweep.json"
    recorded = json.loads(Path("benchmarks/results/sweep-smollm2-epyc.json").read_text())
    shown = to_markdown(recorded)
    newer = [{**each, "joules": 1.0, "stats": {**each["stats"], "joules": 1.0}} for each in recorded["timings"]]
    assert to_markdown({**recorded, "timings": newer}) == shown
    for changed, message in (
        ({"timings": recorded["timings"][:5]}, "no prompt was measured on all variants yet"),
        ({"timings": 5}, "does not hold the figures of its section"),
        ({"timings": [{"variant": "as configured"}]}, "lacks 'prompt_set'"),
    ):
        path.write_text(json.dumps(recorded | changed))
        assert main(["table", "--json", str(path)]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"error: {path}")
        assert message in last


def test_batches_and_long_outputs_are_measured(tmp_path):
    """Batches in documents an hour, each size over the first; outputs to a fixed length, past any end of sequence."""
    path = tmp_path / "batch.json"
    assert main(["batch", *TINY, "--per-bucket", "2", "--repeats", "1", "--json", str(path)]) == 0
    assert [each["num_documents"] for each in timings(path)] == [2] * 4
    rows = rows_of(to_markdown(json.loads(path.read_text())))
    assert [row[0] for row in rows] == ["batch", "---", "1", "2"]  # two documents fill no batch of four
    assert rows[2][2] == rows[2][4] == "1.00"
    path = tmp_path / "reasoning.json"
    assert main(["reasoning", *TINY, "--set", "decoding.temperature=1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {each["group"] for each in found["timings"]} == {"128 in, 8 out", "1K in, 8 out"}
    assert {each["stats"]["num_output_tokens"] for each in found["timings"]} == {8}
    assert min(each["num_prompt_tokens"][0] for each in found["prompts"].values()) == 128


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.load("configs/smollm2.yaml")


def test_each_step_of_an_ablation_changes_what_its_name_says(config):
    """Or the difference between two rows would be that of two things at once."""
    configs = [*ablation_configs(config).values()]
    changed = [differences(before, after) for before, after in pairwise(configs[1:])]
    assert changed == [
        {"attention.backend": ("reference", "auto")},
        {"attention.tree": ("dense", "hybrid")},
        {"cache.policy": ("full", "streaming")},
        {"cache.policy": ("streaming", "retrieval")},
        {"draft.ngram": (False, True)},
        {"attention.tree": ("hybrid", "auto"), "tree.nodes": (15, "auto")},
    ]
    assert configs[-1].decoding == replace(config.decoding, max_batch_size=1)


def test_a_step_that_changes_nothing_says_so_and_is_not_measured(config):
    """Noise between two equal configurations has been taken for a gain before."""

    def idle(variants: list[Variant]) -> list[str]:
        return [each.name for each in variants if each.config is None]

    configs = ablation_configs(config)
    assert idle(ablation_variants(configs, "cpu", 4000)) == []
    assert idle(ablation_variants(configs, "cuda", 4000)) == ["+ flash"]
    assert idle(ablation_variants(configs, "cpu", 1024)) == ["+ streaming", "+ retrieval"]
    for draft in (None, DraftOptions(kind="ngram")):
        with pytest.raises(ValueError, match=r"set draft\.kind and draft\.model"):
            ablation_configs(config.model_copy(update={"draft": draft}))


def test_a_sweep_changes_one_of_four_values_and_leaves_out_what_cannot_be():
    """The view is chunk size times chunks: each family keeps one of the three numbers."""
    points = cache_points(CacheOptions(refresh_every=4))
    sizes = {name: (each.chunk_size, each.top_k_chunks) for name, each in points.items() if "refresh" not in name}
    assert sizes == {
        "as configured": (32, 32),
        "chunk size 8": (8, 128),
        "chunk size 16": (16, 64),
        "chunk size 64": (64, 16),
        "top-k 8": (32, 8),
        "top-k 16": (32, 16),
        "top-k 64": (32, 64),
        "cache size 256": (8, 32),
        "cache size 512": (16, 32),
        "cache size 2048": (64, 32),
    }
    assert [each.refresh_every for name, each in points.items() if "refresh" in name] == [1, 16, 64]
    assert "top-k 8" not in cache_points(CacheOptions(refresh_every=4, recent=512))


def test_loops_are_a_column_of_their_own_and_quartiles_are_those_of_documents():
    """A loop is guessed almost perfectly, and one of them must not carry the median."""
    stats = {"num_output_tokens": 11, "num_spec_steps": 4, "num_accepted_tokens": 6}
    own = [
        {
            "variant": variant,
            "prompt_set": f"report-{number}",
            "group": "2K",
            "repeat": 0,
            "num_documents": 1,
            "wall_s": 3.0,
            "kernels": "compiled",
            "loops": number == 5,
            "output_sha256": "",
            "stats": {**stats, "decode_s": 1.0 if variant == "autoregressive" else 1 / number},
        }
        for number in (1, 2, 3, 4, 5)
        for variant in ("autoregressive", "tree")
    ]
    result = {
        "kind": "ablation",
        "environment": {"device": "made up", "threads": 2, "versions": {"torch": "2.13.0"}},
        "config": {"target": {"dtype": "bfloat16"}},
        "max_new_tokens": 11,
        "repeats": 1,
        "base": "autoregressive",
        "variants": {"autoregressive": {"changes": {}}, "tree": {"changes": {}}},
        "prompts": {f"report-{number}": {"group": "2K", "num_prompt_tokens": [1900]} for number in (1, 2, 3, 4, 5)},
        "timings": own,
    }
    table = to_markdown(result)
    assert "| step | 2K (n=4) | loops (n=1) | over the step above, 2K |" in table
    assert "| tree | 2.50 (1.75-3.25) | 5.00 | 2.50 (1.75-3.25) |" in table
    assert "| tree | 2.50 | 25.0 |" in table

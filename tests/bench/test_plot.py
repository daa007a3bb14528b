"""Drawings and tables of written figures."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jobs.bench import main
from specextend.bench.plot import plot
from specextend.bench.result_tables import to_markdown
from tests.bench.made_up import SIDES, compare_result, looping_result, retrieval_result

FIGURES = Path(__file__).parents[2] / "benchmarks" / "results"


def recorded(name: str) -> dict[str, Any]:
    """The figures that the pages show."""
    return json.loads((FIGURES / f"{name}-smollm2-epyc.json").read_text(encoding="utf-8"))


SERIES = ("ablation", "sweep", "batch", "reasoning", "retrieval-time")
MADE_UP = {"compare": compare_result, "retrieval": retrieval_result}
RESULTS = MADE_UP | {name: partial(recorded, name) for name in SERIES}


def texts(svg: bytes) -> list[str]:
    """What a drawing says, in its order; raises for invalid XML."""
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def written(folder: Path, name: str, result: dict[str, Any]) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    return str(path)


def test_a_drawing_of_compare_names_sides_lengths_and_the_machine():
    """As text, that can be searched and read out, not as outlines of letters."""
    said = texts(plot(compare_result()))
    labels = {name for name in SIDES if name != "specextend"} | {"specextend (draft)"}
    assert labels <= set(said)
    assert {"1K", "2K", "n = 2"} <= set(said)
    assert "decoding speed over autoregressive" in said
    assert any("a-target, bfloat16, A made-up processor" in text for text in said)


def test_a_drawing_of_retrieval_has_a_panel_for_each_draft_and_kind():
    """Lines are what the draft sees; lengths are named as in the tables."""
    said = texts(plot(retrieval_result()))
    assert {"eagle", "small-lm", "govreport", "needles", "streaming 512", "retrieval 512", "1K", "7,000"} <= set(said)
    assert "acceptance length: mean of documents, sd" in said


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("ablation", {"tree", "+ retrieval", "all (n=8)", "decoding speed over autoregressive"}),
        ("sweep", {"top-k 8", "refresh 64", "2K (n=3)", "decoding speed over as configured"}),
        ("batch", {"8", "specextend (n=3)", "documents an hour"}),
        ("reasoning", {"+ n-grams", "128 in, 2,000 out, loops (n=3)"}),
        ("retrieval-time", {"8K (n=3)", "a decoding step", "a retrieval", "milliseconds"}),
    ],
)
def test_a_drawing_of_a_series_names_variants_columns_and_the_machine(name, labels):
    """With n and with what the bars are, so that three documents are not taken for thirty."""
    said = texts(plot(recorded(name)))
    assert labels <= set(said)
    assert "Median and quartiles, or range if n is below 4" in said
    assert "SmolLM2-135M-Instruct, bfloat16, AMD EPYC" in said


@pytest.mark.parametrize("kind", RESULTS)
def test_the_same_figures_give_the_same_bytes(kind):
    """Or every drawing would change with each commit; no date, no random ids."""
    first, second = plot(RESULTS[kind]()), plot(RESULTS[kind]())
    assert first == second
    assert b"date" not in first
    assert len(first) < 100_000


def test_a_length_without_a_ratio_is_left_out_of_the_drawing():
    """Outputs of one token have no decoding speed; the other lengths are drawn all the same."""
    result = compare_result()
    for ratios in result["buckets"]["1K"]["ratios"].values():
        ratios["decode_tokens_per_s"] = None
    assert {"1K", "2K", "merged"} <= set(texts(plot(result)))
    assert "| merged | - |" in to_markdown(result)


def test_tables_hold_median_range_and_deviation_by_length():
    """What a README quotes comes from here and is not typed."""
    table = to_markdown(compare_result())
    assert "**Decoding over autoregressive: median of documents (range, sd)**" in table
    assert "| side | 1K (n=2) | 2K (n=2) | all (n=4) | lowest |" in table
    assert (
        "| merged | 5.25 (5.00-5.50, sd 0.35) | 4.75 (4.50-5.00, sd 0.35) | 5.00 (4.50-5.50, sd 0.41) | 2K |" in table
    )
    assert "| merged | 25.0% |" in table
    assert "1K 900 to 1,000; 2K 1,900 to 2,000" in table
    assert "A made-up processor, 2 threads" in table


def test_tables_give_loops_a_column_of_their_own():
    """A length whose documents all loop has no figures, and the page says why."""
    table = to_markdown(looping_result())
    assert "| side | 1K (n=1) | 2K (n=0) | all (n=1) | loops (n=2) | lowest |" in table
    assert "| merged | 1.00 (1.00-1.00) | - | 1.00 (1.00-1.00) | 1.00 (1.00-1.00, sd 0.00) | 1K |" in table
    assert "All documents of 2K are loops." in table
    assert {"n = 0", "n = 1"} <= set(texts(plot(looping_result())))
    assert "loops" not in to_markdown(compare_result())


def test_tables_hold_shares_of_what_the_machine_can_do():
    """32 steps of 10 MB and more in a second, from a memory that reads 1 GB in it."""
    table = to_markdown(looping_result())
    assert "The machine reads 1.0 GB/s and multiplies 1,000.0 GFLOP/s in bfloat16." in table
    assert "**Decoding: share of the memory bandwidth**" in table
    assert "| merged | 34.9% | - | 34.9% | 36.9% |" in table
    assert "**Prefill: share of the matrix rate**" in table


def test_recorded_figures_of_an_older_version_can_still_be_shown():
    """The page quotes them: they know nothing of loops and of the machine's limits."""
    result = json.loads((FIGURES / "compare-smollm2-cpu.json").read_text())
    result = {name: value for name, value in result.items() if name not in ("machine", "loops")}
    assert "**Decoding over autoregressive" in to_markdown(result)
    assert plot(result)


def test_tables_of_retrieval_hold_mean_deviation_and_n():
    """Acceptance for each kind of document, and the studies."""
    table = to_markdown(retrieval_result())
    assert "**Acceptance length, needles: mean of documents ± sd**" in table
    assert "| eagle | retrieval 512 | 2.50 ± 0.50 (n=3) | 2.50 ± 0.50 (n=3) |" in table
    assert "| small-lm | streaming 512 | 1.50 ± 0.50 (n=3) | 1.50 ± 0.50 (n=3) |" in table
    assert "| heads=max | eagle | govreport |" in table


def test_the_job_draws_and_prints_what_it_wrote(tmp_path, capsys):
    """One drawing a file, named after it."""
    paths = [written(tmp_path, name, result()) for name, result in MADE_UP.items()]
    assert main(["plot", "--json", *paths, "--output", str(tmp_path / "drawings")]) == 0
    for name, result in MADE_UP.items():
        assert (tmp_path / "drawings" / f"{name}.svg").read_bytes() == plot(result())
    assert main(["table", "--json", *paths]) == 0
    printed = capsys.readouterr().out
    assert "Decoding over autoregressive" in printed
    assert "Acceptance length, govreport" in printed


@pytest.mark.parametrize("section", ["plot", "table"])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"kind": "speed"}, "not for 'speed'"),
        ({"kind": "compare"}, "measure again"),
        ({"speed": 3}, "names no kind"),
        ([1, 2], "names no kind"),
    ],
)
def test_figures_that_cannot_be_shown_end_in_one_line(section, result, message, tmp_path, capsys):
    """The file is named, as there may be several."""
    path = written(tmp_path, "figures", result)
    assert main([section, "--json", path]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert path in line
    assert message in line


def test_a_drawing_needs_plain_decoding_to_compare_with(tmp_path, capsys):
    """A run of chosen sides may lack it."""
    result = compare_result()
    del result["sides"]["autoregressive"]
    assert main(["plot", "--json", written(tmp_path, "few", result), "--output", str(tmp_path)]) == 2
    assert "autoregressive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere.json"], "nowhere.json"), (["a/x.json", "b/x.json"], "same name")],
)
def test_files_that_cannot_be_drawn_end_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    """Nothing is written then."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, "x", compare_result())
    assert main(["plot", "--json", *arguments, "--output", "drawings"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "drawings").exists()


def test_without_matplotlib_only_drawing_is_refused(tmp_path, capsys, monkeypatch):
    """It is an extra: measuring and tables need none of it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "specextend.bench.plot")
    path = written(tmp_path, "figures", compare_result())
    assert main(["plot", "--json", path, "--output", str(tmp_path)]) == 2
    assert "specextend[bench]" in capsys.readouterr().err
    assert main(["table", "--json", path]) == 0

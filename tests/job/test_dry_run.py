"""The command `plan` as its users call it: time, workers, memory and cost, before anybody pays for them."""

import re
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from specextend.cluster.checks import check_run
from specextend.cluster.dry_run import Rates, describe_dry_run, dry_run, parse_time
from specextend.config import RunConfig
from tests.job.conftest import CONFIG, ROOT, on, read_json, specextend, write_corpus
from tests.models.conftest import edit_json
from tests.published_heads import WRITERS

NOON = datetime(2026, 11, 22, 12, 0).astimezone()


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "in" / "a.parquet", ["word " * count for count in (50, 100, 200, 400, 800)])


def test_a_calibration_measures_the_time(local_ray, corpus, tmp_path):
    """The real engine over real documents, and what the night would cost."""
    given = on(corpus, tmp_path / "out", "input.id_column=null", "report.price_per_worker_hour=36", "job.workers=2")
    line = f"plan --config tiny-random --calibrate 3 --json {tmp_path}/plan.json"
    said = specextend(line, *given).exits(0).stdout
    assert not (tmp_path / "out").exists(), "a dry run writes nothing there"
    assert max(len(line) for line in said.splitlines() if line.startswith("  ")) <= 80, "on a terminal tables are whole"
    assert "time: by a calibration of 3 documents on" in said
    plan = read_json(tmp_path / "plan.json")
    forecast, rates = plan["forecast"], plan["rates"]
    assert (forecast["documents"], forecast["workers"], rates["num_documents"]) == (5, 2, 3)
    assert 0 < forecast["seconds_low"] < forecast["seconds"] < forecast["seconds_high"]
    assert rates["device"] in forecast["basis"]
    assert plan["cost"]["cost"] == pytest.approx(36 * 2 * forecast["seconds"] / 3600)


@pytest.mark.slow
def test_a_calibration_compares_both_readings_of_a_heads_layers(local_ray, corpus, tmp_path):
    """Published heads number layers in two ways, and no rule is safe."""
    values = SimpleNamespace(**read_json(ROOT / ".models" / "tiny-random" / "target" / "config.json"))
    head = WRITERS["eagle3"](tmp_path / "head", SimpleNamespace(config=values))
    edit_json(tmp_path / "head" / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    settings = ["input.id_column=null", f"draft={{kind: eagle, model: {head}}}"]
    arguments = ["--config", CONFIG, *on(corpus, tmp_path / "out", *settings), "--calibrate", "2"]
    said = specextend("plan", *arguments).exits(0).stderr
    [(chosen, other, advice)] = re.findall(
        r"accepted at ([\d.]+) with the target's layers \[1, 2, 3\], and at ([\d.]+) with \[0, 1, 2\]: (.*)", said
    )
    better = "set draft.feature_layers: [0, 1, 2]" if float(other) > float(chosen) else "keep them"
    assert advice == better


def foreseen(corpus, tmp_path, by_s=3600.0):
    """A dry run by made-up rates: a second for each document, and ten minutes until the first one."""
    config = RunConfig.load(CONFIG, [f"input.path={corpus}", "input.id_column=null", f"output.path={tmp_path}/out"])
    rates = Rates(prefill=0, decode=1 / 24, output_share=1, spread=0, num_documents=9, start_s=600, device="an H200")
    by = datetime.now().astimezone() + timedelta(seconds=by_s)
    plan = dry_run(check_run(config), by=by, calibrate=lambda prepared, estimates: rates)
    return plan, describe_dry_run(plan)


def test_workers_that_are_done_by_an_hour_are_counted(corpus, tmp_path):
    """Five documents of a second each: in an hour one worker is enough, in a minute none loads its models."""
    plan, said = foreseen(corpus, tmp_path)
    assert plan["by"]["workers"] == 1
    assert plan["by"]["workers_surely"] == 1
    assert plan["cost"] is None
    assert "1 worker likely, 1 to be sure" in said
    assert "weights of the target" in said
    assert "CUDA" not in said, "a CPU has none"
    plan, said = foreseen(corpus, tmp_path, by_s=60.0)
    assert plan["by"]["workers"] is None
    assert "impossible with any number of workers" in said


def test_nothing_to_do_takes_no_time(tmp_path):
    """A corpus of null texts, which is one that somebody exported wrongly."""
    plan, said = foreseen(write_corpus(tmp_path / "in" / "a.parquet", [None, None]), tmp_path)
    assert plan["forecast"]["seconds"] == 0
    assert plan["documents_per_hour"] is None
    assert "2 of 2 rows to do, 2 of them rejected" in said


@pytest.mark.parametrize(
    "text, expected",
    {
        "13:30": "2026-11-22T13:30",
        "7:05": "2026-11-23T07:05",
        "12:00": "2026-11-23T12:00",
        "2026-11-24": "2026-11-24T00:00",
        "2026-11-24T08:00": "2026-11-24T08:00",
    }.items(),
)
def test_a_time_is_that_of_the_clock_on_the_wall(text, expected):
    """`HH:MM` is the next time that it shows it: at noon, seven is tomorrow's."""
    assert parse_time(text, NOON) == datetime.fromisoformat(expected).astimezone()

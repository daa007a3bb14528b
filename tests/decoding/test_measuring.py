"""Measuring at the start: what is measured, how it is kept, and that nothing of it can stop a run."""

from collections import defaultdict

import pytest
import torch

from specextend.decoding import measurements
from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.device import Graphs
from specextend.decoding.measurements import load_step_costs, measure
from tests.tiny_models import random_prompt, request, tiny_engine

CHOICES = TreeOptions(nodes="auto"), "dense", 1, Graphs()


@pytest.fixture(scope="module")
def engine(pair):
    return tiny_engine(pair, attention__tree="hybrid")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder of the user, on a machine that is quiet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measurements, "measure_undisturbed", lambda measure: (measure(), True))
    return tmp_path / "specextend"


def mark_cache(target):
    """Put into the first row what a measurement overwrites."""
    target.cache.keys[:, :, 0] = 7.0


def is_marked(target):
    return bool((target.cache.keys[:, :, 0] == 7.0).all())


def test_measuring_leaves_nothing_behind(engine):
    """It writes to rows that requests take later; the prompt that takes them first must not see it."""
    prompt = random_prompt(300)
    [before] = engine.generate([request("a", prompt, 30)])
    measure(engine.target, "hybrid", (1, 4, 16), (512, 1500), Graphs(), defaultdict(dict))
    [after] = engine.generate([request("a", prompt, 30)])
    assert after.token_ids == before.token_ids
    assert torch.isfinite(engine.target.cache.keys[:, :, :300]).all()


def test_a_second_start_measures_nothing(folder, engine):
    """Costs are those of the first, and no temporary file is left."""
    first = load_step_costs(engine.target, *CHOICES)
    mark_cache(engine.target)
    second = load_step_costs(engine.target, *CHOICES)
    assert is_marked(engine.target)
    assert second.lines == first.lines
    assert {path.suffix for path in folder.iterdir()} == {".json"}


@pytest.mark.parametrize("text", ["", "[]", "null", '{"version": 3', '{"code": "0", "value": []}'])
def test_a_file_that_is_damaged_or_of_other_code_is_measured_again(text, folder, engine):
    """It is a cache: whatever a crash, a full disk or another release left costs seconds, never a run."""
    load_step_costs(engine.target, *CHOICES)
    [path] = folder.iterdir()
    path.write_text(text)
    mark_cache(engine.target)
    load_step_costs(engine.target, *CHOICES)
    assert not is_marked(engine.target)


def test_what_a_busy_machine_measured_is_used_and_forgotten(folder, monkeypatch, engine):
    """Costs that were measured beside another process may be wrong; they must not outlive this run."""
    monkeypatch.setattr(measurements, "measure_undisturbed", lambda measure: (measure(), False))
    assert load_step_costs(engine.target, *CHOICES) is not None
    assert not [*folder.glob("*")]

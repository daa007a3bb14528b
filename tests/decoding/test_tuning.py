"""Tuning at start-up: what is measured, how it is kept, and that nothing of it can stop a run."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from specextend.attention.backends import attend_reference, cpu_kernels
from specextend.attention.layer_reference import REFERENCE
from specextend.decoding import tuning
from specextend.decoding.decoding_options import AttentionOptions, TreeOptions
from specextend.decoding.graphs import Graphs
from specextend.decoding.kept import cache_folder
from specextend.decoding.model import CachedModel
from specextend.decoding.step_costs import CostTable
from specextend.decoding.tuning import (
    BUDGET_S,
    TuningGrid,
    describe,
    load_fastest,
    load_step_costs,
    make_grid,
    measure,
    read_table,
    write_table,
)
from tests.tiny_models import FAMILIES, random_prompt, request, tiny_engine, write_pair

GRID = TuningGrid(("dense", "hybrid"), (1, 4, 16), (512, 1500))
TABLE = CostTable({kind: {1: (0.1, 1e-6), 4: (0.2, 0.0), 16: (0.3, 1e-5)} for kind in GRID.kinds})
KEY = {"device": "a", "threads": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pair = write_pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])
    return tiny_engine(pair, attention__tree="hybrid")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specextend"


def steady_clock(step: float = 1e-3):
    """A clock that ticks whenever it is read, so that every step takes the same time."""
    ticks = itertools.count()
    return lambda: next(ticks) * step


@pytest.mark.parametrize(
    ("nodes", "fixed", "batch", "sizes"),
    [
        (15, False, 1, (1, 2, 4, 8, 16)),
        (11, False, 1, (1, 2, 4, 8, 12)),
        (11, True, 1, (1, 12)),
        (7, False, 4, (1, 2, 4, 8, 16, 24, 32)),
        (50, False, 4, (1, 2, 4, 8, 16, 24, 32, 48, 51, 64)),
        (100, False, 4, (1, 2, 4, 8, 16, 24, 32, 48, 64, 101)),
    ],
)
def test_sizes_are_those_that_steps_can_have(nodes, fixed, batch, sizes):
    """Few, so that start-up stays short; rows of a whole batch are sizes too."""
    grid = make_grid(("dense",), nodes, fixed=fixed, max_batch_size=batch, room=100_000)
    assert grid.sizes == sizes


def test_prefixes_fit_the_cache():
    """A cache for short prompts has no room for 6,000 tokens."""
    grid = make_grid(("dense",), 15, fixed=False, max_batch_size=1, room=1024)
    assert grid.lengths == (512, 1008)


def test_every_cell_is_measured_before_any_request(engine):
    """With a clock that ticks evenly all lines are the same: no prefix costs anything."""
    table, is_quiet = measure(engine.target, GRID, Graphs(), steady_clock())
    assert is_quiet
    flat = (pytest.approx(1e-3), pytest.approx(0, abs=1e-12))
    assert table.lines == {kind: dict.fromkeys(GRID.sizes, flat) for kind in GRID.kinds}


def test_a_slow_machine_measures_fewer_prefixes(engine):
    """Start-up is to take seconds: the first prefix is always measured, another one while there is time."""
    lengths, forward = set(), engine.target.forward

    def recording(token_ids, positions, plan):
        lengths.add(plan.lengths[0] - plan.num_new)
        return forward(token_ids, positions, plan)

    engine.target.forward = recording
    measure(engine.target, GRID, Graphs(), steady_clock(BUDGET_S / 8))
    engine.target.forward = forward
    assert lengths == {512}


def test_a_busy_machine_is_not_believed_for_ever(engine):
    """Times that differ by half between two runs are used, but the next start measures again."""
    times = itertools.accumulate(itertools.cycle([0.001, 0.001, 0.001, 0.002]))
    _, is_quiet = measure(engine.target, GRID, Graphs(), lambda: next(times))
    assert not is_quiet


def test_measuring_leaves_nothing_behind(engine):
    """It writes to rows that requests take later; the prompt that takes them first must not see it."""
    prompt = random_prompt(300)
    [before] = engine.generate([request("a", prompt, 30)])
    measure(engine.target, GRID, Graphs(), steady_clock())
    [after] = engine.generate([request("a", prompt, 30)])
    assert after.token_ids == before.token_ids
    assert torch.isfinite(engine.target.cache.keys[:, :, :300]).all()


def test_a_table_is_kept_for_its_device_and_grid_alone(folder):
    """Two machines that share a home must not read each other's."""
    assert read_table(KEY, GRID) is None
    assert write_table(KEY, GRID, TABLE)
    assert read_table(KEY, GRID) == TABLE
    assert read_table(KEY | {"threads": 1}, GRID) is None
    assert read_table(KEY, TuningGrid(("dense",), GRID.sizes, GRID.lengths)) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"], "no temporary file is left"


def damaged(text: str) -> list[str]:
    """What may stand in the file after a crash, a full disk or an older release."""
    values = json.loads(text)
    lines = values["value"]
    return [
        "",
        text[: len(text) // 2],
        "[]",
        "null",
        json.dumps(values | {"version": 0}),
        json.dumps(values | {"key": {}}),
        json.dumps(values | {"value": {"dense": lines["dense"]}}),
        json.dumps(values | {"value": lines | {"hybrid": {"1": [0.1, 0.0]}}}),
        json.dumps(values | {"value": lines | {"hybrid": lines["dense"] | {"4": [-1.0, 0.0]}}}),
        json.dumps(values | {"value": lines | {"hybrid": lines["dense"] | {"4": [0.0, 0.0]}}}),
        json.dumps(values | {"value": lines | {"hybrid": lines["dense"] | {"4": [float("nan"), 0.0]}}}),
        json.dumps(values | {"value": lines | {"hybrid": lines["dense"] | {"4": ["x", 0.0]}}}),
        json.dumps(values | {"value": lines | {"hybrid": lines["dense"] | {"4": [0.1]}}}),
    ]


def test_a_damaged_file_is_measured_again(folder):
    """It is a cache: whatever is wrong with it costs seconds, never a run."""
    write_table(KEY, GRID, TABLE)
    [path] = folder.iterdir()
    for text in damaged(path.read_text()):
        path.write_text(text)
        assert read_table(KEY, GRID) is None, text
    path.write_bytes(b"\xff\xfe\x00")
    assert read_table(KEY, GRID) is None
    path.unlink()
    path.mkdir()
    assert read_table(KEY, GRID) is None
    assert not write_table(KEY, GRID, TABLE), "a folder stands in the way"
    assert [*folder.iterdir()] == [path], "no temporary file is left"


@pytest.mark.parametrize("home", ["file", "none"])
def test_without_a_place_to_write_nothing_is_kept(home, tmp_path, monkeypatch, engine):
    """Containers have read-only homes, or none."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home == "file" else "")
    if home == "none":
        monkeypatch.setenv("HOME", "relative")
        assert cache_folder() is None
    assert not write_table(KEY, GRID, TABLE)
    assert read_table(KEY, GRID) is None
    assert (
        load_step_costs(engine.target, TreeOptions(nodes="auto"), AttentionOptions(tree="dense"), 1, Graphs())
        is not None
    )


def test_the_folder_is_the_users(tmp_path, monkeypatch):
    """The XDG standard: a relative XDG_CACHE_HOME is ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "specextend"


def test_a_kept_table_is_not_measured_again(folder, engine):
    """The second start of a pair on a device takes no seconds."""
    target, options = engine.target, (TreeOptions(nodes="auto", max_nodes=15), AttentionOptions(tree="auto"), 1)
    room = target.cache.rows.num_free
    grid = make_grid(("dense", "hybrid"), 15, fixed=False, max_batch_size=1, room=room)
    table = CostTable({kind: dict.fromkeys(grid.sizes, (0.5, 0.0)) for kind in grid.kinds})
    write_table(describe(target, graphs=False), grid, table)
    mark_cache(target)
    costs = load_step_costs(target, *options, Graphs())
    assert costs is not None
    assert costs.table == table
    assert is_marked(target)


def test_times_of_other_software_are_not_used(folder, monkeypatch, engine):
    """A tree that paid off with one kernel may not with its successor, nor when a graph saves most of a small step."""
    target = engine.target
    write_table(describe(target, graphs=False), GRID, TABLE)
    assert read_table(describe(target, graphs=False), GRID) == TABLE
    assert read_table(describe(target, graphs=True), GRID) is None
    for owner, name, other in (
        (target, "attend", attend_reference),
        (target, "kernels", REFERENCE),
        (tuning, "KERNELS_VERSION", tuning.KERNELS_VERSION + 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert read_table(describe(target, graphs=False), GRID) is None, name


def mark_cache(target: CachedModel) -> None:
    """Put into the first row what a measurement overwrites."""
    target.cache.keys[:, :, 0] = 7.0


def is_marked(target: CachedModel) -> bool:
    return bool((target.cache.keys[:, :, 0] == 7.0).all())


def test_a_measurement_writes_to_the_front_of_the_cache(engine):
    """The tests beside this one would prove nothing otherwise."""
    mark_cache(engine.target)
    measure(engine.target, GRID, Graphs(), steady_clock())
    assert not is_marked(engine.target)


def test_nothing_is_measured_where_nothing_is_chosen(engine):
    """Fixed trees in a fixed kind of attention."""
    mark_cache(engine.target)
    assert load_step_costs(engine.target, TreeOptions(nodes=16), AttentionOptions(tree="hybrid"), 1, Graphs()) is None
    assert is_marked(engine.target)


def test_the_kernels_of_a_first_start_are_those_of_the_second(folder, monkeypatch, engine):
    """A quiet machine keeps its choices: the next start measures nothing."""
    monkeypatch.setattr(tuning, "measure_undisturbed", lambda measure: (measure()[0], True))
    first = load_fastest(engine.target)
    mark_cache(engine.target)
    second = load_fastest(engine.target)
    assert is_marked(engine.target)
    assert second.choices == first.choices
    assert {*first.choices.values()} <= {*cpu_kernels(engine.target.head_dim, engine.target.dtype)}


def test_the_kernels_of_a_busy_start_are_used_and_forgotten(folder, monkeypatch, engine):
    """A choice made beside another process may be the slowest; it must not outlive this run."""
    monkeypatch.setattr(tuning, "measure_undisturbed", lambda measure: (measure()[0], False))
    assert load_fastest(engine.target).choices
    assert not [*folder.glob("*")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda names: None,
        lambda names: "sdpa",
        lambda names: {"sdpa": 1},
        lambda names: names[1:],
        lambda names: ["unknown", *names[1:]],
        lambda names: [["sdpa"], *names[1:]],
        lambda names: [3, *names[1:]],
    ],
)
def test_damaged_choices_are_measured_again(damage, folder, monkeypatch, engine):
    """Of another release, or cut off: whatever is not a known kernel for each cell."""
    monkeypatch.setattr(tuning, "measure_undisturbed", lambda measure: (measure()[0], True))
    load_fastest(engine.target)
    [path] = folder.iterdir()
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"value": damage(stored["value"])}))
    mark_cache(engine.target)
    load_fastest(engine.target)
    assert not is_marked(engine.target)

"""The configuration: what is read, what is refused, and in which words."""

import json
import os

import pytest

from specextend.config import RunConfig
from tests.contract.test_configuration import LEAST, refusal
from tests.contract.test_configuration import config_file as config_file


@pytest.mark.parametrize("key", ["input", "input.path", "output.path", "target.model", "draft.model"])
@pytest.mark.parametrize("value", ["{}", "[{}]", "'{}", "{{x: {}}}", "{} #x"])
def test_no_message_repeats_an_address_that_is_refused(config_file, key, value):
    """It may hold a password, and messages are kept in logs."""
    address = "ftp://user:SECRET@host/path"
    for file_text, overrides in (
        (config_file.read_text(), [f"{key}={value.format(address)}"]),
        (f"{key}: {value.format(address)}\n{key}: 1\nx: [", []),
    ):
        config_file.write_text(file_text)
        assert "SECRET" not in refusal(config_file, *overrides)


def test_paths_of_a_file_are_relative_to_it_and_what_is_typed_to_where_one_types(config_file, tmp_path, monkeypatch):
    """Workers, notebooks and cron run in another current folder. Nobody writes into an installed package."""
    (tmp_path / "owner" / "draft").mkdir(parents=True)
    config = RunConfig.load(config_file, ["input.path=s3://bucket/in", "target.model=./t"])
    assert config.input.path == "s3://bucket/in"
    assert config.output.path == str(tmp_path / "out")
    assert config.target.model == str(tmp_path / "t")
    assert config.draft.model == str(tmp_path / "owner" / "draft"), "a folder of that name is there, so it is meant"
    assert RunConfig.load(config_file).target.model == "owner/target", "no such folder: a Hub id"
    elsewhere = tmp_path / "owner"
    monkeypatch.chdir(elsewhere)
    config = RunConfig.load(config_file, ["output.path=typed"])
    assert (config.input.path, config.output.path) == (str(tmp_path / "in"), str(elsewhere / "typed"))
    assert RunConfig.load(LEAST).input.path == str(elsewhere / "in")
    shipped = RunConfig.load("smollm2")
    assert shipped.output.path == str(elsewhere / "out" / "demo")
    assert os.path.isdir(shipped.input.path)
    assert shipped.draft.model == "{shipped}/models/smollm2-135m-eagle", "each machine has a place of its own"


def test_a_path_may_hold_signs_like_those_of_variables(config_file, monkeypatch):
    """Stores have keys such as `cost_$5`, and the value of a variable may be any path."""
    assert RunConfig.load(config_file, ["input.path=s3://b/cost_$5/a$"]).input.path == "s3://b/cost_$5/a$"
    monkeypatch.setenv("LITERAL", "s3://b/$NAME")
    assert RunConfig.load(config_file, ["input.path=${LITERAL}"]).input.path == "s3://b/$NAME"


def test_a_run_of_some_tasks_alone_has_the_right_answers_of_their_fields(config_file):
    """Those of another task were refused as no field of it; a field that no task has is still said."""
    tasks = [{"name": name, "output": {"column": name}} for name in ("kind", "about")]
    gold = {"kind": "kind_by_hand", "about": "about_by_hand", "knd": "x"}
    config = RunConfig.load([config_file, {"tasks": tasks}], [f"input.gold={json.dumps(gold)}"])
    alone = config.of_tasks(["about"], "out")
    assert alone.input.gold == {"about": "about_by_hand", "knd": "x"}
    assert alone.input.copied_columns == ("about_by_hand", "x")

"""The configuration: what is read, what is refused, and in which words."""

import pytest

from specextend.config import RunConfig
from tests.contract.test_configuration import config_file as config_file
from tests.contract.test_configuration import refusal


@pytest.mark.parametrize(
    "override, message",
    [
        ("decoding.repetition_penalty=0", "decoding.repetition_penalty must be above 0, got 0.0"),
        ("input.reference_column=''", "input.reference_column must not be empty"),
        ("tree.nodes=many", "tree.nodes must be an integer, got 'many'; tree.nodes must be 'auto', got 'many'"),
        ("input.passthrough=[1]", "input.passthrough.0 must be a string, got 1"),
        ("tree={nodes: auto, max_nodes: 0}", "tree.max_nodes must be at least 1, got 0"),
        (
            "draft={kind: ngram, ngram: true, model: m}",
            "draft.model must not be set with draft.kind ngram",
        ),
        ("cache.recent=7", "cache.recent must be at least 8, tree.depth + 2"),
        ("job.stall_s=0", "job.stall_s must be above 0, got 0.0"),
        ("input.id_column=&a [*a]", "an alias is not taken, write the value itself"),
        (
            "input.id_column=" + "9" * 5000,
            "--set input.id_column: a value of type str is not a valid YAML value (Exceeds",
        ),
        ("input.id_column=" + "[" * 5000 + "]" * 5000, "is not a valid YAML value (maximum recursion depth"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(config_file, override, message):
    """It is met hours before the result is; a guess about what was meant costs the night."""
    assert message in refusal(config_file, override)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
            "an alias is not taken, write the value itself (line 2, column",
        ),
        ("a: " + "[" * 5000 + "]" * 5000, "is not valid YAML: maximum recursion depth"),
    ],
    ids=["alias bomb", "deep"],
)
def test_a_file_that_would_fill_the_memory_is_refused_in_one_line(config_file, text, message):
    """Ten lines of aliases of aliases are a billion values."""
    config_file.write_text(text)
    assert message in refusal(config_file)


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


def test_local_paths_become_absolute_and_others_stay(config_file, tmp_path):
    """Workers run elsewhere, in another current directory."""
    (tmp_path / "owner" / "draft").mkdir(parents=True)
    config = RunConfig.load(config_file, ["input.path=s3://bucket/in", "target.model=./t"])
    assert config.input.path == "s3://bucket/in"
    assert config.output.path == str(tmp_path / "out")
    assert config.target.model == str(tmp_path / "t")
    assert config.draft.model == str(tmp_path / "owner" / "draft"), "a folder of that name is there, so it is meant"
    assert RunConfig.load(config_file).target.model == "owner/target", "no such folder: a Hub id"


def test_a_path_may_hold_signs_like_those_of_variables(config_file, monkeypatch):
    """Stores have keys such as `cost_$5`, and the value of a variable may be any path."""
    assert RunConfig.load(config_file, ["input.path=s3://b/cost_$5/a$"]).input.path == "s3://b/cost_$5/a$"
    monkeypatch.setenv("LITERAL", "s3://b/$NAME")
    assert RunConfig.load(config_file, ["input.path=${LITERAL}"]).input.path == "s3://b/$NAME"

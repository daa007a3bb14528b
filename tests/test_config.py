"""The configuration: what is read, what is refused, and in which words."""

from __future__ import annotations

import pytest
import yaml

from specextend.config import ConfigError, JobOptions, RunConfig

LEAST = {
    "input": {"path": "in"},
    "output": {"path": "out"},
    "target": {"model": "owner/target"},
    "draft": {"kind": "model", "model": "owner/draft"},
}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """The least a configuration must say, read from an empty current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(LEAST))
    return file


def refusal(file, *overrides, **keywords) -> str:
    """What a user reads; it must be one line."""
    with pytest.raises(ConfigError) as refused:
        RunConfig.load(file, overrides, **keywords)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decoding.max_new_tokens=1.5", "decoding.max_new_tokens must be an integer, got 1.5"),
        ("decoding.max_batch_size=0", "decoding.max_batch_size must be at least 1, got 0"),
        ("decoding.repetition_penalty=0", "decoding.repetition_penalty must be above 0, got 0.0"),
        ("decoding.no_repeat_ngram_size=-1", "decoding.no_repeat_ngram_size must be at least 0, got -1"),
        ("input.reference_column=''", "input.reference_column must not be empty"),
        ("tree.nodes=many", "tree.nodes must be an integer, got 'many'; tree.nodes must be 'auto', got 'many'"),
        ("input.passthrough=[1]", "input.passthrough.0 must be a string, got 1"),
        ("tree={nodes: auto, max_nodes: 0}", "tree.max_nodes must be at least 1, got 0"),
        (
            "draft={kind: self, model: owner/draft}",
            "draft.kind self, which has no model: leave out, or --set draft.model='\"\"'",
        ),
        ("draft={kind: ngram, revision: main}", "draft.revision must not be set with draft.kind ngram"),
        (
            "draft={kind: ngram, ngram: true, model: m}",
            "draft.model and draft.ngram must not be set with draft.kind ngram",
        ),
        ("cache.recent=7", "cache.recent must be at least 8, tree.depth + 2"),
        ("report.price_per_worker_hour=-1", "report.price_per_worker_hour must be at least 0, got -1.0"),
        ("job.stall_s=0", "job.stall_s must be above 0, got 0.0"),
        ("tree.=3", "--set takes key.path=value, got 'tree.=3'"),
        ("input.id_column=#id", "--set input.id_column: '#id' is a comment in YAML and would be left out"),
        ("input.id_column=&a [*a]", "an alias is not taken, write the value itself"),
        (
            "input.id_column=" + "9" * 5000,
            "--set input.id_column: a value of type str is not a valid YAML value (Exceeds",
        ),
        ("input.id_column=0x" + "f" * 5000, "a value cannot be read: Exceeds the limit"),
        ("input.id_column=" + "[" * 5000 + "]" * 5000, "is not a valid YAML value (maximum recursion depth"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(config_file, override, message):
    """It is met hours before the result is; a guess about what was meant costs the night."""
    assert message in refusal(config_file, override)


def test_a_missing_section_or_key_is_named(config_file):
    """The least a run must say."""
    config_file.write_text("target: {}\noutput: {path: out}\n")
    message = refusal(config_file, "decoding.mode=autoregressive")
    assert "input is missing" in message
    assert "target.model is missing" in message


@pytest.mark.parametrize(
    ("text", "message"),
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


def test_a_draft_without_a_model_is_a_whole_section(config_file):
    """No path to make absolute, and levels of its own."""
    config = RunConfig.load(config_file, ["draft={kind: ngram}", "tree.depth=3"])
    assert (config.draft.kind, config.draft.model, config.num_tree_levels) == ("ngram", "", 16)


@pytest.mark.parametrize(("merged", "levels"), [("false", 3), ("true", 16)])
def test_copies_may_be_deeper_than_a_drafts_own_tree(config_file, merged, levels):
    """Prompts are nevertheless the same: a copy is cut to what a request may still say."""
    config = RunConfig.load(config_file, [f"draft.ngram={merged}", "tree.depth=3"])
    assert config.num_tree_levels == levels
    assert config.max_tokens(2048) == 2044


def test_autoregressive_needs_no_draft(config_file):
    """It is the baseline, and the way to run a target that has no draft yet."""
    config = RunConfig.load(config_file, ["draft=null", "decoding.mode=autoregressive"])
    assert config.draft is None


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


def test_an_eagle_head_is_always_a_local_folder(config_file, tmp_path):
    """`models/x` could be read as a Hub id."""
    config = RunConfig.load(config_file, ["draft.kind=eagle", "draft.model=models/x"])
    assert config.draft.model == str(tmp_path / "models" / "x")


@pytest.mark.parametrize(("mode", "is_active"), [("autoregressive", False), ("tree", True), ("specextend", True)])
def test_plain_decoding_has_no_active_draft(config_file, mode, is_active):
    """A draft that is named but not used must be neither checked, hashed nor loaded."""
    config = RunConfig.load(config_file, [f"decoding.mode={mode}"])
    assert config.draft is not None
    assert config.active_draft == (config.draft if is_active else None)


@pytest.mark.parametrize("key", ["input.path", "output.path", "target.model"])
def test_a_submitted_job_refuses_relative_paths(config_file, key):
    """Its current directory is an unpacked copy that is thrown away, output and all."""
    absolute = [f"{each}=/abs" for each in ("input.path", "output.path", "target.model")]
    message = refusal(config_file, *absolute, f"{key}=./relative", allow_relative=False)
    assert message.startswith(f"{key} must be an absolute path or a URI inside a submitted job, got './relative'")
    assert RunConfig.load(config_file, absolute, allow_relative=False)


def test_job_options_refuse_what_cannot_be():
    """They are checked where they are made, also by a caller who uses no YAML."""
    with pytest.raises(ValueError, match=r"job\.gpus_per_worker must be at least 0"):
        JobOptions(gpus_per_worker=-1)
    with pytest.raises(
        ValueError, match=r"gpus_per_worker must be at most 1, got 2: a model runs on one GPU; set job.wor"
    ):
        JobOptions(gpus_per_worker=2)

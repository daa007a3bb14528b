"""The configuration: what is read, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import date
from pathlib import Path

import pytest
import yaml

from specextend.config import ConfigError, JobOptions, RunConfig

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
LEAST = {
    "input": {"path": "in"},
    "output": {"path": "out"},
    "target": {"model": "owner/target"},
    "draft": {"kind": "model", "model": "owner/draft"},
}
KEYS = {
    "input": "path text_column id_column passthrough max_new_tokens_column num_tokens_column reference_column "
    "instruction_column "
    "filter sample except_done_in limit",
    "output": "path",
    "prompt": "instruction system length_policy max_prompt_tokens",
    "chunks": "tokens instruction merge_instruction",
    "target": "model revision dtype device",
    "draft": "kind model revision ngram",
    "decoding": "mode max_new_tokens temperature top_k top_p seed stop stop_repetition repetition_penalty "
    "no_repeat_ngram_size repetition_scope max_batch_size cache_gib audit_fraction",
    "attention": "backend tree",
    "tree": "nodes max_nodes depth ngram_depth threshold",
    "cache": "policy chunk_size top_k_chunks sinks recent refresh refresh_every draft_prefill_window score_layers",
    "quality": "language",
    "job": "workers gpus_per_worker cpus_per_worker max_attempts max_error_fraction stop_error_fraction "
    "commit_every_s document_deadline_s stall_s deadline_s",
    "report": "price_per_worker_hour",
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


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_loads(file):
    """The ones for GPUs are not run by any test; a renamed key must not be found out on a cluster."""
    config = RunConfig.load(file)
    assert config.draft is not None
    assert config.decoding.mode == "specextend"
    assert config.decoding.max_new_tokens + config.tree.depth + 1 < 8192


def test_the_shipped_configurations_are_these():
    """The test above must not pass because there is nothing to load."""
    gpu = {"vicuna-7b-a100", "longchat-7b-a100", "llama3.1-8b-eagle3-a100", "qwen3-8b-h200"}
    small = {"qwen2.5-1.5b-cpu", "qwen2.5-7b-24gb", "llama3.2-3b-24gb"}
    assert {file.stem for file in CONFIGS} >= {"smollm2", "tiny-random", *gpu, *small}


def test_the_keys_are_the_documented_ones(config_file):
    """Users keep configurations for years; a key that goes away breaks their runs."""
    config = RunConfig.load(config_file)
    found = {name: " ".join(vars_of(getattr(config, name))) for name in RunConfig.model_fields}
    assert found == KEYS


def vars_of(options) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def test_overrides_are_yaml_and_win_over_the_file(config_file):
    """`--set` is how a pipeline varies a run; lists and numbers must come through as such."""
    config = RunConfig.load(
        config_file,
        ['decoding.stop=["\\n\\n", END]', "tree.threshold=1", "draft.model=other/draft", 'input.path="a: #b"'],
    )
    assert config.decoding.stop == ("\n\n", "END")
    assert config.tree.threshold == 1.0
    assert config.draft.model == "other/draft"
    assert config.input.path.endswith("a: #b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decoding.modus=tree", "unknown key decoding.modus; did you mean mode?"),
        ("tree.breadth=3", "unknown key tree.breadth; known keys are nodes, max_nodes, depth, ngram_depth, threshold"),
        ("dekoding.mode=tree", "unknown section dekoding; did you mean decoding?"),
        ("decoding.mode=fast", "decoding.mode must be 'autoregressive', 'tree' or 'specextend', got 'fast'"),
        ("decoding.max_new_tokens='12'", "decoding.max_new_tokens must be an integer, got '12'"),
        ("decoding.max_new_tokens=1.5", "decoding.max_new_tokens must be an integer, got 1.5"),
        ("decoding.max_new_tokens=yes", "decoding.max_new_tokens must be an integer, got True"),
        ("decoding.max_new_tokens=0", "decoding.max_new_tokens must be at least 1, got 0"),
        ("decoding.max_batch_size=0", "decoding.max_batch_size must be at least 1, got 0"),
        ("decoding.top_p=1.5", "decoding.top_p must be in (0, 1], got 1.5"),
        ("decoding.repetition_penalty=0", "decoding.repetition_penalty must be above 0, got 0.0"),
        ("decoding.no_repeat_ngram_size=-1", "decoding.no_repeat_ngram_size must be at least 0, got -1"),
        ("decoding.repetition_scope=prompt", "decoding.repetition_scope must be 'all' or 'output', got 'prompt'"),
        ("input.reference_column=''", "input.reference_column must not be empty"),
        ("tree.nodes=many", "tree.nodes must be an integer, got 'many'; tree.nodes must be 'auto', got 'many'"),
        ("input.passthrough=[1]", "input.passthrough.0 must be a string, got 1"),
        ("tree.threshold=.nan", "tree.threshold must be a finite number, got nan"),
        ("input.passthrough=title", "input.passthrough must be a list, got 'title'"),
        ("input.path=null", "input.path must be a string, got None"),
        ("tree=16", "tree must be a section (nodes, max_nodes, depth, ngram_depth, threshold), got 16"),
        ("target.dtype=int8", "target.dtype must be 'bfloat16', 'float16' or 'float32', got 'int8'"),
        ("tree={nodes: auto, max_nodes: 0}", "tree.max_nodes must be at least 1, got 0"),
        ("tree.ngram_depth=0", "tree.ngram_depth must be at least 1, got 0"),
        ("draft={kind: model}", "draft.model must not be empty with draft.kind model"),
        ("draft.kind=ngram", "draft.model must not be set with draft.kind ngram, which has no model"),
        (
            "draft={kind: self, model: owner/draft}",
            "draft.kind self, which has no model: leave out, or --set draft.model='\"\"'",
        ),
        ("draft={kind: ngram, revision: main}", "draft.revision must not be set with draft.kind ngram"),
        (
            "draft={kind: ngram, ngram: true, model: m}",
            "draft.model and draft.ngram must not be set with draft.kind ngram",
        ),
        ("draft=null", "draft.kind and draft.model are missing: decoding.mode specextend needs a draft"),
        ("job.max_error_fraction=2", "job.max_error_fraction must be in [0, 1], got 2.0"),
        ("cache.recent=7", "cache.recent must be at least 8, tree.depth + 2"),
        ("job.workers=0", "job.workers must be at least 1, got 0"),
        ("report.price_per_worker_hour=-1", "report.price_per_worker_hour must be at least 0, got -1.0"),
        ("job.stall_s=0", "job.stall_s must be above 0, got 0.0"),
        ("tree.nodes", "--set takes key.path=value, got 'tree.nodes'"),
        ("tree.=3", "--set takes key.path=value, got 'tree.=3'"),
        ("input.path.deep=3", "--set input.path.deep: path is a value, not a section"),
        ("input.text_column=the text #1", "--set input.text_column: '#1' is a comment in YAML and would be left out"),
        ("input.id_column=#id", "--set input.id_column: '#id' is a comment in YAML and would be left out"),
        ("input.id_column=&a [*a]", "an alias is not taken, write the value itself"),
        (
            "input.id_column=" + "9" * 5000,
            "--set input.id_column: a value of type str is not a valid YAML value (Exceeds",
        ),
        ("input.id_column=0x" + "f" * 5000, "a value cannot be read: Exceeds the limit"),
        ("input.id_column=" + "[" * 5000 + "]" * 5000, "is not a valid YAML value (maximum recursion depth"),
        ("input.path=[", "--set input.path: '[' is not a valid YAML value"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(config_file, override, message):
    """It is met hours before the result is; a guess about what was meant costs the night."""
    assert message in refusal(config_file, override)


def test_all_mistakes_are_said_at_once(config_file):
    """A user who mends one at a time starts the job once for each."""
    message = refusal(config_file, "tree.nodes=x", "cache.policy=none")
    assert "tree.nodes must be an integer" in message
    assert "cache.policy must be" in message


def test_a_missing_section_or_key_is_named(config_file):
    """The least a run must say."""
    config_file.write_text("target: {}\noutput: {path: out}\n")
    message = refusal(config_file, "decoding.mode=autoregressive")
    assert "input is missing" in message
    assert "target.model is missing" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree: {nodes: 3}\ntree: {depth: 2}\n", "key tree is repeated"),
        ("tree: {nodes: 3", "is not valid YAML"),
        ("- a\n", "must hold sections (input, output, target"),
        ("", "must hold sections"),
        (None, "cannot be read"),
        (
            "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
            "an alias is not taken, write the value itself (line 2, column",
        ),
        ("a: " + "[" * 5000 + "]" * 5000, "is not valid YAML: maximum recursion depth"),
    ],
    ids=["repeated key", "broken", "list", "empty", "no file", "alias bomb", "deep"],
)
def test_a_file_that_is_no_configuration_is_said_in_one_line(config_file, text, message):
    """YAML itself would keep the last of two equal sections without a word."""
    config_file.unlink() if text is None else config_file.write_text(text)
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
    config = RunConfig.load(config_file, ["draft={kind: ngram}", "tree.depth=3", "tree.ngram_depth=9"])
    assert (config.draft.kind, config.draft.model, config.num_tree_levels) == ("ngram", "", 9)


@pytest.mark.parametrize(("merged", "levels"), [("false", 3), ("true", 9)])
def test_copies_may_be_deeper_than_a_drafts_own_tree(config_file, merged, levels):
    """Prompts are nevertheless the same: a copy is cut to what a request may still say."""
    config = RunConfig.load(config_file, [f"draft.ngram={merged}", "tree.depth=3", "tree.ngram_depth=9"])
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


def test_paths_may_hold_the_environment_and_the_date_of_the_run(config_file, tmp_path, monkeypatch):
    """One file serves every night, in every place; the run's date must not change when a start resumes it."""
    monkeypatch.setenv("CORPUS", "s3://bucket/corpus")
    paths = ["input.path=${CORPUS}/day={run_date}", "output.path=out/{run_date}", "input.except_done_in=['out/*']"]
    config = RunConfig.load(config_file, paths, run_date=date(2026, 11, 21))
    assert config.input.path == "s3://bucket/corpus/day=2026-11-21"
    assert config.output.path == str(tmp_path / "out" / "2026-11-21")
    assert config.input.except_done_in == (str(tmp_path / "out" / "*"),)
    monkeypatch.setenv("CORPUS", "")
    for path in ("${CORPUS}", "${NO_SUCH}", "${}", "{date}"):
        assert refusal(config_file, f"input.path='{path}'").startswith(
            f"input.path has {path}, which is not set; it takes"
        )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("output.path=/data/$HOME/out", "output.path has $HOME; write ${HOME} for a variable"),
        ("input.except_done_in=['s3://b/_$1', '$OUT']", "input.except_done_in has $OUT; write ${OUT} for"),
        ("input.path='${CORPUS/a.parquet'", "input.path has a ${ that is not closed; write ${NAME}"),
    ],
)
def test_a_variable_that_is_written_wrongly_is_refused(config_file, path, says):
    """A night's output would lie in a folder named `$HOME`, where nobody looks for it."""
    assert refusal(config_file, path).startswith(says)


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


def test_a_configuration_does_not_change(config_file):
    """What the fingerprint was taken of is what runs."""
    config = RunConfig.load(config_file)
    with pytest.raises(ValueError, match="frozen"):
        config.tree = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tree.nodes = 3


def test_a_configuration_travels_to_another_process(config_file):
    """The driver ships it to its actors."""
    config = RunConfig.load(config_file)
    assert pickle.loads(pickle.dumps(config)) == config


def test_job_options_refuse_what_cannot_be():
    """They are checked where they are made, also by a caller who uses no YAML."""
    with pytest.raises(ValueError, match=r"job\.gpus_per_worker must be at least 0"):
        JobOptions(gpus_per_worker=-1)
    with pytest.raises(
        ValueError, match=r"gpus_per_worker must be at most 1, got 2: a model runs on one GPU; set job.wor"
    ):
        JobOptions(gpus_per_worker=2)

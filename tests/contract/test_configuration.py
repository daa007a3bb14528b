"""The configuration: the keys that users have in their files, what is refused, and in which words."""

import dataclasses
import pickle
from datetime import date
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from specextend import RunConfig
from tests.refused import refused
from tests.tables import cases

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LEAST = yaml.safe_load("""
    input: {path: in}
    output: {path: out}
    target: {model: owner/target}
    draft: {kind: model, model: owner/draft}
""")
KEYS = yaml.safe_load("""
    input: path text_column id_column pages_column passthrough reference_column gold instruction_column
      options_column filter sample except_done_in redo limit
    output: path column schema sources figures confidence verify verify_below rules
    prompt: instruction examples verification template_options system length_policy max_prompt_tokens
    parts: tokens
    target: model adapter dtype quantize
    draft: kind model ngram feature_layers
    decoding: mode max_new_tokens temperature top_k top_p seed stop stop_repetition repetition_penalty
      no_repeat_ngram_size max_batch_size cache_gib
    attention: backend tree
    tree: nodes depth threshold
    cache: policy chunk_size top_k_chunks recent refresh_every score_layers
    quality: language
    job: workers gpus_per_worker cpus_per_worker max_attempts max_error_fraction commit_every_s stall_s deadline_s
    report: price_per_worker_hour
""")
DEFAULTS = yaml.safe_load("""
    input.text_column: text
    target.dtype: bfloat16
    prompt.length_policy: middle
    decoding.mode: specextend
    decoding.max_new_tokens: 256
    decoding.temperature: 0.0
    attention.backend: auto
    cache.policy: retrieval
    job.workers: 1
    job.max_attempts: 3
    job.max_error_fraction: 0.0
""")


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """The least a configuration must say, read from an empty current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(LEAST))
    return file


def refusal(file, *overrides):
    """What a user reads; it must be one line."""
    return refused(RunConfig.load, file, overrides)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_loads(file):
    """The ones for GPUs are not run by any test; a renamed key must not be found out on a cluster."""
    assert len(CONFIGS) > 5
    assert RunConfig.load(file).decoding.mode == "specextend"


@pytest.mark.parametrize("section", KEYS)
def test_the_keys_of_a_section_are_there(section, config_file):
    """Users keep configurations for years: a key that goes away breaks their runs."""
    options = getattr(RunConfig.load(config_file), section)
    assert set(KEYS[section].split()) <= {field.name for field in dataclasses.fields(options)}


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_key_that_is_left_out_has_its_default(key, config_file):
    """Another one would give other summaries."""
    assert attrgetter(key)(RunConfig.load(config_file)) == DEFAULTS[key]


def test_overrides_are_yaml_and_win_over_the_file(config_file):
    """`--set` is how a pipeline varies a run; lists and numbers must come through as such."""
    changes = ['decoding.stop=["\\n\\n", END]', "tree.threshold=1", "draft.model=other/draft", 'input.path="a: #b"']
    config = RunConfig.load(config_file, changes)
    assert config.decoding.stop == ("\n\n", "END")
    assert config.tree.threshold == 1.0
    assert config.draft.model == "other/draft"
    assert config.input.path.endswith("a: #b")


@pytest.mark.parametrize(
    "override, message",
    [
        *cases("""
        decoding.modus=tree -> unknown key decoding.modus; did you mean mode?
        tree.breadth=3 -> unknown key tree.breadth; known keys are nodes
        max_new_tokens=64 -> unknown section max_new_tokens; did you mean decoding.max_new_tokens?
        decoding.mode=fast -> decoding.mode must be 'autoregressive', 'tree' or 'specextend', got 'fast'
        decoding.max_new_tokens='12' -> decoding.max_new_tokens must be an integer, got '12'
        decoding.max_new_tokens=0 -> decoding.max_new_tokens must be at least 1, got 0
        tree.threshold=.nan -> tree.threshold must be a finite number, got nan
        input.passthrough=title -> input.passthrough must be a list, got 'title'
        tree=16 -> tree must be a section (nodes
        draft={kind: model} -> draft.model must not be empty with draft.kind model
        draft={kind: ngram, model: m} -> draft.model must not be set with draft.kind ngram, which has no model
        draft={kind: model, model: m, feature_layers: [1]} -> feature_layers must not be set with draft.kind model
        draft=null -> draft.kind and draft.model are missing: decoding.mode specextend needs a draft
        job.max_error_fraction=2 -> job.max_error_fraction must be in [0, 1], got 2.0
        tree.nodes -> --set takes key.path=value, got 'tree.nodes'
        input.path.deep=3 -> --set input.path.deep: path is a value, not a section
        input.text_column=the text #1 -> --set input.text_column: '#1' is a comment in YAML and would be left out
        input.path=[ -> --set input.path: '[' is not a valid YAML value
        prompt.instruction={{ document }} -> quote a text: --set 'prompt.instruction="{{ document }}"'
        prompt.instruction=Translate: {{ document }} -> --set 'prompt.instruction="Translate: {{ document }}"'
        prompt.instruction={title} -> prompt.instruction must be a string, got {'title': None}; quote a text: --set
        input.reference_column='' -> input.reference_column must not be empty
        tree.nodes=many -> tree.nodes must be an integer, got 'many'; tree.nodes must be 'auto', got 'many'
        input.passthrough=[1] -> input.passthrough.0 must be a string, got 1
        tree={nodes: auto, max_nodes: 0} -> tree.max_nodes must be at least 1, got 0
        draft={kind: ngram, ngram: true, model: m} -> draft.model must not be set with draft.kind ngram
        cache.recent=7 -> cache.recent must be at least 8 (tree.depth + 2)
        job.stall_s=0 -> job.stall_s must be above 0, got 0.0
        input.id_column=&a [*a] -> an alias is not taken, write the value itself
    """),
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


def test_all_mistakes_are_said_at_once(config_file):
    """A user who mends one at a time starts the job once for each."""
    message = refusal(config_file, "tree.nodes=x", "cache.policy=none")
    assert "tree.nodes must be an integer" in message
    assert "cache.policy must be" in message


@pytest.mark.parametrize(
    "text, message",
    [
        ("tree: {nodes: 3}\ntree: {depth: 2}\n", "key tree is repeated"),
        ("tree: {nodes: 3", "is not valid YAML"),
        ("- a\n", "must hold keys with their values"),
        (None, "cannot be read"),
        (
            "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
            "an alias is not taken, write the value itself (line 2, column",
        ),
        ("a: " + "[" * 5000 + "]" * 5000, "is not valid YAML: maximum recursion depth"),
        ("a: {enum: [0.1, .inf, 1.23456789012345678]}", "1.23456789012345678 has more digits than a number holds"),
    ],
    ids=["repeated key", "broken", "list", "no file", "alias bomb", "deep", "digits"],
)
def test_a_file_that_is_no_configuration_is_said_in_one_line(config_file, text, message):
    """YAML itself would keep the last of two equal sections without a word, and ten lines of aliases of aliases are a
    billion values.
    """
    config_file.unlink() if text is None else config_file.write_text(text)
    assert message in refusal(config_file)


def test_paths_may_hold_the_environment_and_the_date_of_the_run(config_file, tmp_path, monkeypatch):
    """One file serves every night, in every place; the run's date must not change when a start resumes it."""
    monkeypatch.setenv("CORPUS", "s3://bucket/corpus")
    paths = ["input.path=${CORPUS}/day={run_date}", "output.path=out/{run_date}", "input.except_done_in=['out/*']"]
    config = RunConfig.load(config_file, paths, run_date=date(2026, 11, 21))
    assert config.input.path == "s3://bucket/corpus/day=2026-11-21"
    assert config.output.path == str(tmp_path / "out" / "2026-11-21")
    assert config.input.except_done_in == (str(tmp_path / "out" / "*"),)
    assert refusal(config_file, "input.path='${NO_SUCH}'").startswith("input.path has ${NO_SUCH}, but it is not set")
    assert refusal(config_file, "output.path=/data/$HOME/out").startswith("output.path has $HOME; write ${HOME}")


def test_a_configuration_travels_to_another_process_and_does_not_change(config_file):
    """The driver ships it to its workers, and what the fingerprint was taken of is what runs."""
    config = RunConfig.load(config_file)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tree.nodes = 3

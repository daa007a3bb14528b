"""The command `specextend`: it answers at once, says errors in one line, and does what the scripts in jobs/ do."""

import fnmatch
import json
import os
import sys
from datetime import date
from pathlib import Path

import pytest

from specextend.config import RunConfig
from tests.job.conftest import ROOT, environment, ran, specextend, write_corpus


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arguments", ["--help", "--version", "run --help", "train --help", "configs"])
def test_help_comes_at_once(arguments):
    """Importing torch takes seconds, in which who asks for a flag has given up. The clock proves nothing here."""
    heavy = {"torch", "ray", "transformers", "pydantic", "pyarrow", "numpy", "yaml"}
    code = (
        "import os, sys; from specextend.cli.main import main\n"
        f"os._exit = lambda code: sys.exit(sorted({heavy} & sys.modules.keys()) or code)\nmain()"
    )
    ended = ran(sys.executable, "-c", code, *arguments.split()).exits(0)
    assert ended.stderr == ""
    assert ended.stdout


def test_every_command_has_its_help():
    """Those that a user meets first come first."""
    listed = [line.split()[0] for line in specextend("--help").stdout.partition("Commands:\n")[2].splitlines()]
    assert listed[:5] == ["demo", "prepare", "init", "run", "plan"]
    for name in listed:
        ended = specextend(f"{name} --help")
        assert ended.code == 0, name
        assert ended.stdout.lower().startswith("usage: ")


@pytest.mark.parametrize(
    "said, arguments",
    {
        "No such command 'rum'. Did you mean 'run'?": "rum",
        "Missing option '--config'. See: specextend run --help": "run",
        "Invalid value for '--calibrate'": "plan --config smollm2 --calibrate 1",
        "the names of shipped ones are": "run --config nothing.yaml",
        "; did you mean smollm2?": "run --config smolm2",
        "; did you mean mine.yaml?": "run --config mine",
        "Invalid value for '--run-date'": "run --config smollm2 --run-date tomorrow",
        "holds no run": "compare nowhere else",
    }.items(),
)
def test_what_is_wrong_is_said_in_one_line(arguments, said, here):
    """With exit code 2, whichever library found it."""
    Path("mine.yaml").touch()
    line = specextend(arguments).line()
    assert line[:7] == "error: "
    assert said in line


def test_of_several_configurations_a_later_one_wins_key_by_key(here):
    """A pair, a task and somebody's own file; each value says whose it is, and a path is relative to its own file.

    What is shown is itself a configuration.
    """
    (here / "mine").mkdir()
    (here / "mine" / "own.yaml").write_text("input: {path: in}\ndraft: {kind: ngram}\ndecoding: {max_new_tokens: 9}\n")
    given = "--config smollm2 --config keywords --config mine/own.yaml"
    shown = specextend(f"config show {given} --set output.path=out").stdout.splitlines()
    assert {
        f'  path: "{here}/mine/in"  # mine/own.yaml',
        f'  path: "{here}/out"  # --set',
        '  column: "keywords"  # keywords',
        "  max_new_tokens: 9  # mine/own.yaml",
        '  stop: ["\\n"]  # keywords',
        '  length_policy: "middle"  # smollm2',
        '  kind: "ngram"  # mine/own.yaml',
        '  model: ""  # default',
    } <= set(shown)
    one = RunConfig.load(["smollm2", "keywords", "mine/own.yaml"], ["output.path=out"])
    (here / "one.yaml").write_text("\n".join(shown))
    assert one == RunConfig.load("one.yaml")
    alone = specextend("plan --config keywords --input in --output out")
    assert alone.line() == "error: target is missing; a pair brings it: --config smollm2"


def test_the_schema_knows_every_key_and_its_meaning():
    """An editor completes keys by it, and shows what they mean."""
    schema = json.loads(specextend("config schema").stdout)
    assert set(schema["required"]) == {"input", "output", "target"}
    assert "Parquet" in schema["$defs"]["InputOptions"]["properties"]["path"]["description"]
    missing = [
        (owner, key)
        for owner, each in schema["$defs"].items()
        for key, value in each["properties"].items()
        if not value.get("description")
    ]
    assert not missing


def test_the_shipped_configurations_are_listed_with_what_they_need():
    """A name is what `--config` takes."""
    lines = specextend("configs").stdout.splitlines()
    names = {"pair": (ROOT / "configs").glob("*.yaml"), "task": (ROOT / "configs" / "tasks").glob("*.yaml")}
    expected = [(path.stem, kind) for kind, paths in names.items() for path in sorted(paths)]
    assert [tuple(line.split()[:2]) for line in lines] == expected
    assert any("one GPU of 24 GB" in line for line in lines)


def test_a_machine_is_checked_for_a_configuration():
    """Before a night is spent on it; the memory is that of the plan."""
    fits = specextend("check --config tiny-random --json -")
    found = json.loads(fits.stdout)
    assert fits.code == 0
    assert found["worker"]["problem"] is None
    assert found["cores"] >= 1
    large = specextend("check --config tiny-random --set job.cpus_per_worker=5000").exits(2)
    assert large.stdout.splitlines()[-1].startswith("does not fit: job.cpus_per_worker is 5000 but this machine has")


def test_the_kernels_of_a_machine_are_tried_with_the_shapes_of_a_target():
    """As a start does, without the target's weights: which are right. Times are for people, and decide nothing."""
    shown = specextend("check --config tiny-random --set attention.tree=auto --kernels --time --json -")
    trials = {trial["name"]: trial for trial in json.loads(shown.stdout)["kernels"]}
    assert trials["compiled attention"]["taken"]
    assert not any(trial["is_wrong"] for trial in trials.values())
    assert "--kernels needs --config" in specextend("check --kernels").line()


def test_a_shell_completes_commands_and_names_of_configurations():
    """By the variable that `--help` names."""

    def complete(line):
        variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split())), "_SPECEXTEND_COMPLETE": "bash_complete"}
        code = "import sys; sys.argv = ['specextend']; from specextend.cli.main import main; main()"
        found = ran(sys.executable, "-c", code, env=environment() | variables)
        return {each.partition(",")[2] for each in found.stdout.split()}

    assert {"run", "report", "compare"} <= complete("specextend ")
    assert {"smollm2", "tiny-random"} <= complete("specextend run --config ")


def test_a_configuration_is_begun_for_somebodys_columns(here):
    """It asks nothing, says why, and the plan takes what it has written."""
    texts = [f"Report {number}. " + "The committee met. " * 9 for number in range(3)]
    columns = {"no": ["a", "b", "c"], "Titel: #1": ["x"] * 3, "body": texts, "doc_id": [7, 8, 9], "n": [1, 2, 3]}
    write_corpus(here / "my data" / "in.parquet", ["short"] * 3, **columns)
    assert specextend("init 'my data' --config tiny-random --to no/mine.yaml").code == 2, "the folder is not there"
    ended = specextend("init 'my data' --config tiny-random --to mine.yaml").exits(0)
    assert (
        "column of the text: body (the longest texts: 181 characters on average in the first 3 rows of in.parquet)"
        in ended.stdout
    )
    written = (here / "mine.yaml").read_text()
    assert 'id_column: "doc_id" # named as an id, unique and never null in the first 3 rows' in written
    assert '# passthrough: ["text", "no", "Titel: #1", "n"]' in written
    config = RunConfig.load("mine.yaml")
    assert config.input.text_column == "body"
    assert config.input.id_column == "doc_id"
    assert config.output.path == f"{here}/out/my data"
    assert specextend("plan --config mine.yaml").stdout.startswith("3 of 3 rows to do")
    again = specextend("init 'my data' --to mine.yaml")
    assert again.line() == "error: mine.yaml exists already; name another file with --to"
    specextend("init 'my data' --config tiny-random --config translation --to task.yaml").exits(0)
    own = [
        "input.path=my data",
        "input.text_column=body",
        "input.id_column=doc_id",
        "output.path=out/my data-translation",
    ]
    assert RunConfig.load("task.yaml") == RunConfig.load(["tiny-random", "translation"], own)
    assert len((here / "task.yaml").read_text().splitlines()) < 16, "of seventy lines nobody finds their own five"
    specextend("init 'my data' --config mine.yaml --config keywords --to more.yaml").exits(0)
    more = RunConfig.load("more.yaml")
    assert more.output.column == "keywords"
    assert more.target == config.target
    assert more.decoding.max_new_tokens == 64


def test_the_first_night_leaves_out_what_the_first_run_has_done(here):
    """With the two lines "every night" taken up, it did everything again, inside the folder of the first run."""
    write_corpus(here / "in" / "in.parquet", ["The committee met."] * 3)
    assert specextend("init in --to first.yaml").code == 0
    begun = (here / "first.yaml").read_text()
    night = begun.replace("# except_done_in:", "except_done_in:").replace('path: "out/in"\n  # ', "")
    (here / "night.yaml").write_text(night)
    earlier = [RunConfig.load("first.yaml"), RunConfig.load("night.yaml", run_date=date(2026, 1, 31))]
    [done] = RunConfig.load("night.yaml", run_date=date(2026, 2, 1)).input.except_done_in
    outputs = [run.output.path for run in earlier]
    assert outputs == [f"{here}/out/in", f"{here}/out/in-2026-01-31"]
    assert fnmatch.filter(outputs, done) == outputs


def test_a_shipped_pair_brings_no_paths_where_somebody_has_their_own(here):
    """`--config mine.yaml --config pair` summarised the demo's documents into the demo's folder, with exit 0."""
    (here / "mine.yaml").write_text("input: {path: in, text_column: body}\noutput: {path: out}\n")
    for order in (["mine.yaml", "tiny-random"], ["tiny-random", "mine.yaml"]):
        config = RunConfig.load(order, ["input.id_column=null"])
        assert config.input.path == f"{here}/in"
        assert config.output.path == f"{here}/out"
        assert config.input.text_column == "body"
        assert config.decoding.max_new_tokens == 24
    (here / "ids.yaml").write_text("input: {id_column: key}\n")
    assert RunConfig.load(["ids.yaml", "tiny-random", "mine.yaml"]).input.id_column == "key"


@pytest.mark.parametrize(
    "base, said",
    {
        "a.yaml": "leads back to itself",
        "{a: 1}": "base must name a configuration",
        "[tiny-random, 3]": "base must name a configuration",
        "smolm2": "; did you mean smollm2?",
    }.items(),
)
def test_a_base_that_is_none_is_refused(base, said, here):
    """A circle would be read for ever."""
    (here / "a.yaml").write_text(f"base: {base}\n")
    with pytest.raises(ValueError, match=said):
        RunConfig.load("a.yaml")


def test_no_column_is_taken_for_an_id_without_a_reason(here):
    """The run refuses repeated ids, and numbers rows where there are none."""
    write_corpus(here / "a.parquet", ["one two three", "four"], id=["x", "x"], year=[1, 2])
    assert specextend("init a.parquet --config tiny-random").code == 0
    assert "  # id_column: NAME # no column is named as an id and unique" in (here / "a.yaml").read_text()
    assert RunConfig.load("a.yaml").input.id_column is None
    columns = {"url": ["x", None, "y"] * 4, "fetched_at": [f"2026-01-{day:02}" for day in range(1, 13)]}
    write_corpus(here / "b.parquet", ["one two three"] * 12, **columns)
    said = specextend("init b.parquet --config tiny-random").stdout
    assert "of the id: fetched_at (unique in the first 12 rows of b.parquet; url is named as one, but has nulls" in said


def test_init_says_what_the_data_lacks_for_the_task(here):
    """An id in another language, a second file with other columns, and a template's column that is nowhere."""
    texts = [f"Report {number} of the committee, which met." for number in range(12)]
    write_corpus(here / "data" / "a.parquet", texts, Titel=[f"T{i}" for i in range(12)], Nummer=list(range(12)))
    write_corpus(here / "data" / "b.parquet", ["one"], Nummer=["7"])
    (here / "data" / "c.pdf").touch()
    ended = specextend("init data --config tiny-random --config question").exits(0)
    assert ": 1 .pdf; run specextend prepare documents data --output out/data-documents\n" in ended.stdout
    assert "of the id: Nummer (unique in the first 12 rows of a.parquet)" in ended.stdout
    assert "b.parquet and a.parquet differ in Nummer, Titel; a run needs the columns it uses in all" in ended.stdout
    assert "the task wants a column question; the data has text, Nummer, Titel: set prompt.i" in ended.stdout
    written = (here / "data.yaml").read_text()
    for line in ('path: "out/data-question-{run_date}"', "limit: 20", 'except_done_in: ["out/data-question*"]'):
        assert f"# {line}" in written


def test_a_wheel_is_built_without_the_tools_of_the_project(tmp_path):
    """`make wheel` first installed torch, the linters and what makes the site: minutes, and gigabytes for a GPU."""
    ended = ran("make", "--dry-run", "wheel", f"VENV={tmp_path}/none", env=dict(os.environ))
    assert "pip wheel " in ended.stdout
    assert "pip install" not in ended.stdout

"""Several tasks of one run: each document is read once, and each answer is that of a run of its own."""

import json
import re
import shlex
import shutil
import signal
from functools import cache, partial

import pytest
import yaml

from specextend import RunConfig, Summarizer
from tests.contract.test_configuration import LEAST
from tests.job.conftest import (
    AT_ONCE_S,
    CONFIG,
    dying_command,
    end_of,
    long_texts,
    on,
    read_json,
    rows,
    sets,
    specextend,
    write_corpus,
)
from tests.refused import refused
from tests.tables import cases

TASKS = yaml.safe_load(r"""
    outline:
      prompt: {instruction: "{{ document }}\n\nWrite an outline for {{ reader }}.", verification: "So?"}
      output: {column: outline, sources: true, verify: true}
      decoding: {temperature: 0.7, stop: [t1]}
    kind:
      prompt: {instruction: "{{ document }}\n\nWhat is it?"}
      output: {column: kind_as_text, schema: {kind: law | report | speech}}
    about:
      prompt: {instruction: "What is it about?\n\n{{ document }}", system: Be brief.}
      output: {column: about}
""")
OWN = {"outline": ["outline"], "kind": ["kind_as_text", "kind", "choices"], "about": ["about"]}
"""The columns of each."""
DIFFERING = {"num_cached_tokens", "num_forwards"}
"""What depends on what else is in the batch."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with the corpus, and with runs that no test writes to."""
    folder = tmp_path_factory.mktemp("shared")
    texts = [f"Section {number}. " * (40 + 60 * number) for number in range(4)]
    readers = [f"reader {number}" for number in range(4)]
    write_corpus(folder / "in.parquet", texts, reader=readers, doc_id=list("abcd"))
    return folder


@pytest.fixture(scope="module")
def ask(summarize_here, shared):
    """Run tasks over the corpus: by the list of one configuration, or one as the configuration itself.

    `run` returns what it said on stderr, and its output.
    """

    def run(output, /, *arguments, code=0, **values):
        file = output.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(values))
        return summarize_here("--config", file, *on(shared / "in.parquet", output), *arguments).exits(
            code
        ).stderr, output

    return run


@pytest.fixture(scope="module")
def alone(ask, shared):
    """Name of a task -> the output of a run of its own."""
    return cache(lambda name: ask(shared / name, **TASKS[name])[1])


@pytest.fixture(scope="module")
def finished(ask, shared):
    """The output of a run of two tasks."""
    return ask(shared / "both", tasks=listed("outline", "kind"))[1]


@pytest.fixture
def output(finished, tmp_path):
    """The same in a folder that may be written to."""
    return shutil.copytree(finished, tmp_path / "out")


def listed(*names):
    return [{"name": name, **TASKS[name]} for name in names]


def assert_are_those_of(found, outputs):
    """The rows of several tasks have, for each, what a run of its own gives."""
    for number, (name, output) in enumerate(outputs.items()):
        for row, own in zip(found, rows(output / "summaries"), strict=True):
            task = row["tasks"][number]
            assert [row[column] for column in OWN[name]] == [own[column] for column in OWN[name]]
            same = [key for key in task.keys() & own.keys() - DIFFERING if not key.endswith("_s")]
            assert [task[key] for key in same] == [own[key] for key in same]
            assert (task["name"], task["text"]) == (name, own[OWN[name][0]])
    for row in found:
        for count in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_requests"):
            assert row[count] == sum(task[count] for task in row["tasks"])
        if row["doc_id"] != "a":  # of which too little is equal
            assert row["num_cached_tokens"] > row["num_prompt_tokens"] / 4, "the second has read nothing but its end"


@pytest.mark.slow
def test_answers_are_those_of_runs_of_their_own(ask, alone, tmp_path):
    """Texts and their verdicts, scored labels and sampled ones."""
    said, output = ask(tmp_path / "out", tasks=listed(*TASKS))
    assert "task about reads each document again" in said
    found = rows(output / "summaries")
    assert_are_those_of(found, {name: alone(name) for name in TASKS})
    assert [row["verdicts"] for row in found] == [row["tasks"][0]["verdicts"] for row in found]


@pytest.mark.slow
def test_answers_about_a_document_in_parts_are_those_too(ask, tmp_path):
    """Of parts nobody asks whether they are right."""
    asked = {name: task | {"output": task["output"] | {"verify": False}} for name, task in TASKS.items()}
    parts = {"length_policy": "parts", "max_prompt_tokens": 400}
    _, output = ask(tmp_path / "out", prompt=parts, tasks=[{"name": name, **task} for name, task in asked.items()])
    outputs = {
        name: ask(tmp_path / name, **task | {"prompt": parts | task["prompt"]})[1] for name, task in asked.items()
    }
    assert_are_those_of(rows(output / "summaries"), outputs)


BROKEN = yaml.safe_load(r"""
    name: form
    prompt: {instruction: "{{ document }}\n\nFill in."}
    output: {column: form, schema: {agency: {type: string, minLength: 20, maxLength: 60}}}
    decoding: {max_new_tokens: 14, stop_repetition: false}
""")
"""A task whose limit lets no answer end."""


def export_of(output):
    """What an export says of its rows."""
    said = specextend("export", output, "--to", output.parent / "all.jsonl", "--replace").exits(0).stdout
    assert said.startswith("4 of 4 documents")
    return said


@pytest.mark.slow
def test_a_task_that_fails_leaves_the_answers_of_the_others(ask, tmp_path):
    """They were nowhere but in errors/, and the remedy that the error named was refused. Now the failed task
    alone is retried, and the row names it. With more tokens, by the remedy, all tasks are done again beside the run.
    """
    given = partial(ask, tmp_path / "out", tasks=[BROKEN, *listed("outline")])
    said, output = given(code=3)
    assert "see the column tasks of summaries/, --retry-errors does none" in said
    assert not (output / "errors").exists()
    before = rows(output / "summaries")
    for row in before:
        failed, answered = row["tasks"]
        assert row["form"] is row["agency"] is answered["error_class"] is None
        assert (row["outline"], row["num_output_tokens"]) == (answered["text"], answered["num_output_tokens"])
        assert (failed["name"], failed["error_class"], failed["retryable"]) == ("form", "IncompleteAnswer", False)
        assert failed["text"].startswith("{"), "what it wrote"
    [remedy] = {
        re.search(r"the answer ended .* with (--.*?), or limit", row["tasks"][0]["message"])[1] for row in before
    }
    assert remedy == """--redo "error_class = 'IncompleteAnswer'" --set decoding.max_new_tokens=28"""
    status = specextend("status", output).stdout
    assert "finished with errors: 0 of 4 rows done, 4 failed, 0 left" in status
    assert "of these, 4 failed in some tasks" in status
    report = read_json(output / "report.json")
    assert (report["rows"]["errors"], report["partial"]) == (4, 4)
    assert report["errors"][0]["example_message"].startswith("task form: the answer ended")
    assert re.search(r"rows done\W+0\W+rows failed\W+4\W", specextend("report", output).stdout)
    _, night = ask(tmp_path / "night", *sets(f"input.except_done_in=[{output}]"), tasks=[BROKEN, *listed("outline")])
    assert not (night / "summaries").exists(), "another try would fail in the same way"
    given("--retry-errors=all", code=3)
    for was, row in zip(before, rows(output / "summaries"), strict=True):
        assert (row["attempts"], row["tasks"][1]) == (2, was["tasks"][1])
        own = ("doc_id", "content_sha256", "worker", "started_at", "num_output_tokens", "outline")
        assert [row[name] for name in own] == [was[name] for name in own]
    assert export_of(output).endswith("; 4 with a task that failed\n")
    given(*shlex.split(remedy.replace("28", "600")))
    for was, row in zip(before, rows(output / "redone" / "again" / "summaries"), strict=True):
        assert row["agency"] in row["form"]
        assert len(row["outline"]) >= len(was["outline"]), "a limit of the command line is that of every task"
    assert "task that failed" not in export_of(output)


def test_another_list_of_tasks_is_another_run(ask, finished, alone):
    """Its rows would not have the same columns, or the column tasks two orders. Without tasks a run is what it was
    before there were any.
    """
    said, _ = ask(finished, code=5, tasks=listed("outline", "about"))
    assert "tasks: outline, kind there, outline, about here" in said
    ask(finished, code=5, tasks=listed("kind", "outline"))
    manifest = read_json(alone("about") / "_run" / "manifest.json")
    assert not any(name.startswith("tasks") for name in manifest["identity"]["config"])
    assert "tasks" not in rows(alone("about") / "summaries")[0]


def test_a_task_added_to_a_finished_run_is_decoded_alone(ask, alone, output, tmp_path):
    """With the answers of a run of its own, right ones beside them; what is done stays as it is, byte for byte."""
    gold = sets("input.gold={about: reader}")
    again = {"name": "again", "base": str(alone("about").with_suffix(".yaml")), "output": {"column": "again"}}
    done = {path: path.read_bytes() for path in (output / "summaries").iterdir()}
    for name, added in (("about", listed("about")), ("again", [*listed("about"), again])):
        tasks = [*listed("outline", "kind"), *added]
        said, _ = ask(output, *gold, tasks=tasks)
        assert f"tasks: only {name}; the others are done" in said
        found = rows(output / "added" / name / "summaries")
        assert [row[name] for row in found] == [row["about"] for row in rows(alone("about") / "summaries")]
        said, _ = ask(output, *gold, tasks=tasks)
        assert "complete already, 4 rows" in said
        assert f"\nadded/{name}: complete: 4 of 4 rows" in specextend("status", output).stdout
    assert done == {path: path.read_bytes() for path in (output / "summaries").iterdir()}
    assert read_json(output / "added" / "about" / "report.json")["gold"]["about"]["rows"] == 4
    (output / "added" / "again").rename(tmp_path / "elsewhere")
    (output / "added" / "again").symlink_to(tmp_path / "elsewhere")
    said, _ = ask(output, *gold, tasks=tasks, code=2)
    for line in said, specextend("status", output).exits(2).stderr:
        assert "added/again is a symbolic link" in line, "it would be written to"


def test_a_task_is_not_added_where_its_rows_would_not_be_those_of_the_others(ask, output):
    """To a run that has not ended, that asked otherwise or of other rows, or chose them by what was done elsewhere."""
    three = listed(*TASKS)
    otherwise = [three[0] | {"decoding": {"temperature": 0.1}}, *three[1:]]
    for limit, tasks in ("null", otherwise), ("3", three):
        said, _ = ask(output, *sets(f"input.limit={limit}"), code=5, tasks=tasks)
        assert "belongs to another run" in said
    for name, why in (("a/b", "name a/b with letters"), ("a" * 256, "too long names for one folder")):
        said, _ = ask(output, code=2, tasks=[*three[:2], three[2] | {"name": name}])
        assert why in said
    (output / "_SUCCESS").unlink()
    said, _ = ask(output, code=2, tasks=three)
    [line] = said.splitlines()
    assert "out has not ended: finish it with its present tasks" in line
    said, _ = ask(output, *sets("input.except_done_in=[x]"), code=2, tasks=three)
    assert "chose its rows by input.except_done_in" in said
    assert not (output / "added").exists()


def test_what_reads_a_run_reads_its_tasks_or_says_that_it_does_not(ask, tmp_path):
    """An export has every column, the page says whose text it shows and how much of the documents nobody read, as
    the start does, and a night does only what is new.
    """
    short = partial(ask, tasks=listed("outline", "kind"), prompt={"max_prompt_tokens": 300})
    said, output = short(tmp_path / "first", *sets("input.limit=3"))
    page = (output / "report.html").read_text()
    cut = r"[12] of 3 documents cut, \d\d% of all tokens unread; prompt.length_policy: parts reads all"
    assert re.search(rf"warning: {cut}\n", said)
    assert re.search(rf"{cut}\.", page)
    assert "with 2 texts each" in page
    assert "those of the first of 2 tasks" in page
    to = tmp_path / "all.jsonl"
    specextend("export", output, "--to", to).exits(0)
    for line, row in zip(to.read_text().splitlines(), rows(output / "summaries"), strict=True):
        found = json.loads(line)
        assert {name: found[name] for name in ("doc_id", "outline", "kind")}.items() <= row.items()
        assert len(found["tasks"]) == 2
    for command in ["export", "--format", "openai", "--to", tmp_path / "x"], ["compare", output], ["audit"]:
        assert "takes a run of one task, and this one has several" in specextend(*command, output).line()
    _, second = short(tmp_path / "second", *sets(f"input.except_done_in=[{output}]"))
    assert [row["doc_id"] for row in rows(second / "summaries")] == ["d"]


def test_paths_of_a_task_are_relative_to_the_file_that_lists_it(tmp_path):
    """A configuration must mean the same wherever it is started from. What workers get is a file's content, in its
    order.
    """
    (tmp_path / "mine.yaml").write_text("output: {column: mine}")
    (tmp_path / "form.json").write_text(
        '{"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}}'
    )
    form = {"name": "form", "base": "mine.yaml", "output": {"column": "form", "schema": "form.json"}}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(LEAST | {"tasks": ["mine.yaml", form]}))
    config = RunConfig.load(tmp_path / "all.yaml")
    (tmp_path / "form.json").unlink()
    assert [each.output.column for each in RunConfig.load(config).each_task.values()] == ["mine", "form"]
    assert [*json.loads(config.each_task["form"].output.json_schema)["properties"]] == ["b", "a"]


def test_a_plan_counts_what_is_read_once(plan, shared, tmp_path):
    """By names of tasks that come with the package, on the command line."""
    known = ["--config", CONFIG, *on(shared / "in.parquet", tmp_path / "out"), "--json", tmp_path / "plan.json"]

    def planned(*arguments):
        plan(*known, *arguments).exits(0)
        return read_json(tmp_path / "plan.json")

    one = planned("--config", "summary")
    both = planned("--task", "summary", "--task", "translation")
    assert one["prompt_tokens"] < both["prompt_tokens"] < 1.3 * one["prompt_tokens"]
    assert both["output_tokens_at_most"] == 4 * (256 + 2048)
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump({"tasks": listed("outline", "about")}))
    [note] = planned("--config", file)["selection"]["notes"]
    assert note.startswith("task about reads each document again")


@pytest.mark.slow
def test_a_killed_run_goes_on_and_loses_no_answer(tmp_path, start):
    """Every document has all of its answers, those of an undisturbed run."""
    corpus = write_corpus(tmp_path / "in.parquet", long_texts(12), reader=["you"] * 12)
    file = tmp_path / "tasks.yaml"
    file.write_text(yaml.safe_dump({"tasks": listed("outline", "kind")}))
    changes = ("input.id_column=null", f"job.commit_every_s={AT_ONCE_S}", "decoding.max_new_tokens=24")

    def started(name, **options):
        return start("--config", file, *on(corpus, tmp_path / name, *changes), **options)

    end_of(started("killed", command=partial(dying_command, "SIGKILL", 1)), -signal.SIGKILL)
    found = []
    for name in ("killed", "whole"):
        end_of(started(name))
        answers = [
            (row["doc_id"], row["outline"], row["kind"], row["verdicts"]) for row in rows(tmp_path / name / "summaries")
        ]
        found.append(answers)
    assert found[0] == found[1]
    assert len(found[0]) == 12
    assert any(verdict["probability"] for *_, verdicts in found[0] for verdict in verdicts)


@pytest.mark.parametrize(
    "changes, message",
    cases("""
        tasks: [question, {name: again, base: question}] -> two write the column answer
        tasks: [summary, {output: {column: x}}] -> mappings with a `name`
        tasks: {keywords: {}} -> keywords has no keys; write just its name
        tasks: [summary, {name: x, target: {model: b}}] -> x has target; a task has prompt
        tasks: [summary, {name: x, output: {column: x}, decoding: {cache_gib: 9}}]
            -> x has another decoding.cache_gib
        {tasks: [summary, keywords], input: {path: in, instruction_column: ask}} -> need a single task
        tasks: [summary, {name: x, base: examples/reports-three-ways.yaml}] -> x lists tasks itself
    """),
)
def test_what_tasks_cannot_be_is_refused_in_one_line(changes, message):
    assert message in refused(RunConfig.load, [LEAST | yaml.safe_load(changes)])


def test_a_configuration_behind_a_list_of_tasks_changes_none_of_them_in_silence():
    """A limit, and a whole question, were not seen."""
    listing = {"tasks": ["translation", "summary", "facts"]}
    limit = {"decoding": {"max_new_tokens": 4}}
    assert "sets decoding.max_new_tokens after a list of tasks" in refused(RunConfig.load, [LEAST, listing, limit])
    assert "after a list of tasks" in refused(RunConfig.load, [LEAST, listing, "question"])
    assert RunConfig.load([LEAST | listing, {"job": {"commit_every_s": 1}}]).tasks


def test_what_is_set_on_the_command_line_counts_for_every_task():
    """And a configuration that was loaded is the same when it is loaded again."""
    two = [LEAST, {"tasks": ["summary", "keywords"]}]
    config = RunConfig.load(two, ["decoding.max_new_tokens=7"])
    assert {each.decoding.max_new_tokens for each in config.each_task.values()} == {7}
    assert RunConfig.load([config], ["decoding.seed=0"]) == config
    assert RunConfig.from_values(config.model_dump(mode="json")) == config
    assert "a Summarizer takes a single task" in refused(Summarizer, config)
    assert "tasksx" in refused(RunConfig.load, two, ["tasksx.y=1"])
    assert RunConfig.load([LEAST], ["tasks=[summary, keywords]"]).tasks.keys() == config.tasks.keys()

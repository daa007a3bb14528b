"""Several tasks of one run: each document is read once, and each answer is that of a run of its own."""

import json
import re
import shlex
import signal
from functools import partial

import pyarrow.parquet as pq
import pytest
import yaml

from specextend import RunConfig, Summarizer
from tests.contract.conftest import settings
from tests.job.conftest import (
    AT_ONCE_S,
    CONFIG,
    ROOT,
    dying_command,
    end_of,
    in_process,
    long_texts,
    on,
    read_json,
    rows,
    specextend,
    write_corpus,
)
from tests.refused import refused

OUTLINE = {
    "prompt": {"instruction": "{{ document }}\n\nWrite an outline for {{ reader }}.", "verification": "So?"},
    "output": {"column": "outline", "sources": True},
    "decoding": {"temperature": 0.7, "stop": ["t1"]},
}
VERIFIED = OUTLINE | {"output": OUTLINE["output"] | {"verify": True}}
KIND = {
    "prompt": {"instruction": "{{ document }}\n\nWhat is it?"},
    "output": {"column": "kind_as_text", "schema": {"kind": "law | report | speech"}},
}
FIRST = {
    "prompt": {"instruction": "What is it about?\n\n{{ document }}", "system": "Be brief."},
    "output": {"column": "about"},
}
TASKS = {"outline": OUTLINE, "kind": KIND, "about": FIRST}
OWN = {"outline": ["outline"], "kind": ["kind_as_text", "kind", "choices"], "about": ["about"]}
"""The columns of each."""
DIFFERING = {"num_cached_tokens", "num_forwards"}
"""What depends on what else is in the batch."""


@pytest.fixture
def corpus(tmp_path):
    readers = [f"reader {number}" for number in range(4)]
    texts = [f"Section {number}. " * (40 + 60 * number) for number in range(4)]
    return write_corpus(tmp_path / "in.parquet", texts, reader=readers, doc_id=list("abcd"))


@pytest.fixture
def ask(kept_kernels, local_ray, corpus, tmp_path):
    """Run tasks over the corpus: by the list of one configuration, or one as the configuration itself.

    `run` returns what it said on stderr, and its output.
    """

    def run(name, *arguments, code=0, **values):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        output = tmp_path / name
        given = ["--config", CONFIG, "--config", file, *on(corpus, output), *arguments]
        return in_process("summarize.py", *given).exits(code).stderr, output

    return run


def listed(*names):
    return [{"name": name, **TASKS[name]} for name in names]


@pytest.mark.parametrize(
    "in_prompt, verifies", [({}, True), ({"length_policy": "parts", "max_prompt_tokens": 400}, False)]
)
def test_answers_are_those_of_runs_of_their_own(in_prompt, verifies, ask):
    """Whether a document fits into a prompt or is read in parts; texts, scored labels and sampled ones."""
    few = settings(decoding={"max_new_tokens": 20})
    asked = TASKS | {"outline": VERIFIED if verifies else OUTLINE}
    tasks = [{"name": name, **task} for name, task in asked.items()]
    said, output = ask("together", *few, tasks=tasks, prompt=in_prompt)
    assert "task about reads each document again" in said
    together = rows(output / "summaries")
    for number, (name, task) in enumerate(asked.items()):
        _, alone = ask(name, *few, **task | {"prompt": in_prompt | task["prompt"]})
        for row, own in zip(together, rows(alone / "summaries"), strict=True):
            task = row["tasks"][number]
            assert [row[column] for column in OWN[name]] == [own[column] for column in OWN[name]]
            same = [key for key in task.keys() & own.keys() - DIFFERING if not key.endswith("_s")]
            assert [task[key] for key in same] == [own[key] for key in same]
            assert (task["name"], task["text"]) == (name, own[OWN[name][0]])
    for row in together:
        assert row.get("verdicts") == row["tasks"][0].get("verdicts")
        for count in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_requests"):
            assert row[count] == sum(task[count] for task in row["tasks"])
        if row["doc_id"] != "a":  # of which too little is equal
            cached = row["num_cached_tokens"]
            assert cached > row["num_prompt_tokens"] / 4, "the second task has read nothing but its end"


def test_a_text_repeats_its_own_instruction_and_no_others(ask, corpus):
    """Where one task asked for a word that stood in another's text, that was flagged as an echo."""
    _, alone = ask("alone", **FIRST)
    own = rows(alone / "summaries")
    words = [re.search(r"\w+", row["about"])[0] for row in own]
    write_corpus(corpus, pq.read_table(corpus)["text"].to_pylist(), reader=words, doc_id=list("abcd"))
    word = {"name": "word", "prompt": {"instruction": "{{ reader }}"}, "output": {"column": "word"}}
    _, output = ask("out", tasks=[word, *listed("about")])
    found = rows(output / "summaries")
    assert [row["about"] for row in found] == [row["about"] for row in own]
    assert [row["tasks"][1]["quality_flags"] for row in found] == [row["quality_flags"] for row in own]


BROKEN = {
    "name": "form",
    "prompt": {"instruction": "{{ document }}\n\nFill in."},
    "output": {"column": "form", "schema": {"agency": {"type": "string", "minLength": 20, "maxLength": 60}}},
    "decoding": {"max_new_tokens": 14, "stop_repetition": False},
}
"""A task whose limit lets no answer end."""


def test_a_task_that_fails_leaves_the_answers_of_the_others(ask):
    """They were nowhere but in errors/, and the remedy that the error named was refused. Now the failed task
    alone is retried, and the row names it. With more tokens, by the remedy, all tasks are done again beside the run.
    """
    given = partial(ask, "out", tasks=[BROKEN, *listed("outline")])
    said, output = given(code=3)
    assert "see the column tasks of summaries/, --retry-errors does none" in said
    assert not (output / "errors").exists()
    before = rows(output / "summaries")
    for row in before:
        failed, answered = row["tasks"]
        assert row["form"] is row["agency"] is None
        assert (row["outline"], row["num_output_tokens"]) == (answered["text"], answered["num_output_tokens"])
        assert (failed["name"], failed["error_class"], failed["retryable"]) == ("form", "IncompleteAnswer", False)
        assert failed["message"].startswith("the answer ended")
        assert failed["text"].startswith("{"), "what it wrote"
        assert answered["error_class"] is None
    [remedy] = {re.search(r"with (--.*?), or limit", row["tasks"][0]["message"])[1] for row in before}
    assert remedy == """--redo "error_class = 'IncompleteAnswer'" --set decoding.max_new_tokens=28"""
    status = specextend("status", output).stdout
    assert "finished with errors: 0 of 4 rows done, 4 failed, 0 left" in status
    assert "of these, 4 failed in some tasks" in status
    report = read_json(output / "report.json")
    assert (report["rows"]["errors"], report["partial"]) == (4, 4)
    assert report["errors"][0]["example_message"].startswith("task form: the answer ended")
    for path in output.glob("_run/parts/*"):  # as in a copy of the folder
        path.rename(output / path.name)
    assert re.search(r"rows done\W+0\W+rows failed\W+4\W", specextend("report", output).stdout)
    for path in output.glob("part-*"):
        path.rename(output / "_run" / "parts" / path.name)
    _, night = ask("night", "--set", f"input.except_done_in=[{output}]", tasks=[BROKEN, *listed("outline")])
    assert not (night / "summaries").exists(), "another try would fail in the same way"
    given("--retry-errors=all", code=3)
    for was, row in zip(before, rows(output / "summaries"), strict=True):
        assert (row["attempts"], row["tasks"][1]) == (2, was["tasks"][1])
        own = ("doc_id", "content_sha256", "worker", "started_at", "num_output_tokens", "outline")
        assert [row[name] for name in own] == [was[name] for name in own]
    exported = specextend("export", output, "--to", output.parent / "all.jsonl").exits(0).stdout
    assert "4 of 4 documents" in exported
    assert exported.endswith("; 4 with a task that failed\n")
    given(*shlex.split(remedy.replace("28", "600")))
    for was, row in zip(before, rows(output / "redone" / "again" / "summaries"), strict=True):
        assert row["agency"] in row["form"]
        assert len(row["outline"]) >= len(was["outline"]), "a limit of the command line is that of every task"
    exported = specextend("export", output, "--to", output.parent / "mended.jsonl").exits(0).stdout
    assert "4 of 4 documents" in exported
    assert "task that failed" not in exported


def test_another_list_of_tasks_is_another_run(ask):
    """Its rows would not have the same columns. Without tasks a run is what it was before there were any."""
    ask("out", tasks=listed("outline", "kind"))
    said, _ = ask("out", code=5, tasks=listed("outline", "about"))
    assert "tasks: outline, kind there, outline, about here" in said
    ask("out", code=5, tasks=listed("kind", "outline"))  # the column tasks would have two orders
    _, output = ask("plain")
    manifest = read_json(output / "_run" / "manifest.json")
    assert not any(name.startswith("tasks") for name in manifest["identity"]["config"])
    assert "tasks" not in rows(output / "summaries")[0]


@pytest.mark.parametrize("first", [["kind"], ["outline", "kind"]], ids=len)
def test_a_task_added_to_a_finished_run_is_decoded_alone(first, ask, tmp_path):
    """With the answers of a run of its own, right ones beside them; what is done stays as it is, byte for byte."""
    gold = settings(input={"gold": "{about: reader}"})
    again = {"name": "again", "base": str(tmp_path / "about.yaml"), "output": {"column": "again"}}
    _, output = ask("out", tasks=listed(*first))
    _, alone = ask("about", **FIRST)
    done = {path: path.read_bytes() for path in (output / "summaries").iterdir()}
    for name, added in (("about", listed("about")), ("again", [*listed("about"), again])):
        tasks = [*listed(*first), *added]
        said, _ = ask("out", *gold, tasks=tasks)
        assert f"tasks: only {name}; the others are done" in said
        found = rows(output / "added" / name / "summaries")
        assert [row[name] for row in found] == [row["about"] for row in rows(alone / "summaries")]
        said, _ = ask("out", *gold, tasks=tasks)
        assert "complete already, 4 rows" in said
        assert f"\nadded/{name}: complete: 4 of 4 rows" in specextend("status", output).stdout
    assert done == {path: path.read_bytes() for path in (output / "summaries").iterdir()}
    assert read_json(output / "added" / "about" / "report.json")["gold"]["about"]["rows"] == 4
    (output / "added" / "again").rename(tmp_path / "elsewhere")
    (output / "added" / "again").symlink_to(tmp_path / "elsewhere")
    said, _ = ask("out", *gold, tasks=tasks, code=2)
    for line in said, specextend("status", output).exits(2).stderr:
        assert "added/again is a symbolic link" in line, "it would be written to"


def test_a_task_is_not_added_where_its_rows_would_not_be_those_of_the_others(ask):
    """Of a run that has not ended, that asked otherwise, or that chose its rows by what was done elsewhere."""
    both = listed("outline", "kind")
    three = [*both, *listed("about")]
    all_but_one = settings(input={"limit": 3})
    _, output = ask("out", *all_but_one, tasks=both)
    otherwise = [both[0] | {"decoding": {"temperature": 0.1}}, *three[1:]]
    for changes in otherwise, three:  # the latter over all rows
        said, _ = ask("out", code=5, tasks=changes)
        assert "belongs to another run" in said
    (output / "_SUCCESS").unlink()
    said, _ = ask("out", *all_but_one, code=2, tasks=three)
    [line] = said.splitlines()
    assert "out has not ended: finish it with its present tasks" in line
    said, _ = ask("out", *all_but_one, "--set", "input.except_done_in=[x]", code=2, tasks=three)
    assert "chose its rows by input.except_done_in" in said
    ask("other", tasks=both)
    for name, why in (("a/b", "name a/b with letters"), ("a" * 256, "too long names for one folder")):
        said, other = ask("other", code=2, tasks=[*both, three[2] | {"name": name}])
        assert why in said
    for folder in (output, other):
        assert not (folder / "added").exists()


def test_what_reads_a_run_reads_its_tasks_or_says_that_it_does_not(ask, tmp_path):
    """An export has every column, the page says whose text it shows and how much of the documents nobody read, as
    the start does, and a night does only what is new.
    """
    tasks = listed("outline", "kind")
    short = ["--set", "prompt.max_prompt_tokens=300"]
    said, output = ask("first", *short, "--set", "input.limit=3", tasks=tasks)
    page = (output / "report.html").read_text()
    cut = r"[12] of 3 documents cut, \d\d% of all tokens unread; prompt.length_policy: parts reads all"
    assert re.search(rf"warning: {cut}\n", said)
    assert re.search(rf"{cut}\.", page)
    assert "with 2 texts each" in page
    assert "those of the first of 2 tasks" in page
    table = tmp_path / "all.jsonl"
    specextend("export", output, "--to", table).exits(0)
    exported = [json.loads(line) for line in table.read_text().splitlines()]
    assert [{name: row[name] for name in ("doc_id", "outline", "kind")} for row in exported] == [
        {name: row[name] for name in ("doc_id", "outline", "kind")} for row in rows(output / "summaries")
    ]
    assert {len(row["tasks"]) for row in exported} == {2}
    for arguments in (
        ["export", output, "--to", tmp_path / "batch.jsonl", "--format", "openai"],
        ["compare", output, output],
        ["audit", output],
    ):
        assert "takes a run of one task, and this one has several" in specextend(*arguments).line()
    _, second = ask("second", *short, "--set", f"input.except_done_in=[{output}]", tasks=tasks)
    assert [row["doc_id"] for row in rows(second / "summaries")] == ["d"]


def test_paths_of_a_task_are_relative_to_the_file_that_lists_it(tmp_path):
    """A configuration must mean the same wherever it is started from."""
    (tmp_path / "mine.yaml").write_text("output: {column: mine}")
    (tmp_path / "form.json").write_text('{"type": "object", "properties": {"a": {"type": "string"}}}')
    form = {"name": "form", "base": "mine.yaml", "output": {"column": "form", "schema": "form.json"}}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(BASE | {"tasks": ["mine.yaml", form]}))
    config = RunConfig.load(tmp_path / "all.yaml")
    assert [each.output.column for each in config.each_task.values()] == ["mine", "form"]
    assert '"a"' in config.each_task["form"].output.json_schema


def test_a_plan_counts_what_is_read_once(corpus, tmp_path, local_ray):
    """By names of tasks that come with the package, on the command line."""
    known = ["--config", CONFIG, *on(corpus, tmp_path / "out"), "--json", tmp_path / "plan.json"]

    def planned(*arguments):
        specextend("plan", *known, *arguments).exits(0)
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
    file.write_text(yaml.safe_dump({"tasks": [{"name": "outline", **VERIFIED}, *listed("kind")]}))
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


LISTING = str(ROOT / "examples" / "reports-three-ways.yaml")
BASE = {"input": {"path": "in"}, "output": {"path": "out"}, "target": {"model": "a"}, "draft": {"kind": "ngram"}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tasks": ["question", {"name": "again", "base": "question"}]}, "two write the column answer"),
        ({"tasks": ["summary", {"output": {"column": "x"}}]}, "mappings with a `name`"),
        ({"tasks": {"keywords": {}}}, "keywords has no keys; write just its name"),
        ({"tasks": ["summary", {"name": "x", "target": {"model": "b"}}]}, "x has target; a task has prompt"),
        (
            {"tasks": ["summary", {"name": "x", "output": {"column": "x"}, "decoding": {"cache_gib": 9}}]},
            "x has another decoding.cache_gib",
        ),
        (
            {"tasks": ["summary", "keywords"], "input": {"path": "in", "instruction_column": "ask"}},
            "need a single task",
        ),
        ({"tasks": ["summary", {"name": "x", "base": LISTING}]}, "x lists tasks itself"),
    ],
)
def test_what_tasks_cannot_be_is_refused_in_one_line(changes, message):
    assert message in refused(RunConfig.load, [BASE | changes])


def test_a_configuration_behind_a_list_of_tasks_changes_none_of_them_in_silence():
    """A limit, and a whole question, were not seen."""
    listing = {"tasks": ["translation", "summary", "facts"]}
    with pytest.raises(ValueError, match=r"sets decoding\.max_new_tokens after a list of tasks"):
        RunConfig.load([BASE, listing, {"decoding": {"max_new_tokens": 4}}])
    with pytest.raises(ValueError, match="after a list of tasks"):
        RunConfig.load([BASE, listing, "question"])
    assert RunConfig.load([BASE | listing, {"job": {"commit_every_s": 1}}]).tasks


def test_columns_of_tasks_that_collide_are_refused_before_anything_is_read(corpus, tmp_path):
    other = {"name": "x", "output": {"column": "kind"}}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": [*listed("kind"), other]}))
    given = ["--config", CONFIG, "--config", tmp_path / "tasks.yaml", *on(corpus, tmp_path / "out")]
    assert "the column kind would be made twice" in specextend("plan", *given).line()


def test_what_is_set_on_the_command_line_counts_for_every_task():
    """And a configuration that was loaded is the same when it is loaded again."""
    config = RunConfig.load([BASE, {"tasks": ["summary", "keywords"]}], ["decoding.max_new_tokens=7"])
    assert {each.decoding.max_new_tokens for each in config.each_task.values()} == {7}
    assert RunConfig.load([config], ["decoding.seed=0"]) == config
    assert RunConfig.from_values(config.model_dump(mode="json")) == config
    with pytest.raises(ValueError, match="a Summarizer takes a single task"):
        Summarizer(config)
    with pytest.raises(ValueError, match="tasksx"):
        RunConfig.load([BASE, {"tasks": ["summary", "keywords"]}], ["tasksx.y=1"])
    assert RunConfig.load([BASE], ["tasks=[summary, keywords]"]).tasks.keys() == config.tasks.keys()

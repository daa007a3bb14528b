"""The command `plan` as its users call it: what there is to do, before anybody pays for it, in words and as JSON."""

import shlex

import pytest
import yaml

from tests.job.conftest import CONFIG, on, read_json, write_corpus
from tests.tables import cases


def test_a_dry_run_says_what_there_is_to_do_and_what_is_wrong_and_writes_nothing(plan, tmp_path):
    """Before a night on eight GPUs: rows, tokens, memory, as a table and as JSON; and no time that nobody measured."""
    texts = ["short", None, " ", "word " * 3000, "no room"]
    corpus = write_corpus(tmp_path / "in" / "a.parquet", texts, limit=[7, None, None, None, 10**6])
    settings = ["input.id_column=null", "input.options_column=limit", "prompt.max_prompt_tokens=100"]
    arguments = ["--config", CONFIG, *on(corpus, tmp_path / "out", *settings)]
    ended = plan(*arguments, "--json", tmp_path / "plan.json").exits(0)
    plan = read_json(tmp_path / "plan.json")
    expected = yaml.safe_load("""
        rows: 5
        rows_to_do: 5
        rows_rejected: {NullText: 1, EmptyText: 1, PromptTooLong: 1}
        output_tokens_at_most: 31
        rows_over_length: 1
        length_policy: middle
        forecast: null
    """)
    assert plan.items() >= expected.items()
    assert sum(plan["prompt_lengths"].values()) == 2
    assert plan["memory_gib"]["target_weights"] > 0
    assert "5 of 5 rows to do" in ended.stdout
    assert "time and cost: not measured; --calibrate N measures them" in ended.stdout
    assert not (tmp_path / "out").exists()
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert 0.9 < plan["cut"]["unread"] < 1
    [line] = plan["cut"]["says"]
    assert line.startswith("1 of 2 documents cut, 9")
    assert line in " ".join(ended.stdout.split())
    for line in "null text 1 error rows", "over the prompt limit 1 cut (middle)", "up to 512 2":
        assert line in lines


@pytest.mark.parametrize("policy, least, most, least_written", [("parts", 4000, 7000, 100), ("middle", 200, 200, 24)])
def test_an_over_long_document_counts_as_what_is_read_and_decoded_for_it(
    plan, tmp_path, policy, least, most, least_written
):
    """Its parts, their summaries and the merge, or what is kept of it: deadlines follow from it."""
    corpus = write_corpus(tmp_path / "in" / "a.parquet", ["word " * 2000])
    settings = ["input.id_column=null", "prompt.max_prompt_tokens=200", f"prompt.length_policy={policy}"]
    plan("--config", CONFIG, *on(corpus, tmp_path / "out", *settings), "--json", tmp_path / "plan.json").exits(0)
    planned = read_json(tmp_path / "plan.json")
    assert planned["rows_over_length"] == 1
    assert least <= planned["prompt_tokens"] <= most
    assert planned["output_tokens_at_most"] >= least_written


def test_a_dry_run_says_which_files_it_does_not_read(plan, tmp_path):
    """A folder may hold the other half of a corpus in another format."""
    folder = write_corpus(tmp_path / "in" / "a.parquet", ["one", "two"]).parent
    (folder / "b.jsonl").write_text("{}")
    (folder / "c.csv").write_text("text")
    ended = plan("--config", CONFIG, *on(folder, tmp_path / "out", "input.id_column=null")).exits(0)
    assert "files of another kind not read skipped: 1 .csv, 1 .jsonl" in " ".join(ended.stdout.split())


def test_a_laptop_plans_for_machines_that_it_is_not(plan, tmp_path):
    """It has neither the cores nor the GPU, and needs neither of them to say what there is to do."""
    corpus = write_corpus(tmp_path / "in" / "a.parquet", ["word " * 50])
    settings = ["input.id_column=null", "job.cpus_per_worker=4096", "job.gpus_per_worker=1"]
    ended = plan("--config", CONFIG, *on(corpus, tmp_path / "out", *settings)).exits(0)
    assert "here no run can start: job." in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    "arguments, said",
    cases("""
        --calibrate 1 -> 1 is not in the range x>=2
        --calibrate 4 --set input.limit=1 -> needs 2 decodable documents, but got 1
        --by 07:00 -> --by needs the time of a document: add --calibrate N
        --by '7 in the morning' -> --by takes HH:MM or a time such as
        --by 2020-01-01T07:00 -> --by 2020-01-01T07:00 is past: it is
    """),
)
def test_wrong_arguments_are_refused(plan, arguments, said):
    """A plan for a moment that nobody meant is worse than none."""
    assert said in plan("--config", CONFIG, *shlex.split(arguments)).line()

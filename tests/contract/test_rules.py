"""Rules: conditions of SQL that answers should meet, and the flags of those that do not."""

import pyarrow as pa
import pytest
import yaml

from specextend import RunConfig, Summarizer
from tests.job.conftest import CONFIG, ROOT, TEXT, on, read_json, rows, specextend, write_corpus
from tests.refused import refused

RULES = yaml.safe_load("""
    titled: title IS NOT NULL
    of_this_year: year = 2026
    whole: NOT list_contains(quality_flags, 'truncated') AND finish_reason = 'stop'
    not_too_long: length(summary) < 100000
    of_a_number: title::INT > 3
""")
BROKEN = {
    "a": {"of_this_year"},  # of which the title is 7
    "b": {"of_a_number"},  # a word
    "c": {"titled", "of_a_number"},  # null
}
"""Rules that rows break by their own columns."""


@pytest.fixture
def corpus(tmp_path):
    """Two files of two years, of which one has no titles."""
    write_corpus(tmp_path / "in" / "year=2025" / "a.parquet", [TEXT * 3], doc=["a"], title=["7"])
    write_corpus(tmp_path / "in" / "year=2026" / "b.parquet", [TEXT * 9], doc=["b"], title=["seven"])
    return write_corpus(tmp_path / "in" / "year=2026" / "c.parquet", [TEXT * 5], doc=["c"]).parents[1]


@pytest.fixture
def asked(tmp_path, corpus, summarize_here):
    """Run a configuration over the corpus; `run` returns the rows and the output."""

    def run(name, **values):
        (file := tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        settings = on(corpus, tmp_path / name, "input.id_column=doc", "input.passthrough=[title, year]")
        summarize_here("--config", file, *settings).exits(0)
        return rows(tmp_path / name / "summaries"), tmp_path / name

    return run


def of_rules(row):
    return {flag.removeprefix("rule:") for flag in row["quality_flags"] if flag.startswith("rule:")}


def test_a_row_that_breaks_a_rule_has_its_flag_and_is_otherwise_what_it_was(asked):
    """By columns of the answer, of the input and of its folders; a value that is null or cannot be cast is doubtful."""
    found, output = asked("ruled", output={"rules": RULES})
    plain, _ = asked("plain")
    for row, before in zip(found, plain, strict=True):
        whole = {"whole"} if row["finish_reason"] != "stop" else set()
        assert of_rules(row) == BROKEN[row["doc_id"]] | whole
        assert of_rules(before) == set()
        assert before["summary"] == row["summary"]
        assert before["quality_flags"] == [flag for flag in row["quality_flags"] if not flag.startswith("rule:")]
        assert row.keys() == before.keys()
    report = read_json(output / "report.json")
    assert report["quality_flags"]["rule:of_a_number"] == 2
    assert report["flagged"]["rule:titled"] == ["c"]
    assert "rule:titled" in specextend("report", output).stdout


def test_each_task_has_rules_about_its_own_answer(asked):
    rules = {"law": "kind = 'law'", "speech": "kind = 'speech'", "sure": "len(choices) = 3"}
    tasks = yaml.safe_load(r"""
        - name: kind
          prompt: {instruction: "{{ document }}\n\nWhat is it?"}
          output: {column: kind_as_text, schema: {kind: law | speech}}
        - name: about
          prompt: {instruction: "{{ document }}\n\nWhat is it about?"}
          output: {column: about, rules: {dated: year = 2026}}
    """)
    tasks[0]["output"]["rules"] = rules
    for row in asked("tasks", tasks=tasks)[0]:
        of_kind, of_about = map(of_rules, row["tasks"])
        assert of_kind == rules.keys() - {row["kind"]}
        assert of_about == ({"dated"} if row["year"] == 2025 else set())
        assert of_rules(row) == of_kind | of_about


def test_a_summarizer_flags_the_rows_of_a_batch():
    rules = "output.rules={recent: year > 2020, long: length(summary) > 100000}"
    config = RunConfig.load(CONFIG, ["input.id_column=doc", "input.passthrough=[year]", rules, "output.path=unused"])
    summarizer = Summarizer(config)
    batch = pa.table({"text": [TEXT, None, TEXT * 2], "doc": ["a", "b", "c"], "year": [2020, 2021, 2022]})
    found = summarizer(batch).to_pylist()
    assert [of_rules(row) for row in found[::2]] == [{"recent", "long"}, {"long"}]
    assert found[1]["error_class"] == "NullText"
    said = refused(summarizer, batch.set_column(2, "year", pa.array([["x"]] * 3)))
    assert "output.rules.recent" in said


def test_rules_of_the_command_line_are_those_of_a_file(tmp_path):
    given = ["output.path=out", 'output.rules.short="length(summary) < 9"']
    assert RunConfig.load(ROOT / "configs" / "tiny-random.yaml", given).output.rules == {"short": "length(summary) < 9"}

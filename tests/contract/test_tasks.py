"""Tasks other than a summary: instructions over the columns of a row, options of a row, examples, and thinking."""

import re
import shlex
from itertools import pairwise

import duckdb
import pyarrow as pa
import pytest
import yaml

from specextend import RunConfig, Summarizer, load_engine
from tests.contract.test_configuration import LEAST
from tests.job.conftest import ROOT, rows, specextend
from tests.tables import cases
from tests.tiny_models import random_prompt, tiny_config

TEXT = " ".join(f"t{token_id}" for token_id in random_prompt(150))


@pytest.fixture(scope="module")
def engine(pairs):
    return load_engine(tiny_config(pairs("llama")))


@pytest.fixture
def answers(pairs, engine):
    """The rows of a table, by a pair that is loaded once."""

    def ask(table, **options):
        config = tiny_config(pairs("llama"), **{"input__id_column": "name", "decoding__max_new_tokens": 12} | options)
        given = {"name": [f"d{number}" for number in range(len(next(iter(table.values()))))]} | table
        return Summarizer(config, lambda _: engine)(pa.table(given)).to_pylist()

    return ask


def test_an_instruction_takes_the_columns_of_its_row(answers):
    """And gives what the same words written out give; null is empty, and a place for the document in data is none."""
    table = {"text": [TEXT] * 3, "topic": ["t5 t6", None, "{{ document }}"], "n": [1, 2, 3]}
    template = "t3 {{ topic }} {% if n > 1 %}t9 {{ n }}{% endif %} {{ document }}"
    found = answers(table, prompt__instruction=template)
    written = ["t3 t5 t6  {{ document }}", "t3  t9 2 {{ document }}"]
    for row, instruction in zip(found, written, strict=False):
        [expected] = answers({"text": [TEXT]}, prompt__instruction=instruction)
        for name in ("summary", "num_prompt_tokens"):
            assert row[name] == expected[name]
    assert found[2]["error_class"] is None
    assert len({row["content_sha256"] for row in found}) == 3, "another topic makes another answer"


def test_a_value_that_does_not_fit_is_the_error_of_its_row(answers):
    rows = answers({"text": [TEXT] * 2, "n": [1, 0]}, prompt__instruction="t{{ 10 // n }} {{ document }}")
    assert [row["error_class"] for row in rows] == [None, "BadInstruction"]


@pytest.mark.parametrize("policy", ["middle", "parts"])
def test_sources_are_places_in_what_was_read_of_the_document(answers, policy):
    """A source in text that the model was never given is an invention of ours; of parts all is read. Each names its
    page if pages are known, and the column is what it was if they are not.
    """
    words = [f"t{token_id}" for token_id in random_prompt(600)]
    text = "\r\n\r\n".join(" ".join(words[begin : begin + 30]) for begin in range(0, 600, 30))
    starts = [0, 0, *(len(text) * page // 40 for page in range(1, 40))]
    options = {"prompt__length_policy": policy, "prompt__max_prompt_tokens": 200, "output__sources": True}
    [plain] = answers({"text": [text]}, **options)
    [row] = answers({"text": [text], "starts": [starts]}, input__pages_column="starts", **options)

    def page(place):
        return None if place is None else sum(start <= place for start in starts)

    for each in row["part_summaries"] or ():
        assert (each.pop("page"), each.pop("last_page")) == (page(each["begin"]), page(each["end"] - 1))
    for each in row["sources"]:
        assert each.pop("page") == page(each["begin"])
    assert all(row[name] == plain[name] for name in ("part_summaries", "sources"))
    half = int(len(text) * row["coverage"]) // 2
    found = [each for each in row["sources"] if each["begin"] is not None]
    assert found
    for each in found:
        assert each["passage"] == text[each["begin"] : each["end"]]
        assert each["begin"] not in range(half + 20, len(text) - half - 20), "what is left out"


METHODS = """st.keys
st.land.upper
st.keys ~ ''
[st.keys]
'%s' | format(st.get)
1 if st.keys
'' ~ st['keys']
[st.land] | map(attribute='title') | join
st | xmlattr | attr('upper')"""


def test_names_of_jinja_are_columns_and_methods_are_no_text(answers):
    """Two workers sent different prompts, in which methods and classes had their places in memory."""
    names = ("namespace", "dict", "range", "lipsum", "cycler", "joiner", "loop", "super", "caller")
    table = {"text": [TEXT], "st": [{"items": "t8", "land": "t9"}], **{name: ["t5"] for name in names}}
    template = " ".join(f"{{{{ {name} }}}}" for name in names) + " {{ st.items }} {{ st.land.upper() }}"
    [row] = answers(table, prompt__instruction=template)
    [expected] = answers({"text": [TEXT]}, prompt__instruction="t5 " * len(names) + "t8 T9")
    assert row["summary"] == expected["summary"]
    for each in METHODS.splitlines():
        [row] = answers(table, prompt__instruction=f"{{{{ {each} }}}}")
        assert row["error_class"] == "BadInstruction", each
        assert " at 0x" not in row["message"]


def test_bytes_that_are_no_text_are_one_row(answers):
    """Half of a surrogate pair in one row ended the worker that read it."""
    broken = pa.array([b"t5 \xed\xa0\x80", b"t6"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, broken.buffers())
    table = {"text": [TEXT] * 2, "st": pa.StructArray.from_arrays([text], names=["topic"])}
    rows = answers(table, prompt__instruction="{{ st.topic }} {{ document }}")
    assert [row["error_class"] for row in rows] == [None, None]


@pytest.mark.parametrize(
    "instruction, message",
    cases(r"""
        Ask {title} -> has \{title\}, which would be read as text; write \{\{ title \}\}
        {% if %} -> prompt.instruction is not a template
        {{ document }} {{ document }} -> more than once
        {{ ''.__class__.__mro__ }} -> prompt.instruction
        {{ document[:20] }} -> uses document in an expression
        {{ document | trim }} -> uses document in an expression
        {% if document | length > 1000 %}Long: {% endif %}{{ document }} -> uses document in an expression
        {% set text %}{{ document }}{% endset %}{{ text | length }} -> uses document in an expression
        {% macro m() %}{{ document }}{% endmacro %}{{ m()[:9] }} -> uses document in an expression
        {% set document = 'x' %}{{ document }} -> uses document in an expression
        {{ self }} {{ document }} -> self, which is a word of jinja's
        {{ none }} {{ document }} -> none, which is a word of jinja's
        {{ names | random }} {{ document }} -> No filter named 'random'
    """),
)
def test_a_bad_instruction_is_refused_before_anything_is_loaded(instruction, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_values(LEAST | {"prompt": {"instruction": instruction}})


def test_a_row_may_have_options_of_its_own(answers):
    """Null takes the run's; a value out of range is the row's error: a temperature of NaN drew any token."""
    own = yaml.safe_load("""
        - null
        - {max_new_tokens: 3}
        - {temperature: 5.0, seed: 1}
        - {temperature: 5.0, seed: 2}
        - {stop: [t]}
        - {top_p: 7.0}
        - {temperature: .inf}
        - {stop: [null]}
        - {temperature: .nan}
    """)
    rows = answers({"text": [TEXT] * 9, "own": own}, input__options_column="own")
    assert [row["error_class"] for row in rows] == [None] * 5 + ["BadOptions"] * 4
    assert rows[-1]["message"] == "temperature must be at least 0 and finite, got nan"
    assert rows[1]["num_output_tokens"] == 3
    assert rows[0]["summary"].startswith(rows[1]["summary"].rstrip())
    assert rows[2]["summary"] != rows[3]["summary"]
    [plain] = answers({"text": [TEXT]})
    assert plain["summary"] == rows[0]["summary"]


def test_pages_that_do_not_fit_their_text_are_the_error_of_their_row(answers):
    """Null and an empty list say that a document has no pages; all else would name a wrong one."""
    good = [[0], [0, 0, 7, 7, len(TEXT)], None, []]
    bad = [[1], [0, 9, 4], [0, len(TEXT) + 1], [0, None], [-1]]
    rows = answers({"text": [TEXT] * 9, "starts": good + bad}, input__pages_column="starts")
    assert [row["error_class"] for row in rows] == [None] * len(good) + ["BadPages"] * len(bad)
    assert rows[5]["message"].startswith("page 3 begins at 4; offsets of pages begin with 0, do not fall, and end ")


@pytest.mark.slow
def test_the_tasks_that_come_with_it_run_as_their_page_shows(local_ray, tmp_path, monkeypatch):
    """On the default pair, from a file with a question in each row to a column for each task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = "".join((ROOT / "docs" / name).read_text() for name in ("tasks.md", "worth.md"))
    [note] = re.findall(r"^echo '(.*)' > notes.jsonl$", page, re.M)
    (tmp_path / "notes.jsonl").write_text(note)
    lines = re.findall(r"^specextend ((?:prepare|run) .*out/.*)$", page, re.M)
    prepare, together, facts = (
        shlex.split(line) for line in lines if "--redo" not in line and "small.yaml" not in line
    )
    asked = {name for option, name in pairwise(together) if option == "--task"}
    assert {*asked, facts[4]} == {path.stem for path in (ROOT / "configs" / "tasks").iterdir()}
    for command in prepare, [*together, "--set", "decoding.max_new_tokens=8"], facts:
        specextend(*command).exits(0)
    for folder, number, first, tasks in ("asked", 1, "ferry", asked), ("facts", 8, "govreport-1k-00", {"facts"}):
        found = rows(tmp_path / "out" / folder / "summaries")
        assert (len(found), found[0]["doc_id"]) == (number, first)
        for task in tasks:
            column = RunConfig.load(["smollm2", task]).output.column
            assert any(row[column].strip() for row in found), task
    for query in re.findall(r"^SELECT .*out/facts.*$", page, re.M):
        assert duckdb.sql(query).fetchall(), query

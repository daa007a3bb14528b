"""Summaries without the job: a table in, a table out, in a test's own process or in Ray Data's."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import ray
import yaml

from specextend import Summarizer, load_engine
from tests.contract.columns import BATCHES, assert_has
from tests.tables import cases
from tests.tiny_models import at_call, random_prompt, tiny_config

INPUT = {"input__id_column": "name", "input__options_column": "most", "input__passthrough": ["year"]}


def changed_input(changes):
    """The options of `tiny_config` for a section `input` in YAML."""
    return {f"input__{key}": value for key, value in yaml.safe_load(changes).items()}


def text(length):
    return " ".join(f"t{token_id}" for token_id in random_prompt(length))


TEXTS = {"a": text(200), "null": None, "b": text(37), "empty": " ", "bad": text(9), "c": text(129)}


def documents():
    """Six documents, of which three can be processed."""
    return pa.table(
        {
            "text": list(TEXTS.values()),
            "name": list(TEXTS),
            "most": pa.array([None, 5, 8, 5, 0, 12], pa.int32()),
            "year": pa.array(range(2001, 2007), pa.int16()),
        }
    )


@pytest.fixture(scope="module")
def config(pairs):
    return tiny_config(pairs("llama"), decoding__max_batch_size=3, decoding__max_new_tokens=20, **INPUT)


@pytest.fixture
def engine(config):
    return load_engine(config)


@pytest.fixture
def summarizer(config, engine):
    return Summarizer(config, lambda _: engine)


def test_half_of_a_surrogate_pair_in_a_text_is_replaced(summarizer):
    """Arrow refused the whole batch for it."""
    broken, replaced = (
        summarizer([{"text": f"{TEXTS['b']} {end}", "name": "a", "most": 8, "year": 2001}])
        for end in ("\ud83d", "\ufffd")
    )
    assert broken[0]["summary"] == replaced[0]["summary"]


def test_a_table_comes_back_with_a_row_for_each_row(summarizer):
    """In its order, with one schema whatever failed: Ray Data joins blocks, and would refuse two."""
    result = summarizer(documents())
    assert_has(result.schema, BATCHES | {"year": "int16"})
    rows = result.to_pylist()
    assert [row["doc_id"] for row in rows] == list(TEXTS)
    assert [row["year"] for row in rows] == [*range(2001, 2007)]
    assert [row["error_class"] for row in rows] == [None, "NullText", None, "EmptyText", "BadMaxNewTokens", None]
    assert [row["stage"] for row in rows if row["summary"] is None] == ["read"] * 3
    for row in rows:
        if row["error_class"] is None:
            assert row["num_prompt_tokens"] > {"a": 200, "b": 37, "c": 129}[row["doc_id"]]
            assert 0 < row["num_output_tokens"] <= {"a": 20, "b": 8, "c": 12}[row["doc_id"]]
            assert row["total_s"] == pytest.approx(row["ttft_s"] + row["decode_s"])
    assert summarizer(documents().slice(1, 1)).schema == result.schema
    assert summarizer(documents().slice(2, 1)).to_pylist()[0]["summary"] == rows[2]["summary"]


def test_results_come_in_the_form_of_the_documents(pairs, engine):
    """Who has a text in a notebook wants no schema first; all forms give what the table gives."""
    columns = {"input__id_column": "name", "input__passthrough": ["year"]}
    few = partial(tiny_config, pairs("llama"), decoding__max_new_tokens=20)
    summarizer = Summarizer(few(**columns), lambda _: engine)
    table = documents().select(["text", "name", "year"])
    expected = summarizer(table)["summary"].to_pylist()
    rows = table.to_pylist()
    by_column = table.to_pydict()
    assert [row["summary"] for row in summarizer(rows)] == expected
    assert summarizer(by_column)["summary"] == expected
    arrays = {name: np.array(values, object) for name, values in by_column.items()}
    assert summarizer(arrays)["summary"] == expected
    frame = pa.Table.from_pandas(summarizer(table.to_pandas())).to_pydict()
    assert frame["summary"] == expected
    assert frame["year"] == by_column["year"]
    one = summarizer(rows[2])
    assert (one["summary"], one["year"]) == (expected[2], 2003)
    alone = Summarizer(few(), lambda _: engine)
    assert alone(TEXTS["b"])["summary"] == expected[2]
    found = alone([TEXTS["b"], None, TEXTS["c"]])
    assert [(row["doc_id"], row["summary"]) for row in found] == [("0", expected[2]), ("1", None), ("2", expected[5])]
    assert alone([]) == []
    with pytest.raises(ValueError, match="documents must be texts, dictionaries, a table or a data frame, got int"):
        summarizer(7)
    empty = table.slice(6)
    for nothing in ([], empty.to_pydict(), pa.table({}), empty, empty.to_pandas()):
        found = summarizer(nothing)
        assert isinstance(found, type(nothing))
        assert list(found) == [] or [*getattr(found, "column_names", found)] == summarizer(table).column_names
    assert summarizer(empty).schema == summarizer(table).schema


def test_several_threads_may_call_it_and_no_paths_need_be_given(pairs):
    """A server does so; the engine has one batch, and answers came under other names. It reads and writes no file."""
    values = tiny_config(pairs("llama"), decoding__max_new_tokens=20).model_dump(mode="json")
    del values["output"], values["input"]["path"]
    summarizer = Summarizer(values)
    texts = [TEXTS["a"], TEXTS["b"], TEXTS["c"]]
    with ThreadPoolExecutor(4) as threads:
        found = [[row["summary"] for row in each] for each in threads.map(summarizer, [texts] * 8)]
    assert found == [[summarizer(text)["summary"] for text in texts]] * 8


def test_questions_about_a_document_read_it_once(pairs, engine):
    """In the middle of other documents, and with the answers that each question alone gets."""
    config = tiny_config(
        pairs("llama"), decoding__max_new_tokens=20, input__id_column="name", input__instruction_column="ask"
    )
    report = text(400)
    batch = pa.table(
        {
            "name": ["report-1", "other", "report-2", "report-3"],
            "text": [report, text(401), report, report],
            "ask": ["{{ document }} t7", None, "{{ document }} t8 t9", "{{ document }} t11"],
        }
    )
    summarizer = Summarizer(config, lambda _: engine)
    rows = summarizer(batch).to_pylist()
    assert sorted(row["num_cached_tokens"] >= 400 for row in rows) == [False, False, True, True]
    for number, row in enumerate(rows):
        assert row["summary"] == summarizer(batch.slice(number, 1)).to_pylist()[0]["summary"]


def fail(*_):
    raise RuntimeError("attention failed")


def test_after_a_failed_batch_its_documents_run_alone(summarizer, engine):
    """One of them, or the machine, made a step fail; the others must not be lost with it."""
    failed = []

    def note_and_fail():
        failed.append(True)
        fail()

    expected = summarizer(documents())["summary"]
    at_call(engine, 20, note_and_fail)
    assert summarizer(documents())["summary"] == expected
    assert failed


def test_a_document_that_fails_alone_is_an_error_in_its_row(summarizer, engine):
    """The engine goes on, and so does the pipeline."""
    engine.target.attend = fail
    [row] = summarizer(documents().slice(2, 1)).to_pylist()
    assert (row["error_class"], row["message"], row["stage"]) == ("RuntimeError", "attention failed", "decode")


@pytest.mark.parametrize(
    "changes, message",
    cases("""
        filter: year > 2003 -> input.filter chooses rows of files, not of batches: leave it out
        passthrough: [stage] -> input.passthrough names stage, also a column of the result
    """),
)
def test_options_that_no_batch_can_follow_are_refused_before_a_model_is_loaded(changes, message, pairs):
    """A filter was ignored: the pipeline summarised, and paid for, what the configuration left out."""
    config = tiny_config(pairs("llama"), **INPUT | changed_input(changes))
    with pytest.raises(ValueError, match=message):
        Summarizer(config, lambda _: pytest.fail("a model was loaded"))


def test_a_column_is_passed_through_under_a_name_that_the_result_leaves_free(config, engine, pairs):
    options = INPUT | {"input__passthrough": ["summary"], "output__column": "answer"}
    batch = documents().append_column("summary", pa.array([f"old {row}" for row in range(len(documents()))]))
    rows = Summarizer(tiny_config(pairs("llama"), **options), lambda _: engine)(batch).to_pylist()
    assert [row["summary"] for row in rows] == batch["summary"].to_pylist()
    assert all("answer" in row for row in rows)


@pytest.mark.parametrize(
    "changes, message",
    cases(r"""
        text_column: body -> the batch has no column 'body' \(input.text_column\); it has text, name
        {id_column: most, options_column: name}
            -> is string, but must be an integer column, or a struct of .*; cast it when you write the Parquet
        {id_column: null, options_column: null} -> input.id_column must be set
    """),
)
def test_a_batch_that_does_not_fit_its_configuration_is_refused(changes, message, pairs, engine):
    """In one line, and before anything is decoded."""
    summarizer = Summarizer(tiny_config(pairs("llama"), **INPUT | changed_input(changes)), lambda _: engine)
    with pytest.raises(ValueError, match=message):
        summarizer(documents())


@pytest.mark.slow
def test_ray_data_maps_batches_with_it(config, summarizer, local_ray):
    """As in docs/cluster.md: actors that load the models once, blocks in, blocks out."""
    found = (
        ray.data.from_arrow(documents())
        .repartition(3)
        .map_batches(
            Summarizer,
            fn_constructor_args=[config],
            batch_format="pyarrow",
            batch_size=4,
            concurrency=1,
            num_cpus=1,
        )
        .sort("year")
        .take_all()
    )
    columns = ("doc_id", "summary", "error_class")
    expected = summarizer(documents()).select(columns).to_pylist()
    assert [{name: row[name] for name in columns} for row in found] == expected

"""Answers as data: columns of the fields, answers that break off, and schemas that are refused."""

import json
from math import exp

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend import RunConfig, Summarizer
from tests.job.conftest import CONFIG, on, read_json, rows, write_corpus
from tests.refused import refused
from tests.tables import cases

SCHEMA = (
    "{kind: audit | budget, closed: boolean, pages: {type: array, items: {type: integer, maximum: 99}, maxItems: 2}}"
)
TYPES = {"kind": pa.string(), "closed": pa.bool_(), "pages": pa.list_(pa.int64())}


TEXTS = {"a": "The committee met.", "b": "The committee met. " + "96 of 1,000 pages. " * 20, "c": None}


@pytest.fixture(scope="module")
def sections():
    names = ["output.path=unused", f"output.schema={SCHEMA}", "output.column=answer", "decoding.max_new_tokens=200"]
    return RunConfig.load(CONFIG, [*names, "input.id_column=doc_id"])


@pytest.fixture(scope="module")
def answered(sections):
    """Answers to three texts, the last of which is null, and what they are with figures and confidence."""
    table = pa.table({"text": [*TEXTS.values()], "doc_id": [*TEXTS]})
    config = RunConfig.load(sections, ["output.figures=true", "output.confidence=true"])
    return Summarizer(sections)(table), Summarizer(config)(table)


def test_each_field_is_a_column_of_its_type(answered):
    """The text stays beside them; what was decoded is what the columns hold."""
    for result in answered:
        assert {name: result.schema.field(name).type for name in TYPES} == TYPES
        *done, failed = result.to_pylist()
        for row in done:
            assert json.loads(row["answer"]) == {name: row[name] for name in TYPES}
        assert [failed[name] for name in TYPES] == [None] * 3


def test_numbers_of_an_answer_are_sought_in_the_document(answered):
    """Where a number stands is said, and that one stands nowhere; no row is held back for it."""
    plain, asked = answered
    assert not any(plain["figures"].to_pylist())
    for row in asked.to_pylist()[:2]:
        text = TEXTS[row["doc_id"]]
        places = [(each["value"], text[slice(each["begin"], each["end"])][:2]) for each in row["figures"]]
        assert places == [(str(page), str(page) if str(page) in text else text[:2]) for page in row["pages"]]
        is_missing = any(str(page) not in text for page in row["pages"])
        assert ("figure_not_found" in row["quality_flags"]) == is_missing


def test_confidence_is_a_column_only_where_it_is_asked_for(answered):
    """It has a number for each field, and scores the labels that stand beside what is written."""
    plain, asked = answered
    assert "confidence" not in plain.column_names
    assert asked["answer"] == plain["answer"]
    assert plain["choices"].null_count == len(TEXTS)
    *done, failed = asked.to_pylist()
    assert failed["confidence"] is None
    values = {"kind": ["audit", "budget"], "closed": ["true", "false"]}
    for row in done:
        assert [*row["confidence"]] == [*TYPES]
        for name, confidence in row["confidence"].items():
            assert confidence is None if row[name] == [] else confidence < 0
        assert [each["value"] for each in row["choices"]] == [value for each in values.values() for value in each]
        for field in values:
            assert sum(exp(each["log_prob"]) for each in row["choices"] if each["field"] == field) == pytest.approx(1)


def test_answers_to_the_parts_of_a_document_are_merged_by_rule(sections):
    """No merge is decoded; `part_summaries` has each part's answer."""
    rules = SCHEMA.replace("audit | budget", "{enum: [audit, budget], merge: majority}").replace(
        "2}", "2, merge: union}"
    )
    lengths = ["prompt.length_policy=parts", "parts.tokens=64", "prompt.max_prompt_tokens=200"]
    config = RunConfig.load(sections, [f"output.schema={rules}", *lengths])
    [row] = Summarizer(config)(pa.table({"text": ["The committee met on Monday. " * 60], "doc_id": ["a"]})).to_pylist()
    assert row["error_class"] is None, row["message"]
    parts = [json.loads(part["text"]) for part in row["part_summaries"]]
    assert row["num_requests"] == len(parts) > 2
    kinds = [part["kind"] for part in parts]
    pages = [page for part in parts for page in part["pages"]]
    assert kinds.count(row["kind"]) == max(map(kinds.count, kinds))
    assert row["closed"] == parts[0]["closed"]
    assert row["pages"] == list(dict.fromkeys(pages))
    assert json.loads(row["answer"]) == {name: row[name] for name in TYPES}


def test_confidence_of_a_text_names_its_least_certain_sentence():
    config = RunConfig.load(CONFIG, ["output.path=unused", "output.confidence=true", "decoding.max_new_tokens=40"])
    row = Summarizer(config)("The committee met.")
    found = row["confidence"]
    assert found["least"] <= found["whole"] < 0
    assert found["least_sentence"] in row["summary"]


ASKED = ["output.verify=true", 'prompt.verification="Is it so?"']
VERDICT = pa.struct({"field": pa.string(), "sentence": pa.string(), "probability": pa.float64()})


def test_each_sentence_has_a_verdict_and_none_is_flagged_until_a_limit_is_set():
    """The text is that of a run without."""
    ends = ["decoding.max_new_tokens=400", "decoding.stop=['e']"]
    config = RunConfig.load(CONFIG, ["output.path=unused", "input.id_column=doc_id", *ends])
    table = pa.table({"text": ["The committee met. It rained.", None], "doc_id": ["a", "b"]})
    plain = Summarizer(config)(table)
    assert "verdicts" not in plain.column_names
    for limits in ([], ["output.verify_below=1.0"]):
        found = Summarizer(RunConfig.load(config, [*ASKED, *limits]))(table)
        assert found.schema.field("verdicts").type == pa.list_(VERDICT)
        [done, failed] = found.to_pylist()
        assert failed["verdicts"] is None
        assert done["summary"] == plain["summary"][0].as_py()
        assert ("unsupported" in done["quality_flags"]) == bool(limits)
        places = [done["summary"].find(each["sentence"]) for each in done["verdicts"]]
        assert places == sorted(places)
        assert places[0] == 0
        assert all(0 < each["probability"] < 1 and each["field"] is None for each in done["verdicts"])


@pytest.mark.parametrize(
    "override, message",
    cases("""
        prompt.length_policy=parts -> output.verify asks about a document that was read whole
        decoding.max_new_tokens=2 -> raise it, or shorten prompt.verification
        prompt.verification="Is {{ sentence }} in {{ document }}?" -> prompt.verification names document
        output.verify_below=1.5 -> output.verify_below must be above 0 and at most 1
    """),
)
def test_what_keeps_a_question_from_being_asked_is_refused(override, message):
    assert message in refused(lambda: Summarizer(RunConfig.load(CONFIG, ["output.path=unused", *ASKED, override])))


@pytest.mark.slow
def test_a_run_writes_columns_and_its_report_counts_what_they_are_worth(tmp_path, summarize_here):
    texts = {"a": "The committee met. " * 20, "b": "It rained."}
    corpus = write_corpus(tmp_path / "a.parquet", [*texts.values()], doc=[*texts])
    schema = f"output.schema={SCHEMA[:-1]}, said: {{type: string, pattern: '^[a-z]{{2,4}}$'}}}}"
    own = ("output.column=answer", "input.id_column=doc", "decoding.max_new_tokens=200")
    worth = ("output.sources=true", "output.figures=true", *ASKED, "output.verify_below=1.0")
    summarize_here(*on(corpus, tmp_path / "out", schema, *own, *worth)).exits(0)
    written = pq.read_schema(tmp_path / "out" / "summaries" / "part-00000.parquet")
    kinds = TYPES | {"said": pa.string()}
    assert {name: written.field(name).type for name in kinds} == kinds
    found = rows(tmp_path / "out" / "summaries")
    for row in found:
        [evidence] = row["evidence"]
        [verdict] = row["verdicts"]
        assert evidence["value"] == verdict["sentence"] == row["said"]
        assert "unsupported" in row["quality_flags"]
        begin = evidence["begin"]
        assert begin is None or texts[row["doc_id"]][begin : evidence["end"]].lower() == row["said"]
    report = read_json(tmp_path / "out" / "report.json")
    assert report["evidence"]["said"]["strings"] == 2
    least = min(row["verdicts"][0]["probability"] for row in found)
    assert report["verdicts"] == {"sentences": 2, "asked": 2, "tenth_percentile": least}
    missing = sum(len(row["pages"]) for row in found)
    assert report["figures"] == {"figures": missing, "rounded": 0, "derived": 0, "not_found": missing}


@pytest.mark.parametrize(
    "schema, said",
    cases("""
        {agency: strng} -> output.schema.agency must be string, number
        {agency: string | null} -> output.schema.agency must be string
        {tags: {type: array, items: {type: string}, uniqueItems: true}} -> field tags cannot be decoded: Unimplemented
        {tree: {$ref: '#'}} -> contains itself
        {any: {type: object}} -> field any must have one type
        {any: {type: array}} -> an array with `items`, or an object with `properties`; got
        {short: {type: string, minLength: 5, maxLength: 2}} -> field short: minLength 5 is above maxLength 2
        {many: {type: array, items: {type: string, maxLenght: 2}}}
            -> field many: maxLenght is no keyword of JSON Schema; did you mean maxLength?
        {person: {name: string, age: integer}} -> output.schema.person: write an object inside another one
        {agency: strin} -> did you mean string?
        {agency: {type: strin}} -> field agency: there is no type strin; did you mean string?
        {agency: {$ref: '#/$defs/name'}} -> field agency: there is no #/$defs/name
        {agency: string, Agency: string} -> agency and Agency differ in case alone
        {type: object, properties: {name: {type: string}}, required: [nam]} -> no field; did you mean name?
        {agency: {type: string, merge: frist}} -> field agency: merge must be first, union, majority
        {agency: {type: string, merge: union}} -> field agency is no list
        nowhere.json -> nowhere.json cannot be read as JSON
        {} -> output.schema must name a field
    """),
)
def test_a_bad_schema_is_refused_and_its_field_named(schema, said):
    changes = ["output.path=unused", f"output.schema={schema}", "output.sources=true"]
    assert said in refused(RunConfig.load, CONFIG, changes)


def test_answers_that_are_scored_need_no_room(plan, tmp_path):
    """Others are refused: a night of 100,000 documents would be 100,000 rows that broke off."""
    corpus = write_corpus(tmp_path / "a.parquet", ["one"])
    scored = ("output.schema={kind: audit | budget}", "output.column=answer", "decoding.max_new_tokens=1")
    plan("--config", CONFIG, *on(corpus, tmp_path / "out", "input.id_column=null", *scored)).exits(0)

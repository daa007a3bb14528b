"""Answers as data: columns of the fields, answers that break off, and schemas that are refused."""

import json
from math import exp

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend import RunConfig, Summarizer
from tests.job.conftest import CONFIG, on, read_json, rows, summarize, write_corpus
from tests.refused import refused

SCHEMA = (
    "{kind: audit | budget, closed: boolean, pages: {type: array, items: {type: integer, maximum: 99}, maxItems: 2}}"
)
TYPES = {"kind": pa.string(), "closed": pa.bool_(), "pages": pa.list_(pa.int64())}


@pytest.fixture(scope="module")
def sections():
    names = ["output.path=unused", f"output.schema={SCHEMA}", "output.column=answer", "decoding.max_new_tokens=200"]
    return RunConfig.load(CONFIG, [*names, "input.id_column=doc_id"])


def test_each_field_is_a_column_of_its_type(sections):
    """The text stays beside them; what was decoded is what the columns hold."""
    result = Summarizer(sections)(pa.table({"text": ["The committee met.", None], "doc_id": ["a", "b"]}))
    assert {name: result.schema.field(name).type for name in TYPES} == TYPES
    done, failed = result.to_pylist()
    assert json.loads(done["answer"]) == {name: done[name] for name in TYPES}
    assert [failed[name] for name in TYPES] == [None] * 3
    assert done["figures"] is None


def test_numbers_of_an_answer_are_sought_in_the_document(sections):
    """Where a number stands is said, and that one stands nowhere; no row is held back for it."""
    config = RunConfig.load(sections, ["output.figures=true"])
    summarizer = Summarizer(config)
    texts = ["The committee met.", "The committee met. " + "96 of 1,000 pages. " * 20]
    for row in summarizer(pa.table({"text": texts, "doc_id": ["a", "b"]})).to_pylist():
        text = texts["ab".index(row["doc_id"])]
        places = [(each["value"], text[slice(each["begin"], each["end"])][:2]) for each in row["figures"]]
        assert places == [(str(page), str(page) if str(page) in text else text[:2]) for page in row["pages"]]
        is_missing = any(str(page) not in text for page in row["pages"])
        assert ("figure_not_found" in row["quality_flags"]) == is_missing


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


def test_confidence_is_a_column_only_where_it_is_asked_for(sections):
    """It has a number for each field, and scores the labels that stand beside what is written."""
    table = pa.table({"text": ["The committee met.", None], "doc_id": ["a", "b"]})
    plain = Summarizer(sections)(table)
    asked = Summarizer(RunConfig.load(sections, ["output.confidence=true"]))(table)
    assert "confidence" not in plain.column_names
    [done, failed] = asked.to_pylist()
    assert failed["confidence"] is None
    assert done["answer"] == plain["answer"][0].as_py()
    assert [*done["confidence"]] == [*TYPES]
    for name in TYPES:
        is_said = done[name] != []
        assert (done["confidence"][name] is not None) == is_said
        assert not is_said or done["confidence"][name] < 0
    assert plain["choices"][0].as_py() is None
    values = {"kind": ["audit", "budget"], "closed": ["true", "false"]}
    assert [each["value"] for each in done["choices"]] == [value for each in values.values() for value in each]
    for field in values:
        assert sum(exp(each["log_prob"]) for each in done["choices"] if each["field"] == field) == pytest.approx(1)


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
    [
        ("prompt.length_policy=parts", "output.verify asks about a document that was read whole"),
        ("decoding.max_new_tokens=2", "raise it, or shorten prompt.verification"),
        ('prompt.verification="Is {{ sentence }} in {{ document }}?"', "prompt.verification names document"),
        ("output.verify_below=1.5", "output.verify_below must be above 0 and at most 1"),
    ],
)
def test_what_keeps_a_question_from_being_asked_is_refused(override, message):
    assert message in refused(lambda: Summarizer(RunConfig.load(CONFIG, ["output.path=unused", *ASKED, override])))


@pytest.mark.slow
@pytest.mark.parametrize("most, code", [(200, 0), (80, 3)])
def test_a_run_writes_columns_and_keeps_what_broke_off(tmp_path, most, code):
    texts = {"a": "The committee met. " * 20, "b": "It rained."}
    corpus = write_corpus(tmp_path / "a.parquet", [*texts.values()], doc=[*texts])
    longer = "{2,4}" if code == 0 else "{90,99}"
    said = f"{{type: string, pattern: '^[a-z]{longer}$'}}"
    settings = [
        f"output.schema={SCHEMA[:-1]}, said: {said}}}",
        "output.sources=true",
        "output.figures=true",
        "output.confidence=true",
        *ASKED,
        "output.verify_below=1.0",
        "output.column=answer",
        "input.id_column=doc",
        f"decoding.max_new_tokens={most}",
    ]
    summarize(*on(corpus, tmp_path / "out", *settings)).exits(code)
    if code:
        errors = rows(tmp_path / "out" / "errors")
        assert {row["error_class"] for row in errors} == {"IncompleteAnswer"}
        assert all(row["answer"].startswith('{"') for row in errors)
        return
    schema = pq.read_schema(tmp_path / "out" / "summaries" / "part-00000.parquet")
    kinds = TYPES | {"said": pa.string()}
    assert {name: schema.field(name).type for name in kinds} == kinds
    num_missing = 0
    for row in rows(tmp_path / "out" / "summaries"):
        assert json.loads(row["answer"]) == {name: row[name] for name in kinds}
        states = [(each["text"], each["found"]) for each in row["figures"]]
        assert states == [(str(page), "no") for page in row["pages"]]
        assert ("figure_not_found" in row["quality_flags"]) == bool(row["pages"])
        num_missing += len(row["pages"])
        assert all((value is None) == (row[name] == []) for name, value in row["confidence"].items())
        [found] = row["evidence"]
        assert (found["field"], found["value"]) == ("said", row["said"])
        [verdict] = row["verdicts"]
        assert (verdict["field"], verdict["sentence"]) == ("said", row["said"])
        assert "unsupported" in row["quality_flags"]
        begin = found["begin"]
        assert begin is None or texts[row["doc_id"]][begin : found["end"]].lower() == row["said"]
    report = read_json(tmp_path / "out" / "report.json")
    assert report["evidence"]["said"]["strings"] == 2
    probabilities = [each["probability"] for row in rows(tmp_path / "out" / "summaries") for each in row["verdicts"]]
    assert report["verdicts"] == {"sentences": 2, "asked": 2, "tenth_percentile": min(probabilities)}
    assert report["figures"] == {"figures": num_missing, "rounded": 0, "derived": 0, "not_found": num_missing}


@pytest.mark.slow
def test_a_schema_of_values_alone_is_scored(tmp_path):
    """Each value has its probability, and the likeliest is the answer, whatever the temperature is."""
    corpus = write_corpus(tmp_path / "a.parquet", ["The committee met. " * 20, "It rained."], doc=["a", "b"])
    settings = [
        "output.schema={kind: audit | budget | other, closed: 'boolean?'}",
        "output.column=answer",
        "input.id_column=doc",
        "decoding.temperature=1.5",
        "decoding.max_new_tokens=80",
    ]
    summarize(*on(corpus, tmp_path / "out", *settings)).exits(0)
    for row in rows(tmp_path / "out" / "summaries"):
        answer = json.loads(row["answer"])
        assert answer == {name: row[name] for name in ("kind", "closed")}
        for field, values in {"kind": ["audit", "budget", "other"], "closed": ["true", "false", "null"]}.items():
            log_probs = {each["value"]: each["log_prob"] for each in row["choices"] if each["field"] == field}
            assert [*log_probs] == values
            assert sum(map(exp, log_probs.values())) == pytest.approx(1)
            best = max(log_probs, key=log_probs.__getitem__)
            assert best == (row[field] if field == "kind" else json.dumps(row[field]))
        assert row["num_spec_steps"] + row["num_plain_steps"] == 0
    found = read_json(tmp_path / "out" / "report.json")["choices"]
    assert found.keys() == {"kind", "closed"}
    for values in found.values():
        assert sum(of["documents"] for of in values.values()) == 2
        assert all(0 < of["probability_sum"] <= of["documents"] for of in values.values())


@pytest.mark.parametrize(
    "schema, said",
    [
        ("{agency: strng}", "output.schema.agency must be string, number"),
        ("{agency: string | null}", "output.schema.agency must be string"),
        (
            "{tags: {type: array, items: {type: string}, uniqueItems: true}}",
            "field tags cannot be decoded: Unimplemented",
        ),
        ("{tree: {$ref: '#'}}", "contains itself"),
        ("{any: {type: object}}", "field any must have one type"),
        ("{any: {type: array}}", "an array with `items`, or an object with `properties`; got"),
        ("{short: {type: string, minLength: 5, maxLength: 2}}", "field short: minLength 5 is above maxLength 2"),
        (
            "{many: {type: array, items: {type: string, maxLenght: 2}}}",
            "field many: maxLenght is no keyword of JSON Schema; did you mean maxLength?",
        ),
        ("{person: {name: string, age: integer}}", "output.schema.person: write an object inside another one"),
        ("{agency: strin}", "did you mean string?"),
        ("{agency: {type: strin}}", "field agency: there is no type strin; did you mean string?"),
        ("{agency: {$ref: '#/$defs/name'}}", "field agency: there is no #/$defs/name"),
        ("{agency: string, Agency: string}", "agency and Agency differ in case alone"),
        ("{type: object, properties: {name: {type: string}}, required: [nam]}", "no field; did you mean name?"),
        ("{agency: {type: string, merge: frist}}", "field agency: merge must be first, union, majority"),
        ("{agency: {type: string, merge: union}}", "field agency is no list"),
        ("nowhere.json", "nowhere.json cannot be read as JSON"),
        ("{}", "output.schema must name a field"),
    ],
)
def test_a_bad_schema_is_refused_and_its_field_named(schema, said):
    changes = ["output.path=unused", f"output.schema={schema}", "output.sources=true"]
    assert said in refused(RunConfig.load, CONFIG, changes)


def test_a_limit_that_no_answer_can_keep_is_refused_before_a_model_is_loaded(call, plan, tmp_path):
    """Otherwise a night of 100,000 documents is 100,000 rows that broke off."""
    corpus = write_corpus(tmp_path / "a.parquet", ["one"])
    settings = ["input.id_column=null", f"output.schema={SCHEMA}", "output.column=answer"]
    given = ["--config", CONFIG, *on(corpus, tmp_path / "out", *settings)]
    ended = call(*given, "--set", "decoding.max_new_tokens=6")
    assert "decoding.max_new_tokens is 6, and the shortest answer of output.schema takes about" in ended.line()
    scored = ["--set", "output.schema={kind: audit | budget}", "--set", "decoding.max_new_tokens=1"]
    plan(*given, *scored).exits(0)


def test_a_schema_may_be_a_file_beside_its_configuration(tmp_path):
    """Read once: what workers get, and what makes the run, is its content, in its order."""
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}, "required": ["b"]}
    (tmp_path / "fields.json").write_text(json.dumps(schema))
    (tmp_path / "task.yaml").write_text("output:\n  schema: fields.json\n")
    config = RunConfig.load([CONFIG, tmp_path / "task.yaml"], ["output.path=unused"])
    (tmp_path / "fields.json").unlink()
    assert list(json.loads(config.output.schema)["properties"]) == ["b", "a"]
    assert RunConfig.load(config, ["output.column=x"]).output.schema == config.output.schema

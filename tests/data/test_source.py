"""What may be wrong with an input, and who pays for it: the run before it starts, or one row."""

from datetime import date
from decimal import Decimal
from itertools import product
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pytest

from specextend.core import DocumentKey
from specextend.data.inputs import InputError, InputOptions
from specextend.data.instructions import Instruction
from specextend.data.rows import RowReader
from specextend.data.selection import select_rows
from specextend.data.source import open_source
from tests.data.conftest import input_error, opened, row_error, row_of
from tests.refused import refused

NOT_UTF8 = pa.array([b"\xff\xfe"]).cast("string", safe=False)


def run_error(path, **options):
    return refused(lambda: select_rows(opened(path, **options)), kind=InputError)


def test_what_is_wrong_with_files_is_said_of_all_of_them_at_once(tmp_path, write):
    """Whoever repairs a corpus wants to do it once."""
    write("in/a.parquet", {"body": ["one"]})
    write("in/b.parquet", {"text": [1]})
    (tmp_path / "in" / "c.parquet").write_bytes(b"no Parquet")
    (tmp_path / "in" / "c.csv").write_bytes(b"text\nnot Parquet either\n")
    write("in/d.parquet", {"text": ["fine"]})
    message = run_error(tmp_path / "in" / "*")
    assert message.startswith("a.parquet has no column 'text' (input.text_column); it has body; ")
    assert "; b.parquet: column 'text' (input.text_column) is int64, but must be a string column; " in message
    assert "; c.csv is not Parquet; convert it: specextend prepare documents INPUT --output FOLDER" in message
    assert "; c.parquet cannot be read as Parquet" in message
    assert message.endswith("; repair or remove it")
    assert "d.parquet" not in message


@pytest.mark.parametrize(
    "id_, kind, expected",
    [
        (7, "int64", "7"),
        (2**64 - 1, "uint64", "18446744073709551615"),
        ("a", "string", "a"),
        ("a", pa.dictionary("int8", "string"), "a"),
        (10**30, pa.decimal128(38, 0), f"1{'0' * 30}"),
        (b"\xab" * 16, pa.uuid(), "abababab-abab-abab-abab-abababababab"),
    ],
)
def test_ids_are_strings_and_integers_become_decimal(write, id_, kind, expected):
    source = opened(write("a.parquet", {"text": ["x"], "n": pa.array([id_], kind)}), id_column="n")
    assert row_of(source, 0).doc_id == source.doc_id(DocumentKey(0, 0)) == expected


def test_a_missing_column_is_a_run_error_that_lists_those_there(write):
    path = write("a.parquet", {"body": ["x"], "n": [1]})
    assert run_error(path) == "a.parquet has no column 'text' (input.text_column); it has body, n"
    assert run_error(path, text_column="boddy").endswith("it has body, n; did you mean body?")
    for option in ("id_column", "options_column", "reference_column", "pages_column"):
        assert f"input.{option}" in run_error(path, text_column="body", **{option: "missing"})
    assert "input.passthrough" in run_error(path, text_column="body", passthrough=("missing",))


def test_a_field_that_the_instruction_misspells_is_a_run_error(write):
    """It was an error row of each document, after the models were loaded. A field of a null struct is an empty text."""
    path = write("a.parquet", {"text": ["x", "y"], "meta": [{"land": "fr", "at": {"page": 1}}, None]})

    def ask(instruction):
        return open_source(InputOptions(path=str(path)), templates=[Instruction("prompt.instruction", instruction)])

    missing = {"meta.lnd": "'lnd'; it has land, at; did you mean land?", "meta['at'].p": "'p'; it has page"}
    for wrong, said in missing.items():
        line = refused(ask, f"{{% if text %}}{{{{ {wrong} }}}}{{% endif %}}", kind=InputError)
        assert line == f"a.parquet: column 'meta' (prompt.instruction) has no field {said}"
    row = ask(
        "{{ meta.land.upper() }} {{ meta.at.page }} {{ meta.keys() | join(' ') }} {{ meta.lnd | default('-') }}"
        "{% if meta.at.p is defined %}{{ meta.at.p }}{% endif %}"
    ).read(DocumentKey(0, 0))
    assert row.instruction == ("FR 1 land at -\n\n", "")
    row = ask("in <{{ meta.land }}{{ meta['at'].page }}>").read(DocumentKey(0, 1))
    assert row.instruction == ("in <>\n\n", "")


@pytest.mark.parametrize(
    "option, column, cast",
    [
        ("text_column", "number", 'CAST("number" AS VARCHAR)'),
        ("text_column", "bytes", 'decode("bytes")'),
        ("id_column", "fixed", 'hex("fixed")'),
        ("id_column", "price", 'CAST("price" AS VARCHAR)'),
        ("options_column", "ratio", 'CAST("ratio" AS BIGINT)'),
        ("reference_column", "wide", 'decode("wide")'),
    ],
)
def test_a_mistyped_column_is_a_run_error_that_writes_out_the_cast(write, option, column, cast):
    """The cast is SQL that works: what DuckDB writes with it is read."""
    columns = {
        "body": ["x"],
        "number": [1],
        "ratio": [8.0],
        "bytes": [b"x"],
        "fixed": pa.array([b"abcd"], pa.binary(4)),
        "wide": pa.array([b"a" * 65], pa.binary(65)),
        "price": [Decimal("1.5")],
    }
    path = write("a.parquet", columns)
    options = {"text_column": "body", option: column}
    message = run_error(path, **options)
    assert f"column '{column}' (input.{option}) is " in message
    assert f"; cast it when you write the Parquet, as in DuckDB: SELECT * REPLACE ({cast} AS" in message
    query = message.partition("DuckDB: ")[2].replace("...", f"'{path}'")
    duckdb.sql(f"COPY ({query}) TO '{path.parent}/b.parquet'")
    assert opened(f"{path.parent}/b.parquet", **options).num_rows == 1
    of_pages = run_error(path, text_column="body", pages_column=column)
    assert of_pages.startswith(f"a.parquet: column '{column}' (input.pages_column) is ")
    assert of_pages.endswith(", but must be a list of integers")


def test_a_row_group_that_no_worker_can_hold_is_refused_with_the_way_out(write, monkeypatch):
    """A worker reads all of it for one document. Only columns of documents count; a name with dots is one of them."""
    path = write("a.parquet", {"a.text": [f"{i}" * 300_000 for i in range(60)], "a": [b"y" * 999_999] * 60}, 60)
    monkeypatch.setattr("specextend.data.check.MAX_GROUP_BYTES", 100 << 20)
    assert opened(path, text_column="a.text").num_rows == 60
    monkeypatch.setattr("specextend.data.check.MAX_GROUP_BYTES", 20 << 20)
    with input_error(r"a.parquet has a row group that takes 0\.0 GiB to read; .*repartition INPUT"):
        opened(path, text_column="a.text")


def test_repeated_ids_are_run_errors_over_all_files(tmp_path, write):
    write("in/a.parquet", {"text": ["x"] * 3, "id": ["1", "2", "3"]})
    write("in/b.parquet", {"text": ["x"] * 2, "id": [4, 2]})
    assert run_error(tmp_path / "in", id_column="id") == (
        "ids must be unique across all files: 1 repeated, the first is '2' in a.parquet row 1 and b.parquet row 1; "
        "change them, remove input.id_column, so that rows go by their places, or leave the rows out with input.filter"
    )
    write("in/b.parquet", {"text": ["x"], "id": NOT_UTF8})
    assert "not UTF-8" in run_error(tmp_path / "in", id_column="id")


@pytest.mark.parametrize(
    "value, kind, path_value, expected",
    [
        (25, "int8", "300", None),
        (1.5, "double", "n%2Fa", None),
        (date(2025, 1, 1), "date32", "2025", None),
        (date(2025, 1, 1), "date32", "2025-01-02", date(2025, 1, 2)),
    ],
)
def test_a_folder_s_value_has_the_type_of_the_column_in_other_files_or_is_a_run_error(
    tmp_path, write, value, kind, path_value, expected
):
    """It was found when everything was decoded, and the summaries could never be written."""
    write("in/c=0/a.parquet", {"text": ["x"], "c": pa.array([value], kind)})
    write(f"in/c={path_value}/b.parquet", {"text": ["y"]})
    if expected is None:
        said = f"but c={path_value}/b.parquet has '{unquote(path_value)}' in its path"
        assert said in run_error(tmp_path / "in", passthrough=("c",))
    else:
        [table] = opened(tmp_path / "in", passthrough=("c",)).batches(1, ["c"])
        assert table["c"].to_pylist() == [expected]


def test_a_column_of_nulls_alone_costs_its_rows_and_no_more(write):
    source = opened(write("a.parquet", {"text": [None]}))
    with row_error("NullText"):
        row_of(source, 0)
    assert [row.error_class for row in source.scan()] == ["NullText"]


@pytest.mark.parametrize("kind", ["string", "string_view", pa.dictionary("int32", "string")])
def test_a_row_may_have_a_reference(write, kind):
    """It is compared with the summary, so a null or a character that is broken costs the document nothing."""
    references = pa.concat_arrays([pa.array(["first", None]), NOT_UTF8]).cast(kind, safe=False)
    source = opened(write("a.parquet", {"text": [*"xyz"], "abstract": references}), reference_column="abstract")
    found = [row_of(source, row).reference for row in range(3)]
    assert found == ["first", None, "\ufffd\ufffd"]


def test_a_limit_beyond_every_length_is_an_error_row(write):
    """An unsigned column holds what no signed one takes."""
    path = write("in.parquet", {"text": ["a b", "c"], "n": pa.array([(1 << 64) - 1, 7], "uint64")})
    source = opened(path, options_column="n")
    assert [row.error_class for row in source.scan()] == ["BadMaxNewTokens", None]
    with row_error("BadMaxNewTokens: max_new_tokens must be at least 1 and at most 2\\^40"):
        row_of(source, 0)


def test_no_text_passes_for_another_one_with_an_instruction():
    """A document that was crafted to have the hash of an earlier one would be left out of the night as unchanged."""
    pieces = (b"a", b"1", b"1:", b"a2:", b"[1, {}]", b"0:12:")
    texts = [*pieces, *(b"".join(pair) for pair in product(pieces, repeat=2))]
    rows = list(product(texts, (None, 1, 11), (None, *texts)))
    reader = RowReader(InputOptions(path="in", options_column="limit", instruction_column="ask"))
    columns = ("text", "limit", "ask")
    assert len({reader.content(dict(zip(columns, row, strict=True))) for row in rows}) == len(rows)


def test_a_row_may_have_an_instruction_of_its_own(write):
    """Null and blank leave the run's; two places for the document are the row's error, not the run's."""
    own = ["Count the words.", None, " ", "{{ document }} {{document}}", "Again."]
    path = write("in.parquet", {"text": ["same"] * 5, "ask": own})
    source = opened(path, instruction_column="ask")
    rows = [row_of(source, row) for row in (0, 1, 2, 4)]
    assert [row.instruction for row in rows] == [("Count the words.\n\n", ""), None, None, ("Again.\n\n", "")]
    first, null, blank, again = (row.content_sha256 for row in rows)
    assert null == blank == row_of(opened(path), 0).content_sha256
    assert len({first, null, again}) == 3, "another question makes another summary"
    with row_error("BadInstruction: the instruction"):
        row_of(source, 3)
    assert "has no column 'asked' (input.instruction_column)" in run_error(path, instruction_column="asked")


def test_a_column_that_only_rules_read_may_have_dates_that_python_has_not(write):
    path = write("a.parquet", {"text": ["one"], "day": pa.array([10**7], "date32")})
    options = InputOptions(path=str(path), passthrough=("day",))
    row = open_source(options, rule_columns=["day"]).read(DocumentKey(0, 0))
    assert row.passed["day"].cast("string").to_pylist() == ["29349-01-26"]

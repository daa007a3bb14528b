"""Whatever Parquet can hold passes through with its values, and with its type if all files have the same."""

import datetime
from decimal import Decimal
from itertools import product
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.data.check import guess_columns
from specextend.data.finalize import finalize
from specextend.data.selection import select_rows
from tests.data.conftest import commit_all, input_error, opened, row_of

NUM_ROWS = 700
"""More than one batch of reading, so that values of two batches must fit together."""
GROUP_ROWS = 300

NESTED = pa.struct([("title", "string"), ("tags", pa.list_(pa.struct([("name", "large_string"), ("at", "int8")])))])

COLUMNS = {
    "string": ("string", [f"text {row}" for row in range(NUM_ROWS)]),
    "dictionary": (pa.dictionary("int32", "string"), ["a category", "another"]),
    "small_dictionary": (pa.dictionary("int8", "large_string"), [f"{row // 3}" for row in range(NUM_ROWS)]),
    "column.with.dots": ("string", ["a text"]),
    "binary": ("binary", [b"\x00\xff"]),
    "uint64": ("uint64", [2**64 - 1, 0]),
    "decimal": (pa.decimal128(20, 3), [Decimal("0.125")]),
    "timestamp": (pa.timestamp("us", "Europe/Berlin"), [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)]),
    "fixed_size_list": (pa.list_(pa.float32(), 3), [[1, 2, 3]]),
    "map": (pa.map_("string", "int64"), [[("key", 1)]]),
    "nested": (NESTED, [{"title": "t", "tags": [{"name": "n", "at": 1}] * 2}, {"title": "u", "tags": []}]),
    "nothing": ("null", [None]),
}
"""Values of a type, which are repeated."""


@pytest.fixture
def summaries_of(output):
    """Give the summaries of each file of an input, whose every row is done."""

    def summaries(source):
        commit_all(source, output)
        finalize(source, output)
        return [pq.read_table(path) for path in sorted(Path(output.path, "summaries").iterdir())]

    return summaries


def test_passthrough_keeps_types_and_values(write, summaries_of):
    """A null in every seventh row. A column that holds nothing else comes out as text, which every reader takes.

    The values of a dictionary in several row groups may be more than its index can tell apart: made one, nobody could
    read them.
    """
    values = {
        name: [None if row % 7 == 6 else given[row % len(given)] for row in range(NUM_ROWS)]
        for name, (_, given) in COLUMNS.items()
    }
    groups = [slice(begin, begin + GROUP_ROWS) for begin in range(0, NUM_ROWS, GROUP_ROWS)]
    kinds = {"text": "string"} | {name: kind for name, (kind, _) in COLUMNS.items()}
    values["text"] = values["string"]
    columns = {name: pa.chunked_array([values[name][each] for each in groups], kinds[name]) for name in kinds}
    path = write("a.parquet", columns, GROUP_ROWS)
    source = opened(path, passthrough=tuple(COLUMNS))
    [written] = summaries_of(source)
    for name in COLUMNS:
        kind = "string" if name == "nothing" else pq.read_table(path, columns=[name])[name].type
        assert written[name].type == kind, name
        assert written[name].to_pylist() == values[name], name


ENCODINGS = ["PLAIN", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"]
FLAT = ["large_string", "string_view", pa.json_(pa.string())]
DICTIONARIES = [pa.dictionary("int32", "string"), pa.dictionary("int8", "large_string")]


@pytest.mark.parametrize("kind, encoding", [*product(FLAT, ENCODINGS), *product(DICTIONARIES, ENCODINGS[:2])])
def test_text_is_read_in_every_type_and_encoding(tmp_path, summaries_of, kind, encoding):
    """Text is read as a dictionary, which pyarrow cannot do of every encoding."""
    texts = [None if i % 7 == 6 else f"text {i % 99} " * (1 + i % 99) for i in range(NUM_ROWS)]
    path = tmp_path / "a.parquet"
    is_dictionary = encoding == "RLE_DICTIONARY"
    options = {"use_dictionary": is_dictionary, "column_encoding": None if is_dictionary else encoding}
    pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), path, row_group_size=300, **options)
    source = opened(path, passthrough=("text",))
    assert [row.text and row.text.decode() for row in source.scan()] == texts
    for row in range(0, NUM_ROWS, 7):
        assert row_of(source, row).text == texts[row]
    [written] = summaries_of(source)
    assert written["text"].type == pq.read_table(path)["text"].type
    assert written["text"].to_pylist() == texts


YEARS = [datetime.datetime(year, 12, 31, 23, 59, 59, 999_999) for year in (9999, 2026, 1, 1816)]


def test_times_of_96_bits_are_right_in_every_year(tmp_path, summaries_of):
    """Spark writes them by default, and 9999 for what has no end: it became 1816, and a filter matched nothing."""
    path = tmp_path / "a.parquet"
    nested = [{"at": [year]} for year in YEARS]
    columns = {"text": list("abcd"), "until": pa.array(YEARS, pa.timestamp("us")), "nested": nested}
    pq.write_table(pa.table(columns), path, use_deprecated_int96_timestamps=True, row_group_size=2)
    assert pq.ParquetFile(path).schema.column(1).physical_type == "INT96"
    assert [row.key.row for row in select_rows(opened(path, filter="until > '2262-01-01'")).scan()] == [0]
    [written] = summaries_of(opened(path, passthrough=("until", "nested")))
    assert written["until"].to_pylist() == YEARS
    assert written["nested"].to_pylist() == nested


@pytest.mark.parametrize("nanoseconds", [1, 2**62 + 1])
@pytest.mark.parametrize("column", ["at", "nested"])
def test_times_of_96_bits_are_never_rounded(tmp_path, nanoseconds, column):
    """Microseconds are for all years; where a time has nanoseconds, one of the two would be lost."""
    at = pa.array([nanoseconds], pa.timestamp("ns"))
    table = pa.table({"text": ["a"], "at": at, "nested": pa.StructArray.from_arrays([at], ["t"])})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert opened(tmp_path).num_rows == 1
    with input_error(r"a\.parquet has INT96 times with fractions of microseconds; cast them"):
        opened(tmp_path, passthrough=(column,))


def utc(*kinds):
    return [pa.timestamp(*kind.split()) for kind in kinds]


S, L, V = pa.string(), pa.large_string(), pa.string_view()
NOON = datetime.datetime(2026, 1, 1, 12)
JOINED = {
    "views": ([V, S], "x", S),
    "dictionaries": ([pa.dictionary("int8", S), pa.dictionary("int32", S), S], "x", S),
    "dictionary of integers": ([pa.dictionary("int8", "int64"), "int32"], 3, "int64"),
    "bytes": (["binary", "large_binary", "binary_view", pa.binary(1)], b"x", "large_binary"),
    "integers and floats": (["int64", "float32", "float64"], 7, "float64"),
    "units of time": (utc("s", "us", "ms"), NOON, pa.timestamp("us")),
    "zones": (utc("us Europe/Berlin", "ms UTC"), NOON.replace(tzinfo=datetime.UTC), *utc("us Europe/Berlin")),
    "decimals": ([pa.decimal128(5, 2), pa.decimal128(9, 1)], Decimal("1.5"), pa.decimal128(10, 2)),
    "lists": ([pa.list_(V), pa.large_list(L), pa.list_(S, 1)], ["x"], pa.large_list(L)),
    "structs": (
        [pa.struct([("a", "int32"), ("b", V)]), pa.struct([("b", L), ("a", "int64")])],
        {"a": 1, "b": "x"},
        pa.struct([("a", "int64"), ("b", L)]),
    ),
    "nothing": (["null", pa.list_(S), "null"], None, pa.list_(S)),
}


@pytest.mark.parametrize("name", JOINED)
def test_types_that_have_room_in_one_are_joined(tmp_path, write, summaries_of, name):
    """Each night's writer has its own, and the last file lacks the column. No value changes."""
    kinds, value, expected = JOINED[name]
    for number, kind in enumerate(kinds):
        write(f"in/{number}.parquet", {"text": ["x"], "c": pa.array([value], kind)})
    write("in/9.parquet", {"text": ["x"]})
    written = [each["c"] for each in summaries_of(opened(tmp_path / "in", passthrough=("c",)))]
    assert all(each.type == expected for each in written), [each.type for each in written]
    assert [each[0].as_py() for each in written] == [value] * len(kinds) + [None]


@pytest.mark.parametrize(
    "one, other",
    [
        (["x"], [1]),
        (["x"], [b"x"]),
        ([Decimal("0.1")], [0.1]),
        ([NOON], [NOON.replace(tzinfo=datetime.UTC)]),
        ([2**53 + 1], [0.5]),
        (pa.array([2**64 - 1], "uint64"), [-1]),
        (YEARS, pa.array([1] * 4, pa.timestamp("ns"))),
    ],
)
def test_types_and_values_that_would_change_are_refused_before_anything_is_decoded(tmp_path, write, one, other):
    """A number that is rounded, or a time that wraps around, would be in the results with exit 0."""
    for number, values in enumerate((one, other)):
        write(f"{number}.parquet", {"text": ["x"] * len(values), "c": values})
    with input_error(r"input.passthrough 'c' .*; use one type in all files"):
        list(opened(tmp_path, passthrough=("c",)).scan())


def test_a_file_whose_row_groups_are_encoded_differently_is_read_to_its_end(tmp_path):
    """Writers give up dictionaries where texts no longer repeat. Such a file was called damaged."""
    path = tmp_path / "a.parquet"
    text = "CASE WHEN i < 2048 THEN 'again' ELSE 'text ' || i || repeat('x', i % 99) END"
    options = "PARQUET_VERSION V2, ROW_GROUP_SIZE 2048"
    duckdb.sql(f"COPY (SELECT {text} AS text FROM range(6000) AS t(i)) TO '{path}' ({options})")
    encodings = [pq.read_metadata(path).row_group(group).column(0).encodings for group in (0, 2)]
    assert encodings == [("RLE_DICTIONARY",), ("DELTA_LENGTH_BYTE_ARRAY",)]
    source = opened(path, passthrough=("text",))
    found = [row.text.decode() for row in source.scan() if row.text]
    assert found == pq.read_table(path)["text"].to_pylist()
    assert row_of(source, 5999).text == found[-1]


@pytest.mark.parametrize("column", ["text", "topic"])
def test_what_pyarrow_cannot_decode_in_a_later_row_group_is_found_by_the_check(write, column):
    """A file with LZO behind its first rows is not damaged: nobody can repair it, but its writer can write it anew."""
    codec = b"\x18" + bytes([len(column)]) + column.encode() + b"\x15"
    path = write("a.parquet", {"text": ["x"] * 4, "topic": ["y"] * 4})
    before, found, behind = path.read_bytes().rpartition(codec + b"\x02")
    path.write_bytes(before + found[:-1] + b"\x06" + behind)
    said = r"a.parquet uses a feature that pyarrow cannot decode \(.*LZO.*\); it is not damaged: "
    with input_error(said):
        opened(path, passthrough=("topic",))


@pytest.mark.parametrize(
    "text",
    [
        [b"a long text of bytes"],
        ["a long text".encode("utf-16")],
        pa.array([b"a text of 20 bytes.."], pa.binary(20)),
        pa.array([b"a long text of bytes"]).dictionary_encode(),
        [["a long paragraph", "another one"]],
        [[{"role": "user", "content": "a long text"}]],
        [{"de": "ein langer Text", "en": None}],
    ],
)
def test_no_other_column_is_guessed_to_be_the_text_because_its_type_is_odd(write, text):
    """The titles would be summarised, with exit 0. Pictures and numbers beside a text are not in its way."""
    others = {"title": ["a title"], "picture": [b"\x89PNG\xff" * 99], "embedding": [[0.5] * 99], "report": [7]}
    path = write("a.parquet", {"text": text} | others)
    with input_error(r"a.parquet: column 'text' looks like the text, but is .*; (cast|join) it"):
        guess_columns(str(path))
    write("a.parquet", {"text": ["a text"], "uuid": pa.array([b"1" * 16], pa.uuid())} | others)
    assert guess_columns(str(path)).text == "title"
    assert guess_columns(str(path)).id == "uuid"

"""Which rows of its input a run is about: filter, sample, limit, and what earlier runs have done."""

import os
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.finalize import finalize
from specextend.data.fingerprint import build_manifest, differences, write_manifest
from specextend.data.inputs import InputOptions
from specextend.data.selection import find_earlier, recall_selection, select_rows, write_selection
from specextend.data.source import open_source
from tests.data.conftest import input_error, location, opened
from tests.properties.rows import done, failed


@pytest.fixture
def corpus(tmp_path, write):
    """Two files of a folder with partitions; keywords are options of the input."""
    for number, lang in enumerate(("de", "en")):
        ids = [f"{lang}{row}" for row in range(5)]
        columns = {"id": ids, "text": [f"text of {each}" for each in ids], "pages": [*range(5)]}
        write(f"in/lang={lang}/year=202{number}/a.parquet", columns)
    return lambda **options: InputOptions(path=f"{tmp_path}/in", id_column="id", **options)


def ids_of(source):
    return [source.doc_id(key) for key in keys_of(source)]


def keys_of(source):
    return [DocumentKey(file.number, row) for file in source.files for row in source.rows(file.number)]


def test_filter_sample_and_limit_choose_rows_in_this_order(corpus):
    """Files without a chosen row are no part of the run, so they get no empty files of results."""
    english = select_rows(open_source(corpus(filter="lang == 'en' and year >= 2021 and pages > 1")))
    assert ids_of(english) == ["en2", "en3", "en4"]
    assert [file.relative_path for file in english.files] == ["lang=en/year=2021/a.parquet"]
    assert ids_of(select_rows(open_source(corpus(filter="pages > 2", limit=2)))) == ["de3", "de4"]
    counted = select_rows(open_source(corpus(filter="pages > 0", sample=5, limit=4)))
    counts = {"input": 10, "not_matching": 2, "not_in_sample": 3, "over_limit": 1, "selected": 4}
    assert counted.selection.counts == counts


def test_a_sample_depends_on_ids_alone(corpus, write):
    """A pilot on one document in two must not change its documents because others have arrived."""
    before = ids_of(select_rows(open_source(corpus(sample=0.5))))
    assert 0 < len(before) < 10
    write("in/lang=fr/year=2022/a.parquet", {"id": ["fr0"], "text": ["t"], "pages": [1]})
    assert [each for each in ids_of(select_rows(open_source(corpus(sample=0.5)))) if each != "fr0"] == before
    assert len(ids_of(select_rows(open_source(corpus(sample=3))))) == 3


@pytest.mark.parametrize(
    "said, options",
    {
        "matches none of 10 rows": {"filter": "pages > 9"},
        "has no column 'page' (input.filter)": {"filter": "page > 9"},
        "fraction between 0 and 1": {"sample": 1.5},
        "credentials": {"except_done_in": ("s3://key:secret@bucket/out",)},
    }.items(),
)
def test_a_selection_that_makes_no_sense_is_refused(corpus, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        select_rows(open_source(corpus(**options)))


@pytest.mark.parametrize(
    "one, other, message",
    [
        (
            [10, 9],
            ["10", "9"],
            "input.filter 'n' is int64 in a.parquet but string in b.parquet; use one type in all files",
        ),
        ([{"a": 1, "x": [{"b": 1, "B": 2}]}] * 2, [{"a": 1}] * 2, "n.x.item has the fields 'b' and 'B'"),
        ([{"land": 1}] * 2, [{"Land": 1}] * 2, "n has the fields 'land' and 'Land', which SQL does not tell apart"),
        ([1 << 60] * 2, [0.5, 1.5], "input.filter 'n' has a value that does not fit into double"),
    ],
)
def test_a_filter_means_the_same_in_all_files(filtered, one, other, message):
    """Text was compared as text, and `m.Land` was `m.land`: exit 0, and some rows too many or too few."""
    with input_error(re.escape(message)):
        filtered("n > '9' or n is null", one, other)


def test_a_filter_compares_numbers_of_different_files_as_one_type(filtered):
    """As text, 1 was `1` in one file and `1.0` in another."""
    source = filtered("n::VARCHAR = '1.0'", [1, 2], [1.0, 0.5], [None, None])
    assert [source.place(key) for key in keys_of(source)] == ["a.parquet:0", "b.parquet:0"]


@pytest.fixture
def filtered(tmp_path, write):
    """Choose rows of files a, b and so on, each with two values of n."""

    def filtered(condition, *files):
        for name, values in zip("abc", files, strict=False):
            write(f"in/{name}.parquet", {"text": ["t"] * 2, "n": values})
        return select_rows(opened(tmp_path / "in", filter=condition))

    return filtered


def test_only_the_ids_of_rows_that_are_wanted_are_checked(write):
    """Drafts without ids kept a run from the documents that have some."""
    path = write("a.parquet", {"id": ["a", None, "a"], "text": ["t"] * 3, "is_final": [True, False, False]})
    with input_error(r"nulls in column 'id'.* remove input.id_column, .* with input.filter"):
        select_rows(opened(path, id_column="id"))
    assert ids_of(select_rows(opened(path, id_column="id", filter="is_final"))) == ["a"]
    assert ids_of(select_rows(opened(path))) == [f"a.parquet:{row}" for row in range(3)]


def manifest_of(source, max_new_tokens=5):
    config = {"input": {"filter": source.options.filter}, "decoding": {"max_new_tokens": max_new_tokens}}
    return build_manifest(source, config, {"target": "t"})


def night(options, output, *, failing="", retryable=True, max_new_tokens=5):
    """Do a night's work: select, commit a result for each row, finalize."""
    whole = open_source(options)
    earlier, notes = find_earlier(options.except_done_in, output, manifest_of(whole, max_new_tokens))
    source = select_rows(whole, earlier, notes)
    write_selection(source, output)
    write_manifest(output, manifest_of(source, max_new_tokens))
    results = []
    for key in keys_of(source):
        row = source.read(key)
        found = failed(key) | {"retryable": retryable} if row.doc_id == failing else done(key, f"summary of {row.text}")
        results.append(found | {"doc_id": row.doc_id, "content_sha256": row.content_sha256})
    CommitWriter(output, "0" * 8).commit(results)
    counts = finalize(source, output)
    assert (counts.rows, counts.errors) == (source.num_rows, int(bool(failing)))
    return source


def counts_of(source):
    """Rows that are unchanged, changed, new and selected."""
    return [source.selection.counts[name] for name in ("unchanged", "changed", "new", "selected")]


def rewrite(path, **changed):
    """Change the texts of some documents of a file."""
    table = pq.read_table(path, partitioning=None)
    texts = [changed.get(row["id"], row["text"]) for row in table.select(["id", "text"]).to_pylist()]
    pq.write_table(table.set_column(1, "text", pa.array(texts)), path)


def test_a_night_does_what_is_new_or_changed_and_nothing_else(corpus, tmp_path, write):
    """Rows are found by id, in whichever file they are by now, and compared by content; errors are tried again."""
    nights = [location(tmp_path / "out" / str(number)) for number in range(4)]
    options = corpus(except_done_in=(f"{tmp_path}/out/*",), passthrough=("lang", "pages"))
    first = night(options, nights[0], failing="de3")
    assert counts_of(first) == [0, 0, 10, 10]
    rewrite(tmp_path / "in/lang=en/year=2021/a.parquet", en1="another text")
    write("in/lang=en/year=2022/b.parquet", {"id": ["en9"], "text": ["text of en1"], "pages": [7]})
    second = night(options, nights[1])
    assert counts_of(second) == [8, 1, 2, 3]
    found = pq.read_table(tmp_path / "out" / "1" / "summaries", partitioning=None).to_pylist()
    assert [(row["doc_id"], row["summary"], row["lang"], row["pages"]) for row in found] == [
        ("de3", "summary of text of de3", "de", 3),
        ("en1", "summary of another text", "en", 1),
        ("en9", "summary of text of en1", "en", 7),
    ]
    (tmp_path / "in/lang=en/year=2022/b.parquet").rename(tmp_path / "in/lang=en/moved.parquet")
    assert counts_of(night(options, nights[2])) == [11, 0, 0, 0]
    third = night(replace(options, limit=4), nights[3], max_new_tokens=6)
    assert counts_of(third) == [0, 0, 4, 4]
    which = f"2 outputs ({tmp_path}/out/0 to 1)"
    why = "of another configuration: decoding.max_new_tokens: 5 there, 6 here"
    assert third.selection.notes == (f"not counted as done: rows of {which}, {why}",)


def test_a_row_that_would_fail_again_waits_until_it_changes(corpus, tmp_path):
    """An empty text counted as new, and as a failure, every night."""
    options = corpus(except_done_in=(f"{tmp_path}/out/*",))
    night(options, location(tmp_path / "out" / "0"), failing="de3", retryable=False)
    rewrite(tmp_path / "in/lang=de/year=2020/a.parquet", de1="another text")
    assert ids_of(night(options, location(tmp_path / "out" / "1"))) == ["de1"]
    rewrite(tmp_path / "in/lang=de/year=2020/a.parquet", de3="a text that is no more at fault")
    assert ids_of(night(options, location(tmp_path / "out" / "2"))) == ["de3"]


def test_only_files_that_were_written_since_are_read(corpus, tmp_path):
    """Reading ten million texts every night to find out that they are the same would take the night.

    Whoever changes a file and sets its old time again, byte for byte of the same size, is not found out.
    """
    options = corpus(except_done_in=(f"{tmp_path}/out",))
    file = tmp_path / "in/lang=de/year=2020/a.parquet"
    pq.write_table(pq.read_table(file, partitioning=None), file, compression="none")
    night(options, location(tmp_path / "out"))
    time = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes().replace(b"text of de2", b"TEXT of de2"))
    for changed_ns, num_changed in ((0, 0), (1, 1)):
        os.utime(file, ns=(time, time + changed_ns))
        whole = open_source(options)
        earlier, _ = find_earlier(options.except_done_in, location(tmp_path / "other"), manifest_of(whole))
        assert counts_of(select_rows(whole, earlier))[1] == num_changed


def test_rows_stay_those_of_the_first_start(corpus, tmp_path, write):
    """A night that is resumed must not take in what has arrived since, nor drop what another run has done since."""
    options = corpus(except_done_in=(f"{tmp_path}/out-*",))
    output = location(tmp_path / "out-1")
    source = night(options, output)
    manifest = manifest_of(source)
    write("in/new.parquet", {"id": ["n"], "text": ["t"], "pages": [1]})
    again = open_source(options, only=manifest["identity"]["files"])
    again = recall_selection(again, output, manifest)
    assert keys_of(again) == keys_of(source)
    assert not differences(manifest, manifest_of(again))
    manifest["identity"]["selection"]["sha256"] = "0"
    with input_error("use another output"):
        recall_selection(again, output, manifest)


def test_an_earlier_output_must_be_one(corpus, tmp_path):
    """A typing error in a path must not let a night do everything again; a glob may match nothing in the first."""
    manifest = manifest_of(open_source(corpus()))
    own = location(tmp_path / "own")
    with input_error("is not an output folder"):
        find_earlier([f"{tmp_path}/typo"], own, manifest)
    assert find_earlier([f"{tmp_path}/night-*"], own, manifest) == ([], ())
    write_manifest(location(tmp_path / "night-1"), manifest)
    _, notes = find_earlier([f"{tmp_path}/night-*"], own, manifest)
    assert notes == (f"not counted as done: rows of {tmp_path}/night-1, which is not finished",)

"""A review by people: which answers are drawn, and what their verdicts say of the whole run."""

import random
from collections import Counter
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from specextend.core import DocumentKey
from specextend.data.schema import SUMMARY_SCHEMA
from specextend.report.gold import wilson
from specextend.report.review import Stratum, allocate, stratified
from tests.job.conftest import read_json, specextend
from tests.properties.rows import done
from tests.report.made_up import begin_run, write_part

FLAGS = [["truncated"]] * 60 + [["copied", "truncated"]] * 20 + [["copied"]] * 17 + [["rule:short", "copied"]] * 3
NUM_ROWS = 400
"""Of which a hundred have flags, most of them one; the rest has none."""
SIZES = {"no flag": 300, "truncated": 60, "copied": 37, "rule:short": 3}
"""Answers by their rarest flag: 80 are truncated, 40 copied."""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A run that has ended; its flags stand in no order. The ids of an answer with a flag and of one without differ by
    a quote.
    """
    output = tmp_path_factory.mktemp("review") / "run"
    begin_run(output, NUM_ROWS)
    flags = FLAGS + [[]] * (NUM_ROWS - len(FLAGS))
    random.Random(1).shuffle(flags)
    ids = [f"=doc {row}" for row in range(NUM_ROWS)]
    ids[flags.index(["truncated"])] = "=doc 1000"
    ids[flags.index([])] = "'=doc 1000"
    made = [
        done(DocumentKey(0, row), f"=text {row};\nits end") | {"doc_id": ids[row], "quality_flags": each}
        for row, each in enumerate(flags)
    ]
    write_part(output / "summaries", pa.Table.from_pylist(made, schema=SUMMARY_SCHEMA))
    return output


@pytest.fixture
def draw(output, tmp_path):
    """Draw a sample of the run."""

    def draw(more="--by flags", rows=40, name="a.parquet"):
        specextend(f"export {output} --sample {rows} --to {tmp_path}/{name} {more}").exits(0)
        to = tmp_path / name
        return pq.read_table(to) if to.suffix == ".parquet" else pa_csv.read_csv(to, parse_options=LINES)

    return draw


LINES = pa_csv.ParseOptions(newlines_in_values=True)
READ = ["verdict", "doc_id", "stratum", "run"]
"""Columns that a review needs."""


def is_good(row):
    """What a person would say: a flag is right twice of three times, and an answer without one is good but for each
    seventh.
    """
    number = int(row["doc_id"].split()[-1])
    return number % 3 == 0 if row["quality_flags"] else number % 7 != 0


def judged(table, to, spell=("good", "bad"), empty=0):
    """The sample as a person gives it back, whose first rows have no verdict yet."""
    verdicts = [spell[not is_good(row)] for row in table.to_pylist()]
    verdicts = [*[None] * empty, *verdicts[empty:]]
    pq.write_table(table.set_column(0, "verdict", pa.array(verdicts)), to)
    return to


def reviewed(output, file):
    specextend(f"report {output} --reviewed {file}").exits(0)
    return read_json(output / "report.json")["reviewed"]


def test_a_sample_has_rows_of_every_flag_and_is_drawn_again_as_it_was(draw):
    """A row with several flags counts for its rarest one; weights say for how many answers of the run a row stands."""
    table = draw()
    rows = table.to_pylist()
    assert table.column_names[:3] == ["verdict", "doc_id", "summary"]
    assert {"sources", "quality_flags"} <= {*table.column_names}
    assert table["verdict"].null_count == len(rows) == 40
    taken = Counter(row["stratum"] for row in rows)
    assert taken.keys() == SIZES.keys()
    assert min(taken.values()) >= 2
    for row in rows:
        assert row["weight"] == SIZES[row["stratum"]] / taken[row["stratum"]]
        assert row["stratum"] in (row["quality_flags"] or ["no flag"])
    again = draw(name="b.parquet")
    assert again == table
    larger = draw(rows=80, name="c.parquet")
    assert {*table["doc_id"].to_pylist()} < {*larger["doc_id"].to_pylist()}
    plain = draw("", name="d.parquet").to_pylist()
    assert {(row["stratum"], row["weight"]) for row in plain} == {("all", 10.0)}


@pytest.mark.parametrize("by", ["--by flags", ""])
def test_verdicts_say_how_often_flags_are_right_and_what_share_of_the_run_is_good(draw, output, tmp_path, by):
    table = draw(by)
    rows = table.to_pylist()[3:]
    found = reviewed(output, judged(table, tmp_path / "judged.parquet", spell=("Yes", " NO "), empty=3))
    assert (found["rows"], found["without_verdict"], found["answers"]) == (40, 3, NUM_ROWS)
    left = Counter(row["stratum"] for row in rows)
    sizes = SIZES if by else {"all": NUM_ROWS}
    expected = sum(sizes[row["stratum"]] / left[row["stratum"]] * is_good(row) for row in rows) / NUM_ROWS
    assert found["good"]["share"] == pytest.approx(expected)
    assert found["flags"].keys() <= {"truncated", "copied", "rule:short"}
    for of in (found["good"], found["flagged"], found["unflagged"]):
        assert of["interval"][0] <= of["share"] <= of["interval"][1]
    assert (found["flagged"]["answers"], found["unflagged"]["answers"]) == (100, 300)
    assert found["flags"]["copied"]["reviewed"] == sum("copied" in row["quality_flags"] for row in rows)
    page = (output / "report.html").read_text()
    assert f"People reviewed 37 answers: of all 400, {found['good']['share']:.0%} (" in page
    assert "Reviewed by people" in specextend(f"report {output} --reviewed {tmp_path}/judged.parquet").stdout
    said = specextend(f"report {output}").exits(0).stderr
    assert said == f"note: the review of {tmp_path / 'judged.parquet'} is not in the report now; --reviewed keeps it\n"
    assert read_json(output / "report.json")["reviewed"] is None
    assert specextend(f"report {output}").exits(0).stderr == ""


def test_a_group_without_a_verdict_leaves_the_share_of_the_run_unknown(draw, output, tmp_path):
    """Flagged answers alone were judged, all bad, and the page said that nothing of the run is good."""
    rows = draw().to_pylist()
    verdicts = ["bad" if row["quality_flags"] else None for row in rows]
    columns = {name: [*(row[name] for row in rows), None, None] for name in READ}
    pa_csv.write_csv(pa.table(columns | {"verdict": [*verdicts, None, None]}), tmp_path / "judged.csv")
    found = reviewed(output, tmp_path / "judged.csv")
    assert (found["good"]["share"], found["flagged"]["share"]) == (None, 1.0)
    assert (found["flagged"]["answers"], found["rows"]) == (100, 40)
    assert "some groups of the sample have no verdict yet" in (output / "report.html").read_text()


def test_a_run_that_was_read_whole_is_known_without_an_interval(draw, output, tmp_path):
    """As is each stratum that was."""
    table = draw(rows=1000)
    found = reviewed(output, judged(table, tmp_path / "judged.parquet", spell=(1.0, 0.0)))
    truth = fmean(map(is_good, table.to_pylist()))
    assert found["good"]["share"] == pytest.approx(truth)
    assert found["good"]["interval"] == pytest.approx([truth, truth])
    assert found["flags"]["truncated"]["answers"] == found["flags"]["truncated"]["reviewed"] == 80


@pytest.mark.parametrize("delimiter", [";", ","])
def test_a_spreadsheet_may_save_the_file_in_its_own_way(draw, output, tmp_path, delimiter):
    """With semicolons, a mark of UTF-8, and the quotes before what would be a formula."""
    path = tmp_path / "a.csv"
    table = draw("--by flags --spreadsheet-safe", 1000, path.name)
    verdicts = [int(doc_id != "'=doc 1000") for doc_id in table["doc_id"].to_pylist()]
    table = table.set_column(0, "verdict", pa.array(verdicts))
    pa_csv.write_csv(table, path, pa_csv.WriteOptions(delimiter=delimiter))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = reviewed(output, path)
    shares = [found[part]["share"] for part in ("good", "flagged", "unflagged")]
    assert shares == pytest.approx([399 / 400, 1 / 100, 1])


@pytest.mark.parametrize(
    "column, values, said",
    [
        ("verdict", ["maybe"], "is 'maybe'; write good or bad, yes or no, 1 or 0"),
        ("verdict", [" "] * 40, "has no verdict yet"),
        ("doc_id", ["doc x"], "the run has no answer to 'doc x'"),
        ("doc_id", ["=doc 399"] * 2, "twice; leave one row"),
        ("run", ["0123456789abcdef"], "is a sample of another run"),
        ("stratum", None, "is no sample of `export --sample`"),
    ],
)
def test_a_file_that_is_no_review_of_this_run_is_refused_in_one_line(draw, output, tmp_path, column, values, said):
    """A verdict on another text, or one that was not understood, would be counted in silence."""
    columns = draw().select(READ).to_pydict()
    columns["verdict"] = ["good"] * 40
    if values is None:
        del columns[column]
    else:
        columns[column][: len(values)] = values
    for path, write in ((tmp_path / "b.csv", pa_csv.write_csv), (tmp_path / "b.parquet", pq.write_table)):
        write(pa.table(columns), path)
        assert said in specextend(f"report {output} --reviewed {path}").line()


@pytest.mark.parametrize(
    "arguments, said",
    {
        "--sample 7 --by flags": "--sample 7 is too small for 4 kinds of answers by flags; take 8",
        "--by flags": "give --sample, too",
        "--sample 9 --follow": "without --follow",
        "--sample 9 --format jsonl": "writes a file that ends in .csv or .parquet",
    }.items(),
)
def test_samples_that_cannot_be_drawn_are_refused(output, tmp_path, arguments, said):
    assert said in specextend(f"export {output} --to {tmp_path}/a.csv {arguments}").line()
    assert not (tmp_path / "a.csv").exists()


def test_the_estimate_is_right_on_average_and_its_interval_as_often_as_it_says():
    """Runs whose flags mean much or nothing, and of which nearly all or half is good, drawn 400 times each."""
    draws = np.random.default_rng(5)
    sizes = np.array([3000, 300, 60, 8])
    taken = [*allocate(dict(enumerate(sizes)), 60).values()]
    for shares in ((0.95, 0.3, 0.5, 0.0), (0.99, 0.98, 1.0, 1.0), (0.5, 0.5, 0.4, 0.5)):
        good = np.rint(sizes * shares).astype(int)
        drawn = draws.hypergeometric(good, sizes - good, taken, (400, 4))
        found = [stratified(map(Stratum, sizes, taken, hits)) for hits in drawn]
        truth = good.sum() / sizes.sum()
        assert fmean(share for share, _ in found) == pytest.approx(truth, abs=0.01)
        assert fmean(low <= truth <= high for _, (low, high) in found) > 0.93
    assert stratified([Stratum(10**9, 10, 8)])[1] == pytest.approx(wilson(0.8, 10))

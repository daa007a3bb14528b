"""The parts are the only record of what is done."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from specextend.core import DocumentKey
from specextend.data.parts import DamagedPartError, PartWriter, StrangePartError, list_parts, read_part
from specextend.data.results import Progress, pending, read_parts, read_results
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location
from tests.damage import DAMAGES, damage

MakeRow = Callable[..., dict[str, Any]]


def test_parts_are_named_by_run_and_counted_on_over_runs(output: Location, done: MakeRow) -> None:
    first = PartWriter(output, "ffffffff")
    assert first.commit([done(0, 0)]) == "part-ffffffff-000000.parquet"
    assert first.commit([]) is None
    assert first.commit([done(0, 1)]) == "part-ffffffff-000001.parquet"
    assert PartWriter(output, "00000000").commit([done(0, 2)]) == "part-00000000-000002.parquet"
    assert [name[5:13] for name in list_parts(output)] == ["ffffffff", "ffffffff", "00000000"]
    assert pq.read_schema(f"{output.path}/_run/parts/{list_parts(output)[0]}").equals(PART_SCHEMA)


def test_done_beats_error_and_later_beats_earlier(output: Location, done: MakeRow, failed: MakeRow) -> None:
    """A run id is random: order by it and a retried row would be an error again in half of all runs."""
    PartWriter(output, "ffffffff").commit([done(0, 0), failed(0, 1, "Early"), failed(0, 2), failed(1, 0, "Early")])
    PartWriter(output, "00000000").commit([failed(0, 0), failed(0, 1, "Late"), done(0, 2)])
    progress = read_parts(output)
    assert progress.done == {DocumentKey(0, 0), DocumentKey(0, 2)}
    assert progress.errors == {DocumentKey(0, 1): "Late", DocumentKey(1, 0): "Early"}


def test_commits_of_one_file_after_the_other_take_little_memory(output: Location, done: MakeRow) -> None:
    """Room for what is known of all rows doubled with every commit that had a new file: thirteen gigabytes."""
    writer = PartWriter(output, "0000000a")
    keys = [(file, 5) for file in range(40)]
    for key in keys:
        writer.commit([done(*key)])
    tracemalloc.start()
    progress = read_parts(output)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert progress.done == set(itertools.starmap(DocumentKey, keys))
    assert peak < 8 << 20


def test_an_empty_folder_has_no_progress(output: Location) -> None:
    assert read_parts(output) == Progress(frozenset(), {})


def test_what_is_pending_is_neither_done_nor_given_up(output: Location, done: MakeRow, failed: MakeRow) -> None:
    PartWriter(output, "0000000a").commit([done(0, 1), failed(1, 0)])
    progress = read_parts(output)
    assert list(pending([2, 0, 1], progress)) == [DocumentKey(0, 0), DocumentKey(2, 0)]
    assert list(pending([2, 1], progress, retry_errors="all")) == [DocumentKey(0, 0), DocumentKey(1, 0)]


def test_only_error_rows_that_another_try_may_mend_are_retried_unless_all_are_asked_for(
    output: Location, done: MakeRow, failed: MakeRow
) -> None:
    """A null text fails every night; what its latest row says of it counts, not what an earlier one said."""
    outage = {"retryable": True}
    rows = [failed(0, 0), failed(0, 1) | outage, failed(0, 2), failed(0, 3) | outage, failed(0, 4)]
    PartWriter(output, "ffffffff").commit(rows)
    PartWriter(output, "00000000").commit([failed(0, 2) | outage, failed(0, 3), done(0, 4)])
    progress = read_parts(output)
    assert list(pending([5], progress)) == []
    assert list(pending([5], progress, retry_errors="retryable")) == [DocumentKey(0, 1), DocumentKey(0, 2)]
    assert list(pending([5], progress, retry_errors="all")) == [DocumentKey(0, row) for row in range(4)]


def test_a_driver_killed_before_the_rename_leaves_no_part(output: Location, done: MakeRow) -> None:
    """What has no final name was never committed: its rows are done again, and the litter goes."""
    PartWriter(output, "0000000a").commit([done(0, 0)])
    script = (
        "import os, sys\n"
        "from specextend.data.parts import PartWriter\n"
        "from specextend.data.storage import resolve\n"
        "os.replace = lambda source, target: os._exit(9)\n"
        "PartWriter(resolve(sys.argv[1]), '0000000b').commit([{'file': 0, 'row': 1}])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run([sys.executable, "-c", script, output.path], env=environment, check=False)
    assert died.returncode == 9
    assert read_parts(output).done == {DocumentKey(0, 0)}
    folder = Path(output.path) / "_run" / "parts"
    assert len(os.listdir(folder)) == 2
    PartWriter(output, "0000000c").commit([done(0, 1)])
    assert len(os.listdir(folder)) == 2
    assert read_parts(output).done == {DocumentKey(0, 0), DocumentKey(0, 1)}


def test_a_row_that_does_not_fit_the_schema_writes_nothing(output: Location, done: MakeRow) -> None:
    writer = PartWriter(output, "0000000a")
    with pytest.raises(pa.ArrowInvalid):
        writer.commit([done(0, 0) | {"attempts": "many"}])
    assert list_parts(output) == []
    assert writer.commit([done(0, 0)]) == "part-0000000a-000000.parquet"


def rewrite(output: Location, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a part again as another version would have written it."""
    path = f"{output.path}/_run/parts/{name}"
    pq.write_table(change(pq.read_table(path)), path)


def test_a_part_of_an_older_version_has_nulls_where_it_had_no_column(output: Location, done: MakeRow) -> None:
    """An upgrade between two nights said that good results were damaged, and to delete them."""
    name = PartWriter(output, "0000000a").commit([done(0, 0), done(0, 1)])

    def earlier(table: pa.Table) -> pa.Table:
        """Make `chunk_summaries` what it was before it was ever filled."""
        column = table.column_names.index("chunk_summaries")
        of_text = table.set_column(column, "chunk_summaries", pa.nulls(len(table), pa.list_(pa.string())))
        return of_text.drop_columns(["num_memory_retries", "coverage"])

    rewrite(output, name, earlier)
    table = read_part(output, name, PART_SCHEMA.names)
    assert table.schema.equals(PART_SCHEMA)
    assert table["num_memory_retries"].to_pylist() == [None, None]
    assert table["summary"].to_pylist() == ["a summary"] * 2
    PartWriter(output, "0000000b").commit([done(0, 2)])
    loaded = pa.concat_tables(read_results(output, PART_SCHEMA.names))
    assert loaded["row"].to_pylist() == [2, 0, 1]
    assert loaded["num_memory_retries"].to_pylist() == [0, None, None]


def test_a_part_of_a_later_version_is_read_without_what_is_not_known(output: Location, done: MakeRow) -> None:
    """Going back a version must not lose a night; a column that has become wider is narrowed again."""
    name = PartWriter(output, "0000000a").commit([done(0, 0)])

    def later(table: pa.Table) -> pa.Table:
        wide = table["attempts"].cast(pa.int64())
        return table.drop_columns(["attempts"]).append_column("attempts", wide).append_column("colour", pa.array(["r"]))

    rewrite(output, name, later)
    assert read_part(output, name, PART_SCHEMA.names).schema.equals(PART_SCHEMA)
    assert read_parts(output).done == {DocumentKey(0, 0)}


def test_a_part_without_keys_is_damaged(output: Location, done: MakeRow) -> None:
    """Nobody could say whose results those are."""
    name = PartWriter(output, "0000000a").commit([done(0, 0)])
    rewrite(output, name, lambda table: table.drop_columns(["row"]))
    with pytest.raises(DamagedPartError, match=f"{name} is damaged .*it has no column row"):
        read_parts(output)


def test_a_part_says_which_run_it_is_of(output: Location, done: MakeRow) -> None:
    """A part that says nothing is of an older version, and is read; one of another run is not."""
    name = PartWriter(output, "0000000a", "beef" * 16).commit([done(0, 0)])
    PartWriter(output, "0000000b").commit([done(0, 1)])
    metadata = pq.read_schema(f"{output.path}/_run/parts/{name}").metadata
    assert metadata[b"specextend.run_id"] == b"0000000a"
    assert read_parts(output, "beef" * 16).done == {DocumentKey(0, 0), DocumentKey(0, 1)}
    with pytest.raises(StrangePartError, match=f"{name} is a part of another run"):
        read_parts(output, "cafe" * 16)


@pytest.mark.parametrize("where", DAMAGES)
def test_a_damaged_part_is_named(where: str, output: Location, done: MakeRow) -> None:
    """A run that took it for a store that is away was to be tried again for ever, and named no file."""
    name = PartWriter(output, "0000000a").commit([done(0, 0)])
    damage(Path(output.path) / "_run" / "parts" / str(name), where)
    with pytest.raises(DamagedPartError, match=f"{name} is damaged"):
        read_parts(output)


def test_a_part_out_of_reach_is_not_damaged(output: Location, done: MakeRow) -> None:
    """It must not be deleted: its store is away."""
    name = str(PartWriter(output, "0000000a").commit([done(0, 0)]))
    (Path(output.path) / "_run" / "parts" / name).unlink()
    with pytest.raises(FileNotFoundError):
        read_part(output, name, ["row"])


def test_parts_live_on_other_file_systems(tmp_path: Path, done: MakeRow) -> None:
    output = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "run")
    PartWriter(output, "0000000a").commit([done(0, 0)])
    assert read_parts(output).done == {DocumentKey(0, 0)}


def test_a_run_id_is_eight_hexadecimal_digits(output: Location) -> None:
    with pytest.raises(ValueError, match="8 hexadecimal digits"):
        PartWriter(output, "run-1")

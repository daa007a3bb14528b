"""Parquet files with large row groups, through the command that a user types."""

import pyarrow as pa
import pyarrow.parquet as pq

from tests.job.conftest import specextend


def test_files_with_large_row_groups_are_written_in_smaller_ones(tmp_path, monkeypatch):
    """What the job asks for where a worker could not hold a row group. Every column and type stays."""
    monkeypatch.chdir(tmp_path)
    table = pa.table(
        {"text": [f"{row} " * 500_000 for row in range(40)], "kind": pa.array(["a", "b"] * 20).dictionary_encode()}
    )
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("a.parquet", "deep/b.parquet"):
        pq.write_table(table, tmp_path / "in" / name, compression="none", use_dictionary=["kind"])
    done = specextend("prepare repartition in --output out").exits(0)
    assert done.stdout == "2 files in out\n"
    metadata = pq.read_metadata(tmp_path / "out" / "deep" / "b.parquet")
    assert metadata.num_row_groups > 2
    assert max(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)) < 20 << 20
    assert pq.read_table(tmp_path / "out" / "deep" / "b.parquet").to_pylist() == table.to_pylist()
    assert specextend("prepare repartition in --output in/out").code == 2

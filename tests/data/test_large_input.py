"""Memory does not grow with the file: two gigabytes are read like two megabytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

READ_IT_ALL = """
import resource, sys
from specextend.core import DocumentKey
from specextend.data.documents import InputOptions, open_source
from specextend.data.finalize import finalize
from specextend.data.parts import PartWriter
from specextend.data.regroup import regroup
from specextend.data.schema import error_row
from specextend.data.storage import resolve

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

before = peak()
output = resolve(sys.argv[2])
source = regroup(open_source(InputOptions(path=sys.argv[1], passthrough=("text",))), output)
assert sum(row.num_bytes for row in source.scan()) >= 2 << 30
keys = [DocumentKey(0, row) for row in range(source.num_rows)]
for key in keys[::40]:
    assert source.read(key).document.text.startswith(f"{key.row:09d}")
row = {"error_class": "X", "message": "", "stage": "read", "retryable": False, "attempts": 1}
PartWriter(output, "0000000a").commit([error_row(key, "x", **row) | {"error_class": None} for key in keys])
assert finalize(source, output).done == len(keys)
print(peak() - before)
"""


def write_two_gigabytes(path: Path, group_rows: int) -> None:
    """2,100 documents of a megabyte, stored as they are: the file is as large as its text."""
    filling = os.urandom(MIB // 2).hex()
    with pq.ParquetWriter(
        path, pa.schema([("text", pa.large_string())]), compression="none", use_dictionary=False
    ) as writer:
        for begin in range(0, 2100, group_rows):
            text = [f"{row:09d} {filling}" for row in range(begin, min(begin + group_rows, 2100))]
            writer.write_table(pa.table({"text": pa.array(text, pa.large_string())}), row_group_size=group_rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group_rows", [8, 700], ids=["in row groups of 8 MiB", "in three row groups"])
def test_two_gigabytes_are_read_in_bounded_memory(tmp_path: Path, group_rows: int) -> None:
    """Audit, plan, documents and summaries with the text passed through; also where a row group is itself too large."""
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    write_two_gigabytes(path, group_rows)
    assert path.stat().st_size > 2 << 30
    process = subprocess.run(
        [sys.executable, "-c", READ_IT_ALL, str(path), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    for large in tmp_path.rglob("*.parquet"):
        large.unlink()
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 400, "MiB over what the libraries take"

"""Memory does not grow with what a file says: long documents, and text that is stored once and repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".models" / "tiny-random"
MIB = 1 << 20

READ_REPEATED_TEXT = """
import sys
from pathlib import Path
from specextend.core import DocumentKey
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.parts import PartWriter
from specextend.data.schema import error_row
from specextend.data.source import open_source
from specextend.data.storage import resolve

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)["VmHWM"].split()[0]) >> 10

before, output = peak(), resolve(sys.argv[2])
options = InputOptions(path=sys.argv[1], text_column="a.text", passthrough=("a.text",))
source = open_source(options)
assert sum(row.num_bytes for row in source.scan()) > 400 << 20
keys = [DocumentKey(0, row) for row in range(source.num_rows)]
for key in keys[::400]:
    assert source.read(key).document.text.startswith(f"{key.row // 860} ")
row = {"error_class": "X", "message": "", "stage": "read", "retryable": False, "attempts": 1}
PartWriter(output, "0000000a").commit([error_row(key, "x", **row) | {"error_class": None} for key in keys])
assert finalize(source, output).done == len(keys)
print(peak() - before)
"""


@pytest.mark.parametrize(
    ("encoding", "at_most"),
    [
        ({"use_dictionary": True}, 300),
        ({"use_dictionary": False, "column_encoding": {"a.text": "DELTA_BYTE_ARRAY"}}, 2000),
    ],
    ids=["in a dictionary", "as prefixes"],
)
def test_text_that_is_stored_once_and_repeated_is_read_in_bounded_memory(
    tmp_path: Path, encoding: dict[str, Any], at_most: int
) -> None:
    """400 MB of text in a file of some hundred kilobytes: its size says nothing about what reading it takes.

    Arrow reads a dictionary as it is stored; of prefixes it makes texts, so a row group takes a few times their length.
    The column has a dot in its name, as if it were inside another one.
    """
    texts = [f"{number} {os.urandom(50_000).hex()}" for number in range(5)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a.text": [texts[row // 860] for row in range(4300)]}), path, **encoding)
    assert path.stat().st_size < 2 * MIB
    [peak] = measured(READ_REPEATED_TEXT, path, tmp_path / "out")
    assert peak < at_most, "MiB over what the libraries take"


def measured(script: str, *arguments: Path) -> list[int]:
    """The numbers that a script prints in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [int(number) for number in process.stdout.split()]

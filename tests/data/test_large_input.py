"""The size of a file says nothing about what reading it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]

READ_REPEATED_TEXT = """
import sys
from pathlib import Path
from specextend.core import DocumentKey
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.parts import PartWriter
from specextend.data.source import open_source
from specextend.data.storage import resolve
from tests.properties.rows import done

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
PartWriter(output, "0000000a").commit([done(key) for key in keys])
assert finalize(source, output).done == len(keys)
print(peak() - before)
"""


def test_text_that_is_stored_once_and_repeated_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """400 MB of text in a file of some hundred kilobytes; the column's dot is no sign of one inside another."""
    texts = [f"{number} {os.urandom(50_000).hex()}" for number in range(5)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a.text": [texts[row // 860] for row in range(4300)]}), path)
    assert path.stat().st_size < 2 << 20
    command = [sys.executable, "-c", READ_REPEATED_TEXT, str(path), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 300, "MiB over what the libraries take"

"""The end of a run whose results are more than its driver's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import random, sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from tests.properties.rows import done

folder, num_files, num_rows, size = Path(sys.argv[1]), 50, 1000, int(sys.argv[2])
(folder / "in").mkdir(parents=True)
for number in range(num_files):
    pq.write_table(pa.table({"text": ["x"] * num_rows}), folder / "in" / f"{number:02d}.parquet")
draw = random.Random(1)
keys = [DocumentKey(file, row) for file in range(num_files) for row in range(num_rows)]
draw.shuffle(keys)
writer = CommitWriter(resolve(str(folder / "out")), "0000000a")
for begin in range(0, len(keys), 2000):
    writer.commit([done(key, draw.randbytes(size // 2).hex()) for key in keys[begin : begin + 2000]])
"""
FINALIZE = """
import re, sys
from pathlib import Path
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.source import open_source
from specextend.data.storage import resolve
from specextend.report import RunFigures, write_report

folder = Path(sys.argv[1])
source, output, figures = open_source(InputOptions(path=str(folder / "in"))), resolve(str(folder / "out")), RunFigures()
counts = finalize(source, output, observe=figures.add)
write_report(output.path, output, figures=figures)
[peak] = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(counts.done, int(peak) >> 10)
"""


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_memory_at_the_end_of_a_run_does_not_grow_with_its_results(tmp_path: Path):
    """400 MB of summaries, then 1.2 GB; ten million documents have many times more than a driver can hold."""
    peaks = []
    for size in (8_000, 24_000):
        folder = tmp_path / str(size)
        run(WRITE, str(folder), str(size))
        done, peak_mib = map(int, run(FINALIZE, str(folder)).split())
        assert done == 50_000
        peaks.append(peak_mib)
    assert peaks[1] < peaks[0] + 400, peaks

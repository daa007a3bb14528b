"""A report of a large run: memory that does not grow with the texts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from tests.report.made_up import FIRST, NIGHT_S, config_of, rows_of_worker, write_manifest_file

NUM_ROWS, COMMIT_ROWS, NUM_WORKERS = 100_000, 64, 8
MOST_BYTES = 1 << 30
MEASURED = """
import json, re, sys, time
from pathlib import Path
from specextend.report import write_report
begin = time.perf_counter()
report = write_report(sys.argv[1])
seconds = time.perf_counter() - begin
[peak] = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(json.dumps({"done": report["rows"]["done"], "seconds": seconds, "peak_bytes": 1024 * int(peak)}))
"""


def write_large_run(folder: Path) -> str:
    """Write commits of 64 rows with summaries of a thousand characters, as a run of 100,000 documents leaves them."""
    output, draw = resolve(str(folder)), random.Random(3)
    write_manifest_file(output, config_of(str(folder)), NUM_ROWS)
    writer = CommitWriter(output, FIRST)
    each = NUM_ROWS // NUM_WORKERS
    rows = [
        row | {"summary": draw.randbytes(500).hex()}
        for number in range(NUM_WORKERS)
        for row in rows_of_worker(range(number * each, (number + 1) * each), f"host:{number}", NIGHT_S, draw)
    ]
    rows.sort(key=lambda row: row["started_at"])
    for begin in range(0, NUM_ROWS, COMMIT_ROWS):
        writer.commit(rows[begin : begin + COMMIT_ROWS])
    return str(folder)


@pytest.mark.slow
def test_a_report_of_a_hundred_thousand_documents_takes_less_than_a_gibibyte(tmp_path: Path):
    """It is written on the driver's machine, which may be a small one; the texts alone are 100 MB."""
    run = write_large_run(tmp_path)
    ended = subprocess.run([sys.executable, "-c", MEASURED, run], capture_output=True, text=True, check=True)
    measured = json.loads(ended.stdout)
    assert measured["done"] == NUM_ROWS
    assert measured["peak_bytes"] < MOST_BYTES

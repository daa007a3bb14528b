"""Measure start and end of a large run on a simulated object store.

    python -m scripts.scale_storage --documents 200000 --workers 1000 --latency-ms 20

Writes input files and commits with made-up texts; nothing is decoded. Each request takes
`--latency-ms` and is counted. Prints for each step: seconds, requests, bytes, CPU seconds, peak
memory, and the seconds for ten million documents. The last figure assumes that requests and CPU
seconds grow with the documents, with 32 requests in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from scripts.simulated_store import SimulatedStore
from specextend.cluster.backlog import RowSet
from specextend.cluster.records import rows_per_commit
from specextend.cluster.workload import make_plan
from specextend.config import RunConfig
from specextend.core import Completion, DocumentKey
from specextend.data.check import check_input
from specextend.data.commits import CommitWriter, pending, read_commits
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.listing import Listing
from specextend.data.prompts import Prompt, Prompts
from specextend.data.quality import Quality
from specextend.data.rows import RowReader
from specextend.data.schema import decoded_columns
from specextend.data.selection import select_rows
from specextend.data.source import Source
from specextend.data.storage import NUM_THREADS, Location, resolve
from specextend.models.causal_lm import load_tokenizer
from specextend.report import RunFigures, write_report
from specextend.requests.tasks import Task
from specextend.stats import DecodingStats

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
TEN_MILLION = 10_000_000
CHARACTERS = 1000
"""Characters of a document and of its summary."""


@dataclass(frozen=True, kw_only=True)
class StorageScale:
    """Size of the measurement."""

    documents: int = 200_000
    rows_per_file: int = 1000
    workers: int = 1000
    rows_per_part: int = 0
    """Rows per commit; 0 takes the number for a run with so many workers."""
    merge: bool = False
    """Merge the commits before they are read, whatever their number."""
    latency_ms: float = 20.0
    tokenizer: str = str(ROOT / ".models" / "SmolLM2-135M-Instruct")
    folder: Path = ROOT / "out" / "scale"
    """Folder of input and output; emptied first."""


@dataclass
class Meter:
    """Measures steps."""

    store: SimulatedStore
    times: float
    """Ratio of ten million documents to the measured number."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step with NUM_THREADS parallel requests."""
        tally, began, busy = self.store.tally, time.monotonic(), time.process_time()
        before = (tally.requests, tally.bytes_read, tally.bytes_written)
        yield
        requests, cpu_s = tally.requests - before[0], time.process_time() - busy
        row = {
            "step": name,
            "seconds": round(time.monotonic() - began, 2),
            "cpu_s": round(cpu_s, 2),
            "requests": requests,
            "read_mib": round((tally.bytes_read - before[1]) / MIB, 1),
            "written_mib": round((tally.bytes_written - before[2]) / MIB, 1),
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            "ten_million_s": round(
                self.times * (requests * self.store.latency_s / NUM_THREADS + cpu_s)
            ),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def measure(options: StorageScale) -> list[dict[str, Any]]:
    """Write a run up to its last commit, then check, resume and finish it. Returns a row per
    step.
    """
    shutil.rmtree(options.folder, ignore_errors=True)
    root, output = options.folder / "input", options.folder / "output"
    names = write_input(options, root)
    write_commits(options, resolve(str(output)))
    store = SimulatedStore(options.latency_ms / 1000)
    filesystem = fs.PyFileSystem(store)
    meter = Meter(store, TEN_MILLION / options.documents)
    with meter.step("audit of the input"):
        source = open_listing(Location(filesystem, str(root)), names)
    with meter.step("rows are chosen by a filter"):
        select_rows(
            Source(
                RowReader(replace(source.options, filter="title != ''")),
                source.root,
                source.files,
                (),
            )
        )
    there, task = Location(filesystem, str(output)), task_of(options)
    with meter.step("resume: commits are read"):
        progress = read_commits(there)
        rows = [file.num_rows for file in source.files]
        keys = RowSet(rows, pending(map(range, rows), progress))
    with meter.step("plan"):
        make_plan(source, [task], keys)
    figures = RunFigures()
    with meter.step("end: summaries and errors"):
        counts = finalize(source, there, observe=figures.add)
    assert counts.done == options.documents, counts
    with meter.step("end: report"):
        write_report(str(output), there, figures=figures)
    return meter.rows


def open_listing(root: Location, names: list[str]) -> Source:
    """Check the input like `open_source`, which does not accept a custom file system."""
    sizes = {name: (Path(root.path) / name).stat().st_size for name in names}
    reader = RowReader(InputOptions(path=root.path, passthrough=("title",)))
    listing = Listing(root, (), sizes)
    return Source(reader, root, *check_input(listing, reader))


def task_of(options: StorageScale) -> Task:
    """Return the task of the run."""
    values = {
        "input": {"path": "in"},
        "output": {"path": "out"},
        "target": {"model": options.tokenizer},
        "draft": {"kind": "ngram"},
        "decoding": {"max_new_tokens": 128},
    }
    config = RunConfig.from_values(values)
    return Task("", config, Prompts(load_tokenizer(options.tokenizer), config.prompt, 8192))


def write_input(options: StorageScale, root: Path) -> list[str]:
    """Write the documents and return the file names."""
    root.mkdir(parents=True)
    draw, names = random.Random(1), []
    for begin in range(0, options.documents, options.rows_per_file):
        rows = range(begin, min(begin + options.rows_per_file, options.documents))
        texts = [draw.randbytes(CHARACTERS // 2).hex() for _ in rows]
        names.append(f"{begin // options.rows_per_file:05d}.parquet")
        pq.write_table(
            pa.table({"text": texts, "title": [f"title {row}" for row in rows]}), root / names[-1]
        )
    return names


def write_commits(options: StorageScale, output: Location) -> None:
    """Commit every document once, in an order unrelated to the input."""
    draw = random.Random(2)
    keys = [
        DocumentKey(*divmod(number, options.rows_per_file)) for number in range(options.documents)
    ]
    draw.shuffle(keys)
    writer, num_rows = CommitWriter(output, "0000000a"), rows_per_part(options)
    for begin in range(0, len(keys), num_rows):
        writer.commit([made_up_row(key, draw) for key in keys[begin : begin + num_rows]])


def rows_per_part(options: StorageScale) -> int:
    """Return the number of rows per commit."""
    return options.rows_per_part or rows_per_commit(options.workers)


def made_up_row(key: DocumentKey, draw: random.Random) -> dict[str, Any]:
    """Make the row of a finished document."""
    steps = draw.randint(5, 60)
    stats = DecodingStats(
        num_prompt_tokens=draw.randint(500, 8000),
        num_output_tokens=3 * steps,
        num_spec_steps=steps,
        num_draft_tokens=16 * steps,
        num_accepted_tokens=2 * steps,
        acceptance_histogram=[0, 0, steps, 0, 0],
        ttft_s=draw.random(),
        decode_s=draw.random(),
        prefill_s=draw.random(),
        verify_s=draw.random(),
    )
    completion = Completion("", [1], draw.randbytes(CHARACTERS // 2).hex(), "stop", stats)
    return decoded_columns(completion, Prompt([1], 0, "middle"), Quality([], None)) | {
        **key._asdict(),
        "doc_id": f"{key.file:05d}.parquet:{key.row}",
        "worker": f"host:{draw.randint(1, 1000)}",
        "content_sha256": draw.randbytes(32).hex(),
        "queue_s": draw.random(),
        "started_at": datetime.fromtimestamp(1.8e9 + draw.uniform(0, 28_800), UTC),
        "attempts": 1,
        "num_requests": 1,
    }


def main() -> int:
    """Run the measurement and print the figures."""
    default = StorageScale()
    parser = argparse.ArgumentParser(
        prog="scale_storage.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("documents", "rows_per_file", "workers", "rows_per_part"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--latency-ms", type=float, default=default.latency_ms)
    parser.add_argument(
        "--folder", type=Path, default=default.folder, help="for input and output; emptied first"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    values = vars(parser.parse_args())
    path = values.pop("json")
    options = StorageScale(**values)
    described = asdict(options) | {"rows_per_part": rows_per_part(options)}
    del described["folder"], described["tokenizer"]
    record = {**described, "cores": os.cpu_count(), "steps": measure(options)}
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

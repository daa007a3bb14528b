"""Measure driver and scheduler with thousands of simulated workers and a simulated clock.

    python -m scripts.scale_driver memory --documents 10000000
    python -m scripts.scale_driver speed --workers 1000 --documents 200000
    python -m scripts.scale_driver night --workers 64 --documents 30000 --spot 4 --slow 0.5

Driver, scheduler, roster, ledger and commits are real; workers are simulated, without Ray. `memory`
prints the driver's bytes per document, `speed` its CPU seconds per document. `night` runs to the
end with reclaimed and slow nodes; the exit code is 1 unless every document is done exactly once, at
its first attempt.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from specextend.cluster.environment import prepare_environment

prepare_environment(os.environ)  # before the first import of ray

from scripts.simulated_cluster import BATCH, Notice, SimulatedClock, SimulatedCluster, SimulatedNode  # noqa: E402
from specextend.cluster.backlog import Estimates, RowSet  # noqa: E402
from specextend.cluster.driver import Driver  # noqa: E402
from specextend.cluster.exits import Interrupt  # noqa: E402
from specextend.cluster.lifecycle import EXTRA_LEASES  # noqa: E402
from specextend.cluster.lock import OutputLock, held  # noqa: E402
from specextend.cluster.messages import Lease  # noqa: E402
from specextend.cluster.progress import (  # noqa: E402
    AwakeClock,
    Display,
    Ledger,
)
from specextend.cluster.records import Committer, StartRecord, rows_per_commit  # noqa: E402
from specextend.cluster.scheduler import Scheduler  # noqa: E402
from specextend.cluster.workers import Roster  # noqa: E402
from specextend.config import JobOptions, RunConfig  # noqa: E402
from specextend.core import Completion, DocumentKey  # noqa: E402
from specextend.data.commits import CommitWriter, read_commits  # noqa: E402
from specextend.data.inputs import InputFile, InputOptions  # noqa: E402
from specextend.data.prompts import Prompt  # noqa: E402
from specextend.data.quality import Quality  # noqa: E402
from specextend.data.rows import RowReader  # noqa: E402
from specextend.data.run_folder import commits_folder  # noqa: E402
from specextend.data.schema import decoded_columns  # noqa: E402
from specextend.data.source import Source  # noqa: E402
from specextend.data.storage import Location, resolve  # noqa: E402
from specextend.stats import DecodingStats  # noqa: E402

FILE_ROWS = 100_000
GROUP_ROWS = 256
OUTPUT_TOKENS = 200
RUN_ID = "0a0a0a0a"
PER_NODE = 8
"""Workers per node."""


@dataclass(frozen=True, kw_only=True)
class DriverScale:
    """Size of a simulation."""

    documents: int = 100_000
    workers: int = 1000
    rate: float = 2000.0
    """Documents per second of all workers."""
    spot: int = 0
    """Nodes to reclaim, half of them with two minutes' notice."""
    slow: float = 0.0
    """Share of nodes slower by a factor of four."""
    is_global: bool = False
    """True for a single neighbourhood, so that all documents go longest first."""
    no_polls: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.spot > self.num_nodes:
            raise ValueError(
                f"--spot must be at most {self.num_nodes}, the nodes of {self.workers} workers"
            )

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes with PER_NODE workers each."""
        return -(-self.workers // PER_NODE)


class Corpus:
    """Documents with lengths like those of reports: most short, a few very long."""

    def __init__(self, options: DriverScale) -> None:
        draw = np.random.default_rng(options.seed)
        num = options.documents
        lengths = np.clip(draw.lognormal(np.log(2000), 1.0, num), 50, 30_000).astype(np.int64)
        self.file_rows = [min(FILE_ROWS, num - begin) for begin in range(0, num, FILE_ROWS)]
        group_rows = num if options.is_global else GROUP_ROWS
        if options.is_global:
            self.file_rows = [num]
        self.groups = [tuple(_cut(rows, group_rows)) for rows in self.file_rows]
        files = np.repeat(np.arange(len(self.file_rows)), self.file_rows)
        rows = np.concatenate([np.arange(rows) for rows in self.file_rows])
        self.estimates = Estimates(files, rows, lengths, np.full(num, OUTPUT_TOKENS))

    @property
    def num_groups(self) -> int:
        """Count the row groups of the input."""
        return sum(-(-rows // GROUP_ROWS) for rows in self.file_rows)

    def source(self, root: Location) -> Source:
        """Return a source without readable files."""
        files = tuple(
            InputFile(number, f"{number:05d}.parquet", 0, groups, 0, "", None)
            for number, groups in enumerate(self.groups)
        )
        return Source(RowReader(InputOptions(path=root.path)), root, files, ())


def _cut(rows: int, size: int) -> list[int]:
    return [min(size, rows - begin) for begin in range(0, rows, size)]


def measure_memory(options: DriverScale) -> dict[str, Any]:
    """Build the document state of a start and measure its memory."""
    process = psutil.Process()
    gc.collect()
    before, began = process.memory_info().rss, time.perf_counter()
    corpus = Corpus(options)
    every = (
        DocumentKey(file, row) for file, rows in enumerate(corpus.file_rows) for row in range(rows)
    )
    keys = RowSet(corpus.file_rows, every)
    ledger = Ledger(corpus.estimates, 0, 0)
    plan = Scheduler(corpus.estimates, JobOptions(), BATCH + EXTRA_LEASES, group_rows=corpus.groups)
    gc.collect()
    held = process.memory_info().rss - before
    assert len(keys) == plan.num_open == len(corpus.estimates)
    assert ledger.output_cost > 0
    return {
        "documents": options.documents,
        "bytes_per_document": held / options.documents,
        "peak_mib": _peak() / (1 << 20),
        "seconds": time.perf_counter() - began,
    }


def _peak() -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) << 10


def measure_speed(options: DriverScale) -> dict[str, Any]:
    """Let the workers do documents; measure the driver's CPU seconds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _night(options, Path(folder)) as (driver, cluster, corpus),
    ):
        until = int(0.8 * options.documents)
        began = time.process_time() - cluster.own_s
        while cluster.num_done < until:
            driver._turn()
        took = time.process_time() - cluster.own_s - began
        num_groups = corpus.num_groups * cluster.num_done / options.documents
        return {
            "workers": options.workers,
            "documents": cluster.num_done,
            "polls": cluster.num_polls,
            "simulated_s": cluster.clock.now,
            "ms_per_document": 1e3 * took / cluster.num_done,
            "documents_per_s": cluster.num_done / took,
            "share_of_a_core": took / cluster.clock.now,
            "reads_per_group": cluster.num_reads / num_groups,
        }


def run_night(options: DriverScale) -> dict[str, Any]:
    """Run to the end, and compare the output with the corpus."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _night(options, Path(folder)) as (driver, cluster, corpus),
    ):
        took = _until_done(driver, cluster)
        output = resolve(str(Path(folder, "output")))
        progress, attempts = read_commits(output), _attempts(output)
        work_s = int(corpus.estimates.totals().sum()) / BATCH
        speeds = [
            node.tokens_per_s for node in _nodes(options, corpus) for _ in range(node.workers)
        ]
        return {
            "workers": options.workers,
            "documents": options.documents,
            "spot": options.spot,
            "slow": options.slow,
            "is_global": options.is_global,
            "done": len(progress.done),
            "errors": len(progress.errors),
            "rows_committed": attempts.total(),
            "charged": attempts.total() - attempts[1],
            "simulated_s": cluster.clock.now,
            "ideal_s": work_s / sum(speeds),
            "held_worker_s": cluster.held_s,
            "reads_per_group": cluster.num_reads / corpus.num_groups,
            "driver_s": took,
        }


def _until_done(driver: Driver, cluster: SimulatedCluster) -> float:
    began = time.process_time() - cluster.own_s
    driver.drive()
    cluster.close()
    return time.process_time() - cluster.own_s - began


def _attempts(output: Location) -> Counter[int]:
    files = sorted(Path(commits_folder(output).path).glob("*.parquet"))
    return Counter(
        value
        for path in files
        for value in pq.read_table(path, columns=["attempts"])[0].to_pylist()
    )


def _nodes(options: DriverScale, corpus: Corpus) -> list[SimulatedNode]:
    num = options.num_nodes
    slow = round(options.slow * num)
    per_worker = (
        options.rate
        * float(corpus.estimates.totals().mean())
        / (num * PER_NODE - 0.75 * slow * PER_NODE)
        / BATCH
    )
    return [
        SimulatedNode(
            f"n{n}", PER_NODE, per_worker / (4 if n < slow else 1), "slow" if n < slow else "fast"
        )
        for n in range(num)
    ]


@contextmanager
def _night(options: DriverScale, folder: Path) -> Iterator[tuple[Driver, SimulatedCluster, Corpus]]:
    corpus, clock = Corpus(options), SimulatedClock()
    nodes = _nodes(options, corpus)
    expected_s = options.documents / options.rate
    draw = random.Random(options.seed)
    notices = [
        Notice(draw.uniform(0.1, 0.9) * expected_s, node, 120.0 if number % 2 else 0.0)
        for number, node in enumerate(draw.sample(range(len(nodes)), options.spot))
    ]
    template = _row()

    def row(lease: Lease) -> dict[str, Any]:
        return template | {"file": lease.key.file, "row": lease.key.row, "attempts": lease.attempt}

    def group(key: DocumentKey) -> tuple[int, int]:
        return key.file, key.row // GROUP_ROWS

    cluster = SimulatedCluster(
        nodes, clock, row, group, notices=notices, polls=not options.no_polls
    )
    output = resolve(str(folder / "output"))
    lock = OutputLock(output, RUN_ID)
    with held(lock):
        yield _driver(options, corpus, cluster, output, lock), cluster, corpus


def _driver(
    options: DriverScale, corpus: Corpus, cluster: Any, output: Location, lock: OutputLock
) -> Driver:
    job = JobOptions(workers=options.workers, document_deadline_s=1e6, stall_s=1e6)
    config = RunConfig.from_values(
        {
            "input": {"path": "in"},
            "output": {"path": "out"},
            "target": {"model": "m"},
            "draft": {"kind": "ngram"},
        }
    )
    record, num_leases = StartRecord(output, RUN_ID, config), BATCH + EXTRA_LEASES
    return Driver(
        scheduler=Scheduler(
            corpus.estimates, job, num_leases, group_rows=corpus.groups, num_extra=EXTRA_LEASES
        ),
        pool=cluster,
        roster=Roster(options.workers),
        committer=Committer(
            output,
            CommitWriter(output, RUN_ID),
            record,
            lock,
            rows_per_commit(job.workers),
            job.commit_every_s,
        ),
        ledger=Ledger(corpus.estimates, 0, 0),
        display=Display(lambda line: None),
        interrupt=Interrupt(60.0),
        record=record,
        source=corpus.source(output),
        job=job,
        clock=AwakeClock(cluster.clock),
    )


def _row() -> dict[str, Any]:
    completion = Completion(
        "", [5, 6], "a summary " * 40, "stop", DecodingStats(num_prompt_tokens=1)
    )
    return decoded_columns(completion, Prompt([1], 0, "middle"), Quality([], None)) | {
        "file": 0,
        "row": 0,
        "doc_id": "a document",
        "content_sha256": "0" * 64,
        "queue_s": 0.5,
        "started_at": datetime.fromtimestamp(0, UTC),
        "worker": "w",
        "attempts": 1,
        "num_requests": 1,
    }


def main() -> int:
    """Run a simulation, print its figures as JSON and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="scale_driver.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = {"memory": measure_memory, "speed": measure_speed, "night": run_night}
    parser.add_argument("what", choices=what)
    for name in ("documents", "workers", "spot", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(DriverScale, name))
    for name in ("rate", "slow"):
        parser.add_argument(f"--{name}", type=float, default=getattr(DriverScale, name))
    parser.add_argument(
        "--global",
        dest="is_global",
        action="store_true",
        help="longest first over the whole corpus",
    )
    parser.add_argument("--no-polls", action="store_true")
    values = vars(parser.parse_args())
    name = values.pop("what")
    try:
        options = DriverScale(**values)
    except ValueError as error:
        parser.error(str(error))
    record = what[name](options)
    print(json.dumps(record, indent=1))
    is_whole = record.get("done", 0) == record.get("rows_committed", 0) and not record.get(
        "charged", 0
    )
    return 0 if name != "night" or (is_whole and record["done"] == record["documents"]) else 1


if __name__ == "__main__":
    sys.exit(main())

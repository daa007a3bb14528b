"""Measure the cost of the job without the engine: documents of 10 KB through an engine that does nothing.

    python -m scripts.overhead --json benchmarks/results/overhead.json

Everything else is the job's own: plan, leases, reading, tokenizing, commits, finalize. The text comes from `examples/`,
and no two documents are alike. Prints documents per second from the first lease to the last commit, and the driver's
memory over time. Exit code 1 below `TARGET_PER_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.cluster.environment import prepare_environment

prepare_environment(os.environ)  # before anything imports ray

from specextend.cluster.display import Display, Fact  # noqa: E402
from specextend.cluster.exits import Interrupt  # noqa: E402
from specextend.cluster.progress import Snapshot  # noqa: E402
from specextend.cluster.run import run  # noqa: E402
from specextend.config import RunConfig  # noqa: E402
from specextend.core import Completion, Request  # noqa: E402
from specextend.models import load_tokenizer  # noqa: E402
from specextend.stats import DecodingStats  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny-random.yaml"
CORPORA = ("govreport", "pg19")
TARGET_PER_S = 300.0
GROUP_ROWS = 256
SAMPLES = 20
"""Number of samples of the driver's memory."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OverheadOptions:
    """Size of the measurement."""

    documents: int = 100_000
    characters: int = 10_000
    """Length of a document."""
    workers: int = 2
    folder: Path = ROOT / "out" / "overhead"
    """Folder of input and output; emptied first."""


class NoOpEngine:
    """An engine that completes each request at once, with one token."""

    num_steps = 0
    num_active = 0
    max_tokens = 8192

    def __init__(self, config: RunConfig) -> None:
        self.tokenizer = load_tokenizer(config.target.model)

    def generate(
        self, source: Iterable[Request | None], on_error: Callable[[str, Exception], None] | None = None
    ) -> Iterator[Completion]:
        """Yield a completion for each request without decoding."""
        for request in source:
            if request is None:
                continue
            self.num_steps += 1
            stats = DecodingStats(num_prompt_tokens=len(request.prompt_token_ids), num_output_tokens=1)
            yield Completion(request.request_id, [0], "nothing", "length", stats)

    def share_start(self, token_ids: Sequence[int]) -> None:
        """Do nothing: no prompt is read."""

    def limits(self) -> None:
        """Return nothing: it works on nothing."""

    def cancel(self, request_id: str) -> None:
        """Do nothing: no request runs long enough."""

    def progress(self) -> dict[str, int]:
        """Return nothing: no request is running."""
        return {}


@dataclass
class Watch(Display):
    """A display that samples the time and the driver's memory instead of showing anything."""

    every: int
    """Documents between two samples."""
    samples: list[dict[str, float]] = field(default_factory=list)
    process: psutil.Process = field(default_factory=psutil.Process)

    def show(self, snapshot: Snapshot, now: float) -> None:
        """Take a sample if enough documents were done since the last one."""
        if not snapshot.num_workers:
            return
        due = not self.samples or snapshot.num_done >= self.samples[-1]["documents"] + self.every
        if due or snapshot.num_done == snapshot.num_rows:
            times = self.process.cpu_times()
            rss = self.process.memory_info().rss / MIB
            self.samples.append(
                {"documents": snapshot.num_done, "at_s": now, "rss_mib": rss, "cpu_s": times.user + times.system}
            )

    def note(self, message: str, event: str = "note", **facts: Fact) -> None:
        """Print the message to stderr."""
        print(message, file=sys.stderr, flush=True)


def measure(options: OverheadOptions) -> dict[str, Any]:
    """Run the job once; return the figures as JSON values."""
    shutil.rmtree(options.folder, ignore_errors=True)
    write_documents(options)
    watch = Watch(max(1, options.documents // SAMPLES))
    load = os.getloadavg()[0]
    began = time.monotonic()
    code = run(configuration(options), watch, Interrupt(60.0), factory=NoOpEngine)
    seconds = time.monotonic() - began
    first, last = watch.samples[0], watch.samples[-1]
    tenth = next(sample for sample in watch.samples if sample["documents"] >= options.documents / 10)
    decoded = last["documents"] - first["documents"]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_average_1min": round(load, 2),
        "python": platform.python_version(),
        **{name: value for name, value in asdict(options).items() if name != "folder"},
        "exit_code": code,
        "documents_per_s": round(decoded / (last["at_s"] - first["at_s"]), 1),
        "driver_cpu_ms_per_document": round(1000 * (last["cpu_s"] - first["cpu_s"]) / decoded, 3),
        "whole_run_s": round(seconds, 1),
        "driver_growth_mib": round(last["rss_mib"] - tenth["rss_mib"], 1),
        "driver_rss_mib": [[sample["documents"], round(sample["rss_mib"], 1)] for sample in watch.samples],
    }


def write_documents(options: OverheadOptions) -> None:
    """Write one Parquet file, in which each document begins elsewhere in the text of the examples."""
    paths = (ROOT / "examples" / f"{name}.parquet" for name in CORPORA)
    text = "\n".join(row for path in paths for row in pq.read_table(path, columns=["text"])["text"].to_pylist())
    folder = options.folder / "input"
    folder.mkdir(parents=True)
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(folder / "documents.parquet", schema, compression="zstd") as writer:
        for begin in range(0, options.documents, GROUP_ROWS):
            numbers = range(begin, min(begin + GROUP_ROWS, options.documents))
            starts = (number * 7919 % (len(text) - options.characters) for number in numbers)
            texts = [text[start : start + options.characters] for start in starts]
            writer.write_table(pa.table({"text": texts}, schema=schema))


def configuration(options: OverheadOptions) -> RunConfig:
    """Return the tiny pair's configuration without a draft; commits are as frequent as by default."""
    settings = {
        "input.path": str(options.folder / "input"),
        "input.id_column": None,
        "output.path": str(options.folder / "output"),
        "decoding.mode": "autoregressive",
        "decoding.max_batch_size": 16,
        "job.workers": options.workers,
        "job.commit_every_s": 30,
    }
    return RunConfig.load(CONFIG, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def main() -> int:
    """Measure once; return the exit code."""
    default = OverheadOptions()
    parser = argparse.ArgumentParser(
        prog="overhead.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("documents", "characters", "workers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--folder", type=Path, default=default.folder, help="for input and output; emptied first")
    parser.add_argument("--json", type=Path, help="write the figures there")
    values = vars(parser.parse_args())
    path = values.pop("json")
    record = measure(OverheadOptions(**values))
    text = json.dumps(record, indent=1) + "\n"
    if path:
        path.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if record["documents_per_s"] >= TARGET_PER_S and record["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

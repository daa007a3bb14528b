"""Run the job under kills: short documents, the tiny random pair, and repeated SIGKILLs.

    python -m scripts.soak --json benchmarks/results/soak.json

Victims are drawn among the workers and the driver; a killed driver is started again, as an operator
would do. In addition, a place is broken: workers there are killed when they get a document. At the
end, every input row must have a summary in its place, and none may be an error; otherwise the exit
code is 1. The job (`jobs/summarize.py`) and the kills are real.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny-random.yaml"
WORDS = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
POLL_S = 0.1
FILES = 4
MAX_STARTS = 200
"""Maximum number of driver starts."""
EXIT_DONE = 0
STARTED_AGAIN = (-signal.SIGKILL, 1)
"""Exit codes after which the driver is started again: killed, or a Ray start failed."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """Size of the run and rate of the kills."""

    documents: int = 2000
    workers: int = 4
    every: int = 40
    """Finished documents between two kills."""
    seed: int = 0
    """Seed of the documents and the victims."""
    sick: int = 1
    """Seat at which every worker is killed, from 1; 0 for none."""
    folder: Path = ROOT / "out" / "soak"
    """Folder of input and output; emptied first."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL."""

    after: int
    """Committed rows at the time."""
    at_s: float
    """Seconds since the start of the soak."""
    victim: str
    """`driver`, `worker`, or `sick` on the broken seat."""


@dataclass
class Soak:
    """A soak, from its documents to its verdict."""

    options: SoakOptions
    kills: list[Kill] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of the driver; -9: killed, 1: Ray did not start."""

    def run(self) -> dict[str, Any]:
        """Run the job to its end under kills; return the results as JSON values."""
        shutil.rmtree(self.options.folder, ignore_errors=True)
        write_documents(self.options)
        began, draw = time.monotonic(), random.Random(self.options.seed)
        next_kill = self.options.every
        while EXIT_DONE not in self.exit_codes and len(self.exit_codes) < MAX_STARTS:
            log = Log(self.options.folder / "log.txt")
            with started(self.options) as driver:
                while driver.poll() is None:
                    for victim in log.handed_out_at(f"seat {self.options.sick}", driver.pid):
                        self._kill(
                            victim, "sick", committed_rows(self.output), time.monotonic() - began
                        )
                    rows = committed_rows(self.output)
                    if (
                        rows >= next_kill
                        and (victim := choose_victim(driver.pid, draw)) is not None
                    ):
                        what = "driver" if victim.pid == driver.pid else "worker"
                        self._kill(victim, what, rows, time.monotonic() - began)
                        next_kill = rows + self.options.every
                    time.sleep(POLL_S)
                self.exit_codes.append(driver.returncode)
            if driver.returncode not in (EXIT_DONE, *STARTED_AGAIN):
                break
        return self._record(time.monotonic() - began)

    @property
    def output(self) -> Path:
        """Return the output folder."""
        return self.options.folder / "output"

    def _kill(self, victim: psutil.Process, what: str, rows: int, at_s: float) -> None:
        try:
            victim.kill()
        except psutil.NoSuchProcess:  # ended before the signal
            return
        self.kills.append(Kill(rows, round(at_s, 1), what))

    def _record(self, seconds: float) -> dict[str, Any]:
        options = {name: value for name, value in asdict(self.options).items() if name != "folder"}
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **options,
            "seconds": round(seconds, 1),
            "exit_codes": self.exit_codes,
            "kills": [asdict(kill) for kill in self.kills],
            "num_kills": Counter(kill.victim for kill in self.kills),
            **reconcile(self.options, self.output),
        }


@dataclass
class Log:
    """The growing log of a driver: places of workers and their documents."""

    path: Path
    _read: int = field(init=False)
    _there: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Place and process of each worker."""

    def __post_init__(self) -> None:
        self._read = self.path.stat().st_size if self.path.exists() else 0

    def handed_out_at(self, place: str, driver: int) -> list[psutil.Process]:
        """Return the workers at a place with a new document since the last call."""
        busy = set()
        for event in self._new_events():
            if event["event"] == "worker_ready":
                self._there[event["worker"]] = (event["place"], event["pid"])
            elif event["event"] == "document_leased":
                where, pid = self._there[event["worker"]]
                busy |= {pid} if where == place else set()
        return [each for each in workers_of(driver) if each.pid in busy]

    def _new_events(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                if line.startswith(b"{"):
                    yield json.loads(line)


def write_documents(options: SoakOptions) -> None:
    """Write documents of 20 to 80 words in `FILES` files, numbered by a passthrough column."""
    draw = random.Random(options.seed)
    texts = [
        " ".join(draw.choices(WORDS, k=draw.randint(20, 80))) for _ in range(options.documents)
    ]
    folder = options.folder / "input"
    folder.mkdir(parents=True)
    for file in range(FILES):
        numbers = list(range(file, options.documents, FILES))
        columns = {
            "doc_id": [f"document-{number}" for number in numbers],
            "text": [texts[number] for number in numbers],
            "number": numbers,
        }
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=100)


@contextmanager
def started(options: SoakOptions) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job as a process with a private Ray, with a core per worker in any case."""
    settings = {
        "input.passthrough": ["number"],
        "job.workers": options.workers,
        "job.commit_every_s": 1,
        "job.max_attempts": 10,
    }
    command = [sys.executable, "jobs/summarize.py", "--config", str(CONFIG), "--log", "json"]
    command += [
        "--input",
        str(options.folder / "input"),
        "--output",
        str(options.folder / "output"),
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    cores = json.dumps({"CPU": options.workers})
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "RAY_OVERRIDE_RESOURCES": cores,
        "PYTHONPATH": str(ROOT),
    }
    with open(options.folder / "log.txt", "ab") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def committed_rows(output: Path) -> int:
    """Count the committed rows."""
    return sum(
        pq.read_metadata(path).num_rows
        for path in (output / "_run" / "parts").glob("part-*.parquet")
    )


def choose_victim(driver: int, draw: random.Random) -> psutil.Process | None:
    """Choose a worker or the driver; None while no worker runs."""
    workers = workers_of(driver)
    return draw.choice([*workers, psutil.Process(driver)]) if workers else None


def workers_of(driver: int) -> list[psutil.Process]:
    """List the job's workers by process id."""
    children = psutil.Process(driver).children(recursive=True)
    return sorted((child for child in children if is_worker(child)), key=lambda worker: worker.pid)


def is_worker(process: psutil.Process) -> bool:
    """Return True for the process of an actor, renamed by Ray."""
    try:
        return any(word.startswith("ray::Worker") for word in process.cmdline()[:1])
    except psutil.Error:  # ended meanwhile
        return False


def reconcile(options: SoakOptions, output: Path) -> dict[str, Any]:
    """Count the outcomes of the input rows. `exact`: each has a summary in its place, and no
    errors.
    """
    places = []
    for file in range(FILES):
        path = output / "summaries" / f"part-{file:05d}.parquet"
        there = (
            pq.read_table(path, columns=["doc_id", "number"]).to_pylist() if path.exists() else []
        )
        places.append([(row["doc_id"], row["number"]) for row in there])
    expected = [
        [(f"document-{number}", number) for number in range(file, options.documents, FILES)]
        for file in range(FILES)
    ]
    errors = sum(pq.read_metadata(path).num_rows for path in (output / "errors").glob("*.parquet"))
    rows = [row for path in output.glob("summaries/*.parquet") for row in read_rows(path)]
    return {
        "num_summaries": sum(map(len, places)),
        "num_errors": errors,
        "num_rows_in_parts": committed_rows(output),
        "attempts": Counter(str(row["attempts"]) for row in rows),
        "is_success": (output / "_SUCCESS").exists(),
        "exact": places == expected and not errors,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the attempts of each row of a file, 0 for a copy."""
    return list(pq.read_table(path, columns=["attempts"]).to_pylist())


def main() -> int:
    """Run a soak, print the results and return the exit code."""
    default = SoakOptions()
    parser = argparse.ArgumentParser(
        prog="soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("documents", "workers", "every", "seed", "sick"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument(
        "--folder", type=Path, default=default.folder, help="for input and output; emptied first"
    )
    parser.add_argument("--json", type=Path, help="write what happened there")
    values = vars(parser.parse_args())
    path = values.pop("json")
    record = Soak(SoakOptions(**values)).run()
    text = json.dumps(record, indent=1) + "\n"
    if path:
        path.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if record["exact"] and record["is_success"] else 1


if __name__ == "__main__":
    sys.exit(main())

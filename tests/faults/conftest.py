"""A corpus, the tiny pair, and a Ray that faults may be done to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from specextend.cluster.exits import EXIT_DONE, Interrupt
from specextend.cluster.run import run
from specextend.cluster.worker import EngineFactory
from specextend.config import RunConfig
from specextend.loading import load_engine
from tests.cluster.conftest import Screen
from tests.cluster.conftest import job as job  # as here: a fixture of this folder, too
from tests.faults.nodes import nodes as nodes

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny-random.yaml"
NUM_ROWS = 12
SENTENCE = "The committee met and talked about the weather, then about number {}. "
SAME = (
    "doc_id",
    "summary",
    "finish_reason",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_dropped_tokens",
    "length_policy",
)
"""Columns of a summary that no fault may change; beside them those of the input."""
PASSTHROUGH = ("year", "source")


def write_corpus(path: Path) -> None:
    """Documents of different lengths, the longest of which do not fit; the columns beside the text are nested."""
    table = pa.table(
        {
            "text": [SENTENCE.format(row) * (4 + 3 * row) for row in range(NUM_ROWS)],
            "year": pa.array(range(1990, 1990 + NUM_ROWS), pa.int16()),
            "source": [{"url": f"a/{row}", "tags": ["x"] * (row % 3)} for row in range(NUM_ROWS)],
        }
    )
    pq.write_table(table, path, row_group_size=5)


@dataclass
class RealJob:
    """The corpus through the tiny pair, driven from this process."""

    folder: Path
    screen: Screen = field(default_factory=Screen)

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def __post_init__(self) -> None:
        write_corpus(self.folder / "corpus.parquet")

    def settings(self, **options: Any) -> list[str]:
        """The job as `--set` would say it; `options` are those of `job.*`."""
        values = {
            "input.path": self.folder / "corpus.parquet",
            "input.id_column": "null",
            "input.passthrough": f"[{', '.join(PASSTHROUGH)}]",
            "output.path": self.output,
            "prompt.max_prompt_tokens": 400,
            "job.commit_every_s": 0,
            "job.stall_s": 600,  # a busy machine is no fault
            "job.document_deadline_s": 600,
        }
        values |= {f"job.{name}": value for name, value in options.items()}
        return [f"{name}={value}" for name, value in values.items()]

    def run(self, factory: EngineFactory = load_engine, **options: Any) -> int:
        return run(RunConfig.load(CONFIG, self.settings(**options)), self.screen, Interrupt(600.0), factory=factory)

    def result(self) -> list[dict[str, Any]]:
        """What must not change, in the order of the files."""
        return same_columns(self.output)

    def column(self, name: str) -> list[Any]:
        """The values of all documents."""
        return [row[name] for row in rows(self.output / "summaries")]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of all files of a folder, in order."""
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def same_columns(output: Path) -> list[dict[str, Any]]:
    """The summaries of a run, without what is measured."""
    return [{name: row[name] for name in (*SAME, *PASSTHROUGH)} for row in rows(output / "summaries")]


def parts(output: Path) -> dict[str, bytes]:
    """The commits of a run."""
    return {path.name: path.read_bytes() for path in sorted((output / "_run" / "parts").glob("part-*.parquet"))}


def committed(output: Path) -> list[tuple[int, int]]:
    """Keys of all rows of all commits."""
    return [(row["file"], row["row"]) for row in rows(output / "_run" / "parts")]


def environment(address: str | None = None) -> dict[str, str]:
    """That of a process on a cluster: the Ray of the tests, if nothing else is said."""
    joined = address or ray.get_runtime_context().gcs_address
    # A driver whose head is gone waits a minute for it, else.
    return os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": joined, "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}


def start(job: RealJob, *command: str, address: str | None = None, **options: Any) -> subprocess.Popen[str]:
    """The job as a process of its own."""
    arguments = ["--config", str(CONFIG)]
    arguments += [part for setting in job.settings(**options) for part in ("--set", setting)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *arguments], env=environment(address), cwd=ROOT, **pipes)


@pytest.fixture
def real_job(tmp_path: Path, local_ray: None) -> Iterator[RealJob]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield RealJob(tmp_path)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> list[dict[str, Any]]:
    """What the same corpus gives when nothing happens."""
    calm = RealJob(tmp_path_factory.mktemp("undisturbed"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    load_engine(RunConfig.load(CONFIG, calm.settings()))  # keeps its kernels for the workers, which would measure them
    assert calm.run() == EXIT_DONE
    for number, handler in handlers.items():
        signal.signal(number, handler)
    result = calm.result()
    assert len({row["summary"] for row in result}) > NUM_ROWS / 2, "equal summaries would prove nothing"
    assert {row["num_dropped_tokens"] > 0 for row in result} == {False, True}
    return result


def twice(*kinds: str, fast: int = 1) -> Callable[[Any], Any]:
    """Parametrises `kind`: each twice, since a fault that is survived once may have been lucky.

    The first round of the first `fast` kinds is in every test run, the rest in the long one.
    """
    rounds = [(kind, number) for number in (1, 2) for kind in kinds]
    quick = [(kind, 1) for kind in kinds[:fast]]
    slow = pytest.mark.slow
    names = [
        pytest.param(kind, id=f"{kind}-{number}", marks=() if (kind, number) in quick else slow)
        for kind, number in rounds
    ]
    return pytest.mark.parametrize("kind", names)

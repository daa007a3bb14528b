"""A small corpus, a run of it through fake engines on a real Ray, and what came out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.exits import Interrupt
from specextend.cluster.lifecycle import run_job
from specextend.cluster.progress import Display, Fact, Snapshot
from specextend.config import RunConfig
from specextend.core import Values
from tests.cluster.fakes import FakeEngine
from tests.job.conftest import kept_handlers, rows

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".models" / "tiny-random"


@dataclass
class Screen:
    """A display that keeps what it was told; `on_show` and `on_event` may look in."""

    notes: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Fact]]] = field(default_factory=list)
    on_show: Callable[[Snapshot], None] = lambda snapshot: None
    on_event: Callable[[str, dict[str, Fact]], None] = lambda name, facts: None

    def show(self, snapshot, now):
        self.on_show(snapshot)

    note = Display.note

    def event(self, name, message="", **facts):
        self.notes += [message] if message else []
        self.events.append((name, facts))
        self.on_event(name, facts)

    def told(self, name):
        """The facts of every event of a name."""
        return [facts for event, facts in self.events if event == name]

    def close(self):
        pass


@dataclass
class Job:
    """A job of fake engines over the given texts, in a folder of its own."""

    folder: Path
    texts: list[str | None]
    job: Values
    screen: Screen = field(default_factory=Screen)
    max_batch_size: int = 3
    target: Path = MODELS / "target"
    sections: dict[str, Values] = field(default_factory=dict)
    """Further options."""
    input: Path = field(init=False)

    def __post_init__(self):
        table = pa.table(
            {"id": [f"d{row}" for row in range(len(self.texts))], "text": pa.array(self.texts, pa.string())}
        )
        self.input = self.folder / "input.parquet"
        pq.write_table(table, self.input)

    @property
    def output(self):
        return self.folder / "output"

    def config(self, **job):
        return RunConfig.from_values(
            {
                "input": {"path": str(self.input), "id_column": "id"},
                "output": {"path": str(self.output)},
                "target": {"model": str(self.target), "dtype": "float32"},
                "decoding": {
                    "mode": "autoregressive",
                    "max_new_tokens": 5,
                    "max_batch_size": self.max_batch_size,
                    "cache_gib": 2.0,
                },
                "job": {"cpus_per_worker": 1, "max_attempts": 2, **self.job, **job},
                **self.sections,
            }
        )

    def run(
        self,
        factory=FakeEngine,
        retry_errors="none",
        interrupt=None,
        report=lambda *arguments, **options: None,
        **job,
    ):
        return run_job(
            self.config(**job),
            self.screen,
            interrupt or Interrupt(600.0),
            retry_errors=retry_errors,
            report=report,
            factory=factory,
        )

    def summaries(self):
        return rows_of(self.output / "summaries")

    def column(self, name):
        return [row[name] for row in self.summaries().values()]

    def errors(self):
        return rows_of(self.output / "errors")


def rows_of(folder):
    """Rows of a folder's files, by document; none may be there twice."""
    found = rows(folder)
    by_id = {row["doc_id"]: row for row in found}
    assert len(by_id) == len(found), "a document ended twice"
    return by_id


@pytest.fixture
def job(tmp_path, local_ray):
    """Makes jobs: `job(texts, **job_options)`."""
    with kept_handlers():
        yield lambda texts, **options: Job(tmp_path, texts, options)

"""What users have: the jobs, a folder of documents, a pair of models, and a Ray that the runs of these tests share."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from specextend import RunConfig, load_engine
from tests.job.conftest import AT_ONCE_S, CONFIG, ROOT, in_process, rows, sets, write_corpus
from tests.job.conftest import call as call  # fixtures of this folder, too
from tests.job.conftest import plan as plan
from tests.job.conftest import start as start
from tests.reference_outputs import Ties

NUM_ROWS = 12
SENTENCE = "The committee met and talked about the weather, then about number {}. "
SAME = (
    "doc_id", "summary", "finish_reason", "num_prompt_tokens", "num_output_tokens", "num_dropped_tokens", "verdicts"
)  # fmt: skip
"""Columns of a summary that no fault may change; beside them those of the input."""
PASSTHROUGH = ("year", "source")


@pytest.fixture(scope="module")
def ties(request):
    ties = Ties()
    yield ties
    request.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{ties.summary()}")


@pytest.fixture(scope="session")
def kept_kernels():
    """This process measures the kernels once and keeps what is fastest; each worker would do so, at its first start."""
    load_engine(RunConfig.load(CONFIG, ["output.path=unused"]))


@pytest.fixture(scope="session")
def summarize_here(kept_kernels, local_ray):
    """The job in this process, on the Ray of these tests: as `summarize`, without the seconds in which both begin."""
    return partial(in_process, "summarize.py", "--config", str(CONFIG))


@dataclass
class Run:
    """A corpus and the folder of its run. Documents are of different lengths, the longest of which do not fit."""

    folder: Path

    def __post_init__(self):
        texts = [SENTENCE.format(row) * (4 + 3 * row) for row in range(NUM_ROWS)]
        years = pa.array(range(1990, 1990 + NUM_ROWS), pa.int16())
        sources = [{"url": f"a/{row}", "tags": ["x"] * (row % 3)} for row in range(NUM_ROWS)]
        write_corpus(self.folder / "corpus.parquet", texts, year=years, source=sources)
        self.temporary.mkdir()

    @property
    def output(self):
        return self.folder / "output"

    @property
    def temporary(self):
        """The folder of temporary files of processes that were started."""
        return self.folder / "temporary"

    def settings(self, **job):
        """How the configuration differs from the file; `job` are options of `job.*`."""
        patient = {"commit_every_s": AT_ONCE_S, "stall_s": 600, "document_deadline_s": 600}  # for busy machines
        return [
            f"input.path={self.folder / 'corpus.parquet'}",
            "input.id_column=null",
            f"input.passthrough=[{','.join(PASSTHROUGH)}]",
            f"output.path={self.output}",
            "output.figures=true",
            "output.confidence=true",
            "output.verify=true",
            'prompt.verification="Is it so?"',
            "prompt.max_prompt_tokens=400",
            *(f"job.{key}={value}" for key, value in (patient | job).items()),
        ]

    def start(self, *command, address=None, **job):
        """Start the job as a process on a Ray: that of the tests, if no other is named."""
        import ray

        address = address or ray.get_runtime_context().gcs_address
        # A driver whose head is gone waits a minute for it, else.
        variables = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address, "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
        variables["TMPDIR"] = str(self.temporary)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        whole = [sys.executable, *command, "--config", CONFIG, *sets(*self.settings(**job))]
        return subprocess.Popen(whole, env=os.environ | variables, cwd=ROOT, **pipes)

    def result(self):
        """What must not change, in the order of the files."""
        return [{name: row[name] for name in (*SAME, *PASSTHROUGH)} for row in rows(self.output / "summaries")]

    def column(self, name):
        """The values of a column of the summaries."""
        return [row[name] for row in rows(self.output / "summaries")]


def commits(output):
    """The files of the commits of a run."""
    return {path.name: path.read_bytes() for path in sorted((output / "_run" / "parts").glob("*.parquet"))}


def committed(output):
    """Keys of all rows of all commits of a run."""
    return [(row["file"], row["row"]) for row in rows(output / "_run" / "parts")]


@pytest.fixture
def run(tmp_path, summarize_here):
    return Run(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, summarize_here):
    """What the same corpus gives when nothing happens."""
    calm = Run(tmp_path_factory.mktemp("undisturbed"))
    summarize_here(*sets(*calm.settings())).exits(0)
    result = calm.result()
    assert len({row["summary"] for row in result}) > NUM_ROWS / 2, "equal summaries would prove nothing"
    assert {row["num_dropped_tokens"] > 0 for row in result} == {False, True}
    return result

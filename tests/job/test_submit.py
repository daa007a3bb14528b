"""`ray job submit` on a cluster of one node: exit codes through its API, stop, resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.job.conftest import ROOT, environment, parts, rows, wait_for
from tests.job.test_summarize import long_corpus

pytestmark = pytest.mark.slow
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
MODELS = ROOT / ".models" / "tiny-random"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@dataclass
class Cluster:
    """A head node of our own."""

    dashboard: str

    def jobs(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.dashboard}/api/jobs/", timeout=30) as answer:
            return json.load(answer)

    def job(self, name: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.dashboard}/api/jobs/{name}", timeout=30) as answer:
            return json.load(answer)

    def ray(self, *arguments: str) -> None:
        its_own = environment() | {"RAY_ADDRESS": self.dashboard}
        ended = subprocess.run([*RAY, "job", *arguments], env=its_own, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def submit(self, name: str, *arguments: str) -> None:
        entry = f"{sys.executable} jobs/summarize.py --config configs/tiny-random.yaml"
        models = f"--set target.model={MODELS}/target --set draft.model={MODELS}/draft-model"
        settings = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
        options = ["--submission-id", name, "--no-wait", "--working-dir", str(ROOT)]
        self.ray("submit", *options, "--runtime-env-json", settings, "--", *f"{entry} {models}".split(), *arguments)

    def ended(self, name: str) -> tuple[str, int | None]:
        """Status and the driver's own exit code, once it has ended; Ray keeps none of a job that it stopped."""
        job = wait_for(lambda: (job := self.job(name))["status"] in ("SUCCEEDED", "FAILED", "STOPPED") and job, "end")
        return job["status"], job["driver_exit_code"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ports of its own: the agents of a killed node hold Ray's usual ones for a minute."""
    port, dashboard, agent = free_port(), free_port(), free_port()
    folder = tempfile.mkdtemp(prefix="sx", dir="/tmp")  # socket paths must stay short
    options = [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    options += [f"--dashboard-agent-listen-port={agent}"]
    command = [*RAY, "start", "--head", "--block", "--num-cpus=2", f"--object-store-memory={80 << 20}", *options]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = Cluster(f"http://127.0.0.1:{dashboard}")
    wait_for(lambda: answers(found), "dashboard")
    yield found
    head.send_signal(signal.SIGTERM)
    head.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


def answers(cluster: Cluster) -> bool:
    try:
        cluster.jobs()
    except OSError:
        return False
    return True


def test_a_stopped_job_commits_what_is_finished_and_a_second_submission_resumes_it(cluster: Cluster, tmp_path: Path):
    """`ray job stop`, a preempted driver: the attempt's record says 75, the next job does the rest."""
    output = tmp_path / "out"
    arguments = [*long_corpus(tmp_path), "--output", str(output)]
    cluster.submit("first", *arguments)
    wait_for(lambda: parts(output), "part")
    cluster.ray("stop", "first")
    assert cluster.ended("first") == ("STOPPED", None)
    [attempt] = (output / "_run" / "attempts").glob("*.json")
    assert json.loads(attempt.read_text())["exit_code"] == 75
    kept = {path: path.read_bytes() for path in parts(output)}
    assert 0 < len(kept) < 40
    cluster.submit("second", *arguments)
    assert cluster.ended("second") == ("SUCCEEDED", 0)
    assert len(rows(output / "summaries")) == 40
    assert {path: path.read_bytes() for path in parts(output)}.items() >= kept.items()


def test_a_relative_path_is_refused_by_the_submitted_job(cluster: Cluster, tmp_path: Path):
    """It would name a folder in the job's own copy of the project, which is deleted."""
    cluster.submit("relative", *long_corpus(tmp_path), "--output", "out/relative")
    assert cluster.ended("relative") == ("FAILED", 2)

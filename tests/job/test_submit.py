"""`ray job submit` on a cluster of one node with its token: upload, logs, exit codes, stop, resume."""

import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.job.conftest import (
    LONGEST_S,
    ROOT,
    environment,
    is_paused,
    long_corpus,
    on,
    parts,
    pausing_command,
    ran,
    read_json,
    rows,
    wait_for,
    write_corpus,
)

pytestmark = pytest.mark.slow
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""On which `python` and `ray` are ours, for the cluster as for its user."""
MODELS = ROOT / ".models" / "tiny-random"
TINY = ["--config", "configs/tiny-random.yaml"]
TINY += ["--set", f"target.model={MODELS}/target", "--set", f"draft.model={MODELS}/draft-model"]


def free_ports(number):
    """Different ones, below those that the system hands out: another process could be given such a one before Ray."""
    with ExitStack() as stack:
        return [draw_port(stack.enter_context(socket.socket())) for _ in range(number)]


def draw_port(server):
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


@dataclass
class Cluster:
    """A head node of our own, which asks for a token."""

    dashboard: str
    token: str

    def job(self, name=""):
        """What its API says of a job; of all without a name."""
        request = urllib.request.Request(f"{self.dashboard}/api/jobs/{name}")
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def run(self, *command, token=None):
        """Run a command of a user who has the token, or another one."""
        own = {"RAY_ADDRESS": self.dashboard, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token or self.token}
        return ran(*command, env=environment() | own | {"PATH": SEARCH_PATH})

    def ray(self, *arguments):
        """Output of `ray job`, which must succeed."""
        return self.run(*RAY, "job", *arguments).exits(0).stdout

    def submit(self, name, *arguments, job=("jobs/summarize.py",)):
        settings = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}})
        options = ["--submission-id", name, "--no-wait", "--working-dir", ".", "--runtime-env-json", settings]
        self.ray("submit", *options, "--", "python", *job, *TINY, *arguments)

    def ended(self, name):
        """Status and the driver's own exit code, once it has ended; Ray keeps none of a job that it stopped."""
        job = wait_for(lambda: (job := self.job(name))["status"] in ("SUCCEEDED", "FAILED", "STOPPED") and job, "end")
        return job["status"], job["driver_exit_code"]


@pytest.fixture(scope="module")
def cluster():
    """Ports of its own: the agents of a killed node hold Ray's usual ones for a minute."""
    port, dashboard, agent = free_ports(3)
    folder = tempfile.mkdtemp(prefix="sx", dir="/tmp")  # socket paths must stay short
    options = [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    options += [f"--dashboard-agent-listen-port={agent}"]
    command = [*RAY, "start", "--head", "--block", "--num-cpus=2", f"--object-store-memory={80 << 20}", *options]
    found = Cluster(f"http://127.0.0.1:{dashboard}", secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": found.token, "PATH": SEARCH_PATH}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: answers(found), "dashboard")
    yield found
    head.send_signal(signal.SIGTERM)
    head.wait(LONGEST_S)
    shutil.rmtree(folder, ignore_errors=True)


def answers(cluster):
    try:
        cluster.job()
    except OSError:
        return False
    return True


def is_told_to_stop(pid):
    """Whether SIGTERM waits for a suspended process to go on."""
    [pending] = re.findall(r"ShdPnd:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) & 1 << signal.SIGTERM - 1)


def test_a_stopped_job_commits_what_is_finished_and_a_second_submission_resumes_it(cluster, tmp_path):
    """`ray job stop`, a preempted driver: the attempt's record says 75, the next job does the rest."""
    output = tmp_path / "out"
    arguments = [*long_corpus(tmp_path), "--output", output]
    _, *pausing_job = pausing_command()
    cluster.submit("first", *arguments, job=pausing_job)
    wait_for(lambda: parts(output), "part")
    driver = read_json(output / "_run" / "lock")["pid"]
    wait_for(lambda: is_paused(driver), "pause")
    cluster.ray("stop", "--no-wait", "first")
    wait_for(lambda: is_told_to_stop(driver), "SIGTERM")
    os.kill(driver, signal.SIGCONT)
    assert cluster.ended("first") == ("STOPPED", None)
    [attempt] = (output / "_run" / "attempts").glob("*.json")
    assert read_json(attempt)["exit_code"] == 75
    kept = {path: path.read_bytes() for path in parts(output)}
    assert 0 < len(kept) < 40
    cluster.submit("second", *arguments)
    assert cluster.ended("second") == ("SUCCEEDED", 0)
    assert len(rows(output / "summaries")) == 40
    assert {path: path.read_bytes() for path in parts(output)}.items() >= kept.items()


def test_a_submission_shows_the_log_and_ends_with_the_jobs_own_code(cluster, tmp_path):
    """A pipeline must tell "look at errors/" (3) from "run again" (75); Ray's CLI says 1 for both."""
    corpus = write_corpus(tmp_path / "in.parquet", ["The committee met and talked about the weather.", None])
    arguments = [*TINY, *on(corpus, tmp_path / "out", "input.id_column=null")]
    ended = cluster.run("scripts/submit.sh", *arguments).exits(3)
    for said in ("2 of 2 rows to do", "2 rows: 1 done, 1 failed", "rows done", "Summary of in.parquet:0:"):
        assert said in ended.stdout
    assert not any("\x1b" in line for line in ended.stdout.splitlines() if "rows" in line), "progress in plain lines"
    cluster.run("scripts/submit.sh", *arguments, "--set", "job.max_error_fraction=0.5").exits(0)
    [one, other] = [job for job in cluster.job() if (job["submission_id"] or "").startswith("specextend-")]
    assert {one["driver_exit_code"], other["driver_exit_code"]} == {0, 3}


def test_nobody_submits_without_the_token(cluster):
    """Whoever submits a job runs code on the cluster."""
    refused = cluster.run(*RAY, "job", "submit", "--no-wait", "--", "true", token="0" * 64)
    assert refused.code != 0
    assert "token" in refused.stdout + refused.stderr
    assert not any(job["entrypoint"] == "true" for job in cluster.job())


def test_the_log_of_a_job_holds_no_token(cluster, tmp_path):
    """Logs are kept, and read by more people than may run code."""
    cluster.submit("quiet", *long_corpus(tmp_path, 1), "--output", tmp_path / "out")
    assert cluster.ended("quiet") == ("SUCCEEDED", 0)
    assert cluster.token not in cluster.ray("logs", "quiet")

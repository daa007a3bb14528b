"""`ray job submit` on a cluster of two nodes with its token: upload, logs, exit codes, stop, resume."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.job.conftest import (
    AT_ONCE_S,
    LONGEST_S,
    ROOT,
    environment,
    long_texts,
    on,
    parts,
    ran,
    read_json,
    rows,
    text_of,
    wait_for,
    write_corpus,
)

pytestmark = pytest.mark.slow
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SEARCH_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
"""On which `python` and `ray` are ours, for the cluster as for its user."""
MODELS = ROOT / ".models" / "tiny-random"
TINY = ["--config", "configs/tiny-random.yaml"]


def free_port():
    """One below those that the system hands out: another process could be given such a one before Ray."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


@dataclass
class Cluster:
    """Two nodes of our own, which ask for a token."""

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Its nodes have the tiny models, and no others yet."""
    port, token = free_port(), secrets.token_hex(32)
    folder = tempfile.mkdtemp(prefix="sx", dir="/tmp")  # socket paths must stay short
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PATH": SEARCH_PATH}
    own["RAY_TMPDIR"] = folder  # where a job looks for its Ray; in the usual place another one may have written
    own["XDG_CACHE_HOME"] = str(cache := tmp_path_factory.mktemp("cache"))
    (cache / "specextend" / "models").mkdir(parents=True)
    (cache / "specextend" / "models" / "tiny-random").symlink_to(MODELS)
    without = {name: value for name, value in environment().items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.job.nodes", str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    nodes = subprocess.Popen(command, env=without | own, cwd=ROOT, **pipes)
    nodes.stdout.readline()  # the head is up
    print(file=nodes.stdin, flush=True)
    assert nodes.stdout.readline() == "done\n"
    found = Cluster(f"http://127.0.0.1:{port}", token)
    wait_for(lambda: found.run(*RAY, "job", "submit", "--no-wait", "--", "echo").code == 0, "node that takes a job")
    yield found
    nodes.communicate(timeout=LONGEST_S)
    shutil.rmtree(folder, ignore_errors=True)


def is_told_to_stop(pid):
    """Whether SIGTERM waits for a suspended process to go on."""
    [pending] = re.findall(r"ShdPnd:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) & 1 << signal.SIGTERM - 1)


@pytest.fixture
def night(cluster, tmp_path):
    """Submit the night of a date by the line of the page, with its configuration: other folders, models and sizes."""
    page = text_of("docs/cluster.md")
    [configuration] = re.findall(
        r"^```yaml\n(# /etc/specextend/nightly.yaml\n.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    ours = {"llama3.1-8b-eagle3-a100": "tiny-random", "/shared/": f"{tmp_path}/"}
    ours["workers: 32"] = f"workers: 2\n  commit_every_s: {AT_ONCE_S}"
    for theirs, own in ours.items():
        assert theirs in configuration
        configuration = configuration.replace(theirs, own)
    (tmp_path / "nightly.yaml").write_text(configuration)
    [line] = re.findall(r"^scripts/submit.sh --config /etc.*", page, re.MULTILINE)
    line = line.replace("/etc/specextend", str(tmp_path))
    return lambda date: cluster.run("bash", "-c", line.replace("$(date +%F)", date))


def test_a_night_that_is_killed_and_then_stopped_ends_with_every_row_once(cluster, night, tmp_path):
    """The page's recipe on two nodes, with its exit codes: 1 for a driver that was killed, 75 for one that was told to
    stop, 0 for one that finished or has nothing to do; the next night does what is new.
    """
    today, ids = "2026-11-22", [f"report-{number}" for number in range(150)]
    output = tmp_path / "summaries" / today
    write_corpus(tmp_path / "reports" / "a.parquet", long_texts(len(ids)), id=ids)

    def suspended(number):
        wait_for(lambda: len(parts(output)) > number, "part")
        driver = read_json(output / "_run" / "lock")["pid"]
        os.kill(driver, signal.SIGSTOP)
        return driver

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(night, today)
        os.kill(suspended(0), signal.SIGKILL)
        assert killed.result().exits(1)
        stopped = pool.submit(night, today)
        driver = suspended(len(parts(output)))
        [job] = [job for job in cluster.job() if job["status"] == "RUNNING"]
        cluster.ray("stop", "--no-wait", job["submission_id"])
        wait_for(lambda: is_told_to_stop(driver), "SIGTERM")
        os.kill(driver, signal.SIGCONT)
        assert stopped.result().exits(75)
    kept = {path: path.read_bytes() for path in parts(output)}
    assert 0 < len(kept) < len(ids)
    night(today).exits(0)
    assert [row["doc_id"] for row in rows(output / "summaries")] == ids
    assert {path: path.read_bytes() for path in parts(output)}.items() >= kept.items()
    assert "complete already" in night(today).exits(0).stdout
    write_corpus(tmp_path / "reports" / "b.parquet", long_texts(1), id=["new"])
    night("2026-11-23").exits(0)
    assert [row["doc_id"] for row in rows(tmp_path / "summaries" / "2026-11-23" / "summaries")] == ["new"]


def test_a_submission_shows_the_log_and_ends_with_the_jobs_own_code(cluster, tmp_path):
    """A pipeline must tell "look at errors/" (3) from "run again" (75); Ray's CLI says 1 for both."""
    corpus = write_corpus(tmp_path / "in.parquet", ["The committee met at 9 o'clock.", None])
    arguments = [*TINY, *on(corpus, tmp_path / "out", "input.id_column=null")]
    said = cluster.run("scripts/submit.sh", *arguments).exits(3).stdout
    for line in ("2 of 2 rows to do", "2 rows: 1 done, 1 failed", "rows done", "in.parquet:0"):
        assert line in said
    assert not any("\x1b" in line for line in said.splitlines() if "rows" in line), "progress in plain lines"
    cluster.run("scripts/submit.sh", *arguments, "--set", "job.max_error_fraction=0.5").exits(0)
    jobs = sorted(cluster.job(), key=lambda job: job["start_time"])
    assert [job["driver_exit_code"] for job in jobs[-2:]] == [3, 0]


def test_the_default_pair_is_submitted_by_a_line_that_names_input_and_output(cluster, tmp_path):
    """The first thing that anybody tries. The draft travels with the code, and the node fetches the target."""
    corpus = write_corpus(tmp_path / "in.parquet", ["The library of the town will open on Sundays. " * 9])
    arguments = ["--config", "configs/smollm2.yaml", "--input", corpus, "--output", tmp_path / "out"]
    ended = cluster.run("scripts/submit.sh", *arguments).exits(0)
    assert f"each node needs the same files at {corpus}" in ended.stdout.splitlines()
    [row] = rows(tmp_path / "out" / "summaries")
    assert row["num_spec_steps"] > 0
    assert cluster.token not in ended.stdout, "logs are read by more people than may run code"
    for text in (ended.stdout, (tmp_path / "out" / "_run" / "manifest.json").read_text()):
        assert "/_ray_pkg_" not in text, "a folder that Ray removes"


def test_nobody_submits_without_the_token(cluster):
    """Whoever submits a job runs code on the cluster."""
    refused = cluster.run(*RAY, "job", "submit", "--no-wait", "--", "true", token="0" * 64)
    assert refused.code != 0
    assert "token" in refused.stdout + refused.stderr
    assert not any(job["entrypoint"] == "true" for job in cluster.job())

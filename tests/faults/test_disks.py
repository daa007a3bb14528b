"""The output folder's file system fills up, or takes no more files, while a run goes on."""

import gc
import os
import subprocess
from dataclasses import replace

import pytest
import ray

from specextend.cluster.exits import EXIT_DONE, OutputError, RefusedError
from tests.cluster.fakes import FakeEngine
from tests.contract.conftest import commits
from tests.faults.conftest import during
from tests.job.conftest import wait_for


class WordyEngine(FakeEngine):
    """Its summaries are a MiB and more."""

    def completion(self, running):
        completion = running.completion()
        return replace(completion, text=completion.text + "." * (1 << 20))


TEXTS = [f"text number {number} " * 5 for number in range(30)]


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of a few MiB, where the output goes: with room for a part for each row."""
    folder = tmp_path / "output"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    except subprocess.CalledProcessError:
        pytest.skip("mounting a file system needs root")
    yield folder
    gc.collect()  # a file that nobody reads any more may be open until then
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    """A file that leaves no room for another."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return ballast


class Full:
    """Somebody else's files fill the disk."""

    error = "No space left on device"

    def happens(self, folder):
        self.ballast = fill(folder)

    def is_mended(self, folder):
        self.ballast.unlink()


class ReadOnly:
    """The kernel does so after an error of the disk; for us it waits until no file is open, such as a heartbeat's."""

    error = "Read-only file system"

    def happens(self, folder):
        remount = ["mount", "-o", "remount,ro", str(folder)]
        wait_for(lambda: subprocess.run(remount, check=False).returncode == 0, "read-only file system")

    def is_mended(self, folder):
        mount("-o", "remount,rw", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Full, ReadOnly])
def test_a_disk_that_takes_no_more_files_ends_the_run_in_one_line_and_a_resume_completes_it(job, disk, kind):
    """Half a part must not pass for a whole one, and what was committed before must not be done again."""
    fault = kind()
    run = job(TEXTS, commit_every_s=0)
    during(run, lambda: fault.happens(disk), num_done=5)
    with pytest.raises(
        OutputError, match=f"{run.output} cannot be written to: .*{fault.error}.*run again to resume"
    ) as said:
        run.run()
    assert "\n" not in str(said.value)
    kept = commits(run.output)
    assert 0 < len(kept) < len(TEXTS)
    fault.is_mended(disk)
    assert run.run() == EXIT_DONE
    assert commits(run.output).items() >= kept.items()
    assert list(run.summaries()) == [f"d{row}" for row in range(len(TEXTS))]
    assert not list(run.output.rglob(".*.tmp")), "nor is anything left of what broke off"


@pytest.mark.parametrize("kind", [Full, ReadOnly])
def test_a_disk_that_takes_no_files_from_the_start_is_said_before_any_model_is_loaded(job, disk, kind):
    """Not after ten minutes of loading one."""
    fault = kind()
    run = job(TEXTS)
    fault.happens(disk)
    with pytest.raises((OutputError, RefusedError), match=f"cannot be written to|{fault.error}") as said:
        run.run()
    assert "\n" not in str(said.value)
    assert not run.screen.notes
    fault.is_mended(disk)


@pytest.mark.slow
def test_a_full_object_store_stops_nobody(job):
    """Whoever shares the cluster may fill it; long results go through it, and Ray makes room on the disk."""
    ballast = [ray.put(os.urandom(8 << 20)) for _ in range(16)]  # 128 MiB into 80
    run = job(TEXTS)
    assert run.run(WordyEngine) == EXIT_DONE
    lengths = {len(row["summary"]) for row in run.summaries().values()}
    assert len(run.summaries()) == len(TEXTS)
    assert min(lengths) > 1 << 20, "shorter ones would travel without it"
    assert all(len(ray.get(reference)) == 8 << 20 for reference in ballast)

import asyncio
import gc
from pathlib import Path

import ray

from specextend.cluster.exits import EXIT_DONE
from specextend.cluster.messages import Done
from specextend.cluster.worker import Worker
from specextend.core import DocumentKey, Request
from specextend.data.source import open_source
from specextend.requests.rounds import document_seed
from tests.cluster.conftest import Job
from tests.cluster.fakes import FakeEngine, QuotingEngine
from tests.job.conftest import wait_for


def test_a_document_keeps_its_seed_wherever_and_whenever_it_runs():
    """Pinned: another value would make a resumed sampled run differ from an undisturbed one."""
    assert document_seed(0, "d1") == document_seed(0, "d1")
    assert len({document_seed(run, f"d{row}") for run in range(3) for row in range(100)}) == 300
    assert all(0 <= document_seed(run, "d") < 2**63 for run in range(100))
    assert document_seed(7, "govreport-1k-00") == 1394459061051453103


def test_a_text_that_an_error_quotes_cannot_drive_the_terminal_that_shows_the_log(job):
    """Ray keeps what a worker writes in files that people print, and shows it on the driver's terminal."""
    logs = Path(ray.nodes()[0]["RayletSocketName"]).parent.parent / "logs"

    def written():
        return "".join(path.read_text() for path in logs.glob("worker-*.err"))

    assert job(["one text", "another text"]).run(QuotingEngine) == EXIT_DONE
    wait_for(lambda: "ValueError: cannot read" in written(), "error in the log")
    assert r"ValueError: cannot read \x1b[2J\u202ethis\rok" in written()


def prompts_kept(lease):
    """Requests of a lease that something in this process still holds."""
    gc.collect()
    return sum(type(each) is Request and each.request_id == lease for each in gc.get_objects())


def test_the_prompt_of_a_cancelled_lease_is_forgotten(tmp_path):
    """A worker kept every one until a batch failed: 100 KB a document of 16K tokens, for as long as it lived."""
    config = Job(tmp_path, ["crawl", "one", "two"], {}).config()

    async def lease_and_cancel(worker):
        late = asyncio.create_task(worker.run("late", DocumentKey(0, 0), 1))
        while "late" not in (await worker.progress()).outputs:
            await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        for row in (1, 2):
            assert isinstance(await worker.run(f"next {row}", DocumentKey(0, row), 1), Done)

    worker = Worker(config, open_source(config.input), FakeEngine)
    worker.load()
    asyncio.run(lease_and_cancel(worker))
    assert prompts_kept("late") == 0

from pathlib import Path

import ray

from specextend.cluster.exits import EXIT_DONE
from specextend.requests.rounds import document_seed
from tests.cluster.fakes import QuotingEngine
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

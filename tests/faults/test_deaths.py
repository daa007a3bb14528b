"""A worker that goes in the middle of a batch: its process is killed, its device is beyond use, or it hangs."""

import pytest

from specextend.cluster.exits import EXIT_DONE
from tests.faults.scarce import Breaks
from tests.job.conftest import rows


@pytest.mark.parametrize("kind", ["kill", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("device", "hang"))])
def test_another_worker_takes_over_and_no_summary_changes(real_job, undisturbed, tmp_path, kind):
    """The kernel's out-of-memory killer, a device after whose error every later call fails, a kernel that never
    returns: the summaries are those of a run to which nothing happened.
    """
    options = {"stall_s": 12} if kind == "hang" else {"commit_every_s": 3600}
    assert real_job.run(Breaks(kind, tmp_path / "broken"), max_attempts=5, **options) == EXIT_DONE
    assert real_job.result() == undisturbed
    killed = [facts["reason"] for facts in real_job.screen.told("worker_killed")]
    assert {*killed} == ({"no step for 12 s"} if kind == "hang" else set())
    assert len(real_job.screen.told("worker_died")) == (kind != "hang")
    most = 5 if kind == "hang" else 2  # on a busy machine others may seem to hang
    assert max(real_job.column("attempts")) <= most, "charged once, and not at all where it was not seen to start"
    assert rows(real_job.output / "errors") == []

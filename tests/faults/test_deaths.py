"""A worker's process is killed: at every moment of a document's life."""

from specextend.cluster.exits import EXIT_DONE
from tests.faults.conftest import each
from tests.faults.engines import DiesOnce, note_received


@each("decoding", "prefill", "finished")
def test_a_worker_killed_at_any_moment_changes_no_summary(real_job, undisturbed, tmp_path, kind):
    """The kernel's out-of-memory killer: the summaries are those of a run to which nothing happened."""
    marker = tmp_path / "killed"
    note_received(real_job.screen, marker)
    assert real_job.run(DiesOnce(kind, marker), commit_every_s=3600) == EXIT_DONE
    assert marker.exists()
    assert len(real_job.screen.told("worker_died")) == 1
    assert real_job.result() == undisturbed
    assert max(real_job.column("attempts")) <= 2
    assert real_job.column("attempts").count(2) <= 3, "no more than a batch was charged"
    assert not list((real_job.output / "errors").glob("*.parquet"))

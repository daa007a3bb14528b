"""Documents in parts over real Ray: nothing that is done of one is done again, and a part that fails is named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specextend.cluster.exits import EXIT_DONE, EXIT_TOO_MANY_ERRORS, Interrupt, InterruptedRunError
from specextend.cluster.prepare import prepare
from specextend.cluster.progress import Snapshot
from specextend.data.chunks import ChunkPrompts
from tests.cluster.conftest import Job
from tests.cluster.fakes import NotingEngine

SECTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"length_policy": "chunk", "max_prompt_tokens": 240},
    "chunks": {"instruction": "Shorten.", "merge_instruction": "Merge."},
}
SENTENCES = "".join(f"Rain fell on roof {number} all night. " for number in range(24))
OTHERS = SENTENCES.replace("Rain", "Snow")


def num_kept(run: Job) -> int:
    """What is kept of documents that are not done."""
    files = (run.output / "_run" / "chunks").glob("*.parquet")
    return sum(pq.read_metadata(file).num_rows for file in files)


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what differs between two runs."""
    return {name: value for name, value in row.items() if not (name.endswith("_s") or name in ("worker", "started_at"))}


def num_parts(run: Job) -> int:
    return len(ChunkPrompts(prepare(run.config()).prompts).parts(run.texts[0], 5, None))


@pytest.mark.slow
def test_a_run_that_is_stopped_within_a_document_does_no_part_of_it_again(job, tmp_path: Path):
    """What is resumed ends as if it had never been stopped, and only the part that was not done is decoded twice."""
    holds = tmp_path / "holds"
    holds.touch()
    texts = [f"{SENTENCES} crawl@{holds} {OTHERS}", "short"]
    run: Job = job(texts, commit_every_s=0.0)
    run.sections = SECTIONS
    interrupt, total = Interrupt(600.0), num_parts(run)

    def stop_when_all_others_are_kept(snapshot: Snapshot) -> None:
        if num_kept(run) == total - 1 and snapshot.num_done == 1:
            interrupt.tell("the test")

    run.screen.on_show = stop_when_all_others_are_kept
    with pytest.raises(InterruptedRunError):
        run.run(NotingEngine, interrupt=interrupt)
    interrupt.disarm()
    holds.unlink()
    run.screen.on_show = lambda snapshot: None
    assert run.run(NotingEngine) == EXIT_DONE
    row = run.summaries()["d0"]
    assert len(row["chunk_summaries"]) == total > 3
    assert row["num_requests"] > total
    assert (row["coverage"], row["num_output_tokens"]) == (1.0, 5 * row["num_requests"])
    assert num_kept(run) == 0, "a complete run needs them no more"
    twice = [text for text, count in Counter(NotingEngine.noted(run.config())).items() if count > 1]
    assert len(twice) == 1
    assert "crawl" in twice[0]
    (tmp_path / "unstopped").mkdir()
    unstopped = Job(tmp_path / "unstopped", texts, {}, sections=SECTIONS)
    assert unstopped.run() == EXIT_DONE
    assert timeless(unstopped.summaries()["d0"]) == timeless(row)


@pytest.mark.slow
def test_a_part_that_fails_is_found_and_named_and_a_worker_that_dies_loses_no_part(job, tmp_path: Path):
    """Parts share a batch, so a failure there is everybody's; tried again one by one, it is one part's."""
    killed = f"{SENTENCES} kill:{tmp_path / 'killed'} {OTHERS}"
    texts = [f"{SENTENCES} raise {OTHERS}", killed, "short"]
    run: Job = job(texts, max_attempts=3)  # one for a neighbour's failure, one for its own death, and one that succeeds
    run.sections = SECTIONS
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [error] = run.errors().values()
    assert (error["doc_id"], error["error_class"]) == ("d0", "ValueError")
    assert error["message"].startswith("part ")
    assert error["message"].endswith("this document cannot be done")
    assert len(run.summaries()["d1"]["chunk_summaries"]) > 2

"""Rows with equal texts, through fake engines on a real Ray: one of them is decoded, the others get copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from specextend.cluster.dry_run import describe_dry_run, dry_run
from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.prepare import prepare
from specextend.report import build_report
from specextend.report.sections import render
from tests.cluster.conftest import Job

TEXTS = ["one", "two", "one", "raise", None, "one", "raise", None, "two"]


def leased(run: Job) -> set[int]:
    """The rows that a worker was given."""
    return {int(str(facts["row"])) for facts in run.screen.told("document_leased")}


@pytest.mark.slow
def test_of_rows_with_equal_texts_one_is_decoded_and_the_others_end_like_it(job: Callable[..., Job]) -> None:
    """With it, in one commit. Rows that are refused anyway are each refused."""
    run = job(TEXTS, commit_every_s=0)
    seen: list[tuple[int, int]] = []
    run.screen.on_show = lambda snapshot: seen.append((snapshot.num_done + snapshot.num_errors, snapshot.num_rows))
    assert run.run() == EXIT_TOO_MANY_ERRORS
    assert leased(run) == {0, 1, 3, 4, 7}
    summaries, errors = run.summaries(), run.errors()
    assert {name: row["copied_from"] for name, row in summaries.items()} == {
        **dict.fromkeys(("d0", "d1")),
        **dict.fromkeys(("d2", "d5"), "d0"),
        "d8": "d1",
    }
    assert all(row["summary"] == summaries[row["copied_from"] or name]["summary"] for name, row in summaries.items())
    assert sum(row["num_output_tokens"] for row in summaries.values()) == 10, "what was decoded"
    assert {name: row["message"] for name, row in errors.items()} == {
        **dict.fromkeys(("d3", "d6"), "this document cannot be done"),
        **dict.fromkeys(("d4", "d7"), "the text is null"),
    }
    parts = [pq.read_table(path)["doc_id"].to_pylist() for path in (run.output / "_run" / "parts").iterdir()]
    assert any({"d0", "d2", "d5"} <= set(part) for part in parts)
    assert seen[0][1] == seen[-1][1] == len(TEXTS)
    notes = "\n".join(run.screen.notes)
    assert "9 of 9 rows to do, 4 of them copied from rows with an equal text" in notes
    assert "this document cannot be done (rows with an equal text that fail like it: 1)\n" in notes
    report = build_report(str(run.output))
    assert report["rows"] == {"input": 9, "done": 5, "copied": 3, "errors": 4, "pending": 0}
    assert report["per_document"]["total_s"]["n"] == 2
    assert "rows copied from rows with an equal text" in render(report)
    run.screen.events.clear()
    assert run.run(retry_errors="all") == EXIT_TOO_MANY_ERRORS
    assert leased(run) == {3, 4, 7}, "known from the record of the first start"


@pytest.mark.parametrize(("temperature", "num_copied"), [(0.0, 4), (0.7, 0)])
def test_a_dry_run_counts_copies_which_a_run_that_draws_its_tokens_has_none_of(
    tmp_path: Path, temperature: float, num_copied: int
) -> None:
    """Each row has its own seed then, and somebody may want several samples of one text."""
    config = Job(tmp_path, TEXTS, {}).config()
    config = config.model_copy(update={"decoding": replace(config.decoding, temperature=temperature)})
    plan = dry_run(prepare(config))
    assert (plan["rows_to_do"], plan["rows_copied"], plan["rows_rejected"]) == (9, num_copied, {"NullText": 2})
    assert plan["output_tokens_at_most"] == 5 * (7 - num_copied)
    assert ("4 of them copied from rows with an equal text" in describe_dry_run(plan)) == bool(num_copied)

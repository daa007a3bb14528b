"""The driver over real Ray actors whose engines do what the documents tell them to."""

import shutil
from pathlib import Path

import pytest

from specextend.cluster import workers
from specextend.cluster.exits import (
    EXIT_TOO_MANY_ERRORS,
    Interrupt,
    InterruptedRunError,
    RunError,
)
from specextend.cluster.records import describe_status, read_status
from specextend.models.causal_lm import load_causal_lm
from specextend.models.pairing import pair_hashes
from specextend.report.build import write_report
from tests.cluster.fakes import LosingEngine, MissingEngine, SwapsWeights
from tests.data.conftest import location
from tests.job.conftest import read_json
from tests.models.conftest import edit_json
from tests.published_heads import WRITERS

UNSAID = (
    "part_summaries mean_acceptance_length draft_acceptance_rate acceptance_histogram retrieval_coverage sources "
    "retrieval_churn copied_fraction rouge1 rouge2 rougeL reasoning evidence choices figures"
)
"""Columns that plain decoding leaves null: 0 would pull an average down."""
GOOD = [f"text number {number} " * (number + 1) for number in range(6)]


def test_a_document_that_cannot_be_done_becomes_an_error_row_and_its_worker_lives_on(job):
    """One bad row must not stop a night's work, nor cost a model load.

    A failed batch does not say whose fault it was: its documents are tried again one by one, on the same worker.
    """
    run = job([*GOOD, "raise", "oom", None], max_attempts=9)
    assert run.run() == EXIT_TOO_MANY_ERRORS
    errors = {name: (row["error_class"], row["stage"], row["retryable"]) for name, row in run.errors().items()}
    assert errors == {
        "d6": ("ValueError", "decode", False),
        "d7": ("OutOfMemoryError", "decode", True),
        "d8": ("NullText", "read", False),
    }
    assert run.errors()["d6"]["message"] == "this document cannot be done"
    assert run.errors()["d7"]["message"].startswith("even alone and without a draft: ")
    assert run.errors()["d6"]["attempts"] <= 2, "in its batch and alone; another one would fail the same way"
    assert run.errors()["d8"]["attempts"] == 1
    assert len(set(run.column("worker"))) == 1
    assert len(run.summaries()) == 6
    assert {name for name, value in run.summaries()["d0"].items() if value is None} == set(UNSAID.split())
    assert not (run.output / "_SUCCESS").exists()
    [why] = [note for note in run.screen.notes if note.startswith("exit 3, ")]
    assert "job.max_error_fraction 0 allows 0 failed rows; see errors/" in why


def test_workers_for_which_the_machine_has_no_room_are_said(job):
    """Otherwise somebody waits for 48 of 50 all night."""
    run = job(["one"], workers=500)
    interrupt = Interrupt(600.0)
    run.screen.on_show = lambda snapshot: interrupt.tell("SIGTERM received")
    with pytest.raises(InterruptedRunError):
        run.run(interrupt=interrupt)
    interrupt.disarm()
    assert any(note.endswith("of 500 workers (job.workers)") for note in run.screen.notes)


def test_a_worker_that_stops_drafting_says_so_at_once_and_in_the_report(job):
    """Slower for a whole night by what was to make it faster, and nobody was told."""
    run = job(GOOD)
    assert run.run(LosingEngine) == 0
    said = "worker-1 drafts no more for 200 documents: drafts made it 0.93 times as fast as plain decoding"
    assert run.screen.notes.count(said) == 1
    report = write_report(str(run.output))
    assert report["drafting"] == {"n": 1, "median": 0.93, "min": 0.93, "max": 0.93}
    assert "drafts_lose" in {each["rule"] for each in report["advice"]}


def test_a_head_that_is_wrong_is_seen(job, tmp_path):
    """Read wrongly or made for another target it gives right text at plain speed, all night, and nobody was told."""
    run = job(["text"] * 20, workers=1)
    head = WRITERS["eagle3"](tmp_path / "head", load_causal_lm(str(run.target), "float32", "cpu"))
    edit_json(tmp_path / "head" / "config.json", eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    run.sections = {"draft": {"kind": "eagle", "model": head}, "decoding": {"max_new_tokens": 5, "cache_gib": 2.0}}
    assert run.run(MissingEngine) == 0
    assert any(note.endswith("number layers by their inputs (4 is no output)") for note in run.screen.notes)
    said = [name for name, _ in run.screen.events if name in ("document_done", "draft_doubted")]
    assert said == ["document_done"] * 16 + ["draft_doubted"] + ["document_done"] * 4 + ["draft_doubted"]
    doubt = "0.25 of the head's first tokens were accepted (80 steps), about 0.75 is usual: is this head for"
    assert f"warning: {doubt} this target?" in run.screen.notes
    assert f"warning: {doubt} this target?" in describe_status(read_status(location(run.output)))
    assert f"{doubt} this target?" in [each["says"] for each in write_report(str(run.output))["advice"]]


@pytest.mark.slow
def test_a_worker_whose_weights_are_not_the_runs_takes_no_document(job, monkeypatch, tmp_path):
    """Half of the summaries by one model, half by another, and nobody would know: the second worker refuses."""
    monkeypatch.setattr(workers, "MAX_FAILED_STARTS", 2)
    monkeypatch.setattr(workers, "FIRST_PAUSE_S", 0.01)
    run = job([GOOD[0], f"kill:{tmp_path}/killed"])
    run.target = Path(shutil.copytree(run.target, tmp_path / "target"))
    weights = run.target / "model.safetensors"
    expected = pair_hashes(run.config().target, None)["target"][:12]
    why = rf"the target in {run.target} on \S+ is not the run's: its files have the hash \w{{12}}, the run's {expected}"
    with pytest.raises(RunError, match=f"2 tries in a row failed: .*{why}"):
        run.run(SwapsWeights(weights))
    [attempt] = (run.output / "_run" / "attempts").iterdir()
    assert sum(worker["ready"] is not None for worker in read_json(attempt)["workers"]) == 1


SENTENCES = "".join(f"Rain fell on roof {number} all night. " for number in range(24))
OTHERS = SENTENCES.replace("Rain", "Snow")


@pytest.mark.slow
def test_a_part_that_fails_is_found_and_named_and_a_worker_that_dies_loses_none(job, tmp_path):
    """Parts share a batch, so a failure there is everybody's; tried again one by one, it is one part's."""
    killed = f"{SENTENCES} kill:{tmp_path / 'killed'} {OTHERS}"
    texts = [f"{SENTENCES} raise {OTHERS}", killed, "short"]
    run = job(texts, max_attempts=3)  # one for a neighbour's failure, one for its own death, and one that succeeds
    run.sections = {
        "prompt": {"length_policy": "parts", "max_prompt_tokens": 240},
        "parts": {"instruction": "Shorten.", "merge_instruction": "Merge."},
    }
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [error] = run.errors().values()
    assert (error["doc_id"], error["error_class"]) == ("d0", "ValueError")
    assert error["message"].startswith("part ")
    assert error["message"].endswith("this document cannot be done")
    assert len(run.summaries()["d1"]["part_summaries"]) > 2

"""Figures of replays, by hand."""

from __future__ import annotations

import json

import pytest
import torch

from specextend.bench.replay import Divergence, Replay, ReplayedStep
from specextend.bench.replay_figures import cells, measure
from specextend.bench.study_documents import StudyDocument
from specextend.bench.study_drafts import CacheChoice
from specextend.bench.trace import Trace
from specextend.bench.workload import BenchDocument
from specextend.decoding.decoding_options import CacheOptions
from specextend.stats import DecodingStats

# An answer of eight tokens; the target would not say the one at 5. Tokens 3 to 6 repeat prompt positions 20 to 23.
KNOWN = [10, 11, 12, 13, 14, 15, 16, 17]
CHOICES = [10, 11, 12, 13, 14, 99, 16, 17]
SOURCES = [None, None, None, 20, 21, 22, 23, None]
NOTHING = torch.empty(0)


def step(first: int, num_accepted: int, agrees: bool, variation: float | None = None) -> ReplayedStep:
    divergence = None if variation is None else Divergence(variation, 2 * variation)
    return ReplayedStep(first, num_accepted, 4, agrees, divergence, 100)


def trace(margin: int = 2) -> Trace:
    more = [50] * margin
    return Trace([1] * 30, KNOWN + more, 8, 8, CHOICES + more, NOTHING, NOTHING, {}, {}, {})


STEPS = [step(1, 3, True, 0.2), step(5, 0, False, 0.4), step(6, 1, True, 0.6)]
REPLAY = Replay(STEPS, DecodingStats(), [(0, torch.tensor([0, 20, 21])), (4, torch.tensor([0, 22, 23]))])
RETRIEVAL = CacheChoice(CacheOptions(top_k_chunks=8))


def document(doc_id: str = "quote-1024-00", length: int = 1024, probe: bool = True) -> StudyDocument:
    bench = BenchDocument(doc_id, length, [1] * 30)
    return StudyDocument(bench, "quote", KNOWN, SOURCES) if probe else StudyDocument(bench, "govreport")


def test_a_documents_figures_are_means_over_its_steps():
    """Three steps accept four tokens; two first guesses are right."""
    found = measure(document(), trace(), "a", RETRIEVAL, REPLAY)
    assert found.acceptance_length == pytest.approx(1 + 4 / 3)
    assert found.agreement == pytest.approx(2 / 3)
    assert (found.divergence, found.kl) == (pytest.approx(0.4), pytest.approx(0.8))


def test_needle_tokens_are_counted_apart_from_the_rest():
    """Token 0 is the prefill's, 5 is not the target's own. Of the needle's 3, 4, 6 the first came from a tree."""
    categories = measure(document(), trace(), "a", RETRIEVAL, REPLAY).categories
    needle, rest = categories["needle"], categories["rest"]
    assert (needle.tokens, rest.tokens) == (3, 3)
    assert needle.accepted == pytest.approx(2 / 3), "3 and 6; 4 was a bonus token"
    assert rest.accepted == pytest.approx(2 / 3), "1 and 2; 7 was a bonus token"
    assert needle.acceptance_length == 2.0, "of the step that starts with token 6"
    assert needle.agreement == 1.0
    assert rest.acceptance_length == 4.0, "of the step that starts with token 1"
    assert rest.agreement == 1.0


def test_a_needle_is_in_view_if_its_source_was_shown_in_that_step():
    """Sources 20 and 21 are shown to the step of tokens 1 to 4, then 22 and 23 to those behind."""
    assert measure(document(), trace(), "a", RETRIEVAL, REPLAY).categories["needle"].visible == 1.0
    hidden = Replay(STEPS, DecodingStats(), [(0, torch.tensor([0, 21]))])
    assert measure(document(), trace(), "a", RETRIEVAL, hidden).categories["needle"].visible == pytest.approx(1 / 3)


def test_a_document_without_a_known_answer_has_no_categories():
    found = measure(document(probe=False), trace(), "a", RETRIEVAL, REPLAY)
    assert found.categories == {}
    assert cells([found])[0]["categories"] == {}


def test_cells_gather_what_differs_in_the_document_alone():
    """By draft, cache, kind and length; a study is told from the policy that it varies."""
    full = CacheChoice(CacheOptions(policy="full"))
    study = CacheChoice(CacheOptions(top_k_chunks=8, refresh_every=1), "refresh: every 1")
    replayed = [
        measure(document(doc_id, length), trace(), draft, choice, REPLAY)
        for doc_id, length in (("x", 1024), ("y", 1024), ("z", 2048))
        for draft in ("a", "b")
        for choice in (full, RETRIEVAL, study)
    ]
    found = cells(replayed)
    keys = ("draft", "policy", "cache_tokens", "length", "documents", "study")
    assert [tuple(cell.get(key) for key in keys) for cell in found[:4]] == [
        ("a", "full", None, 1024, 2, None),
        ("a", "retrieval", 256, 1024, 2, None),
        ("a", "retrieval", 256, 1024, 2, "refresh: every 1"),
        ("b", "full", None, 1024, 2, None),
    ]
    assert len(found) == 12
    assert found[0]["acceptance_length"]["n"] == 2
    assert found[0]["categories"]["needle"]["tokens"] == 6
    json.dumps(found, allow_nan=False)


def test_a_draft_without_probabilities_has_no_divergence():
    """A copy has a rate, not a distribution."""
    replay = Replay([step(1, 0, False)], DecodingStats(), [(0, torch.tensor([0]))])
    [cell] = cells([measure(document(), trace(), "ngram", RETRIEVAL, replay)])
    assert cell["divergence"] is None
    assert cell["kl"] is None
    assert cell["categories"]["needle"]["acceptance_length"] is None

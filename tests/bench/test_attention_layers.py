"""Layers are told apart by whether they look at the source of the next token."""

from __future__ import annotations

import pytest
import torch

from specextend.bench.replay_figures import LayerView, layer_cells, layer_views
from specextend.bench.study_documents import StudyDocument
from specextend.bench.trace import Trace
from specextend.bench.workload import BenchDocument
from specextend.decoding.decoding_options import CacheOptions

NOTHING = torch.empty(0)
NUM_PROMPT_TOKENS, SOURCES = 200, [None, 70, 71, None, 150]
OPTIONS = CacheOptions(chunk_size=8, top_k_chunks=5, sinks=8, recent=16)


def trace() -> Trace:
    """Keys are one axis a position; layer 0 asks for the token's source, layer 1 for position 120, whatever is next."""
    num_known, num_positions = len(SOURCES), NUM_PROMPT_TOKENS + len(SOURCES) - 1
    queries = torch.zeros(2, num_known, 1, num_positions)
    for number, source in enumerate(SOURCES):
        queries[0, number, 0, 20 if source is None else source] = 50
        queries[1, number, 0, 120] = 50
    keys = torch.eye(num_positions).unsqueeze(0)
    known = [5, 6, 7, 8, 9]
    return Trace(
        [1] * NUM_PROMPT_TOKENS,
        known,
        5,
        5,
        [5, 6, 99, 8, 9],
        NOTHING,
        NOTHING,
        {},
        dict(enumerate(queries)),
        {0: keys, 1: keys},
    )


def document(sources: list[int | None] | None) -> StudyDocument:
    return StudyDocument(BenchDocument("a", 512, [1] * NUM_PROMPT_TOKENS), "needles", [5, 6, 7, 8, 9], sources)


def test_a_layer_that_asks_for_the_source_shows_it():
    """Token 2 is not the target's own choice and is left out; 1 and 4 have sources that only layer 0 asks for."""
    views = layer_views(document(SOURCES), trace(), OPTIONS, 1.0)
    assert [(view.layer, view.shown) for view in views] == [(0, 1.0), (1, 0.0)]


def test_a_document_without_an_answer_says_nothing_of_layers():
    assert layer_views(document(None), trace(), OPTIONS, 1.0) == []
    [view, *_] = layer_views(document([None] * 5), trace(), OPTIONS, 1.0)
    assert view.shown is None


def test_documents_of_a_kind_are_put_together():
    """Over all lengths; one without needle tokens does not count."""
    views = [LayerView("quote", 3, shown) for shown in (0.5, 1.0, None)]
    [cell] = layer_cells(views)
    assert (cell["kind"], cell["heads"], cell["layer"]) == ("quote", "mean", 3)
    assert (cell["shown"]["n"], cell["shown"]["mean"]) == (2, pytest.approx(0.75))
    assert layer_cells([LayerView("quote", 3, None)])[0]["shown"] is None

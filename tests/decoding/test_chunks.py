"""Where a text is cut: by hand, and by rules that hold for every text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.chunks import Chunks, Cutter, pack, sentence_table
from specextend.decoding.options import CacheOptions
from specextend.models import load_tokenizer
from tests.tiny_models import tiny_tokenizer

TARGET = Path(__file__).parents[2] / ".models/SmolLM2-135M-Instruct"


def test_whole_sentences_are_packed_and_long_ones_are_cut():
    """3 + 4 tokens fit a chunk of 8, 3 more do not; a sentence of 20 is cut twice, and its rest takes company."""
    assert pack([3, 7, 10, 30, 33], 35, 8) == [0, 7, 10, 18, 26, 33, 35]


def test_a_text_without_sentences_is_cut_as_any():
    assert pack([], 20, 8) == [0, 8, 16, 20]


@given(ends=st.sets(st.integers(1, 200)), more=st.integers(0, 60), size=st.integers(1, 40))
def test_chunks_are_whole_sentences_of_at_most_their_size(ends, more, size):
    """No token is lost, none is in two chunks; a border inside a sentence stands only where one is too long."""
    ends = sorted(ends)
    num_tokens = max(ends, default=0) + max(more, 1)
    edges = pack(ends, num_tokens, size)
    assert (edges[0], edges[-1]) == (0, num_tokens)
    assert all(0 < end - start <= size for start, end in itertools.pairwise(edges))
    borders = [0, *ends, num_tokens]
    for edge in set(edges) - set(borders):
        start, end = max(b for b in borders if b < edge), min(b for b in borders if b > edge)
        assert end - start > size, "cut inside a sentence that would have fitted"


@pytest.mark.parametrize("prompt_edges", [None, [0, 5, 9]])
def test_output_is_cut_every_so_many_tokens(prompt_edges):
    """Behind the prompt, whose last chunk stays as it is; without edges of its own the grid runs through."""
    chunks = Chunks(4, None if prompt_edges is None else torch.tensor(prompt_edges))
    assert chunks.edges(9).tolist() == (prompt_edges or [0, 4, 8, 9])
    assert chunks.edges(14).tolist() == ([0, 4, 8, 12, 14] if prompt_edges is None else [0, 5, 9, 13, 14])


@pytest.mark.parametrize("chunks", [Chunks(4), Chunks(4, torch.tensor([0, 1, 4, 6]))])
def test_sums_are_those_of_each_chunk(chunks):
    """Both ways to add up, over any leading shape."""
    values = torch.arange(1.0, 31.0).view(2, 1, 15)
    edges = chunks.edges(15).tolist()
    expected = torch.stack([values[..., start:end].sum(-1) for start, end in itertools.pairwise(edges)], -1)
    assert torch.equal(chunks.sums(values), expected)


def test_a_vocabulary_of_words_has_no_sentences():
    """Nothing in it ends one, so chunks are cut by their size; rows beyond the tokenizer mean nothing."""
    table = sentence_table(tiny_tokenizer(), 140)
    assert len(table.stops) == len(table.breaks) == len(table.opens) == 140
    assert not table.stops.any()
    assert table.cut(list(range(20)), 8).edges(20).tolist() == [0, 8, 16, 20]


def test_only_retrieval_by_sentences_looks_at_the_tokens():
    """The table takes a moment to make, and `streaming` keeps its fixed grid."""
    for options in (
        CacheOptions(chunk_size=8),
        CacheOptions(chunk_size=8, policy="streaming", chunk_boundaries="sentence"),
    ):
        assert Cutter(options, tokenizer=None, vocab_size=10).cut([1, 2, 3]) == Chunks(8)


@pytest.mark.skipif(not TARGET.is_dir(), reason="needs the default target: make models")
def test_sentences_of_a_real_tokenizer():
    """A full stop inside a number ends nothing, one before a quotation mark or a line break does."""
    tokenizer = load_tokenizer(str(TARGET))
    table = sentence_table(tokenizer, len(tokenizer))
    text = 'It cost 3.5 million. "It is not worth a penny!" he said.\n\nWas it (after all)?) Perhaps.'
    ids = tokenizer(text)["input_ids"]
    edges = table.cut(ids, 10).edges(len(ids)).tolist()
    pieces = [tokenizer.decode(ids[start:end]) for start, end in itertools.pairwise(edges)]
    assert pieces == [
        "It cost 3.5 million.",
        ' "It is not worth a penny!"',
        " he said.\n\n",
        "Was it (after all)?) Perhaps.",
    ]

"""Prompts of parts and of merges, for a tokenizer with a token for each character and one with a template."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from specextend.data.chunk_prompts import ChunkPrompts
from specextend.data.inputs import DocumentError
from specextend.data.prompt_options import ChunkOptions, PromptOptions
from specextend.data.prompts import Prompts
from specextend.data.splitting import covered

TEXT = "A sentence of some words. " * 60


def chunks(tokenizer, limit: int = 400, **options) -> ChunkPrompts:
    options = {"instruction": "Shorten.", "merge_instruction": "Merge."} | options
    return ChunkPrompts(Prompts(tokenizer, PromptOptions(length_policy="chunk"), limit, ChunkOptions(**options)))


def test_each_part_fits_and_has_the_instruction_of_parts(chat_tokenizer):
    found = chunks(chat_tokenizer).parts(TEXT, 40, None)
    assert len(found) > 3
    assert all(len(part.prompt.token_ids) <= 400 - 40 for part in found)
    assert "".join(TEXT[part.span.begin : part.span.end] for part in found) == TEXT
    assert all("Shorten." in chat_tokenizer.decode(part.prompt.token_ids) for part in found)


@pytest.mark.parametrize("overlap_tokens", [0, 40])
@pytest.mark.parametrize("text", [" " * 900 + TEXT, TEXT + "\n" * 900 + TEXT, TEXT + "\t" * 900], ids=len)
def test_what_holds_only_white_space_is_not_summarised(chat_tokenizer, text, overlap_tokens):
    """A model asked for the summary of nothing invents one. A scanned page may be blank, a table's filling endless."""
    prompts = chunks(chat_tokenizer, tokens=200, overlap_tokens=overlap_tokens)
    found = prompts.parts(text, 40, None)
    assert len(found) <= 2 * len(prompts.parts(TEXT, 40, None)) + 1
    assert all("sen" in chat_tokenizer.decode(part.prompt.token_ids) for part in found)
    spans = [part.span for part in found]
    assert (spans[0].begin, spans[-1].end, covered(spans)) == (0, len(text), len(text))


def test_a_documents_own_instruction_is_that_of_its_parts_and_merges(chat_tokenizer):
    """A question about the document must be asked of every part."""
    prompts = chunks(chat_tokenizer)
    found = [prompts.parts(TEXT, 40, "Who?")[0].prompt, *prompts.merges(["one", "two"], 40, "Who?")]
    assert all("Who?" in chat_tokenizer.decode(prompt.token_ids) for prompt in found)


def test_parts_may_be_smaller_than_what_fits_and_repeat_the_end_of_the_one_before(chat_tokenizer):
    found = chunks(chat_tokenizer, tokens=100, overlap_tokens=40).parts(TEXT, 40, None)
    assert max(part.num_tokens for part in found) <= 100
    assert all(after.span.begin < before.span.end for before, after in pairwise(found))


def test_summaries_that_do_not_fit_together_are_merged_group_by_group(chat_tokenizer):
    """In groups of about as many, so that no summary is summarised alone."""
    prompts = chunks(chat_tokenizer)
    texts = [f"summary {number} " + "x" * 50 for number in range(9)]
    merges = [chat_tokenizer.decode(prompt.token_ids) for prompt in prompts.merges(texts, 40, None)]
    counts = [sum(text in merge for text in texts) for merge in merges]
    assert len(merges) > 1
    assert (sum(counts), min(counts) >= 2) == (9, True)
    assert len(prompts.merges(texts[:2], 40, None)) == 1


def test_any_number_of_summaries_is_merged_if_two_fit(chat_tokenizer):
    """Of an odd number one may be alone in its merge; and each round leaves fewer."""
    prompts = chunks(chat_tokenizer)
    room = 400 - 40 - len(prompts.merges([""], 40, None)[0].token_ids)
    for count in range(2, 10):
        merges = prompts.merges(["x" * (room // 2 - 20)] * count, 40, None)
        assert len(merges) == (count + 1) // 2


def test_what_the_start_accepts_can_be_merged(chat_tokenizer):
    """Summaries as long as they may be, with the line that numbers each."""
    accepted = 0
    for limit in range(250, 420, 10):
        for new, own in ((20, None), (60, None), (20, 60), (60, 20)):
            prompts = chunks(chat_tokenizer, limit, max_new_tokens=own)
            try:
                prompts.check(new)
            except ValueError:
                continue  # refused at the start, so nothing is promised
            accepted += 1
            assert len(prompts.merges(["x" * (own or new)] * 5, new, None)) <= 3
    assert accepted > 10


def test_forged_control_tokens_make_smaller_parts(chat_tokenizer):
    """Each is spelled out in its prompt, so it takes a multiple of the tokens that it takes in the text."""
    text = "A sentence. " * 20 + "<think>" * 200
    found = chunks(chat_tokenizer).parts(text, 40, None)
    assert "".join(text[part.span.begin : part.span.end] for part in found) == text
    assert all(len(part.prompt.token_ids) <= 400 - 40 for part in found)


def test_two_summaries_that_do_not_fit_are_an_error_row(chat_tokenizer):
    with pytest.raises(DocumentError, match="two summaries of parts have up to"):
        chunks(chat_tokenizer).merges(["x" * 300, "y" * 300], 40, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 190}, "lower chunks.max_new_tokens"),
        ({"max_new_tokens": 350}, "a part has room for"),
        ({"overlap_tokens": 200}, "chunks.overlap_tokens must be less than half of a part"),
    ],
)
def test_options_with_which_no_document_could_be_done_are_refused_at_the_start(chat_tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        chunks(chat_tokenizer, **options).check(40)
    chunks(chat_tokenizer).check(40)


def test_the_work_of_a_document_is_estimated_closely(chat_tokenizer):
    """By it deadlines are set and the longest documents begin first."""
    prompts = chunks(chat_tokenizer)
    parts = prompts.parts(TEXT, 40, None)
    merge = prompts.merges(["x" * 40 for _ in parts], 40, None)
    true = sum(len(prompt.token_ids) for prompt in [*(part.prompt for part in parts), *merge])
    tokens = sum(part.num_tokens for part in parts)
    [prompt_tokens], [outputs], [requests] = prompts.work(np.array([tokens]), np.array([40]))
    assert prompt_tokens == pytest.approx(true, rel=0.25)
    assert outputs == 40 * (len(parts) + 1)
    assert requests == len(parts) + 1

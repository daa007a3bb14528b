"""Documents in parts: how a text is split, and the prompts of its parts and of merges."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.data.instructions import around_document
from specextend.data.prompts import PartOptions, PromptOptions, Prompts
from specextend.requests.splitting import PartPrompts, split
from tests.data.conftest import row_error

WORDS = st.lists(
    st.sampled_from(["word", "a", "end.", "\n", "\n\n", "# head", "Chapter 2", "\f", "。", "é"]), min_size=1
)


def starts_of(text):
    """A token for each word, and for each character between words."""
    return [found.start() for found in re.finditer(r"\w+|\W", text)]


def sizes(text, spans):
    return [sum(span.begin <= start < span.end for start in starts_of(text)) for span in spans]


@given(words=WORDS, most=st.integers(1, 40))
@settings(max_examples=200)
def test_the_parts_are_the_whole_text_in_order_and_none_is_too_long(words, most):
    text = " ".join(words)
    spans = split(text, starts_of(text), most)
    assert spans[0].begin == 0
    assert spans[-1].end == len(text)
    assert all(before.end == after.begin < after.end for before, after in pairwise(spans))
    assert all(size <= most for size in sizes(text, spans))


SENTENCE = "one two three four. "


@pytest.mark.parametrize("separator, begins", [("\nChapter IV\n", "Chapter IV"), ("\n\n", "one"), (" ", "one")])
def test_a_part_ends_where_the_text_does_best(separator, begins):
    """What is better than a sentence's end wins although it is farther from the middle."""
    text = SENTENCE * 9 + separator + SENTENCE * 11
    [first, second] = split(text, starts_of(text), len(starts_of(text)) * 2 // 3)
    assert text[second.begin :].startswith(begins)
    assert text[first.begin : first.end].rstrip().endswith(".")


TEXT = "A sentence of some words. " * 60


def part_prompts(tokenizer, limit=400, **options):
    options = {"instruction": "Shorten.", "merge_instruction": "Merge."} | options
    return PartPrompts(Prompts(tokenizer, PromptOptions(length_policy="parts"), limit, PartOptions(**options)))


def test_each_part_fits_and_has_the_instruction_of_parts_or_the_documents_own(chat_tokenizer):
    """A question about the document must be asked of every part and of every merge."""
    prompts = part_prompts(chat_tokenizer)
    found = prompts.parts(TEXT, 40, None)
    assert len(found) > 3
    assert all(len(part.prompt.token_ids) <= 400 - 40 for part in found)
    assert "".join(TEXT[part.span.begin : part.span.end] for part in found) == TEXT
    assert all("Shorten." in chat_tokenizer.decode(part.prompt.token_ids) for part in found)
    assert all("Who?" in text for text in asked(chat_tokenizer, prompts, around_document("Who?")))


def asked(tokenizer, prompts, own=None):
    """Texts of the prompts of all parts, and of a merge."""
    merges = prompts.merges(["one", "two"], 40, own)
    given = [*(part.prompt for part in prompts.parts(TEXT, 40, own)), *merges]
    return [tokenizer.decode(prompt.token_ids) for prompt in given]


def test_parts_and_merges_ask_what_the_task_asks(chat_tokenizer):
    """Keywords of a long document were summaries of its parts."""
    task = PromptOptions(length_policy="parts", instruction="List the keywords.")
    shown = asked(chat_tokenizer, PartPrompts(Prompts(chat_tokenizer, task, 400)))
    assert all("List the keywords." in text and "ummar" not in text for text in shown)


@pytest.mark.parametrize("text", [" " * 900 + TEXT, TEXT + "\n" * 900 + TEXT], ids=len)
def test_what_holds_only_white_space_is_not_summarised(chat_tokenizer, text):
    """A model asked for the summary of nothing invents one. A scanned page may be blank, a table's filling endless."""
    prompts = part_prompts(chat_tokenizer, tokens=200)
    found = prompts.parts(text, 40, None)
    assert len(found) <= 2 * len(prompts.parts(TEXT, 40, None)) + 1
    assert all("sen" in chat_tokenizer.decode(part.prompt.token_ids) for part in found)
    assert "".join(text[part.span.begin : part.span.end] for part in found) == text


def test_summaries_that_do_not_fit_together_are_merged_group_by_group(chat_tokenizer):
    """In groups of about as many, so that no summary is summarised alone; two that do not fit are an error row."""
    prompts = part_prompts(chat_tokenizer)
    texts = [f"summary {number} " + "x" * 50 for number in range(9)]
    merges = [chat_tokenizer.decode(prompt.token_ids) for prompt in prompts.merges(texts, 40, None)]
    counts = [sum(text in merge for text in texts) for merge in merges]
    assert len(merges) > 1
    assert sum(counts) == 9
    assert min(counts) >= 2
    assert len(prompts.merges(texts[:2], 40, None)) == 1
    with row_error("two summaries of parts have up to"):
        prompts.merges(["x" * 300, "y" * 300], 40, None)


def test_what_the_start_accepts_can_be_merged_and_what_could_not_be_is_refused(chat_tokenizer):
    """Summaries as long as they may be, with the line that numbers each."""
    with pytest.raises(ValueError, match=r"lower decoding\.max_new_tokens"):
        part_prompts(chat_tokenizer).check(190)
    with pytest.raises(ValueError, match="a part has room for"):
        part_prompts(chat_tokenizer).check(350)
    accepted = 0
    for limit in range(250, 420, 10):
        for new in (20, 60):
            prompts = part_prompts(chat_tokenizer, limit)
            try:
                prompts.check(new)
            except ValueError:
                continue  # refused at the start, so nothing is promised
            accepted += 1
            assert len(prompts.merges(["x" * new] * 5, new, None)) <= 3
    assert accepted > 5


def test_forged_control_tokens_make_smaller_parts(chat_tokenizer):
    """Each is spelled out in its prompt, so it takes a multiple of the tokens that it takes in the text."""
    text = "A sentence. " * 20 + "<think>" * 200
    found = part_prompts(chat_tokenizer).parts(text, 40, None)
    assert "".join(text[part.span.begin : part.span.end] for part in found) == text
    assert all(len(part.prompt.token_ids) <= 400 - 40 for part in found)

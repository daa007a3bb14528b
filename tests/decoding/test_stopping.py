"""A sequence ends exactly where it must, whatever the borders of its tokens."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specextend.decoding.sequence import StopChecker
from tests.tiny_models import spelling_tokenizer

SPECIAL = ["<eos>", "<|im_end|>", "<pad>"]


def byte_fallback():
    """Spaces inside tokens, stripped at the start, and bytes as tokens, as Llama 2 and Vicuna have."""
    words = ["▁", "▁the", "▁end", "▁report", ".", "#", "é", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZERS = {"byte_level": spelling_tokenizer(300), "byte_fallback": byte_fallback()}
LETTERS = TOKENIZERS["byte_level"]


def byte_ids(text):
    """`text` with each byte a token of its own: the worst borders there are."""
    backend = LETTERS.backend_tokenizer
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [backend.token_to_id(letter) for piece, _ in pieces for letter in piece]


def slow_stop(tokenizer, token_ids, stop):
    """The definition: decode every prefix whole; how many tokens it takes, and the text before the stop string."""
    for size in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:size], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        starts = [text.rstrip("\ufffd").find(string) for string in stop]
        if any(start >= 0 for start in starts):
            return size, text[: min(start for start in starts if start >= 0)]
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=250, derandomize=True)
def test_incremental_search_equals_decoding_every_prefix_whole(name, data):
    """Random tokens, most of them no valid text, and stop strings cut from what they decode to."""
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.eos_token_id
    vocabulary = [token_id for token_id in range(len(tokenizer)) if token_id != eos]
    pieces = st.one_of(
        st.lists(st.sampled_from(vocabulary), max_size=4),
        st.sampled_from(["the end", " report", "é", "😀", "日本", "a  b", "\ufffd"]).map(
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        ),
    )
    token_ids = [*chain.from_iterable(data.draw(st.lists(pieces, min_size=1, max_size=8)))]
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = (text[start : start + data.draw(st.integers(1, 5))].strip("\ufffd") or "the", "zz")
    check = StopChecker(tokenizer, frozenset({eos}), stop, 1_000)
    check.push(token_ids)
    expected = slow_stop(tokenizer, token_ids, stop)
    if expected is None:
        assert check.finish_reason is None
        assert check.text == text
    else:
        assert (check.finish_reason, len(check.token_ids), check.text) == ("stop", *expected)


def loop_checker():
    return StopChecker(LETTERS, frozenset({LETTERS.eos_token_id}), ("the end",), 10**6, stop_repetition=True)


@pytest.mark.parametrize(
    "period, tokens_needed", [(1, 64), (2, 64), (15, 64), (16, 64), (17, 68), (64, 256), (65, None)]
)
def test_a_loop_ends_the_output_at_the_token_that_makes_it_one(period, tokens_needed):
    """Four repeats and 64 tokens; a longer stretch than 64 tokens is not looked for."""
    loop = [10 + n for n in range(period)] * 100
    check = loop_checker()
    assert check.push([5, 7, *loop]) == (tokens_needed and "repetition")
    assert len(check.token_ids) == 2 + (tokens_needed or len(loop))


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{number}. The report finds that costs rose.\n" for number in range(1, 40)),
        "".join(f"| {year} | 0.0 | 0.0 | 0.0 |\n" for year in range(1990, 2025)),
    ],
)
def test_lists_and_tables_are_no_loops(text):
    """With a byte a token, which stretches a repeat more than any real tokenizer does."""
    assert loop_checker().push(byte_ids(text * 2)) is None

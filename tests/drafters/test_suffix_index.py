"""Matches of a text's end, kept up to date token by token, are those that a search finds."""

from hypothesis import given
from hypothesis import strategies as st

from specextend.drafters.ngram import LONGEST, MOST, Match, SuffixIndex

TOKENS = st.integers(0, 3)
TEXTS = st.lists(TOKENS, max_size=60)


def searched(text, most=MOST):
    """By definition: for every earlier place, the tokens before it that are also the last ones of the text."""
    found = []
    for position in range(1, len(text)):
        pairs = zip(reversed(text[:position]), reversed(text), strict=False)
        length = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), position)
        if length:
            found.append(Match(min(length, LONGEST), position))
    return sorted(found, reverse=True)[:most]


@given(st.lists(st.lists(TOKENS, max_size=3 * LONGEST), max_size=4), TEXTS)
def test_a_prompt_in_chunks_is_a_text_like_any_other(chunks, output):
    """Only the last tokens of a chunk are matched; a match across the border of two must not be cut."""
    index = SuffixIndex()
    text = []
    for chunk in chunks:
        index.extend(chunk)
        text += chunk
        assert index.matches() == searched(text)
    for token_id in output:
        index.push(token_id)
        text.append(token_id)
        assert index.matches() == searched(text)
    assert index.token_ids == text

"""Probes: of the right length, with the answer in the text, and with every needle token where it is said to be."""

from __future__ import annotations

from itertools import pairwise

import pytest

from specextend.bench.probes import PROBE_KINDS, ProbeMaker, sentences_of
from specextend.models import load_tokenizer
from tests.bench.corpora import TARGET, texts


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TARGET))


@pytest.fixture(scope="module")
def maker(tokenizer) -> ProbeMaker:
    return ProbeMaker(tokenizer, "", texts("govreport", 4096), seed=0)


@pytest.mark.parametrize("kind", PROBE_KINDS)
@pytest.mark.parametrize("length", [512, 2048, 7168])
def test_a_probe_has_the_length_that_was_asked_for(kind, length, maker):
    """Chat template and question counted in; short of it by a long sentence at most."""
    for number in range(3):
        probe = maker.make(kind, length, number)
        assert length - 150 < len(probe.prompt_token_ids) <= length


@pytest.mark.parametrize("kind", PROBE_KINDS)
def test_needle_tokens_stand_where_their_source_is_said_to_be(kind, maker):
    """So that one can tell whether the draft could see what it was to repeat."""
    for number in range(4):
        probe = maker.make(kind, 1500, number)
        pairs = [(t, s) for t, s in zip(probe.answer_token_ids, probe.sources, strict=True) if s is not None]
        assert 4 <= len(pairs) < len(probe.answer_token_ids)
        assert all(probe.prompt_token_ids[source] == token_id for token_id, source in pairs)


def test_a_passkey_is_five_digits(maker, tokenizer):
    """And nothing else of the answer is needle."""
    probe = maker.make("passkey", 1024, 0)
    needle = [t for t, s in zip(probe.answer_token_ids, probe.sources, strict=True) if s is not None]
    answer = tokenizer.decode(probe.answer_token_ids)
    assert answer == f"The pass key is {tokenizer.decode(needle)}."
    assert len(tokenizer.decode(needle)) == 5
    assert tokenizer.decode(probe.prompt_token_ids).count(answer) == 1


def test_needles_are_scattered_and_all_asked_for(maker, tokenizer):
    """In another order than they stand in, so that nothing but their names tells which is next."""
    in_order = 0
    for number in range(4):
        probe = maker.make("needles", 2048, number)
        text = tokenizer.decode(probe.prompt_token_ids)
        facts = [f"{fact}." for fact in tokenizer.decode(probe.answer_token_ids).removesuffix(".").split(". ")]
        assert 4 <= len(facts) <= 8
        assert all(text.count(fact) == 1 for fact in facts)
        places = [text.index(fact) for fact in facts]
        assert max(places) - min(places) > len(text) / 5
        in_order += places == sorted(places)
    assert in_order < 4


def test_a_quote_lies_far_back_and_its_beginning_is_given(maker, tokenizer):
    """The words of the question are not needle: the draft can copy them from close by."""
    for number in range(4):
        probe = maker.make("quote", 2048, number)
        needle = [s for s in probe.sources if s is not None]
        given = len(probe.sources) - len(needle)
        assert probe.sources[given:] == needle
        assert all(b == a + 1 for a, b in pairwise(needle))
        assert 40 <= len(probe.answer_token_ids) <= 130
        assert needle[-1] < 0.6 * len(probe.prompt_token_ids)
        question = tokenizer.decode(probe.prompt_token_ids[-60:])
        assert f'begins with "{tokenizer.decode(probe.answer_token_ids[:given])}"' in question


def test_probes_are_the_same_every_time_and_differ_among_themselves(maker, tokenizer):
    """A seed makes a study that can be repeated."""
    again = ProbeMaker(tokenizer, "", texts("govreport", 4096), seed=0)
    other = ProbeMaker(tokenizer, "", texts("govreport", 4096), seed=1)
    for kind in PROBE_KINDS:
        assert again.make(kind, 1024, 1) == maker.make(kind, 1024, 1)
        assert maker.make(kind, 1024, 1).answer_token_ids != maker.make(kind, 1024, 2).answer_token_ids
        assert other.make(kind, 1024, 1).prompt_token_ids != maker.make(kind, 1024, 1).prompt_token_ids


def test_texts_that_are_too_short_are_refused(tokenizer):
    """Rather than a probe of another length than its name."""
    maker = ProbeMaker(tokenizer, "", ["One sentence. Another one."], seed=0)
    with pytest.raises(ValueError, match="too short for 1024 tokens"):
        maker.make("passkey", 1024, 0)


def test_sentences_are_cleaned():
    """Line breaks of the source are no sentences, tables are not text."""
    assert sentences_of('It\nwas  late. "Go!"  he said. ') == ["It was late.", '"Go!" he said.']
    assert sentences_of("Yes. " + "1 " * 100 + "end. No.") == ["Yes.", "No."]

"""A request that follows another in its place reads what is new in its prompt, and answers as if it had read all."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from tests.covering import covering
from tests.tiny_models import (
    Family,
    Pair,
    at_call,
    perturbed,
    random_prompt,
    request,
    tiny_engine,
    tiny_model,
    write_eagle,
    write_model,
)

NEW = 20
"""Most new tokens of a request; they differ, so that the longest is not the first."""
DRAFTS = ("good", "eagle", "eagle3", "copy", "ngram", "merged-eagle")
DOCUMENTS = [random_prompt(length, seed=1) for length in (1100, 300, 41)]
QUESTIONS = [random_prompt(length, seed=length) for length in (40, 3, 300)]
CASES = covering(DRAFTS, ("full", "retrieval"), [1, 3])


def questions_about(document, number):
    return [
        request(f"{number}.{place}", document + question, NEW - 5 * (place != 1))
        for place, question in enumerate(QUESTIONS)
    ]


def chained(requests):
    first = None
    for each in reversed(requests):
        first = replace(each, then=first)
    return first


def outcomes(engine, requests):
    return {each.request_id: each for each in engine.generate(requests)}


@pytest.fixture(scope="module")
def compiled_pair(tmp_path_factory):
    """One in bf16 whose products and rows are of sizes that the compiled kernels take."""
    folder = tmp_path_factory.mktemp("compiled")
    model = tiny_model(Family(config=LlamaConfig, head_dim=32), seed=3, hidden_size=128)
    drafts = {
        "good": write_model(perturbed(model, 0.02, seed=4), folder / "good"),
        "eagle": write_eagle(folder / "eagle", model, hidden_size=128),
    }
    return Pair(write_model(model, folder / "target"), drafts)


def check_followed(engine, *, drafts_alike=True):
    """drafts_alike: under a window drafts of several layers read other pieces; merging minds the batch."""
    asked = [questions_about(document, number) for number, document in enumerate(DOCUMENTS)]
    followed = outcomes(engine, [chained(requests) for requests in asked])
    assert len(followed) == 9
    for requests, document in zip(asked, DOCUMENTS, strict=True):
        for place, each in enumerate(requests):
            [whole] = engine.generate([each])
            one = followed[each.request_id]
            assert (one.token_ids, one.finish_reason) == (whole.token_ids, whole.finish_reason)
            assert not drafts_alike or one.stats.num_accepted_tokens == whole.stats.num_accepted_tokens
            assert one.stats.num_prompt_tokens == len(each.prompt_token_ids)
            assert one.stats.num_cached_tokens == (len(document) - 1 if place else 0)


@pytest.mark.parametrize(("draft", "policy", "batch"), CASES)
def test_answers_and_acceptance_are_those_of_whole_prompts(draft, policy, batch, pair):
    """A user who asks three things at once must not get other answers than one who asks one after the other."""
    engine = tiny_engine(pair, draft, cache__policy=policy, decoding__max_batch_size=batch)
    check_followed(engine, drafts_alike=policy == "full" or draft in ("eagle", "copy"))


@pytest.mark.parametrize(("draft", "batch"), [("good", 3), ("eagle", 2), ("ngram", 3), ("merged-eagle", 1)])
def test_in_bf16_the_compiled_kernels_give_the_same_bytes(draft, batch, compiled_pair):
    """A row of the cache has the same bits however its prompt was read."""
    engine = tiny_engine(compiled_pair, draft, target__dtype="bfloat16", decoding__max_batch_size=batch)
    if not engine.target.runs_in_one_call:
        pytest.skip("the kernels do not compile here")
    check_followed(engine)


def test_what_follows_a_request_that_fails_is_answered(pair):
    """One bad question must not take the answers of the others with it, nor leave them rows that it has spoilt."""
    engine, errors = tiny_engine(pair), []
    first, second, third = questions_about(DOCUMENTS[1], 0)
    [alone] = engine.generate([third])
    too_long = replace(second, max_new_tokens=5000)
    _, last = engine.generate([chained([first, too_long, third])], lambda name, _: errors.append(name))
    assert errors == [second.request_id]
    assert last.token_ids == alone.token_ids


def test_a_dropped_request_takes_those_that_follow_with_it(pair):
    """A lease that is taken back must not go on to occupy its place."""
    engine = tiny_engine(pair)
    chain = chained(questions_about(DOCUMENTS[1], 0))
    at_call(engine, 12, lambda: engine.cancel(chain.request_id))
    assert [each.request_id for each in engine.generate([chain, request("other", DOCUMENTS[2])])] == ["other"]
    assert engine.num_active == 0


def test_a_chain_that_found_no_memory_starts_again_and_loses_nothing(pair):
    """Wherever memory runs out: every question has one answer, the right one."""
    engine = tiny_engine(pair, decoding__max_batch_size=2)
    asked = questions_about(DOCUMENTS[1], 0)
    right = [completion.token_ids for each in asked for completion in engine.generate([each])]
    for call in (1, 10, 60, 100):
        at_call(engine, call, run_out)
        found = outcomes(engine, [chained(asked)])
        assert [found[each.request_id].token_ids for each in asked] == right


def run_out():
    raise torch.OutOfMemoryError("out of memory, as a test wants it")

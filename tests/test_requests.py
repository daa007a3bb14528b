"""Documents in parts, with a tiny pair: what comes of them is what their parts and merges give one by one."""

import re
from dataclasses import replace

import pyarrow as pa
import pytest

from specextend import Summarizer, load_engine
from specextend.core import Completion, DocumentKey
from specextend.data.prompts import Prompts
from specextend.data.rows import Row
from specextend.requests.rounds import advance, check_requests, summarize
from specextend.stats import DecodingStats
from tests.tiny_models import random_prompt, tiny_config

TEXT = " ".join(f"t{token_id}" for token_id in random_prompt(1600))
OPTIONS = {"prompt__length_policy": "parts", "prompt__max_prompt_tokens": 160, "decoding__max_new_tokens": 20}
"""Parts of about 150 tokens, and merges of some five summaries."""


@pytest.fixture(scope="module")
def config(pair):
    return tiny_config(pair, decoding__max_batch_size=3, input__id_column="name", **OPTIONS)


@pytest.fixture(scope="module")
def engine(config):
    return load_engine(config)


@pytest.fixture
def prompts(config, engine):
    return Prompts(engine.tokenizer, config.prompt, engine.max_tokens, config.parts)


def row(text=TEXT):
    return Row(DocumentKey(0, 0), "book", text, None, None, "00")


def follow(rounds, answer):
    """Take all rounds of a document, with the outcomes that `answer` gives; return what it comes to, and the rounds."""
    seen = []
    step = advance(rounds, None)
    while isinstance(step, tuple):
        seen.append(step)
        step = advance(rounds, answer(step))
    return step, seen


def said(request):
    return Completion(request.request_id, [1] * 18, "t7 " * 18, "stop", DecodingStats())


def test_a_long_document_has_the_summary_that_its_parts_and_merges_give_one_by_one(config, engine, prompts):
    """Beside a short one and in batches, with the counts of all requests in its row and all of its text read."""

    def alone(step):
        return [completion for request in step for completion in engine.generate([request])]

    summary, rounds = follow(summarize(config, prompts, row(), "book"), alone)
    sizes = [len(each) for each in rounds]
    assert len(sizes) > 2, "summaries that do not fit into one merge are merged level by level"
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    batch = pa.table({"name": ["book", "page"], "text": [TEXT, TEXT[:300]]})
    long, short = Summarizer(config, lambda _: engine)(batch).to_pylist()
    assert long["summary"] == summary.completion.text
    assert [part["text"] for part in long["part_summaries"]] == [part["text"] for part in summary.part_rows]
    assert "".join(TEXT[part["begin"] : part["end"]] for part in long["part_summaries"]) == TEXT
    requests = [request for each in rounds for request in each]
    assert [request.request_id for request in requests] == [f"book:{number}" for number in range(sum(sizes))]
    assert long["num_prompt_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
    assert long["num_output_tokens"] == summary.completion.stats.num_output_tokens > 20
    assert long["num_accepted_tokens"] == sum(n * count for n, count in enumerate(long["acceptance_histogram"]))
    assert long["coverage"] == 1.0
    assert long["num_dropped_tokens"] == 0
    assert 0 < long["decode_s"] < long["total_s"]
    assert short["part_summaries"] is None
    assert short["coverage"] == 1.0
    assert short["length_policy"] == "parts"


def test_a_model_that_begins_by_thinking_is_refused_under_a_schema(pair, engine, monkeypatch):
    """What it thinks is no part of the object. A template that closes the thought leaves room for it."""
    config = tiny_config(pair, output__schema={"kind": "a | b", "why": "string"})
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if quiet else '<think>' }}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    thinking, quiet = (
        Prompts(engine.tokenizer, replace(config.prompt, template_options=options), engine.max_tokens, config.parts)
        for options in ({}, {"quiet": True})
    )
    with pytest.raises(ValueError, match=r"output\.schema leaves no room to think.*template_options"):
        check_requests(config, thinking)
    check_requests(config, quiet)


@pytest.mark.parametrize(
    "reason, advice",
    [("length", "do it again with --redo"), ("repetition", "decoding.repetition_penalty")],
)
def test_an_answer_that_broke_off_says_what_helps(pair, prompts, reason, advice):
    """More tokens do not end an answer that repeats itself."""
    config = tiny_config(pair, output__schema={"why": "string"})
    rounds = summarize(config, prompts, row("t1 t2"), "book")
    error, _ = follow(rounds, lambda step: [replace(said(step[0]), finish_reason=reason)])
    assert re.search(rf"\({reason}\) after .* tokens, before its object did: .*{advice}", str(error))

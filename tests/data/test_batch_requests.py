"""Requests of OpenAI's Batch API as documents."""

import json
import shlex

import pytest

from specextend.config import RunConfig
from specextend.data.inputs import InputError
from specextend.documents.batch_requests import BatchRequests
from tests.refused import refused

SYSTEM = {"role": "system", "content": "You write one sentence: {short}."}


def line(custom_id, *messages, **body):
    values = {"model": "gpt-4o-mini", "messages": list(messages), **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": values}


def user(content):
    return {"role": "user", "content": content}


def requests(folder, *lines):
    (folder / "in.jsonl").write_text("\n\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines))
    return BatchRequests(folder / "in.jsonl")


def test_requests_become_documents_and_the_settings_of_their_run(tmp_path):
    """The settings are a shell's arguments: what they give a run must be what the requests say."""
    shared = {"temperature": 0.5, "stop": "END", "seed": 7}
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    found = requests(
        tmp_path,
        line("r-1", SYSTEM, user("one"), max_tokens=9, **shared),
        line("r-2", SYSTEM, user(parts), max_completion_tokens=None, max_tokens=5, **shared),
        line("r-3", SYSTEM | {"role": "developer"}, user("three"), **shared),
    )
    assert list(found) == [
        {"id": "r-1", "text": "one", "max_new_tokens": 9},
        {"id": "r-2", "text": "two parts", "max_new_tokens": 5},
        {"id": "r-3", "text": "three", "max_new_tokens": None},
    ]
    least = "input: {path: in, passthrough: [title]}\noutput: {path: out}\ntarget: {model: owner/target}\n"
    (tmp_path / "run.yaml").write_text(f"{least}draft: {{kind: ngram}}\n")
    words = shlex.split(found.settings)
    assert words[::2] == ["--set"] * (len(words) // 2)
    config = RunConfig.load(tmp_path / "run.yaml", words[1::2])
    assert config.input.id_column == "id"
    assert config.input.options_column == "max_new_tokens"
    assert config.input.passthrough == (), "the demo's configuration names columns of its reports"
    assert config.prompt.instruction == "{{ document }}"
    assert config.prompt.system == SYSTEM["content"]
    assert config.decoding.temperature == 0.5
    assert config.decoding.seed == 7
    assert config.decoding.stop == ("END",)
    assert config.decoding.top_p == 1.0, "not named, so the run's own"


@pytest.mark.parametrize(
    "message, second",
    {
        "is not JSON": "{",
        "is not served: custom_id: Input should be a valid string": line(7, user("x")),
        "in.jsonl:3 has the custom_id 'a' of line 1; make them different": line("a", user("x")),
        "url: Input should be '/v1/chat/completions'": line("b", user("x")) | {"url": "/v1/embeddings"},
        "is not served: body.tools: Extra inputs are not permitted": line("b", user("x"), tools=[]),
        "body.model would be 'gpt-5' here and is 'gpt-4o-mini' in the first request (line 1)": line(
            "b", user("x"), model="gpt-5"
        ),
        "max_tokens and max_completion_tokens that differ": line("b", user("x"), max_tokens=5, max_completion_tokens=6),
        "body.messages.0.name: Extra inputs": line("b", user("x") | {"name": "Ann"}),
        "body.messages.0.content.0.more: Extra inputs": line("b", user([{"type": "text", "text": "x", "more": 1}])),
        "content.0.type: Input should be 'text'": line("b", user([{"type": "image_url"}])),
        "messages.0.content.0.type: Input should be 'text'": line("b", user([{"type": "input_file", "text": "x"}])),
        "is not served: priority: Extra inputs": line("b", user("x")) | {"priority": 1},
        "decoding.temperature would be 1 here and is None in the first request": line("b", user("x"), temperature=1),
        "than one from the user, behind at most one from the system": line("b", user("x"), user("y")),
        "body.max_tokens: Input should be greater than 0": line("b", user("x"), max_tokens=0),
        "half of a surrogate pair": line("b", user("\ud83d")),
    }.items(),
)
def test_what_a_run_cannot_do_is_refused_by_line(second, message, tmp_path):
    """A request that is silently answered otherwise than asked is worse than none."""
    said = refused(list, requests(tmp_path, line("a", user("fine")), second), kind=InputError)
    assert said.startswith("in.jsonl:3")
    assert message in said

"""From a file of OpenAI's Batch API to one: `prepare openai`, `run`, `export --format openai`."""

import json
import shlex

import pytest

from tests.job.conftest import on, rows, specextend


def request(custom_id, content, max_tokens):
    body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.mark.slow
def test_a_file_of_requests_comes_back_as_a_file_of_responses(tmp_path, summarize_here):
    """Every custom_id exactly once, with its answer or its error, as a client of the API reads it."""
    texts = {"r-1": ("The committee met. " * 40, 12), "r-2": ("Nothing was decided.", 7), "empty": (" ", 5)}
    (tmp_path / "in.jsonl").write_text("\n".join(request(name, *asked) for name, asked in texts.items()))
    prepared = specextend("prepare", "openai", tmp_path / "in.jsonl", "--output", tmp_path / "in.parquet").exits(0)
    settings = shlex.split(prepared.stdout.partition("give specextend run:")[2])
    output, to = tmp_path / "out", tmp_path / "out.jsonl"
    summarize_here(*on(tmp_path / "in.parquet", output, "job.max_error_fraction=0.5"), *settings).exits(0)
    exported = specextend("export", output, "--format", "openai", "--to", to).exits(0)
    assert (exported.stderr, exported.stdout) == ("", f"3 of 3 documents in {to}, 1 of them as errors\n")
    found = {each["custom_id"]: each for each in map(json.loads, to.read_text(encoding="utf-8").splitlines())}
    assert set(found) == set(texts)
    error = {"code": "EmptyText", "message": "the text is empty or white space"}
    assert (found["empty"]["response"], found["empty"]["error"]) == (None, error)
    for row in rows(output / "summaries"):
        line = found[row["doc_id"]]
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        body = line["response"]["body"]
        [choice] = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": row["summary"]}
        assert choice["finish_reason"] == row["finish_reason"]
        usage = body["usage"]
        assert usage["completion_tokens"] == row["num_output_tokens"] <= texts[row["doc_id"]][1]
        assert usage["prompt_tokens_details"]["cached_tokens"] == row["num_cached_tokens"]
        assert usage["total_tokens"] == row["num_prompt_tokens"] + row["num_output_tokens"]

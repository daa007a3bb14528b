"""From a file of OpenAI's Batch API to one: `prepare.py openai`, `summarize.py`, `export.py`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job.conftest import ROOT, rows, summarize

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def request(custom_id: str, content: str, max_tokens: int) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def test_a_file_of_requests_comes_back_as_a_file_of_responses(tmp_path: Path):
    """Every custom_id exactly once, with its answer or its error, as a client of the API reads it."""
    texts = {"r-1": ("The committee met. " * 40, 12), "r-2": ("Nothing was decided.", 7), "empty": (" ", 5)}
    (tmp_path / "in.jsonl").write_text("\n".join(request(name, *asked) for name, asked in texts.items()))
    prepared = run("prepare.py", "openai", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "in.parquet"))
    assert prepared.returncode == 0, prepared.stderr
    settings = shlex.split(prepared.stdout.partition("give jobs/summarize.py:")[2])
    output, places = tmp_path / "out", ("--input", str(tmp_path / "in.parquet"), "--output", str(tmp_path / "out"))
    ended = summarize(*places, *settings, "--set", "job.max_error_fraction=0.5")
    assert ended.code == 0, ended.stderr
    exported = run("export.py", str(output), "--to", str(tmp_path / "out.jsonl"))
    assert (exported.returncode, exported.stderr) == (0, "")
    assert exported.stdout == f"3 of 3 documents in {tmp_path / 'out.jsonl'}, 1 of them as errors\n"
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    found = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert set(found) == set(texts)
    assert found["empty"]["response"] is None
    assert found["empty"]["error"] == {"code": "EmptyText", "message": "the text is empty or white space"}
    for row in rows(output / "summaries"):
        response = found[row["doc_id"]]["response"]
        assert (response["status_code"], found[row["doc_id"]]["error"]) == (200, None)
        [choice] = response["body"]["choices"]
        assert choice["message"] == {"role": "assistant", "content": row["summary"]}
        assert choice["finish_reason"] == row["finish_reason"]
        usage = response["body"]["usage"]
        assert usage["completion_tokens"] == row["num_output_tokens"] <= texts[row["doc_id"]][1]
        assert usage["prompt_tokens_details"]["cached_tokens"] == row["num_cached_tokens"]
        assert usage["total_tokens"] == row["num_prompt_tokens"] + row["num_output_tokens"]


def test_a_folder_without_a_run_is_exit_2_in_one_line(tmp_path: Path):
    """And leaves no file that looks like a result."""
    failed = run("export.py", str(tmp_path), "--to", str(tmp_path / "out.jsonl"))
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert "holds no run" in failed.stderr
    assert not list(tmp_path.iterdir())

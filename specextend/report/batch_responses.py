"""The results of a run in the output format of OpenAI's Batch API, one JSON line for each document."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from specextend.data.fingerprint import num_input_rows, read_manifest
from specextend.data.storage import Location, atomic_output
from specextend.report.rows import RUN_ID, read_rows

_DONE = (
    "doc_id",
    "summary",
    "finish_reason",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "started_at",
)
_FAILED = ("doc_id", "error_class", "message")


def write_responses(output: Location, file: Location) -> tuple[int, int, int | None]:
    """Write the responses of a run folder to a file, whole or not at all.

    Returns how many there are, how many of them are errors, and how many documents the run has: None if the folder has
    no manifest. Lines come in no particular order. Raises ValueError if the folder holds no run.
    """
    manifest = read_manifest(output)
    model = "" if manifest is None else str(manifest["config"]["target"]["model"])
    counts = [0, 0]
    with atomic_output(file) as path, open(path, "w", encoding="utf-8") as stream:
        for response in _responses(output, model):
            stream.write(json.dumps(response, ensure_ascii=False) + "\n")
            counts[0] += 1
            counts[1] += response["error"] is not None
    return counts[0], counts[1], None if manifest is None else num_input_rows(manifest)


def _responses(output: Location, model: str) -> Iterator[dict[str, Any]]:
    for is_done, table in read_rows(output, _DONE, _FAILED):
        yield from (_response(row, model) if is_done else _error(row) for row in table.to_pylist())


def _response(row: dict[str, Any], model: str) -> dict[str, Any]:
    name, started_at = _name(row), row["started_at"]
    num_prompt, num_output = row["num_prompt_tokens"], row["num_output_tokens"]
    message = {"role": "assistant", "content": row["summary"]}
    body = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": 0 if started_at is None else int(started_at.timestamp()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(row["finish_reason"])}],
        "usage": {
            "prompt_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": row["num_cached_tokens"] or 0},
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": row["doc_id"], "response": response, "error": None}


def _error(row: dict[str, Any]) -> dict[str, Any]:
    error = {"code": row["error_class"], "message": row["message"]}
    return {"id": f"batch_req_{_name(row)}", "custom_id": row["doc_id"], "response": None, "error": error}


def _name(row: dict[str, Any]) -> str:
    """Make an identifier that is the same in every export of a folder."""
    return hashlib.sha256(f"{row[RUN_ID]}:{row['doc_id']}".encode()).hexdigest()[:24]


def _reason(finish_reason: str) -> str:
    """Return a reason that the API knows: an output that was ended because it had become a loop was cut, too."""
    return "length" if finish_reason == "repetition" else finish_reason

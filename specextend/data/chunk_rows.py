"""What was decoded of documents that are summarised in parts, so that no later attempt or start does it again.

The rows are commits of the driver in `_run/chunks/`, which is emptied when the run is complete.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from specextend.core import Completion, DocumentKey
from specextend.data.run_folder import chunks_folder
from specextend.data.side_rows import SideWriter, read_side_rows
from specextend.data.storage import Location, delete, list_files
from specextend.stats import DecodingStats

CHUNK_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("digest", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("stats", pa.string()),
        ("run_id", pa.string()),
    ]
)
"""A row for each request that was done: the document's key, the digest of the request, and its outcome."""


def chunk_row(key: DocumentKey, digest: str, completion: Completion) -> dict[str, Any]:
    """Make the row of a request."""
    return {
        "file": key.file,
        "row": key.row,
        "digest": digest,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "stats": json.dumps(asdict(completion.stats)),
    }


class ChunkWriter(SideWriter):
    """Commits rows of `chunk_row` to `_run/chunks/`."""

    def __init__(self, output: Location, run_id: str) -> None:
        super().__init__(chunks_folder(output), "chunk", CHUNK_SCHEMA, run_id)


def read_chunks(output: Location, wanted: Container[DocumentKey]) -> dict[DocumentKey, dict[str, Completion]]:
    """Read what is done of the documents that are wanted, by the digest of the request. Raises DamagedPartError.

    A row whose counts another version has written is left out: what it says is decoded again.
    """
    found: dict[DocumentKey, dict[str, Completion]] = {}
    for table in read_side_rows(chunks_folder(output), CHUNK_SCHEMA):
        keys = [*map(DocumentKey, table["file"].to_pylist(), table["row"].to_pylist())]
        places = [place for place, key in enumerate(keys) if key in wanted]
        for place, row in zip(places, table.take(pa.array(places, pa.int64())).to_pylist(), strict=True):
            if (stats := _parse_stats(row["stats"])) is not None:
                completion = Completion(row["digest"], row["token_ids"], row["text"], row["finish_reason"], stats)
                found.setdefault(keys[place], {})[row["digest"]] = completion
    return found


def _parse_stats(text: str | None) -> DecodingStats | None:
    try:
        return DecodingStats(**json.loads(text or ""))
    except (ValueError, TypeError):
        return None


def remove_chunks(output: Location) -> None:
    """Remove the rows of a run that needs them no more; the driver calls it while it holds the lock."""
    folder = chunks_folder(output)
    for name in list_files(folder):
        if name.startswith("chunk-"):
            delete(folder.child(name))

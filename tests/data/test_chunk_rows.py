"""What is kept of documents in parts between two starts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.core import Completion, DocumentKey
from specextend.data.chunk_rows import ChunkWriter, chunk_row, read_chunks, remove_chunks
from specextend.data.parts import DamagedPartError
from specextend.data.storage import Location
from specextend.stats import DecodingStats

STATS = DecodingStats(num_prompt_tokens=7, num_output_tokens=2, acceptance_histogram=[1, 0], prefill_s=0.25)
DONE = Completion("lease:3", [4, 5], "a part", "stop", STATS)
BOOK, OTHER = DocumentKey(0, 1), DocumentKey(2, 0)


def kept(output: Location, *rows: dict[str, Any]) -> Path:
    """Commit rows; return the file."""
    ChunkWriter(output, "0000000a").commit(rows)
    [path] = Path(output.path, "_run", "chunks").iterdir()
    return path


def test_what_was_kept_comes_back_for_the_documents_that_are_wanted(output: Location):
    kept(output, chunk_row(BOOK, "one", DONE), chunk_row(OTHER, "two", DONE))
    assert read_chunks(output, {BOOK}) == {BOOK: {"one": replace(DONE, request_id="one")}}
    remove_chunks(output)
    assert read_chunks(output, {BOOK, OTHER}) == {}


def test_counts_that_this_version_does_not_know_are_decoded_again(output: Location):
    """An upgrade in the middle of a run costs some parts, not the run."""
    later = json.dumps(asdict(STATS) | {"num_wishes": 3})
    rows = [chunk_row(BOOK, name, DONE) | {"stats": text} for name, text in (("a", later), ("b", None), ("c", "{"))]
    kept(output, *rows, chunk_row(BOOK, "d", DONE))
    assert read_chunks(output, {BOOK})[BOOK].keys() == {"d"}


def test_a_file_of_another_kind_is_named(output: Location):
    path = kept(output, chunk_row(BOOK, "one", DONE))
    table = pq.read_table(path)
    texts = pa.array(["x"])
    pq.write_table(table.set_column(table.column_names.index("row"), "row", texts), path)
    with pytest.raises(DamagedPartError, match=r"chunk-0000000a-000000\.parquet is damaged .* delete it"):
        read_chunks(output, {BOOK})

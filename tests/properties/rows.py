"""Rows of parts, and inputs to which they belong."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Completion
from specextend.data.inputs import InputOptions
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.data.schema import decoded_columns
from specextend.data.source import open_source
from specextend.stats import DecodingStats


def done(key, text="a summary"):
    """A document done."""
    completion = Completion("lease", [5, 6], text, "stop", DecodingStats(num_prompt_tokens=1, num_output_tokens=2))
    prompt = Prompt([1], 0, "middle")
    told = {"content_sha256": "00", "queue_s": 0.5, "started_at": 0, "worker": "w", "attempts": 1, "num_requests": 1}
    return decoded_columns(completion, prompt, Quality([], None)) | key._asdict() | told | {"doc_id": name_of(key)}


def failed(key):
    """A document given up."""
    told = {"error_class": "WorkerDied", "message": "why", "stage": "decode", "retryable": True, "attempts": 3}
    return {**key._asdict(), "doc_id": name_of(key), **told}


def name_of(key):
    return f"{key.file}.parquet:{key.row}"


def source_of(folder, sizes):
    """Files of so many rows, with a number to be passed through."""
    folder.mkdir(parents=True)
    for file, size in enumerate(sizes):
        columns = {"text": pa.array(["x"] * size, "string"), "n": pa.array(range(size), "int64")}
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=3)
    return open_source(InputOptions(path=str(folder), passthrough=("n",)))


def in_a_folder(check):
    """Hypothesis calls a test many times: each in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))

"""What a row of results says, and what it leaves out."""

import pyarrow as pa

from specextend.core import Completion, DocumentKey
from specextend.data.prompts import Prompt
from specextend.data.quality import Quality
from specextend.data.schema import COMMIT_SCHEMA, SUMMARY_SCHEMA, result_row
from specextend.stats import DecodingStats


def test_what_there_is_nothing_to_say_about_is_null():
    """Plain decoding has no acceptance: 0 would pull an average down."""
    completion = Completion("1:2", [4, 5], "text", "stop", DecodingStats(num_output_tokens=1))
    facts = {
        "content_sha256": "00",
        "queue_s": 0.5,
        "max_new_tokens": 9,
        "started_at": 1.25,
        "worker": "host/0",
        "attempts": 2,
    }
    row = result_row(DocumentKey(1, 2), "doc", completion, Prompt([1], 7, "tail"), Quality([], None), **facts)
    [built] = pa.Table.from_pylist([row], schema=COMMIT_SCHEMA).to_pylist()
    empty = [name for name in SUMMARY_SCHEMA.names if built[name] is None]
    names = "part_summaries mean_acceptance_length draft_acceptance_rate acceptance_histogram retrieval_coverage "
    names += (
        "sources retrieval_churn output_tokens_per_s copied_fraction rouge1 rouge2 rougeL reasoning evidence choices"
    )
    assert sorted(empty) == sorted(names.split())

"""The columns of the results and their types, as docs/output.md lists them and as other programs read them."""

import pyarrow as pa

STRING = pa.string()
PLACE = {"begin": pa.int64(), "end": pa.int64(), "score": pa.float64()}
TYPES = {
    "doc_id summary finish_reason length_policy worker content_sha256 reasoning": pa.string(),
    "num_prompt_tokens num_output_tokens num_dropped_tokens num_cached_tokens num_requests": pa.int32(),
    "max_new_tokens num_network_steps num_first_accepted": pa.int32(),
    "num_spec_steps num_plain_steps num_draft_tokens num_accepted_tokens num_hybrid_steps num_fallbacks": pa.int32(),
    "num_retrievals num_memory_retries attempts": pa.int32(),
    "mean_acceptance_length draft_acceptance_rate retrieval_coverage retrieval_churn": pa.float64(),
    "queue_s ttft_s decode_s total_s output_tokens_per_s num_forwards": pa.float64(),
    "prefill_s draft_prefill_s draft_s verify_s retrieval_s other_s": pa.float64(),
    "copied_fraction rouge1 rouge2 rougeL coverage": pa.float64(),
    "acceptance_histogram": pa.list_(pa.int32()),
    "quality_flags": pa.list_(pa.string()),
    "evidence": pa.list_(pa.struct({"field": STRING, "value": STRING} | PLACE)),
    "sources": pa.list_(pa.struct({"sentence": STRING} | PLACE | {"passage": STRING})),
    "figures": pa.list_(
        pa.struct(
            dict.fromkeys(("text", "kind", "value", "unit", "found"), STRING) | {"begin": pa.int64(), "end": pa.int64()}
        )
    ),
    "choices": pa.list_(pa.struct([("field", pa.string()), ("value", pa.string()), ("log_prob", pa.float64())])),
    "started_at": pa.timestamp("ms", tz="UTC"),
}
SUMMARIES = {name: kind for names, kind in TYPES.items() for name in names.split()}
"""Columns of `summaries/` and of a batch; those of a document in parts are not among them."""
WHY = {"error_class": pa.string(), "message": pa.string(), "stage": pa.string(), "retryable": pa.bool_()}
ERRORS = {
    "key": pa.struct([("file", pa.int32()), ("row", pa.int64())]),
    "doc_id": pa.string(),
    **WHY,
    "attempts": pa.int32(),
    "content_sha256": pa.string(),
    "summary": pa.string(),
}
"""Columns of `errors/`, all of them but the passthrough columns."""
BATCHES = SUMMARIES | WHY
"""Columns of a batch of results."""


def assert_has(schema, columns):
    """Every column is there, with its type."""
    assert {name: schema.field(name).type for name in columns if name in schema.names} == columns

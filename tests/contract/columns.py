"""The columns of the results and their types, as docs/output.md lists them and as other programs read them."""


def columns(table):
    """Name -> type as Arrow writes it; a line has the names of a type."""
    lines = [line.partition(": ") for line in table.strip().splitlines()]
    return {name: kind for names, _, kind in lines for name in names.split()}


SUMMARIES = columns("""
doc_id summary finish_reason length_policy worker content_sha256 reasoning: string
num_prompt_tokens num_output_tokens num_dropped_tokens num_cached_tokens num_requests: int32
max_new_tokens num_network_steps num_first_accepted: int32
num_spec_steps num_plain_steps num_draft_tokens num_accepted_tokens num_hybrid_steps num_fallbacks: int32
num_retrievals num_memory_retries attempts: int32
mean_acceptance_length draft_acceptance_rate retrieval_coverage retrieval_churn: double
queue_s ttft_s decode_s total_s output_tokens_per_s num_forwards: double
prefill_s draft_prefill_s draft_s verify_s retrieval_s other_s: double
copied_fraction rouge1 rouge2 rougeL coverage: double
acceptance_histogram: list<item: int32>
quality_flags: list<item: string>
evidence: list<item: struct<field: string, value: string, begin: int64, end: int64, score: double>>
sources: list<item: struct<sentence: string, begin: int64, end: int64, score: double, passage: string>>
figures: list<item: struct<text: string, kind: string, value: string, unit: string, found: string, begin: int64, \
end: int64>>
choices: list<item: struct<field: string, value: string, log_prob: double>>
started_at: timestamp[ms, tz=UTC]
""")
"""Columns of `summaries/` and of a batch; those of a document in parts are not among them."""
WHY = columns("""
error_class message stage: string
retryable: bool
""")
ERRORS = WHY | columns("""
key: struct<file: int32, row: int64>
doc_id content_sha256 summary: string
attempts: int32
""")
"""Columns of `errors/`, all of them but the passthrough columns."""
BATCHES = SUMMARIES | WHY
"""Columns of a batch of results."""


def assert_has(schema, wanted):
    """Every column is there, with its type."""
    found = {field.name: str(field.type).replace("<element: ", "<item: ") for field in schema}
    assert found.items() >= wanted.items()

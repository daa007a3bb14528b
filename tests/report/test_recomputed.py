"""Every figure of a report, computed a second time from the Parquet by queries that share no code with it."""

from functools import reduce
from operator import getitem

import duckdb
import pytest

from tests.report.made_up import FIRST, LIMITS, NIGHT_S, NUM_DOCUMENTS, PRICE, SECOND

BUSY = "prefill_s + draft_prefill_s + draft_s + verify_s + retrieval_s + other_s"
PHASES = ("prefill", "draft_prefill", "draft", "verify", "retrieval", "other")
RESULTS = r"""
    create view results as
    select *, error_class is null as done, regexp_extract(filename, 'part-([0-9a-f]{8})-(\d+)', 1) as run_id
    from read_parquet('{folder}/_run/parts/*.parquet', filename = true)
    qualify row_number() over (
        partition by file, row
        order by error_class is null desc, regexp_extract(filename, 'part-([0-9a-f]{{8}})-(\d+)', 2)::int desc
    ) = 1
"""
DONE = """
    create view done as
    select *, epoch_ms(started_at) / 1000 as began, epoch_ms(started_at) / 1000 + total_s as ended,
        greatest(512, 2 ** ceil(log2(num_prompt_tokens)))::int as bucket
    from results where done
"""


@pytest.fixture(scope="module")
def rows(made_up):
    """The rows that count, as views of a database."""
    connection = duckdb.connect()
    connection.execute(RESULTS.replace("{folder}", str(made_up)).replace("{{8}}", "{8}"))
    connection.execute(DONE)
    yield connection
    connection.close()


def one(rows, query):
    """The first column of the first row."""
    return rows.execute(f"select {query}").fetchone()[0]


def counted(rows, query):
    return dict(rows.execute(query).fetchall())


def close(value):
    return pytest.approx(value, rel=1e-9)


CHURNED = "filter (retrieval_churn is not null)"
PAID_S = 2 * (118 - 2) + 2 * (420 - 5)
CLOCK_S = 118 + 430
"""By the records: until the last heartbeat of the driver that was killed, and the second start."""
FIGURES = {
    **{f"tokens.{name}": f"sum(num_{name}_tokens)" for name in ("prompt", "cached", "output", "dropped")},
    "rows.done": "count(*)",
    "retries.documents": "count(*) filter (attempts > 1)",
    "retries.memory": "sum(num_memory_retries)",
    "sources.sentences": "2 * count(*) filter (summary <> '')",
    "sources.found": "count(*) filter (summary <> '')",
    "flagged_texts": "count(*) filter (len(quality_flags) > 0)",
    "acceptance.num_spec_steps": "sum(num_spec_steps)",
    "acceptance.num_plain_steps": "sum(num_plain_steps)",
    "acceptance.num_draft_tokens": "sum(num_draft_tokens)",
    "acceptance.num_accepted_tokens": "sum(num_accepted_tokens)",
    "acceptance.num_fallbacks": "sum(num_fallbacks)",
    "acceptance.first_acceptance_rate": "sum(num_first_accepted) / sum(num_network_steps)",
    "acceptance.mean_acceptance_length": "1 + sum(num_accepted_tokens) / sum(num_spec_steps)",
    "acceptance.draft_acceptance_rate": "sum(num_accepted_tokens) / sum(num_draft_tokens)",
    "acceptance.speculative_share": "sum(num_spec_steps) / (sum(num_spec_steps) + sum(num_plain_steps))",
    "acceptance.mean_tree_size": "sum(num_draft_tokens) / sum(num_spec_steps)",
    "retrieval.num_retrievals": "sum(num_retrievals)",
    "retrieval.coverage": "sum(retrieval_coverage * num_retrievals) / sum(num_retrievals)",
    "retrieval.churn": f"sum(retrieval_churn * (num_retrievals - 1)) / (sum(num_retrievals - 1) {CHURNED})",
    "time.busy_s": f"sum({BUSY})",
    **{f"time.shares.{phase}": f"sum({phase}_s) / sum({BUSY})" for phase in PHASES},
    "speed.decode_tokens_per_s": "(sum(num_output_tokens) - count(*)) / sum(decode_s)",
    "speed.end_to_end_tokens_per_s": "sum(num_output_tokens) / sum(total_s)",
    "speed.tokens_per_busy_s": f"sum(num_output_tokens) / sum({BUSY})",
    "wall_clock.seconds": f"{CLOCK_S}",
    "wall_clock.documents_per_hour": f"3600 * count(*) / {CLOCK_S}",
    "wall_clock.prompt_tokens_per_s": f"sum(num_prompt_tokens) / {CLOCK_S}",
    "wall_clock.output_tokens_per_s": f"sum(num_output_tokens) / {CLOCK_S}",
    "wall_clock.worker_hours": f"{PAID_S} / 3600",
    "wall_clock.gpu_hours": f"{PAID_S} / 7200",
    "wall_clock.cost.price_per_worker_hour": f"{PRICE}",
    "wall_clock.cost.total": f"{PRICE * PAID_S} / 3600",
    "wall_clock.cost.per_thousand_documents": f"{PRICE * PAID_S} / 3.6 / count(*)",
    "wall_clock.cost.per_million_output_tokens": f"{PRICE * PAID_S} / 0.0036 / sum(num_output_tokens)",
    "wall_clock.paid_s.prefill": "sum(prefill_s + draft_prefill_s)",
    "wall_clock.paid_s.decode": "sum(draft_s + verify_s + retrieval_s)",
    "wall_clock.paid_s.other": "sum(other_s)",
}
"""Figures that follow from all rows that are done."""
OF_BUCKET = {
    "documents": "count(*)",
    "mean_acceptance_length": "1 + sum(num_accepted_tokens) / nullif(sum(num_spec_steps), 0)",
    **{f"seconds_per_document.{phase}": f"sum({phase}_s) / count(*)" for phase in PHASES},
    **{f"time_shares.{phase}": f"sum({phase}_s) / sum({BUSY})" for phase in PHASES},
    "decode_tokens_per_s": "(sum(num_output_tokens) - count(*)) / sum(decode_s)",
}
COUNTS = {
    "finish_reasons": "select finish_reason, count(*) from done group by 1",
    "quality_flags": "select flag, count(*) from (select unnest(quality_flags) as flag from done) group by 1",
    "flagged": """select flag, list(doc_id order by doc_id)[:10]
        from (select unnest(quality_flags) as flag, doc_id from done) group by 1""",
    "workers": "select worker, count(*) from done group by 1",
}


def differing(rows, figures, found, where=""):
    """The figures of a report, or of a part of it, that are not those of its rows."""
    wanted = {path: one(rows, f"({query})::double from done {where}") for path, query in figures.items()}
    values = {path: reduce(getitem, path.split("."), found) for path in figures}
    return {path: (values[path], value) for path, value in wanted.items() if values[path] != (value and close(value))}


def test_sums_and_ratios_of_sums(rows, report):
    """Of the whole run, and of each bucket, which is a report of its own."""
    assert not differing(rows, FIGURES, report)
    for bucket in report["buckets"]:
        assert not differing(rows, OF_BUCKET, bucket, f"where bucket = {bucket['max_prompt_tokens']}")
    assert sum(bucket["documents"] for bucket in report["buckets"]) == report["rows"]["done"]


def test_counts_are_exact(rows, report):
    """Rows, reasons, flags, workers; and the histogram, as shares of at least so many."""
    done, errors = (one(rows, f"count(*) from results where {which}") for which in ("done", "not done"))
    assert report["rows"] == {"input": NUM_DOCUMENTS, "done": done, "errors": errors, "pending": 0}
    assert {name: report[name] for name in COUNTS} == {name: counted(rows, query) for name, query in COUNTS.items()}
    histogram = [one(rows, f"sum(acceptance_histogram[{depth + 1}]) from done") for depth in range(5)]
    assert report["acceptance"]["histogram"] == histogram
    assert report["acceptance"]["at_least"] == [close(sum(histogram[depth:]) / sum(histogram)) for depth in range(5)]
    assert not report["wall_clock"]["is_exact"]
    for start, run_id in zip(report["starts"], (FIRST, SECOND), strict=True):
        assert start["documents"] == one(rows, f"count(*) from done where run_id = '{run_id}'")


def test_shares_of_the_limits(rows, report):
    """Of every document but those of the worker that measured nothing."""
    num_read = "(num_prompt_tokens - num_cached_tokens)"
    flop = f"2 * ({num_read} * {{layer_parameters}} + {{head_parameters}}) + {{attention_flop_per_pair}} * pairs"
    pairs = f"{num_read}::double * (num_prompt_tokens + num_cached_tokens + 1) / 2"
    steps = "(num_spec_steps + num_plain_steps) * (num_prompt_tokens + num_output_tokens / 2)"
    bytes_read = f"num_forwards * {{weight_bytes}} + {steps} * {{kv_bytes_per_token}}"
    known = "from done where worker != 'host:2'"
    limits = report["limits"]
    assert limits["documents"] == one(rows, f"count(*) {known}")
    for share, work, rate, seconds in (
        ("prefill_share", flop.replace("pairs", pairs), "flop_per_s", "prefill_s"),
        ("verify_share", bytes_read, "read_bytes_per_s", "verify_s"),
    ):
        wanted = f"sum(({work.format(**LIMITS)})::double) / {LIMITS[rate]} / sum({seconds}) {known}"
        assert limits[share] == close(one(rows, wanted))
    assert [device["workers"] for device in limits["devices"]] == [one(rows, f"count(distinct worker) {known}")]


def test_the_spread_of_documents(rows, report):
    """Of seconds, and of what a sequence sees."""
    for name in ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length"):
        figures = f"count({name}), median({name}), avg({name}), min({name}), max({name}), stddev_samp({name}) from done"
        wanted = rows.execute(f"select {figures}").fetchone()
        found = report["per_document"][name]
        assert [found[key] for key in ("n", "median", "mean", "min", "max", "sd")] == [close(each) for each in wanted]


def test_what_the_paid_time_was_spent_on(rows, report):
    """The seven kinds add up to all of it, and are what the rows and the record say."""
    paid = report["wall_clock"]["paid_s"]
    assert paid["loading"] == close((10 - 2) + (20 - 2) + 2 * (20 - 5))
    assert paid["dead"] == close(80 - 60)
    gone = {"host:1": 118, "host:2": 60, "host:3": 118}
    last = counted(rows, f"select worker, max(ended) from done where run_id = '{FIRST}' group by 1")
    assert paid["lost"] == pytest.approx(sum(NIGHT_S + gone[name] - ended for name, ended in last.items()), abs=1e-3)
    assert sum(paid.values()) == close(PAID_S)
    assert report["wall_clock"]["shares"] == {kind: close(seconds / PAID_S) for kind, seconds in paid.items()}


def test_the_tail(rows, report):
    """One long document at the end, for which one worker stayed and the other waited."""
    second = f"from done where run_id = '{SECOND}'"
    last = one(rows, f"max(ended) {second}")
    num = one(rows, f"count(*) {second}")
    idle = last - one(rows, f"max(ended) {second} and worker = 'host:12'")
    before = rows.execute(f"select ended {second} order by ended desc").fetchall()[2][0]
    assert report["tail"] == {
        "run_id": SECOND,
        "documents": num,
        "last_percent_documents": 2,
        "last_percent_s": pytest.approx(last - before, abs=1e-5),
        "last_worker_alone_s": pytest.approx(idle, abs=1e-5),
        "workers": 2,
        "idle_workers": 1,
        "idle_median_s": pytest.approx(idle, abs=1e-5),
    }


def test_the_texts_that_are_shown_are_a_sample_of_all(rows, report):
    """Drawn by the ids alone, so that nobody has chosen them; then some that have a flag."""
    drawn = "select doc_id from done {} order by md5(doc_id) limit 3"
    first = [each for (each,) in rows.execute(drawn.format("")).fetchall()]
    flagged = f"where len(quality_flags) > 0 and doc_id not in ({', '.join(map(repr, first))})"
    others = [each for (each,) in rows.execute(drawn.format(flagged)).fetchall()]
    texts = {name: [text["doc_id"] for text in found] for name, found in report["texts"].items()}
    assert texts == {"random": first, "flagged": others}
    for text in (*report["texts"]["random"], *report["texts"]["flagged"]):
        assert text["summary"] == one(rows, f"summary from done where doc_id = {text['doc_id']!r}")


def test_the_documents_of_each_part_of_a_start(rows, report):
    """They add up to those whose end is known."""
    for line in report["timeline"]:
        ended = f"select ended from done where run_id = {line['run_id']!r}"
        assert sum(line["ended"]) == one(rows, f"count(*) from ({ended})")
        assert len(line["ended"]) == 40

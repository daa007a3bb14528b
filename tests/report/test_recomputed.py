"""Every figure of a report, computed a second time from the Parquet by queries that share no code with it."""

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


def test_rows_tokens_and_reasons(rows, report):
    """Counts are exact."""
    done, errors = one(rows, "count(*) from results where done"), one(rows, "count(*) from results where not done")
    counts = {"done": done, "errors": errors, "pending": 0}
    assert report["rows"] == {"input": NUM_DOCUMENTS, **counts}
    for name in ("prompt", "cached", "output", "dropped"):
        assert report["tokens"][name] == one(rows, f"sum(num_{name}_tokens) from done")
    reasons = "select finish_reason, count(*) from results where done group by 1"
    assert report["finish_reasons"] == counted(rows, reasons)
    flags = "select flag, count(*) from (select unnest(quality_flags) as flag from results) group by 1"
    assert report["quality_flags"] == counted(rows, flags)
    ids = "select flag, list(doc_id order by doc_id)[:10] from (select unnest(quality_flags) as flag, doc_id from done)"
    assert report["flagged"] == counted(rows, f"{ids} group by 1")
    assert report["workers"] == counted(rows, "select worker, count(*) from done group by 1")
    texts = one(rows, "count(*) from done where summary <> ''")
    assert report["sources"] == {"sentences": 2 * texts, "found": texts}
    assert report["retries"] == {
        "documents": one(rows, "count(*) from done where attempts > 1"),
        "memory": one(rows, "sum(num_memory_retries) from done"),
    }


def test_speculation(rows, report):
    """Ratios of sums, and the histogram as shares of at least so many."""
    acceptance = report["acceptance"]
    for name in ("num_spec_steps", "num_plain_steps", "num_draft_tokens", "num_accepted_tokens", "num_fallbacks"):
        assert acceptance[name] == one(rows, f"sum({name}) from done")
    assert acceptance["mean_acceptance_length"] == close(
        one(rows, "1 + sum(num_accepted_tokens) / sum(num_spec_steps) from done")
    )
    assert acceptance["draft_acceptance_rate"] == close(
        one(rows, "sum(num_accepted_tokens) / sum(num_draft_tokens) from done")
    )
    steps = "sum(num_spec_steps) + sum(num_plain_steps)"
    assert acceptance["speculative_share"] == close(one(rows, f"sum(num_spec_steps) / ({steps}) from done"))
    assert acceptance["mean_tree_size"] == close(one(rows, "sum(num_draft_tokens) / sum(num_spec_steps) from done"))
    histogram = [one(rows, f"sum(acceptance_histogram[{depth + 1}]) from done") for depth in range(5)]
    assert acceptance["histogram"] == histogram
    assert acceptance["at_least"] == [close(sum(histogram[depth:]) / sum(histogram)) for depth in range(5)]
    churns = "from done where retrieval_churn is not null"
    assert report["retrieval"] == {
        "num_retrievals": one(rows, "sum(num_retrievals) from done"),
        "coverage": close(one(rows, "sum(retrieval_coverage * num_retrievals) / sum(num_retrievals) from done")),
        "churn": close(one(rows, f"sum(retrieval_churn * (num_retrievals - 1)) / sum(num_retrievals - 1) {churns}")),
    }


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


def test_speeds_and_phases(rows, report):
    """Seconds of workers, and what a sequence sees."""
    assert report["time"]["busy_s"] == close(one(rows, f"sum({BUSY}) from done"))
    for phase in PHASES:
        assert report["time"]["shares"][phase] == close(one(rows, f"sum({phase}_s) / sum({BUSY}) from done"))
    assert report["speed"] == {
        "decode_tokens_per_s": close(one(rows, "(sum(num_output_tokens) - count(*)) / sum(decode_s) from done")),
        "end_to_end_tokens_per_s": close(one(rows, "sum(num_output_tokens) / sum(total_s) from done")),
        "tokens_per_busy_s": close(one(rows, f"sum(num_output_tokens) / sum({BUSY}) from done")),
    }
    for name in ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length"):
        figures = f"count({name}), median({name}), avg({name}), min({name}), max({name}), stddev_samp({name}) from done"
        wanted = rows.execute(f"select {figures}").fetchone()
        found = report["per_document"][name]
        assert [found[key] for key in ("n", "median", "mean", "min", "max", "sd")] == [close(each) for each in wanted]


def test_buckets(rows, report):
    """Each bucket is a report of its own."""
    for bucket in report["buckets"]:
        where = f"from done where bucket = {bucket['max_prompt_tokens']}"
        assert bucket["documents"] == one(rows, f"count(*) {where}")
        steps = one(rows, f"sum(num_spec_steps) {where}")
        length = one(rows, f"1 + sum(num_accepted_tokens) / sum(num_spec_steps) {where}") if steps else None
        assert bucket["mean_acceptance_length"] == (length and close(length))
        for phase in PHASES:
            assert bucket["seconds_per_document"][phase] == close(one(rows, f"sum({phase}_s) / count(*) {where}"))
            assert bucket["time_shares"][phase] == close(one(rows, f"sum({phase}_s) / sum({BUSY}) {where}"))
        assert bucket["decode_tokens_per_s"] == close(
            one(rows, f"(sum(num_output_tokens) - count(*)) / sum(decode_s) {where}")
        )
    assert sum(bucket["documents"] for bucket in report["buckets"]) == report["rows"]["done"]


def test_the_wall_clock(rows, report):
    """The records have the times: 118 s until the last heartbeat of the driver that was killed, and 430 s."""
    clock, done = report["wall_clock"], one(rows, "count(*) from done")
    assert clock["seconds"] == close(118.0 + 430.0)
    assert not clock["is_exact"]
    assert clock["documents_per_hour"] == close(3600 * done / 548)
    assert clock["prompt_tokens_per_s"] == close(one(rows, "sum(num_prompt_tokens) / 548 from done"))
    assert clock["output_tokens_per_s"] == close(one(rows, "sum(num_output_tokens) / 548 from done"))
    for start, run_id in zip(report["starts"], (FIRST, SECOND), strict=True):
        assert start["documents"] == one(rows, f"count(*) from done where run_id = '{run_id}'")
    paid_s = 2 * (118 - 2) + 2 * (420 - 5)
    assert clock["worker_hours"] == close(paid_s / 3600)
    assert clock["gpu_hours"] == close(paid_s / 7200)
    assert clock["cost"] == {
        "price_per_worker_hour": PRICE,
        "total": close(PRICE * paid_s / 3600),
        "per_thousand_documents": close(1000 * PRICE * paid_s / 3600 / done),
        "per_million_output_tokens": close(
            one(rows, f"1e6 * {PRICE * paid_s / 3600} / sum(num_output_tokens) from done")
        ),
    }


def test_what_the_paid_time_was_spent_on(rows, report):
    """The seven kinds add up to all of it, and are what the rows and the record say."""
    paid = report["wall_clock"]["paid_s"]
    busy = {"prefill": "prefill_s + draft_prefill_s", "decode": "draft_s + verify_s + retrieval_s", "other": "other_s"}
    for kind, seconds in busy.items():
        assert paid[kind] == close(one(rows, f"sum({seconds}) from done"))
    assert paid["loading"] == close((10 - 2) + (20 - 2) + 2 * (20 - 5))
    assert paid["dead"] == close(80 - 60)
    gone = {"host:1": 118, "host:2": 60, "host:3": 118}
    last = counted(rows, f"select worker, max(ended) from done where run_id = '{FIRST}' group by 1")
    assert paid["lost"] == pytest.approx(sum(NIGHT_S + gone[name] - ended for name, ended in last.items()), abs=1e-3)
    assert sum(paid.values()) == close(3600 * report["wall_clock"]["worker_hours"])
    shares = report["wall_clock"]["shares"]
    assert shares == {kind: close(seconds / sum(paid.values())) for kind, seconds in paid.items()}


def test_the_tail(rows, report):
    """One long document at the end, for which one worker stayed and the other waited."""
    second = f"from done where run_id = '{SECOND}'"
    last, num = one(rows, f"max(ended) {second}"), one(rows, f"count(*) {second}")
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
    assert report["flagged_texts"] == one(rows, "count(*) from done where len(quality_flags) > 0")


def test_the_documents_of_each_part_of_a_start(rows, report):
    """They add up to those whose end is known."""
    for line in report["timeline"]:
        ended = f"select ended from done where run_id = {line['run_id']!r}"
        assert sum(line["ended"]) == one(rows, f"count(*) from ({ended})")
        assert len(line["ended"]) == 40

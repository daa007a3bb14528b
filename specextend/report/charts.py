"""Figures of the rows of a run. Begin at `document_figures`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from specextend.core import Values, mended
from specextend.data.database import Database
from specextend.data.flags import GENERIC, RunWords
from specextend.data.run_folder import Start
from specextend.data.schema import COMMIT_SCHEMA, SUMMARY_SCHEMA
from specextend.report.result_rows import ANSWERED, RUN_ID, told_apart
from specextend.stats import PHASES, ModelWork, ratio

SMALLEST = 512
"""Tokens of prompts in the smallest bucket, at most."""
NUM_SLOWEST = 10
NUM_IDS = 10
"""Ids listed for a class of errors or a flag."""
NUM_TEXTS = 3
_HELD_TEXTS = 100
"""Texts in which flags of the whole run are searched."""
TEXT_CHARACTERS = 2000
"""Texts drawn at random, and as many with a flag, with their longest length."""
_SHOWN = f"left(summary, {TEXT_CHARACTERS}) AS summary, sources[:200] AS sources"
_MOST_WAITING = 16 << 20
"""Bytes of rows that wait for one insertion."""
_LIMITED = """
    SELECT worker, count(*) AS documents, sum(prefill_s) AS prefill_s, sum(verify_s) AS verify_s,
        sum(num_forwards) AS num_forwards, sum(num_requests) AS num_prompts,
        sum(num_prompt_tokens - num_cached_tokens) AS num_read,
        sum((num_prompt_tokens * (num_prompt_tokens / num_requests + 1)
            - num_cached_tokens * (num_cached_tokens / num_requests + 1)) / 2) AS num_pairs,
        sum((num_spec_steps + num_plain_steps) * (num_prompt_tokens + num_output_tokens / 2)
            / num_requests) AS num_kept
    FROM work
    WHERE num_prompt_tokens + num_cached_tokens + num_output_tokens + num_spec_steps
        + num_plain_steps + num_forwards + num_requests + prefill_s + verify_s IS NOT NULL
        AND worker IN (SELECT unnest(?))
    GROUP BY worker
"""
"""Work by worker, without cached tokens. Requests of a document in parts count as equally long."""
_WORK = [spec.name for spec in fields(ModelWork)]
_LIMITS = {*_WORK, "read_bytes_per_s", "flop_per_s"}
_UNREAD = {
    "length_policy",
    "part_summaries",
    "reasoning",
    "content_sha256",
    "coverage",
    "draft_acceptance_rate",
    "output_tokens_per_s",
}
DONE_COLUMNS = (*(name for name in SUMMARY_SCHEMA.names if name not in _UNREAD), "verdicts")
"""Columns of a finished document in the report."""
_SUMMED_COLUMNS = (
    *(name for name in DONE_COLUMNS if name.startswith("num_")),
    "decode_s",
    "total_s",
    *PHASES,
)
_SUMS = {name: f"sum({name})" for name in _SUMMED_COLUMNS} | {
    "coverage_sum": "sum(retrieval_coverage * num_retrievals)",
    "churn_sum": "sum(retrieval_churn * (num_retrievals - 1))",
    "num_churns": "sum(num_retrievals - 1) FILTER (retrieval_churn IS NOT NULL)",
    "tried_again": "count(*) FILTER (attempts > 1)",
    "num_flagged": "count(*) FILTER (len(quality_flags) > 0)",
}
"""Sums of columns. A document with one retrieval has no churn."""
_OF_TEXT = ("copied_fraction", "rouge1", "rouge2", "rougeL")
_OF_WORK = ("queue_s", "ttft_s", "decode_s", "total_s", "mean_acceptance_length")
_SLOWEST = (
    "doc_id",
    "worker",
    "attempts",
    "num_prompt_tokens",
    "num_output_tokens",
    "finish_reason",
    "queue_s",
)
ERROR_COLUMNS = ("doc_id", "error_class", "message", "stage", "retryable")
"""Columns of a failed document in the report."""
_DONE_SCHEMA = pa.schema(
    [*(COMMIT_SCHEMA.field(name) for name in DONE_COLUMNS), (RUN_ID, "string")]
)
_FLOATS = [field.name for field in _DONE_SCHEMA if pa.types.is_floating(field.type)]
_FINITE = ", ".join(f"if(isfinite({name}), {name}, NULL) AS {name}" for name in _FLOATS)
"""One NaN or infinity would spoil every sum."""
_APART = "evidence, sources, choices, figures, verdicts, summary"
"""Columns with tables of their parts."""
_TABLES = (
    f"CREATE TABLE done AS SELECT * EXCLUDE ({_APART}) FROM given",
    f"CREATE TABLE texts AS SELECT doc_id, quality_flags, {_SHOWN} FROM given",
    "CREATE TABLE errors (doc_id TEXT, error_class TEXT, message TEXT, stage TEXT, retryable BOOL, "
    "answered BOOL)",
    "CREATE TABLE evidence (field TEXT, documents INT, strings INT, found INT)",
    "CREATE TABLE sources (sentences INT, found INT)",
    "CREATE TABLE figures (found TEXT, figures INT)",
    "CREATE TABLE verdicts (probability DOUBLE)",
    "CREATE TABLE choices (field TEXT, value TEXT, documents INT, probability_sum DOUBLE)",
    f"""CREATE VIEW work AS SELECT * REPLACE (coalesce(worker, '') AS worker),
        epoch_ms(started_at) / 1000 AS began, began + total_s AS ended,
        (2 ** ceil(log2(greatest({SMALLEST}, num_prompt_tokens))))::INT AS bucket
    FROM done""",
)
_ADD_DONE = (
    f"INSERT INTO done SELECT * EXCLUDE ({_APART}) REPLACE ({_FINITE}) FROM given",
    f"INSERT INTO texts SELECT doc_id, quality_flags, {_SHOWN} FROM given "
    "WHERE summary IS NOT NULL",
    f"""CREATE OR REPLACE TABLE texts AS FROM texts
    WINDOW flagged AS (PARTITION BY len(quality_flags) > 0 ORDER BY md5(doc_id))
    QUALIFY row_number() OVER (ORDER BY md5(doc_id)) <= {_HELD_TEXTS}
        OR len(quality_flags) > 0 AND row_number() OVER flagged <= 2 * {NUM_TEXTS}""",
    """INSERT INTO evidence SELECT each.field, count(DISTINCT place), count(*), count(each."begin")
    FROM (SELECT row_number() OVER () AS place, unnest(evidence) AS each FROM given)
        GROUP BY each.field""",
    """INSERT INTO sources SELECT count(DISTINCT (place, each.sentence)),
        count(DISTINCT (place, each.sentence)) FILTER (each."begin" IS NOT NULL)
    FROM (SELECT row_number() OVER () AS place, unnest(sources) AS each FROM given)""",
    """INSERT INTO figures SELECT each.found, count(*)
    FROM (SELECT unnest(figures) AS each FROM given) GROUP BY 1""",
    """INSERT INTO verdicts SELECT each.probability
    FROM (SELECT unnest(verdicts) AS each FROM given)""",
    """INSERT INTO choices SELECT field, value, count(*), sum(exp(log_prob))
    FROM (
        SELECT each.field, arg_max(each.value, each.log_prob) AS value,
        max(each.log_prob) AS log_prob
        FROM (SELECT row_number() OVER () AS place, unnest(choices) AS each FROM given)
        WHERE isfinite(each.log_prob) GROUP BY place, each.field
    )
    GROUP BY field, value""",
)
_FLAG_GENERIC = """
    UPDATE {} SET quality_flags = list_append(quality_flags, '{}')
    WHERE doc_id IN (SELECT doc_id FROM generic) AND NOT list_contains(quality_flags, '{}')
"""
_ADD_ERRORS = f"INSERT INTO errors SELECT {', '.join(ERROR_COLUMNS)}, {ANSWERED} FROM given"
_ERRORS = f"""
    SELECT error_class, coalesce(stage, '') AS stage, retryable, count(*) AS rows,
        arg_min(coalesce(doc_id, ''), rowid) AS example_doc_id,
        arg_min(coalesce(message, ''), rowid) AS example_message,
        arg_min(coalesce(doc_id, ''), rowid, {NUM_IDS}) AS doc_ids
    FROM errors GROUP BY ALL ORDER BY rows DESC, min(rowid)
"""
_EVIDENCE = """
    SELECT field, sum(documents)::BIGINT AS documents, sum(strings)::BIGINT AS strings,
    sum(found)::BIGINT AS found
    FROM evidence GROUP BY field ORDER BY min(rowid)
"""
_SOURCES = """
    SELECT coalesce(sum(sentences), 0)::BIGINT AS sentences,
    coalesce(sum(found), 0)::BIGINT AS found FROM sources
"""
_FIGURES = """
    SELECT coalesce(sum(figures), 0)::BIGINT AS figures,
    coalesce(sum(figures) FILTER (found = 'rounded'), 0)::BIGINT AS rounded,
    coalesce(sum(figures) FILTER (found = 'derived'), 0)::BIGINT AS derived,
    coalesce(sum(figures) FILTER (found = 'no'), 0)::BIGINT AS not_found FROM figures
"""
_VERDICTS = """
    SELECT count(*)::BIGINT AS sentences, count(probability)::BIGINT AS asked,
    (SELECT probability FROM verdicts WHERE probability IS NOT NULL ORDER BY probability
        LIMIT 1 OFFSET (SELECT count(probability) // 10 FROM verdicts)) AS tenth_percentile
    FROM verdicts
"""
_CHOICES = """
    SELECT field, value, sum(documents)::BIGINT AS documents,
    sum(probability_sum) AS probability_sum
    FROM choices GROUP BY field, value
    ORDER BY min(min(rowid)) OVER (PARTITION BY field), 3 DESC, min(rowid)
"""
_DEPTHS = """
    SELECT coalesce(list(steps ORDER BY depth), []) AS histogram,
        coalesce(list(share ORDER BY depth) FILTER (isfinite(share)), []) AS at_least
    FROM (
        SELECT depth, sum(steps)::BIGINT AS steps,
            sum(sum(steps)) OVER (ORDER BY depth DESC) / nullif(sum(sum(steps)) OVER (), 0) AS share
        FROM (
            SELECT unnest(acceptance_histogram) AS steps,
            generate_subscripts(acceptance_histogram, 1) AS depth
            FROM done
        )
        GROUP BY depth
    )
"""
_FLAGS = f"""
    SELECT flag, count(*) AS rows, min(doc_id, {NUM_IDS}) AS ids
    FROM (SELECT unnest(quality_flags) AS flag, doc_id FROM done)
    GROUP BY flag ORDER BY rows DESC, flag
"""


class RunFigures:
    """Rows of a run in a database of bounded memory."""

    def __init__(self) -> None:
        self._database = Database()
        self._database.add(_DONE_SCHEMA.empty_table(), *_TABLES)
        self._waiting: list[pa.Table] = []
        self._num_bytes = 0
        self.words = RunWords()
        """Words of the answers, from the reader of commits."""

    def add(self, results: pa.Table) -> None:
        """Add results of `read_results`, with all columns."""
        for is_done, rows in told_apart(results, DONE_COLUMNS, ERROR_COLUMNS):
            self.take(is_done, rows)

    def take(self, is_done: bool, rows: pa.Table) -> None:
        """Add rows of `read_rows`, with DONE_COLUMNS or ERROR_COLUMNS."""
        if not is_done:
            self._database.add(rows, _ADD_ERRORS)
            return
        self._waiting.append(rows.select(_DONE_SCHEMA.names))
        self._num_bytes += rows.nbytes
        if self._num_bytes >= _MOST_WAITING:
            self._insert()

    def create(self, name: str, columns: str, rows: Sequence[Sequence[Any]]) -> None:
        """Create a table of a few rows. `columns` are names and types in SQL."""
        self.select(f"CREATE OR REPLACE TABLE {name} ({columns})")
        if rows:
            arrays = [*map(pa.array, zip(*mended(rows), strict=True))]
            self._database.add(
                pa.table(arrays, [*map(str, range(len(arrays)))]), f"INSERT INTO {name} FROM given"
            )

    def flag_generic(self) -> None:
        """Add the flag `generic` to rows of commits."""
        self.create("generic", "doc_id TEXT", [[row["doc_id"]] for row in self.words.flagged()])
        for table in ("done", "texts"):
            self.select(_FLAG_GENERIC.format(table, GENERIC, GENERIC))

    def select(self, query: str, *values: Any) -> list[Values]:
        """Query `done`, `errors` and `work`, which is `done` with times and buckets."""
        self._insert()
        return self._database.select(query, *values)

    def _insert(self) -> None:
        """Insert waiting rows together: statements are slow."""
        if self._waiting:
            self._database.add(pa.concat_tables(self._waiting), *_ADD_DONE)
            self._waiting = []
            self._num_bytes = 0


def _of_phases(form: str) -> str:
    return "{" + ", ".join(f"'{name.removesuffix('_s')}': {name} / {form}" for name in PHASES) + "}"


_SUMMED = ", ".join(f"coalesce({what}, 0) AS {name}" for name, what in _SUMS.items())
_SECTIONS = f"""
    WITH sums AS (
        SELECT bucket, count(*) AS documents, {_SUMMED} FROM work
            GROUP BY GROUPING SETS ((), bucket)
    ), figures AS (
        SELECT *, {" + ".join(PHASES)} AS busy_s,
            1 + num_accepted_tokens / nullif(num_spec_steps, 0) AS acceptance_length,
            (num_output_tokens - documents) / nullif(decode_s, 0) AS decode_tokens_per_s,
            num_output_tokens / nullif(total_s, 0) AS end_to_end_tokens_per_s,
            num_output_tokens / nullif(busy_s, 0) AS tokens_per_busy_s,
            coverage_sum / nullif(num_retrievals, 0) AS coverage,
            {_of_phases("nullif(busy_s, 0)")} AS shares
        FROM sums
    )
    SELECT
        {{
            'prompt': num_prompt_tokens, 'cached': num_cached_tokens, 'output': num_output_tokens,
            'dropped': num_dropped_tokens
        }} AS tokens,
        {{
            'mean_acceptance_length': acceptance_length,
            'draft_acceptance_rate': num_accepted_tokens / nullif(num_draft_tokens, 0),
            'speculative_share': num_spec_steps / nullif(num_spec_steps + num_plain_steps, 0),
            'mean_tree_size': num_draft_tokens / nullif(num_spec_steps, 0),
            'num_spec_steps': num_spec_steps, 'num_plain_steps': num_plain_steps,
            'num_draft_tokens': num_draft_tokens, 'num_accepted_tokens': num_accepted_tokens,
            'num_network_steps': num_network_steps, 'num_first_accepted': num_first_accepted,
            'first_acceptance_rate': num_first_accepted / nullif(num_network_steps, 0),
            'num_fallbacks': num_fallbacks, 'num_hybrid_steps': num_hybrid_steps
        }} AS acceptance,
        {{
            'decode_tokens_per_s': decode_tokens_per_s,
            'end_to_end_tokens_per_s': end_to_end_tokens_per_s,
            'tokens_per_busy_s': tokens_per_busy_s
        }} AS speed,
        {{'busy_s': busy_s, 'shares': shares}} AS time,
        {{
            'num_retrievals': num_retrievals, 'coverage': coverage,
            'churn': churn_sum / nullif(num_churns, 0)
        }} AS retrieval,
        {{'documents': tried_again, 'memory': num_memory_retries}} AS retries,
        num_flagged AS flagged_texts,
        {{
            'bucket': if(bucket >= 1024, bucket // 1024 || 'K', bucket::TEXT),
            'max_prompt_tokens': bucket,
            'documents': documents, 'mean_acceptance_length': acceptance_length,
            'decode_tokens_per_s': decode_tokens_per_s,
            'end_to_end_tokens_per_s': end_to_end_tokens_per_s,
            'tokens_per_busy_s': tokens_per_busy_s, 'retrieval_coverage': coverage,
            'time_shares': shares,
            'seconds_per_document': {_of_phases("nullif(documents, 0)")}
        }} AS of_bucket
    FROM figures ORDER BY bucket NULLS FIRST
"""
"""Sums over all documents, and by prompt length up to powers of two. Missing values count as 0."""


def document_figures(figures: RunFigures) -> Values:
    """Compute the sections of the report that need only rows."""
    figures.flag_generic()
    whole, *buckets = figures.select(_SECTIONS)
    del whole["of_bucket"]
    [depths] = figures.select(_DEPTHS)
    flags = figures.select(_FLAGS)
    names = ", ".join(dict.fromkeys((*_SLOWEST, "total_s", *PHASES)))
    slowest = f"""SELECT {names}, strftime(epoch_ms(epoch_ms(started_at)),
        '%Y-%m-%dT%H:%M:%S.%g+00:00') AS started_at
    FROM done WHERE total_s IS NOT NULL ORDER BY total_s DESC, doc_id LIMIT {NUM_SLOWEST}"""
    choices: dict[str, dict[str, Values]] = {}
    for row in figures.select(_CHOICES):
        choices.setdefault(row.pop("field"), {})[row.pop("value")] = row
    drawn = figures.select("FROM texts ORDER BY md5(doc_id)")
    of_flags = [text for text in drawn[NUM_TEXTS:] if text["quality_flags"]]
    return whole | {
        "acceptance": whole["acceptance"] | depths,
        "per_document": {name: _spread(figures, name) for name in (*_OF_WORK, *_OF_TEXT)},
        "buckets": [bucket["of_bucket"] for bucket in buckets],
        "finish_reasons": _counts(figures, "finish_reason"),
        "quality_flags": {row["flag"]: row["rows"] for row in flags},
        "flagged": {row["flag"]: row["ids"] for row in flags},
        "workers": _counts(figures, "worker"),
        "slowest": figures.select(slowest),
        "evidence": {row.pop("field"): row for row in figures.select(_EVIDENCE)},
        "sources": figures.select(_SOURCES)[0],
        "figures": figures.select(_FIGURES)[0],
        "verdicts": figures.select(_VERDICTS)[0],
        "choices": choices,
        "errors": figures.select(_ERRORS),
        "texts": {"random": drawn[:NUM_TEXTS], "flagged": of_flags[:NUM_TEXTS]},
    }


def _spread(figures: RunFigures, name: str) -> Values | None:
    measures = (
        f"avg({name}) AS mean, min({name}) AS min, max({name}) AS max, stddev_samp({name}) AS sd"
    )
    [row] = figures.select(f"SELECT count({name}) AS n, {measures} FROM done")
    if not row["n"]:
        return None
    # `median()` would hold all values in memory
    places = f"LIMIT {2 - row['n'] % 2} OFFSET {(row['n'] - 1) // 2}"
    ordered = f"SELECT {name} AS each FROM done WHERE {name} IS NOT NULL ORDER BY each {places}"
    [middle] = figures.select(f"SELECT avg(each) AS median FROM ({ordered})")
    return row | middle


def _counts(figures: RunFigures, name: str) -> dict[str, int]:
    query = (
        f"SELECT {name} AS value, count(*) AS n FROM done WHERE value IS NOT NULL GROUP BY "
        "1 ORDER BY n DESC, 1"
    )
    return {row["value"]: row["n"] for row in figures.select(query)}


def limit_figures(figures: RunFigures, starts: Sequence[Start]) -> Values | None:
    """Compute the reached shares of matrix rate and bandwidth; None without measured limits."""
    limits = {
        worker.name: (worker.device, worker.limits)
        for start in starts
        for worker in start.workers or ()
        if worker.name is not None and worker.limits is not None and worker.limits.keys() >= _LIMITS
    }
    sums: Counter[str] = Counter()
    for row in figures.select(_LIMITED, [*limits]):
        known: Values = limits[row.pop("worker")][1]
        work = ModelWork(**{name: known[name] for name in _WORK})
        flop = work.prefill_flop(row["num_read"], row["num_prompts"], row["num_pairs"])
        num_bytes = (
            row["num_forwards"] * work.weight_bytes + row["num_kept"] * work.kv_bytes_per_token
        )
        row["prefill_limit_s"] = flop / known["flop_per_s"]
        row["verify_limit_s"] = num_bytes / known["read_bytes_per_s"]
        sums.update(row)
    if not sums:
        return None
    devices = Counter(
        (device, values["read_bytes_per_s"], values["flop_per_s"])
        for device, values in limits.values()
    )
    return {
        "documents": sums["documents"],
        "prefill_share": ratio(sums["prefill_limit_s"], sums["prefill_s"]),
        "verify_share": ratio(sums["verify_limit_s"], sums["verify_s"]),
        "devices": [
            {"device": device, "read_bytes_per_s": read, "flop_per_s": flop, "workers": count}
            for (device, read, flop), count in devices.most_common()
        ],
    }

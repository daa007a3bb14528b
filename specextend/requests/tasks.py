"""Tasks: several questions to one document, and their row of results.

Begin at `answer`, which combines the rounds of all tasks, and `finished_row`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, NamedTuple

from specextend.config import RunConfig
from specextend.core import DocumentKey, Values
from specextend.data.commits import Earlier
from specextend.data.flags import broken_rules
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.quality import answer_words, assess
from specextend.data.rows import Row
from specextend.data.schema import (
    COMMITTED_TASKS,
    FAILURE,
    decoded_columns,
    failure_of,
    stats_columns,
    with_pages,
)
from specextend.requests.rounds import Round, Rounds, Summary, advance, max_new_tokens_of, summarize
from specextend.stats import DecodingStats


@dataclass(frozen=True)
class Task:
    """A question to each document."""

    name: str
    """Name; empty for the only task of a run."""
    config: RunConfig
    prompts: Prompts


class Answered(NamedTuple):
    """Outcome of one of several tasks, and the document with its instruction."""

    task: Task
    row: Row
    state: Summary | DocumentError | Values
    """Summary, error, or the entry of an earlier start."""


def tasks_of(config: RunConfig, tokenizer: Any, limit: int) -> list[Task]:
    """Return the tasks of a run. Raises ValueError if the chat template cannot render a task.

    Args:
        limit: Most tokens of prompt and output.
    """
    return [
        Task(name, each, Prompts(tokenizer, each.prompt, limit, each.parts))
        for name, each in config.each_task.items()
    ]


def answer(tasks: Sequence[Task], row: Row, name: str, earlier: Earlier | None = None) -> Rounds:
    """Yield the requests for all tasks of a document, round by round, like `summarize`.

    Requests with a common prompt prefix are consecutive, so the engine reads the prefix once. A
    failed task does not end the others.

    Args:
        name: Document name, as for `summarize`.
        earlier: Answers of an earlier start, if only some tasks are repeated.

    Raises:
        DocumentError: Every decoded task failed.
    """
    if len(tasks) == 1:
        return (yield from summarize(tasks[0].config, tasks[0].prompts, row, name))
    rows = [row, *(replace(row, instruction=other) for other in row.others)]
    under_way = [
        summarize(task.config, task.prompts, own, f"{name}:{number}")
        for number, (task, own) in enumerate(zip(tasks, rows, strict=True))
    ]
    kept = {} if earlier is None else {each["name"]: each for each in earlier.tasks}
    states: list[Round | Summary | DocumentError | Values] = [
        kept[task.name] if earlier and task.name not in earlier.again else advance(rounds, None)
        for task, rounds in zip(tasks, under_way, strict=True)
    ]
    openings = [
        (*task.prompts.opening[:2], (own.instruction or task.prompts.opening[2:])[0])
        for task, own in zip(tasks, rows, strict=True)
    ]
    order = sorted(range(len(tasks)), key=lambda number: openings.index(openings[number]))
    while step := tuple(
        chain.from_iterable(state for number in order if isinstance(state := states[number], tuple))
    ):
        found = iter((yield step))
        for number in order:
            if isinstance(state := states[number], tuple):
                states[number] = advance(under_way[number], [*islice(found, len(state))])
    ended = [state for state in states if not isinstance(state, tuple)]
    return _together(tuple(map(Answered, tasks, rows, ended)))


def _together(answered: tuple[Answered, ...]) -> Summary:
    summaries = [state for _, _, state in answered if isinstance(state, Summary)]
    if not summaries:
        entries = _task_rows(answered)
        raise DocumentError(**failure_of(entries), summary=entries[0]["text"], tasks=entries)
    stats = DecodingStats()
    for summary in summaries:
        stats.add(summary.completion.stats)
    whole = replace(summaries[0].completion, stats=stats)
    return replace(summaries[0], completion=whole, tasks=answered)


def _task_rows(answered: Iterable[Answered]) -> list[Values]:
    found: list[Values] = []
    for task, row, state in answered:
        made: Values
        if isinstance(state, Summary):
            made = _of_one(task.config, row, state)
        elif isinstance(state, DocumentError):
            made = asdict(state)
        else:
            found.append(state)
            continue
        entry = dict.fromkeys(each.name for each in COMMITTED_TASKS.value_type)
        entry |= {name: value for name, value in made.items() if name in entry}
        found.append(entry | {"name": task.name, "text": made["summary"]})
    return found


def finished_row(
    config: RunConfig,
    row: Row,
    summary: Summary,
    *,
    received: float = 0.0,
    ended: float = 0.0,
    worker: str = "",
    attempts: int = 0,
) -> Values:
    """Assess a summary (up to 0.1 s) and make the row of its document.

    `received` and `ended` are times of `time.monotonic`.
    """
    total_s = summary.completion.stats.total_s
    started_at = time.time() - (time.monotonic() - ended) - total_s
    kept = (each.state for each in summary.tasks if isinstance(each.state, dict))
    made = (
        _of_all(_task_rows(summary.tasks), summary.completion.stats, kept)
        if summary.tasks
        else _of_one(config, row, summary)
    )
    return made | {
        **row.key._asdict(),
        "doc_id": row.doc_id,
        "content_sha256": row.content_sha256,
        "queue_s": max(0.0, ended - received - total_s),
        "started_at": datetime.fromtimestamp(started_at, UTC),
        "worker": worker,
        "attempts": attempts,
    }


def failed_row(
    key: DocumentKey, error: DocumentError, attempts: int, earlier: Earlier | None
) -> Values:
    """Return the row of a failed document, with the answers of an earlier start to other tasks."""
    made = asdict(error)
    if earlier and len({each["error_class"] is None for each in earlier.tasks}) == 2:
        again = {each["name"]: each for each in error.tasks or ()}
        failure = {name: made[name] for name in FAILURE.names}
        entries = [
            again.get(each["name"], dict.fromkeys(each) | failure | {"name": each["name"]})
            if each["name"] in earlier.again
            else each
            for each in earlier.tasks
        ]
        made = _of_all(entries, DecodingStats(), entries) | earlier.document
    return made | {**key._asdict(), "attempts": attempts}


def _of_one(config: RunConfig, row: Row, summary: Summary) -> Values:
    prompt = summary.prompt
    quality = assess(
        summary.completion,
        row.text,
        prompt.num_dropped_tokens,
        row.reference,
        config.quality,
        " ".join(row.instruction or [config.prompt.instruction]),
        config.output.evidence_for,
        prompt.left_out if config.output.sources and not config.output.schema else None,
        [text for each in config.prompt.examples for text in (each.user, each.assistant)],
        config.output.figures_for,
        config.output.verify_below,
    )
    made = {
        **decoded_columns(summary.completion, prompt, quality),
        "part_summaries": summary.part_rows,
        "num_requests": summary.num_requests,
        "reasoning": summary.reasoning,
        "max_new_tokens": max_new_tokens_of(config, row),
        "confidence": summary.confidence,
        "verdicts": summary.verdicts,
        "words": None if config.output.schema else answer_words(summary.completion.text, row.text),
    }
    made = with_pages(made, row.page_starts)
    broken = broken_rules(config.output, made, row.passed)
    return made | {"quality_flags": [*quality.quality_flags, *broken]}


def _of_all(entries: list[Values], stats: DecodingStats, kept: Iterable[Values]) -> Values:
    """Return the columns for all tasks: sums of counts, and the first answer.

    `stats` are the counts of this start, `kept` the entries of an earlier start.
    """
    tasks = [each for each in entries if each["error_class"] is None]
    joined = {
        name: [each for task in tasks for each in task[name] or ()]
        for name in ("quality_flags", "evidence", "choices", "figures", "verdicts")
    }
    total = DecodingStats()
    for one in (stats, *map(DecodingStats.of_row, kept)):
        total.add(one)
    reasons = [task["finish_reason"] for task in tasks]
    return {
        **tasks[0],
        **stats_columns(total),
        "summary": entries[0]["text"] if entries[0]["error_class"] is None else None,
        "finish_reason": next((reason for reason in reasons if reason != "stop"), "stop"),
        "max_new_tokens": None,
        "num_dropped_tokens": sum(task["num_dropped_tokens"] for task in tasks),
        "num_requests": sum(task["num_requests"] for task in tasks),
        "coverage": min(task["coverage"] for task in tasks),
        "quality_flags": [*dict.fromkeys(joined["quality_flags"])],
        "evidence": joined["evidence"] or None,
        "choices": joined["choices"] or None,
        "figures": joined["figures"] or None,
        "verdicts": joined["verdicts"] or None,
        **failure_of(entries),
        "tasks": entries,
    }

"""The study of verdicts: whether the target tells sentences of a document's summary from others.

For each document the target judges sentences of its reference summary, and as many of the next
document's. The area under the curve says how often a sentence of the right summary has the higher
probability. It pools the documents of a length, because a run has one limit for all documents.

Sentences of another report are easy to tell apart. An invented detail in a sentence about the right
report is not, so the area bounds the use of verdicts from above.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.benchmark import Benchmark
from benchmarks.documents import bucket_name, bucket_of
from specextend import Request, RunConfig, SamplingParams, load_engine
from specextend.core import Questions
from specextend.data.confidence import claims_of
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompt, Prompts
from specextend.decoding.engine import Engine

_SHORT = SamplingParams(stop=(" ",))
"""Ends an output after a word or two: the rows of the others are needed, not their tokens."""


def judge_summaries(
    benchmark: Benchmark, configs: Mapping[str, RunConfig], say: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each variant and length. Raises ValueError if documents are missing."""
    for name, config in configs.items():
        engine = load_engine(config)
        prompts = Prompts(engine.tokenizer, config.prompt, engine.max_tokens)
        size = benchmark.max_new_tokens
        for bucket, documents in _documents(benchmark, config, prompts).items():
            judged = [_judge(engine, prompts, size, *each) for each in documents]
            own, other = (
                [value for document in judged for value in document[side]]
                for side in ("own", "other")
            )
            costs = [document["judge_s"] / document["prefill_s"] for document in judged]
            say(f"{name}, {bucket}: {len(own)} sentences and {len(other)} of other documents")
            yield [
                {
                    "variant": name,
                    "documents": [document["doc_id"] for document in judged],
                    "bucket": bucket,
                    "repeat": 0,
                    "num_documents": len(judged),
                    "auc": _area(own, other),
                    "cost": median(costs),
                    "own": own,
                    "other": other,
                }
            ]


def _documents(
    benchmark: Benchmark, config: RunConfig, prompts: Prompts
) -> dict[str, list[tuple[str, str, Prompt, list[str], list[str]]]]:
    """Return by length documents that fit whole: id, text, prompt, sentences of the summary, and
    sentences of the next summary.
    """
    options = config.input
    if options.reference_column is None:
        raise ValueError("input.reference_column must name the column with the summaries")
    columns = [options.id_column or "doc_id", options.text_column, options.reference_column]
    rows = pq.read_table(options.path, columns=columns).to_pylist()
    said = [
        _spread([text for _, text in claims_of(row[columns[2]] or "", None)], benchmark.verdicts)
        for row in rows
    ]
    chosen: dict[int, list[Any]] = {bucket: [] for bucket in sorted(benchmark.buckets)}
    for number, row in enumerate(rows):
        try:
            prompt = prompts.render(row[columns[1]], benchmark.max_new_tokens)
        except DocumentError:
            continue
        found = chosen.get(bucket_of(len(prompt.token_ids)), [])
        if not prompt.num_dropped_tokens and len(found) < benchmark.per_bucket:
            others = said[(number + 1) % len(rows)]
            found.append((str(row[columns[0]]), row[columns[1]], prompt, said[number], others))
    if missing := [bucket_name(bucket) for bucket, found in chosen.items() if not found]:
        raise ValueError(f"{benchmark.documents} has no document of up to {missing[0]} tokens")
    return {bucket_name(bucket): found for bucket, found in chosen.items()}


def _spread(items: Sequence[str], count: int) -> list[str]:
    """Return `count` items at even distances."""
    return [items[len(items) * number // count] for number in range(min(count, len(items)))]


def _judge(
    engine: Engine,
    prompts: Prompts,
    max_new_tokens: int,
    doc_id: str,
    text: str,
    prompt: Prompt,
    own: list[str],
    other: list[str],
) -> dict[str, Any]:
    """Judge sentences about a document; the seconds are of its own sentences."""
    before, after = prompts.options.question
    began = 0.0

    def ask(sentences: list[str]) -> Callable[[str, list[int]], Questions]:
        def questions(said: str, token_ids: list[int]) -> Questions:
            nonlocal began
            began = time.perf_counter()
            asked = [f"{before}{each}{after}" for each in sentences]
            return prompts.questions(prompt, text, None, asked)

        return questions

    request = Request(
        request_id=doc_id,
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens,
        sampling=_SHORT,
    )
    asked = replace(request, questions=ask(own))
    found = engine.generate([asked, replace(asked, request_id="other", questions=ask(other))])
    completion = next(found)
    judge_s = time.perf_counter() - began
    [of_other] = found
    return {
        "doc_id": doc_id,
        "judge_s": judge_s,
        "prefill_s": completion.stats.prefill_s,
        "own": [each for each in completion.verdicts if each is not None],
        "other": [each for each in of_other.verdicts if each is not None],
    }


def _area(own: Sequence[float], other: Sequence[float]) -> float:
    """Return how often one of `own` is above one of `other`; equal ones count half."""
    pairs = np.subtract.outer(np.array(own), np.array(other))
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)

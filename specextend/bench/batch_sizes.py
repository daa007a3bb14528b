"""`batch`: documents an hour by the number of sequences that are decoded together, with a draft and without."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from specextend.bench.series import PromptSet, Series, SeriesOptions, Variant, measure_series
from specextend.bench.sides import in_mode
from specextend.bench.workload import Say, bench_documents
from specextend.config import RunConfig
from specextend.core import counted
from specextend.decoding.decoding_options import Mode
from specextend.report.statistics import bucket_name

BATCH = SeriesOptions(buckets=(512, 1024), per_bucket=4, max_new_tokens=64, repeats=3)
BATCH_QUICK = SeriesOptions(buckets=(1024,), per_bucket=8, max_new_tokens=16, repeats=2)
BATCH_SIZES = (1, 2, 4, 8)
"""Sizes to try, as far as there are documents to fill one batch."""


def batch(config: RunConfig, options: SeriesOptions, path: str | None, say: Say) -> dict[str, Any]:
    """Measure each batch size on all documents at once, and return the series as JSON values.

    Raises ValueError if the input, a model or the file at `path` cannot be used.
    """
    documents = bench_documents(config, options)
    modes: list[Mode] = ["autoregressive"] if config.draft is None else ["autoregressive", "specextend"]
    sizes = [size for size in BATCH_SIZES if size <= len(documents)]
    variants = [
        Variant(f"{mode}, batch {size}", in_batches(config, mode, size), {"mode": mode, "batch_size": size})
        for mode, size in product(modes, sizes)
    ]
    lengths = ", ".join(map(bucket_name, sorted({document.bucket for document in documents})))
    prompts = [document.prompt_token_ids for document in documents]
    series = Series(
        kind="batch",
        options=options,
        documents=documents,
        variants=variants,
        prompts=[PromptSet(counted(len(prompts), "document"), lengths, prompts, options.max_new_tokens)],
        base=variants[0].name,
        how="greedy, all documents handed over at once",
    )
    return measure_series(config, series, path, say)


def in_batches(config: RunConfig, mode: Mode, size: int) -> RunConfig:
    """Put the configuration into a mode and a batch size. Raises ValueError if it lacks the draft."""
    own = in_mode(config, mode)
    return own.model_copy(update={"decoding": replace(own.decoding, max_batch_size=size)})

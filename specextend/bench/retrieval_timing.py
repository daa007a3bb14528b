"""`sweep`: the options of retrieval, one at a time around the configuration. `retrieval-time`: its time, by length.

The options are chunk size, number of chunks in view (top-k), tokens in view (cache size) and steps between retrievals.
The cache size is the product of the first two, so two of the three change together: `chunk size` keeps the cache size,
`top-k` the chunk size, `cache size` the number of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from specextend.bench.series import Series, SeriesOptions, Variant, document_prompts, measure_series
from specextend.bench.sides import in_mode
from specextend.bench.workload import Say, bench_documents
from specextend.config import RunConfig
from specextend.decoding.decoding_options import CacheOptions

RETRIEVAL_TIME = SeriesOptions(buckets=(1024, 2048, 4096, 8192), per_bucket=3, max_new_tokens=64)
RETRIEVAL_TIME_QUICK = SeriesOptions(buckets=(1024, 2048), per_bucket=2, max_new_tokens=24)
SWEEP = SeriesOptions(buckets=(2048, 4096), per_bucket=3, max_new_tokens=64)
SWEEP_QUICK = SeriesOptions(buckets=(2048,), per_bucket=2, max_new_tokens=24)
BASE = "as configured"
FACTORS = (1 / 4, 1 / 2, 2)
"""Sizes to try, as multiples of the configured ones."""
INTERVALS = (1, 4, 16, 64)
"""Steps between two retrievals to try."""


def sweep(config: RunConfig, options: SeriesOptions, path: str | None, say: Say) -> dict[str, Any]:
    """Measure every point on the same documents, and return the series as JSON values.

    Raises ValueError if the cache policy is another one, or the input, a model or the file at `path` cannot be used.
    """
    own = _with_retrieval(config)
    points = cache_points(own.cache)
    documents = bench_documents(config, options)
    variants = [Variant(name, own.model_copy(update={"cache": cache}), _about(cache)) for name, cache in points.items()]
    prompts = document_prompts(documents, options.max_new_tokens)
    series = Series(kind="sweep", options=options, documents=documents, variants=variants, prompts=prompts, base=BASE)
    return measure_series(config, series, path, say)


def retrieval_time(config: RunConfig, options: SeriesOptions, path: str | None, say: Say) -> dict[str, Any]:
    """Measure decoding with retrieval by length, and return the series as JSON values.

    Every step verifies a whole tree, so that a retrieval is due as often as `cache.refresh_every` says. Raises
    ValueError as `sweep`.
    """
    own = _with_retrieval(config)
    own = own.model_copy(update={"tree": replace(own.tree, nodes=own.tree.most_nodes)})
    documents = bench_documents(config, options)
    variants = [Variant(BASE, own, _about(own.cache))]
    prompts = document_prompts(documents, options.max_new_tokens)
    series = Series(
        kind="retrieval-time", options=options, documents=documents, variants=variants, prompts=prompts, base=BASE
    )
    return measure_series(config, series, path, say)


def _with_retrieval(config: RunConfig) -> RunConfig:
    """Put the configuration into mode `specextend`. Raises ValueError if its drafts need no retrieval."""
    own = in_mode(config, "specextend")
    if own.cache.policy != "retrieval" or (own.draft is not None and own.draft.kind == "ngram"):
        raise ValueError("there is no retrieval to measure; set cache.policy to retrieval, and draft.kind to a network")
    return own


def cache_points(cache: CacheOptions) -> dict[str, CacheOptions]:
    """List the points by name, the configuration first, without caches that `sinks` and `recent` fill."""
    points = {BASE: cache}
    for name, size, count in _sizes(cache):
        try:
            points[name] = replace(cache, chunk_size=size, top_k_chunks=count)
        except ValueError:
            continue  # the view has no room for a chunk beside those that are always in it
    intervals = [interval for interval in INTERVALS if interval != cache.refresh_every]
    points |= {f"refresh {each}": replace(cache, refresh_every=each) for each in intervals}
    return points


def _sizes(cache: CacheOptions) -> Iterator[tuple[str, int, int]]:
    """Yield the name, chunk size and number of chunks of each point that changes the view."""
    size, count = cache.chunk_size, cache.top_k_chunks
    for factor in FACTORS:
        if (changed := int(size * factor)) and (size * count) % changed == 0:
            yield f"chunk size {changed}", changed, size * count // changed
    for factor in FACTORS:
        if changed := int(count * factor):
            yield f"top-k {changed}", size, changed
    for factor in FACTORS:
        if changed := int(size * factor):
            yield f"cache size {changed * count}", changed, count


def _about(cache: CacheOptions) -> dict[str, Any]:
    return {
        "chunk_size": cache.chunk_size,
        "top_k_chunks": cache.top_k_chunks,
        "cache_tokens": cache.chunk_size * cache.top_k_chunks,
        "refresh": cache.refresh_every,
    }

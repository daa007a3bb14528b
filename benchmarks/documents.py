"""Documents of a benchmark: whole reports by length, rendered once for all variants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from benchmarks.benchmark import Benchmark
from specextend import RunConfig
from specextend.core import counted
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.models.causal_lm import load_tokenizer, read_facts

SMALLEST = 512
"""Upper bound of the smallest bucket, in tokens."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Prompts decoded together."""

    doc_ids: list[str]
    bucket: str
    """Table column, such as `2K`."""
    prompts: list[list[int]]


def bucket_of(num_tokens: int) -> int:
    """Return the upper bound of a prompt's bucket: a power of two, at least 512."""
    return max(SMALLEST, 1 << (num_tokens - 1).bit_length())


def bucket_name(bucket: int) -> str:
    """Name a bucket by its upper bound: `512`, `1K`, `7K`, `6,000`."""
    return f"{bucket // 1024}K" if bucket % 1024 == 0 else f"{bucket:,}"


def choose_documents(benchmark: Benchmark, configs: Sequence[RunConfig]) -> list[PromptGroup]:
    """Choose the first documents of each bucket that fit every variant's context with their output.

    Raises:
        ValueError: The documents cannot be read, or a bucket has too few.
    """
    config = configs[0]
    facts = read_facts(config.target.model)
    limit = min(each.max_tokens(facts.context_length) for each in configs)
    tokenizer = load_tokenizer(config.target.model)
    if benchmark.cut_to is not None:
        cut = replace(config.prompt, max_prompt_tokens=benchmark.cut_to, length_policy="head")
        found = _rendered(config, Prompts(tokenizer, cut, limit), benchmark.max_new_tokens)
        chosen = {
            benchmark.cut_to: [(doc_id, tokens) for doc_id, tokens, _ in found][
                : benchmark.per_bucket
            ]
        }
    else:
        chosen = {bucket: [] for bucket in sorted(benchmark.buckets)}
        for doc_id, tokens, is_whole in _rendered(
            config, Prompts(tokenizer, config.prompt, limit), benchmark.max_new_tokens
        ):
            bucket = bucket_of(len(tokens))
            if is_whole and bucket in chosen and len(chosen[bucket]) < benchmark.per_bucket:
                chosen[bucket].append((doc_id, tokens))
    for bucket, documents in chosen.items():
        if len(documents) < benchmark.per_bucket:
            raise ValueError(
                f"{benchmark.documents} has {len(documents)} of "
                f"{counted(benchmark.per_bucket, 'document')} of up to "
                f"{bucket_name(bucket)} tokens that fit whole, with their output; choose other "
                "buckets or documents"
            )
    named = {bucket_name(bucket): documents for bucket, documents in chosen.items()}
    if benchmark.mixed:
        named = {
            "mixed": [document for turn in zip(*named.values(), strict=True) for document in turn]
        }
    return [
        group
        for name, documents in named.items()
        for group in _groups(name, documents, benchmark.together)
    ]


def _groups(
    bucket: str, documents: list[tuple[str, list[int]]], size: int
) -> Iterator[PromptGroup]:
    for first in range(0, len(documents), size):
        doc_ids, prompts = zip(*documents[first : first + size], strict=True)
        yield PromptGroup([*doc_ids], bucket, [*prompts])


def _rendered(
    config: RunConfig, prompts: Prompts, max_new_tokens: int
) -> Iterator[tuple[str, list[int], bool]]:
    for doc_id, text in read_texts(config):
        try:
            prompt = prompts.render(text, max_new_tokens)
        except DocumentError:
            continue
        yield doc_id, prompt.token_ids, prompt.num_dropped_tokens == 0


def read_texts(config: RunConfig) -> list[tuple[str, str]]:
    """Read ids and texts in input order. Raises ValueError for missing files or columns."""
    options: Any = config.input
    columns = [options.text_column, *([options.id_column] if options.id_column else [])]
    try:
        table = pq.read_table(options.path, columns=columns)
    except (OSError, KeyError) as error:
        raise ValueError(f"{options.path} cannot be read: {error}") from None
    if missing := [name for name in columns if name not in table.column_names]:
        raise ValueError(f"{options.path} has no column {missing[0]}")
    ids = table[options.id_column].to_pylist() if options.id_column else [*range(len(table))]
    texts = table[options.text_column].to_pylist()
    return [(str(doc_id), text) for doc_id, text in zip(ids, texts, strict=True) if text]

"""The same documents through every decoding mode and through transformers, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specextend.bench.documents import BenchDocument, choose_documents
from specextend.bench.environment import environment, use_configured_threads
from specextend.bench.figures import figures
from specextend.bench.measurement import Side
from specextend.bench.rounds import Say, run_rounds
from specextend.bench.sides import SideName, default_sides, describe_sides, draft_name, load_side, side_config
from specextend.config import RunConfig
from specextend.data.documents import open_source
from specextend.data.prompts import Prompts
from specextend.models import load_tokenizer, read_facts
from specextend.report.buckets import bucket_name


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure on. Decoding is greedy and one document at a time, whatever the configuration says."""

    buckets: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Prompt lengths: upper bounds in tokens."""
    per_bucket: int = 3
    """Documents of each."""
    max_new_tokens: int = 64
    """Tokens decoded of each document, at most."""

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("name one bucket at least")
        for name in ("per_bucket", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def compare(
    config: RunConfig, options: BenchOptions, say: Say, sides: Sequence[SideName] | None = None
) -> dict[str, Any]:
    """Measure `sides` on the configuration's input; figures as JSON values. None: all that the configuration can run.

    Raises ValueError for input, models or options that cannot be.
    """
    sides = sides or default_sides(config)
    described = describe_sides(config, sides)
    use_configured_threads(config)
    own = [side_config(config, name) for name in sides]
    documents = bench_documents(config, options, [side for side in own if side is not None])
    for bucket in missing_buckets(options, documents):
        say(f"no whole document of {bucket_name(bucket)} fits")
    header = describe(config, options, documents) | {
        "configured_draft": None if config.draft is None else draft_name(config.draft),
        "sides": described,
    }
    loaded: dict[str, Side] = {}
    for name in sides:
        say(f"loading {name}")
        loaded[name] = load_side(name, config)
    records = [*run_rounds(loaded, documents, options.max_new_tokens, say)]
    return {"kind": "compare", **header, **figures(records)}


def bench_documents(config: RunConfig, options: BenchOptions, sides: Sequence[RunConfig] = ()) -> list[BenchDocument]:
    """The documents to run on, rendered by the configuration's template, that fit it and each of `sides` whole."""
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    facts = read_facts(config.target.model, config.target.revision)
    return choose_documents(
        open_source(config.input),
        Prompts(tokenizer, config.prompt, min(each.max_tokens(facts.context_length) for each in (config, *sides))),
        buckets=options.buckets,
        per_bucket=options.per_bucket,
        max_new_tokens=options.max_new_tokens,
    )


def missing_buckets(options: BenchOptions, documents: Sequence[BenchDocument]) -> list[int]:
    """The buckets without a document."""
    found = {document.bucket for document in documents}
    return [bucket for bucket in options.buckets if bucket not in found]


def _without_own_paths(config: RunConfig) -> dict[str, Any]:
    """The configuration; no output, and local paths relative to here, as figures are published."""
    values = config.model_dump(mode="json", exclude={"output"})
    for section, key in (("input", "path"), ("target", "model"), ("draft", "model")):
        path = (values.get(section) or {}).get(key)
        if path and os.path.isabs(path):
            values[section][key] = os.path.relpath(path)
    return values


def describe(config: RunConfig, options: BenchOptions, documents: Sequence[BenchDocument]) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    return {
        "environment": environment(config),
        "config": _without_own_paths(config),
        "max_new_tokens": options.max_new_tokens,
        "doc_ids": [document.doc_id for document in documents],
    }

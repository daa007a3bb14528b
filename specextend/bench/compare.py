"""The same documents through every decoding mode and through transformers, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specextend.bench.documents import BenchDocument, choose_documents
from specextend.bench.environment import environment, use_configured_threads
from specextend.bench.figures import figures
from specextend.bench.rounds import Say, run_rounds
from specextend.bench.sides import Side, SideName, load_side
from specextend.config import RunConfig
from specextend.data.documents import open_source
from specextend.data.prompts import Prompts
from specextend.models import load_tokenizer, read_facts

SIDES: tuple[SideName, ...] = ("autoregressive", "tree", "specextend", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure on. Decoding is greedy and one document at a time, whatever the configuration says."""

    buckets: tuple[int, ...] = (1024, 2048, 4096)
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


def compare(config: RunConfig, options: BenchOptions, say: Say, sides: Sequence[SideName] = SIDES) -> dict[str, Any]:
    """Measure `sides` on the configuration's input; figures as JSON values.

    Raises ValueError for input, models or options that cannot be.
    """
    use_configured_threads(config)
    documents = bench_documents(config, options)
    header = describe(config, options, documents)
    loaded: dict[str, Side] = {}
    for name in sides:
        say(f"loading {name}")
        loaded[name] = load_side(name, config)
    records = [*run_rounds(loaded, documents, options.max_new_tokens, say)]
    return {"kind": "compare", **header, **figures(records)}


def bench_documents(config: RunConfig, options: BenchOptions) -> list[BenchDocument]:
    """The documents to run on, rendered by the configuration's template."""
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    facts = read_facts(config.target.model, config.target.revision)
    return choose_documents(
        open_source(config.input),
        Prompts(tokenizer, config.prompt, config.max_tokens(facts.context_length)),
        buckets=options.buckets,
        per_bucket=options.per_bucket,
        max_new_tokens=options.max_new_tokens,
    )


def _without_own_paths(config: RunConfig) -> dict[str, Any]:
    """The configuration; no output, and local paths relative to here, as figures are published."""
    values = config.model_dump(mode="json", exclude={"output"})
    for section, key in (("input", "path"), ("target", "model"), ("draft", "model")):
        if values.get(section) and os.path.isabs(values[section][key]):
            values[section][key] = os.path.relpath(values[section][key])
    return values


def describe(config: RunConfig, options: BenchOptions, documents: Sequence[BenchDocument]) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    return {
        "environment": environment(config),
        "config": _without_own_paths(config),
        "max_new_tokens": options.max_new_tokens,
        "doc_ids": [document.doc_id for document in documents],
    }

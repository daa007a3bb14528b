"""What the draft's view of the document is worth: drafts, cache policies and lengths, replayed against one target."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from typing import Any

from specextend.bench.attention_layers import layer_cells
from specextend.bench.compare import BenchOptions, describe
from specextend.bench.environment import use_configured_threads
from specextend.bench.retrieval_figures import Replayed, cells
from specextend.bench.rounds import Say
from specextend.bench.study import Study, StudyPlan
from specextend.bench.study_documents import KINDS, StudyDocument, StudyDocuments
from specextend.bench.study_drafts import (
    default_drafts,
    label_drafts,
    main_choices,
    parse_draft,
    study_choices,
    study_config,
)
from specextend.config import RunConfig
from specextend.decoding.retrieval import scored_layers
from specextend.drafters.options import DraftOptions
from specextend.models import load_tokenizer
from specextend.pairing import check_pair

_LONGEST_ANSWER = 192  # tokens of a probe's


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalOptions:
    """What to replay. Documents are greedy and one at a time; trees are whole, also where `tree.nodes` is auto."""

    kinds: tuple[str, ...] = KINDS
    lengths: tuple[int, ...] = (1024, 2048, 4096, 7168)
    """Prompt tokens, upper bounds."""
    per_length: int = 3
    """Documents of each kind and length."""
    drafts: tuple[str, ...] = ()
    """As `parse_draft` reads them; none: the configuration's, copies, and both merged."""
    policies: tuple[str, ...] = ("full", "streaming", "retrieval")
    cache_tokens: tuple[int, ...] = (256, 512, 1024)
    """Budgets of visible tokens, the smallest of them for the studies."""
    study: str | None = None
    """Label of the draft to study retrieval's own choices with; None: the first; `none`: no study."""
    max_new_tokens: int = 64
    """Greedy tokens of a document that is no probe."""
    seed: int = 0
    """Of the probes."""
    examples: str = "examples"
    """Folder of `govreport.parquet` and `pg19.parquet`."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"a kind is one of {', '.join(KINDS)}, got {kind!r}")
        for name in ("kinds", "lengths", "policies", "cache_tokens"):
            if not getattr(self, name):
                raise ValueError(f"name one of {name} at least")
        for name, least in (("per_length", 1), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.lengths) < 512:
            raise ValueError(f"a length is 512 tokens or more, got {min(self.lengths)}")


def retrieval(config: RunConfig, options: RetrievalOptions, say: Say) -> dict[str, Any]:
    """Record every document, replay it with every draft and cache; figures as JSON values.

    Raises ValueError for options, drafts or documents that cannot be, before a model is loaded.
    """
    use_configured_threads(config)
    plan = _plan(config, options, say)
    documents = _documents(config, options, plan, say)
    header = describe(
        config, BenchOptions(max_new_tokens=options.max_new_tokens), [each.document for each in documents]
    )
    say(f"loading {', '.join(plan.configs)}")
    study = Study(config, plan, documents, options.max_new_tokens)
    replayed: list[Replayed] = []
    for number, document in enumerate(documents, start=1):
        found = study.run(document)
        say(f"{number}/{len(documents)} {document.document.doc_id}: {_best(found)}")
        replayed += found
    return {
        "kind": "retrieval",
        **header,
        "seed": options.seed,
        "drafts": {label: _published(own.draft) for label, own in plan.configs.items() if own.draft is not None},
        "lengths": sorted(options.lengths),
        "cells": cells(each for each in replayed if each.choice.study is None),
        "studies": cells(each for each in replayed if each.choice.study is not None),
        "layers": layer_cells(study.views),
        "documents": study.documents,
    }


def _plan(config: RunConfig, options: RetrievalOptions, say: Say) -> StudyPlan:
    """What is replayed. Raises ValueError for what cannot be."""
    drafts = label_drafts([parse_draft(text) for text in options.drafts] or default_drafts(config))
    study = next(iter(drafts)) if options.study is None else options.study
    if study not in (*drafts, "none"):
        raise ValueError(f"the draft to study is one of {', '.join(drafts)} or none, got {study!r}")
    configs = {label: study_config(config, draft) for label, draft in drafts.items()}
    for label, own in configs.items():
        say(f"checking {label}")
        facts = check_pair(own.target, own.draft)
    scored_layers(config.cache, facts.num_layers)
    full = main_choices(config.cache, ["full"], ())
    choices = main_choices(config.cache, options.policies, options.cache_tokens)
    studied = study_choices(config.cache, min(options.cache_tokens), facts.num_layers)
    return StudyPlan(
        facts,
        load_tokenizer(config.target.model, config.target.revision),
        configs,
        # Nothing is hidden from a draft that copies alone.
        {label: full if draft.kind == "ngram" else choices for label, draft in drafts.items()},
        {} if study == "none" else {study: studied},
        studied[0].options,
    )


def _documents(config: RunConfig, options: RetrievalOptions, plan: StudyPlan, say: Say) -> list[StudyDocument]:
    """The short ones first. Raises ValueError where there is none, or one cannot fit the target."""
    max_tokens = plan.facts.context_length - plan.num_levels - 1
    needed = max(options.lengths) + max(_LONGEST_ANSWER, options.max_new_tokens)
    if needed > max_tokens:
        raise ValueError(f"the longest length and its output take {needed} tokens, the target holds {max_tokens}")
    source = StudyDocuments(config, options.examples, plan.tokenizer, max_tokens, options.seed)
    documents: list[StudyDocument] = []
    for length, kind in product(sorted(options.lengths), options.kinds):
        chosen = source.choose(kind, length, options.per_length, options.max_new_tokens)
        if len(chosen) < options.per_length:
            say(f"{kind}: {len(chosen)} documents of about {length} tokens, not {options.per_length}")
        documents += chosen
    if not documents:
        raise ValueError(f"no document of {', '.join(options.kinds)} has one of the lengths")
    return documents


def _published(draft: DraftOptions) -> dict[str, Any]:
    """Local paths relative to here."""
    model = os.path.relpath(draft.model) if os.path.isabs(draft.model) else draft.model
    return {"kind": draft.kind, "model": model, "ngram": draft.ngram}


def _best(replayed: list[Replayed]) -> str:
    """Acceptance length of each draft with the cache that serves it best."""
    best: dict[str, float] = {}
    for each in replayed:
        best[each.draft] = max(best.get(each.draft, 0.0), each.acceptance_length or 0.0)
    return ", ".join(f"{draft} {length:.2f}" for draft, length in best.items())

"""`retrieval`: the value of a draft's view of the document, for several drafts, cache policies and prompt lengths.

The target runs each document once; the trace is replayed with every draft and cache. Nothing is timed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specextend.bench.replay import Replayer
from specextend.bench.replay_figures import LayerView, Replayed, cells, layer_cells, layer_views, measure
from specextend.bench.study_documents import KINDS, StudyDocument, StudyDocuments
from specextend.bench.study_drafts import (
    CacheChoice,
    default_drafts,
    label_drafts,
    load_study_drafter,
    main_choices,
    parse_draft,
    study_choices,
    study_config,
)
from specextend.bench.trace import Trace, TraceRecorder
from specextend.bench.workload import BenchOptions, Say, describe, use_configured_threads
from specextend.config import RunConfig
from specextend.core import counted
from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.retrieval import scored_layers
from specextend.drafters.draft_options import DraftOptions
from specextend.loading import load_cached_target
from specextend.models import ModelFacts, load_tokenizer
from specextend.pairing import check_pair
from specextend.stats import ratio

_LONGEST_ANSWER = 192  # tokens of a probe's answer, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalOptions:
    """Options of a study. Decoding is greedy, one document at a time, with whole trees even if `tree.nodes` is auto."""

    kinds: tuple[str, ...] = KINDS
    """Kinds of documents."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 7168)
    """Upper bounds of the prompt in tokens."""
    per_length: int = 3
    """Number of documents of each kind and length."""
    drafts: tuple[str, ...] = ()
    """Drafts as `parse_draft` reads them; none: the configuration's draft, n-grams, and both merged."""
    policies: tuple[str, ...] = ("full", "streaming", "retrieval")
    """Cache policies."""
    cache_tokens: tuple[int, ...] = (256, 512, 1024)
    """Numbers of visible tokens; the studies use the smallest."""
    study: str | None = None
    """Label of the draft with which retrieval's own choices are studied; None: the first draft; `none`: no study."""
    max_new_tokens: int = 64
    """Number of greedy tokens of a document that is no probe."""
    seed: int = 0
    """Seed of the probes."""
    examples: str = "examples"
    """Folder that holds `govreport.parquet` and `pg19.parquet`."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"a kind must be one of {', '.join(KINDS)}, got {kind!r}")
        for name in ("kinds", "lengths", "policies", "cache_tokens"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name, least in (("per_length", 1), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.lengths) < 512:
            raise ValueError(f"a length must be 512 tokens or more, got {min(self.lengths)}")


def retrieval(config: RunConfig, options: RetrievalOptions, say: Say) -> dict[str, Any]:
    """Trace every document, replay it with every draft and cache, and return figures as JSON values.

    Raises ValueError, before a model is loaded, if an option, a draft or a document cannot be used.
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
    """Plan the replays. Raises ValueError if a draft or a cache is impossible."""
    drafts = label_drafts([parse_draft(text) for text in options.drafts] or default_drafts(config))
    study = next(iter(drafts)) if options.study is None else options.study
    if study not in (*drafts, "none"):
        raise ValueError(f"--study must be one of {', '.join(drafts)} or none, got {study!r}")
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
        # Nothing is hidden from an n-gram draft.
        {label: full if draft.kind == "ngram" else choices for label, draft in drafts.items()},
        {} if study == "none" else {study: studied},
        studied[0].options,
    )


def _documents(config: RunConfig, options: RetrievalOptions, plan: StudyPlan, say: Say) -> list[StudyDocument]:
    """Choose the documents, the short ones first. Raises ValueError if there is none, or if a length is too long."""
    max_tokens = plan.facts.context_length - plan.num_levels - 1
    needed = max(options.lengths) + max(_LONGEST_ANSWER, options.max_new_tokens)
    if needed > max_tokens:
        raise ValueError(f"the longest length and its output take {needed} tokens, but the target holds {max_tokens}")
    source = StudyDocuments(config, options.examples, plan.tokenizer, max_tokens, options.seed)
    documents: list[StudyDocument] = []
    for length, kind in product(sorted(options.lengths), options.kinds):
        chosen = source.choose(kind, length, options.per_length, options.max_new_tokens)
        if len(chosen) < options.per_length:
            wanted = counted(options.per_length, "document")
            say(f"{kind}: found only {len(chosen)} of {wanted} with about {length} tokens")
        documents += chosen
    if not documents:
        raise ValueError(f"no document of {', '.join(options.kinds)} has one of the lengths; choose others")
    return documents


def _published(draft: DraftOptions) -> dict[str, Any]:
    """Describe a draft, with a local path relative to the working folder."""
    model = os.path.relpath(draft.model) if os.path.isabs(draft.model) else draft.model
    return {"kind": draft.kind, "model": model, "ngram": draft.ngram}


def _best(replayed: list[Replayed]) -> str:
    """Format the acceptance length of each draft with its best cache."""
    best: dict[str, float] = {}
    for each in replayed:
        best[each.draft] = max(best.get(each.draft, 0.0), each.acceptance_length or 0.0)
    return ", ".join(f"{draft} {length:.2f}" for draft, length in best.items())


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The replays of a study, checked before a model is loaded."""

    facts: ModelFacts
    tokenizer: Any
    configs: dict[str, RunConfig]
    """Label of each draft -> the configuration with it."""
    choices: dict[str, list[CacheChoice]]
    """Label of each draft -> caches to compare."""
    study_choices: dict[str, list[CacheChoice]]
    """Label of each studied draft -> retrieval's own choices to compare."""
    layer_options: CacheOptions
    """Cache options with which layers are compared."""

    @property
    def num_levels(self) -> int:
        """Return the depth of the deepest tree of all drafts."""
        return max(config.num_tree_levels for config in self.configs.values())


class Study:
    """The loaded target and drafts."""

    def __init__(
        self, config: RunConfig, plan: StudyPlan, documents: Sequence[StudyDocument], max_new_tokens: int
    ) -> None:
        """Load everything, with room for the longest of `documents`."""
        self._plan, self._max_new_tokens = plan, max_new_tokens
        self.documents: list[dict[str, Any]] = []
        """Documents run so far, as JSON values."""
        self.views: list[LayerView] = []
        """Figures of the target's layers on the probes run so far."""
        longest = max(len(each.document.prompt_token_ids) + len(each.answer_token_ids or ()) for each in documents)
        num_rows = longest + max_new_tokens + 2 * plan.num_levels
        self._target, lm_head = load_cached_target(config, num_rows)
        self._drafters = {
            label: load_study_drafter(own, self._target, lm_head, num_rows) for label, own in plan.configs.items()
        }
        self._recorder = TraceRecorder(
            self._target,
            plan.facts.eos_token_ids,
            hidden_layers={layer for drafter in self._drafters.values() for layer in drafter.hidden_layers},
            scored_layers=range(plan.facts.num_layers),
            margin=plan.num_levels,
        )

    def run(self, document: StudyDocument) -> list[Replayed]:
        """Trace a document, and replay it with every draft and cache."""
        prompt = document.document.prompt_token_ids
        trace = self._recorder.record(prompt, document.answer_token_ids, self._max_new_tokens)
        self.documents.append(_describe(document, trace))
        self.views += layer_views(document, trace, self._plan.layer_options, self._target.scale)
        return [
            self._replay(document, trace, label, choice)
            for all_choices in (self._plan.choices, self._plan.study_choices)
            for label, choices in all_choices.items()
            for choice in choices
        ]

    def _replay(self, document: StudyDocument, trace: Trace, label: str, choice: CacheChoice) -> Replayed:
        replayer = Replayer(trace, self._drafters[label], choice.options, self._plan.facts.num_layers)
        return measure(document, trace, label, choice, replayer.run(self._target.scale))


def _describe(document: StudyDocument, trace: Trace) -> dict[str, Any]:
    """Describe one document as JSON values."""
    known = trace.known_token_ids[: trace.num_counted]
    own = sum(token_id == choice for token_id, choice in zip(known, trace.choice_token_ids, strict=False))
    return {
        "doc_id": document.document.doc_id,
        "kind": document.kind,
        "length": document.document.bucket,
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_dropped_tokens": document.num_dropped_tokens,
        "num_known_tokens": trace.num_counted,
        "target_agreement": None if document.answer_token_ids is None else ratio(own, trace.num_counted),
    }

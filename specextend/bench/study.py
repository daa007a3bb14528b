"""One target, several drafts: each document is recorded once and replayed with every draft and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specextend.bench.attention_layers import LayerView, layer_views
from specextend.bench.recording import Recorder, Recording
from specextend.bench.replay import Replayer
from specextend.bench.retrieval_figures import Replayed, measure
from specextend.bench.study_documents import StudyDocument
from specextend.bench.study_drafts import CacheChoice, load_study_drafter
from specextend.config import RunConfig
from specextend.decoding.chunks import Cutter
from specextend.decoding.options import CacheOptions
from specextend.loading import load_cached_target
from specextend.models import ModelFacts
from specextend.stats import ratio


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """What is replayed, checked before a model is loaded."""

    facts: ModelFacts
    tokenizer: Any
    configs: dict[str, RunConfig]
    """Label of each draft -> the configuration with it."""
    choices: dict[str, list[CacheChoice]]
    """Label -> caches to compare."""
    study_choices: dict[str, list[CacheChoice]]
    """Label -> retrieval's own choices to compare."""
    layer_options: CacheOptions
    """The budget that layers are compared with."""

    @property
    def num_levels(self) -> int:
        """Of the deepest tree of all drafts."""
        return max(config.num_tree_levels for config in self.configs.values())

    def every_choice(self) -> list[CacheChoice]:
        """Of all drafts."""
        return [choice for choices in (*self.choices.values(), *self.study_choices.values()) for choice in choices]


class Study:
    """The loaded models."""

    def __init__(
        self, config: RunConfig, plan: StudyPlan, documents: Sequence[StudyDocument], max_new_tokens: int
    ) -> None:
        """Loads all. `documents` say how much room is needed."""
        self._plan, self._max_new_tokens = plan, max_new_tokens
        self.documents: list[dict[str, Any]] = []
        """What was run so far, as JSON values."""
        self.views: list[LayerView] = []
        """The target's layers on the probes run so far."""
        longest = max(len(each.document.prompt_token_ids) + len(each.answer_token_ids or ()) for each in documents)
        num_rows = longest + max_new_tokens + 2 * plan.num_levels
        self._target, lm_head = load_cached_target(config, num_rows)
        self._drafters = {
            label: load_study_drafter(own, self._target, lm_head, num_rows) for label, own in plan.configs.items()
        }
        options = {choice.options for choice in plan.every_choice()}
        self._cutters = {each: Cutter(each, plan.tokenizer, plan.facts.vocab_size) for each in options}
        self._recorder = Recorder(
            self._target,
            plan.facts.eos_token_ids,
            hidden_layers={layer for drafter in self._drafters.values() for layer in drafter.hidden_layers},
            scored_layers=range(plan.facts.num_layers),
            margin=plan.num_levels,
        )

    def run(self, document: StudyDocument) -> list[Replayed]:
        """Record a document, and replay it."""
        prompt = document.document.prompt_token_ids
        recording = self._recorder.record(prompt, document.answer_token_ids, self._max_new_tokens)
        self.documents.append(_describe(document, recording))
        self.views += layer_views(document, recording, self._plan.layer_options, self._target.scale)
        return [
            self._replay(document, recording, label, choice)
            for all_choices in (self._plan.choices, self._plan.study_choices)
            for label, choices in all_choices.items()
            for choice in choices
        ]

    def _replay(self, document: StudyDocument, recording: Recording, label: str, choice: CacheChoice) -> Replayed:
        chunks = self._cutters[choice.options].cut(recording.prompt_token_ids)
        replayer = Replayer(recording, self._drafters[label], choice.options, chunks, self._plan.facts.num_layers)
        return measure(document, recording, label, choice, replayer.run(self._target.scale))


def _describe(document: StudyDocument, recording: Recording) -> dict[str, Any]:
    """One document as JSON values."""
    known = recording.known_token_ids[: recording.num_counted]
    own = sum(token_id == choice for token_id, choice in zip(known, recording.choice_token_ids, strict=False))
    return {
        "doc_id": document.document.doc_id,
        "kind": document.kind,
        "length": document.document.bucket,
        "num_prompt_tokens": recording.num_prompt_tokens,
        "num_dropped_tokens": document.num_dropped_tokens,
        "num_known_tokens": recording.num_counted,
        "target_agreement": None if document.answer_token_ids is None else ratio(own, recording.num_counted),
    }

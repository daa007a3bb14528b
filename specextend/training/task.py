"""The inputs of a training, for any kind of draft: options, text, samples, recordings, frozen target.

One document in ten is held out: no draft learns from it, and every draft is evaluated on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from specextend.config import RunConfig
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import Source
from specextend.models import load_tokenizer, read_facts, tokens_sha256
from specextend.training.fit import FitOptions, Say
from specextend.training.recording import (
    Recorder,
    Sample,
    SampleMaker,
    SampleOptions,
    SummaryOptions,
)

TrainedKind = Literal["eagle", "model"]
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelOptions:
    """Shape of a small standalone LM."""

    hidden_size: int = 384
    num_layers: int = 2
    intermediate_size: int = 1024
    num_kv_heads: int = 2
    positions: int = 1024
    """Most tokens of a window: what the model is trained on, and its `max_position_embeddings`."""

    def __post_init__(self) -> None:
        if min(self.hidden_size, self.num_layers, self.intermediate_size, self.num_kv_heads, self.positions) < 1:
            raise ValueError("the sizes of a standalone LM must be 1 or more")
        if self.hidden_size % (HEAD_DIM * self.num_kv_heads):
            raise ValueError(f"hidden_size must be a multiple of {HEAD_DIM} x num_kv_heads, got {self.hidden_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Settings of a whole training."""

    kind: TrainedKind = "eagle"
    """`eagle`: a head over the target's last hidden state, in our format; `model`: a small standalone LM."""
    start_from: str | None = None
    """Folder of a head in our format to continue from; it keeps its shape and vocabulary, and gains copy heads if it
    has none."""
    num_samples: int = 96
    """Number of prompts that the target reads."""
    vocabulary: int = 8192
    """Number of tokens that the draft can propose: all special tokens and the most frequent tokens of the text."""
    copy_heads: int = 2
    """`eagle`: number of KV heads that look up earlier occurrences of the last tokens."""
    text_passes: int = 1
    """`model`: number of passes over the text itself before the model learns from the target."""
    sample: SampleOptions = field(default_factory=SampleOptions)
    summary: SummaryOptions = field(default_factory=SummaryOptions)
    fit: FitOptions = field(default_factory=FitOptions)
    language_model: LanguageModelOptions = field(default_factory=LanguageModelOptions)

    def __post_init__(self) -> None:
        if self.kind not in get_args(TrainedKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(TrainedKind))}, got {self.kind!r}")
        if self.kind != "eagle" and self.start_from is not None:
            raise ValueError("start_from works with kind eagle only; a standalone LM starts from scratch")
        for name, least in (("num_samples", 2), ("vocabulary", 16), ("copy_heads", 0), ("text_passes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


Item = TypeVar("Item")

HELD_OUT = 10
"""One in this many documents, and one in this many samples, is held out."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text of a training, tokenized, sampled and recorded for one target."""

    config: RunConfig
    source: Source
    options: TrainOptions
    maker: SampleMaker
    learned: list[str]
    """Texts that are long enough for a sample."""
    held: list[str]
    """Texts that are long enough and held out."""
    short: list[str]
    """Texts that are too short for a sample."""

    def token_ids(self) -> Iterator[list[int]]:
        """Yield the tokens of every text that is not held out."""
        tokenizer = self._tokenizer()
        for text in (*self.learned, *self.short):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def vocabulary(self) -> Tensor:
        """Choose the token ids [V] int64 that a draft proposes. Raises ValueError if the text has too few of them."""
        return frequent_tokens(self.token_ids(), self._tokenizer().all_special_ids, self.options.vocabulary)

    def samples(self) -> list[Sample]:
        """Make `num_samples` samples, cycling over the documents; one in `HELD_OUT` comes from a held-out document."""
        learned, held = split(list(range(self.options.num_samples)))
        texts = dict(zip(learned, cycle(self.learned), strict=False))
        texts |= dict(zip(held, cycle(self.held), strict=False))
        return [self.maker.make(text, number) for number, text in sorted(texts.items())]

    def record(self, model: Any, samples: list[Sample], folder: Path, say: Say) -> list[Path]:
        """Record each sample with the target, and return the paths. Existing recordings are kept."""
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{number:05d}.safetensors" for number in range(len(samples))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        facts = read_facts(self.config.target.model, self.config.target.revision)
        recorder = Recorder(model, frozenset(facts.eos_token_ids), self.options.summary)
        for count, number in enumerate(missing, start=1):
            recorder.record(samples[number], self.options.sample.seed + number).save(paths[number])
            say(f"recording {count}/{len(missing)}: {len(samples[number].prompt_token_ids)} prompt tokens")
        return paths

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.target.model, self.config.target.revision)


def open_corpus(config: RunConfig, source: Source, options: TrainOptions) -> Corpus:
    """Read all texts of the source.

    Raises ValueError if fewer than two documents are long enough, or if the target's context is too short for one.
    """
    maker = _sample_maker(config, options)
    keys = [scanned.key for scanned in source.scan() if scanned.error_class is None]
    texts = [source.read(key).document.text for key in keys]
    fits = [maker.fits(text) for text in texts]
    if sum(fits) < 2:
        raise ValueError(
            f"at least two texts must have the {options.sample.min_tokens} tokens that a sample needs, because one is "
            f"held out: found {sum(fits)} of {len(texts)}"
        )
    learned, held = split([text for text, fit in zip(texts, fits, strict=True) if fit])
    short = [text for text, fit in zip(texts, fits, strict=True) if not fit]
    return Corpus(config, source, options, maker, learned, held, short)


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Split two or more items into those to learn from and those held out."""
    first = min(HELD_OUT // 2, len(items) - 1)
    return [item for number, item in enumerate(items) if number % HELD_OUT != first], items[first::HELD_OUT]


def _sample_maker(config: RunConfig, options: TrainOptions) -> SampleMaker:
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    context = read_facts(config.target.model, config.target.revision).context_length
    try:
        prompts = Prompts(tokenizer, config.prompt, context)
        return SampleMaker(tokenizer, prompts, options.sample, options.summary.max_new_tokens)
    except DocumentError as error:
        raise ValueError(f"the prompt does not fit the target: {error.message}") from None


def frequent_tokens(texts: Iterable[Sequence[int]], special: Sequence[int], size: int) -> Tensor:
    """Return `size` token ids in ascending order: the special ids and the most frequent others.

    Ties go to the lower id. Raises ValueError if the texts have fewer different tokens.
    """
    counts: Counter[int] = Counter()
    for token_ids in texts:
        counts.update(token_ids)
    kept = sorted(set(special))
    others = sorted((token_id for token_id in counts if token_id not in set(kept)), key=lambda i: (-counts[i], i))
    if len(kept) + len(others) < size:
        raise ValueError(
            f"a vocabulary of {size} cannot be made: the text has {len(kept) + len(others)} different tokens; "
            "give more text, or choose a smaller vocabulary"
        )
    return torch.tensor(sorted([*kept, *others[: size - len(kept)]]))


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen parts of a target that a draft is trained against."""

    name: str
    tokens_sha256: str
    """Hash of its tokenizer, from `models.tokens_sha256`."""
    config: Any
    """Configuration of transformers."""
    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""

    @property
    def device(self) -> torch.device:
        """Return the device on which drafts are trained."""
        return self.lm_head.device

    @property
    def head_dim(self) -> int:
        """Return the size of an attention head."""
        size: int | None = getattr(self.config, "head_dim", None)
        return size or self.config.hidden_size // self.config.num_attention_heads


@dataclass(frozen=True, slots=True)
class Task:
    """A training whose recordings exist."""

    corpus: Corpus
    target: Target
    vocabulary: Tensor | None
    """[V] int64 token ids that the draft proposes; None: those of the head to start from."""
    learned: list[Path]
    """Recordings to learn from."""
    held: list[Path]
    """Recordings to evaluate the draft on."""
    output: Path
    say: Say

    @property
    def options(self) -> TrainOptions:
        """Return the settings of the training."""
        return self.corpus.options

    @property
    def work(self) -> Path:
        """Return the folder that holds what a resumed training needs."""
        return self.output / "work"

    def groups(self) -> list[str]:
        """Name the kind of text of each part of a recording, the prompt first."""
        sample, summary = self.options.sample, self.options.summary
        facts = ["facts"] if sample.num_facts else []
        return ["text", *["quotes"] * sample.num_quotes, *facts, *["summaries"] * summary.count]


def frozen_parts(config: RunConfig, model: Any) -> Target:
    """Copy the parts of the configuration's target that lie outside its layers."""
    return Target(
        Path(config.target.model).name,
        tokens_sha256(load_tokenizer(config.target.model, config.target.revision)),
        model.config,
        model.get_input_embeddings().weight.detach().clone(),
        model.get_output_embeddings().weight.detach().clone(),
        model.model.norm.weight.detach().clone(),
    )

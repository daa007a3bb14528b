"""The text of a training, the samples made of it, and the target's recordings of them.

One document in ten is held out: no draft learns from it, and each is judged on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.hybrid import load_backend
from specextend.config import RunConfig
from specextend.data.documents import Source
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.decoding.model import CachedModel
from specextend.models import load_target, load_tokenizer, read_facts
from specextend.training.fit import Say
from specextend.training.options import TrainOptions
from specextend.training.recording import Recorder, rows_needed
from specextend.training.samples import Sample, SampleMaker
from specextend.training.vocabulary import frequent_tokens

Item = TypeVar("Item")

HELD_OUT = 10
"""One document, and one sample, in so many is held out."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts that can be read."""

    learned: list[str]
    """Long enough for a sample."""
    held: list[str]
    """The same, held out."""
    short: list[str]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents as a target reads them."""

    config: RunConfig
    source: Source
    options: TrainOptions
    documents: Documents
    maker: SampleMaker

    def token_ids(self) -> Iterator[list[int]]:
        """Every text that is not held out."""
        tokenizer = self._tokenizer()
        for text in (*self.documents.learned, *self.documents.short):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def vocabulary(self) -> Tensor:
        """[V] int64: the token ids that a draft is to propose. Raises ValueError where the text has fewer."""
        return frequent_tokens(self.token_ids(), self._tokenizer().all_special_ids, self.options.vocabulary)

    def samples(self) -> list[Sample]:
        """`num_samples` of them, round and round over the documents; one in `HELD_OUT` is of those held out."""
        learned, held = split(list(range(self.options.num_samples)))
        texts = dict(zip(learned, cycle(self.documents.learned), strict=False))
        texts |= dict(zip(held, cycle(self.documents.held), strict=False))
        return [self.maker.make(text, number) for number, text in sorted(texts.items())]

    def record(self, samples: list[Sample], layers: tuple[int, ...], folder: Path, say: Say) -> list[Path]:
        """A recording a sample with the outputs of `layers`; those that are there already are left as they are."""
        folder.mkdir(exist_ok=True)
        paths = [folder / f"{number:05d}.safetensors" for number in range(len(samples))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        if missing:
            recorder = self._recorder(samples, layers)
            for count, number in enumerate(missing, start=1):
                recorder.record(samples[number], self.options.sample.seed + number).save(paths[number])
                say(f"recording {count}/{len(missing)}: {len(samples[number].prompt_token_ids)} prompt tokens")
        return paths

    def _recorder(self, samples: list[Sample], layers: tuple[int, ...]) -> Recorder:
        config, options = self.config, self.options.summary
        facts = read_facts(config.target.model, config.target.revision)
        model = load_target(config.target, IMPLEMENTATION)
        longest = max(len(sample.prompt_token_ids) + max(map(len, sample.answers), default=0) for sample in samples)
        attend = load_backend(config.attention.backend, model.device)
        target = CachedModel(model, attend, rows_needed(longest, options))
        return Recorder(target, frozenset(facts.eos_token_ids), options, layers)

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.target.model, self.config.target.revision)


def open_corpus(config: RunConfig, source: Source, options: TrainOptions) -> Corpus:
    """Reads all texts.

    Raises ValueError where fewer than two documents are long enough, and where the target has no room for one.
    """
    maker = _sample_maker(config, options)
    keys = [scanned.key for scanned in source.scan() if scanned.error_class is None]
    texts = [source.read(key).document.text for key in keys]
    fits = [maker.fits(text) for text in texts]
    if sum(fits) < 2:
        raise ValueError(
            f"{sum(fits)} of {len(texts)} texts have the {options.sample.min_tokens} tokens that a sample needs; two "
            "must have them, as one is held out"
        )
    learned, held = split([text for text, fit in zip(texts, fits, strict=True) if fit])
    short = [text for text, fit in zip(texts, fits, strict=True) if not fit]
    return Corpus(config, source, options, Documents(learned, held, short), maker)


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Those to learn from, and those held out, of two or more."""
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

"""The text of a training, the samples made of it, and the target's recordings of them.

One document in ten is held out: no draft learns from it, and each is judged on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    def token_ids(self) -> Iterator[list[int]]:
        """Every text that is not held out."""
        tokenizer, documents = self._tokenizer(), self._documents()
        for text in (*documents.learned, *documents.short):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def vocabulary(self) -> Tensor:
        """[V] int64: the token ids that a draft is to propose. Raises ValueError where the text has fewer."""
        return frequent_tokens(self.token_ids(), self._tokenizer().all_special_ids, self.options.vocabulary)

    def samples(self) -> list[Sample]:
        """`num_samples` of them, round and round over the documents; one in `HELD_OUT` is of those held out.

        Raises ValueError where fewer than two documents are long enough, and where the target has no room for one.
        """
        documents, maker = self._documents(), self._maker()
        held = set(self.split(list(range(self.options.num_samples)))[1])
        counts = {True: 0, False: 0}
        samples = []
        for number in range(self.options.num_samples):
            pool = documents.held if number in held else documents.learned
            samples.append(maker.make(pool[counts[number in held] % len(pool)], number))
            counts[number in held] += 1
        return samples

    def split(self, samples: list[Item]) -> tuple[list[Item], list[Item]]:
        """Those to learn from, and those held out."""
        first = min(HELD_OUT // 2, len(samples) - 1)
        return [x for i, x in enumerate(samples) if i % HELD_OUT != first], samples[first::HELD_OUT]

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

    def _documents(self) -> Documents:
        maker = self._maker()
        rows = [scanned.key for scanned in self.source.scan() if scanned.error_class is None]
        texts = [self.source.read(key).document.text for key in rows]
        fits = [maker.fits(text) for text in texts]
        if sum(fits) < 2:
            raise ValueError(
                f"{sum(fits)} of {len(texts)} texts have the {self.options.sample.min_tokens} tokens that a sample "
                "needs; two must have them, as one is held out"
            )
        learned, held = self.split([text for text, fit in zip(texts, fits, strict=True) if fit])
        return Documents(learned, held, [text for text, fit in zip(texts, fits, strict=True) if not fit])

    def _maker(self) -> SampleMaker:
        tokenizer, target = self._tokenizer(), self.config.target
        context = read_facts(target.model, target.revision).context_length
        try:
            prompts = Prompts(tokenizer, self.config.prompt, context)
            return SampleMaker(tokenizer, prompts, self.options.sample, self.options.summary.max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"the prompt does not fit the target: {error.message}") from None

    def _tokenizer(self) -> Any:
        return load_tokenizer(self.config.target.model, self.config.target.revision)

"""What drafts learn from: prompts around pieces of documents, and what the target made of them.

A summary repeats its document, so a draft must learn to find earlier occurrences of a token. Beside the target's own
summaries, a sample has answers that quote spans of its document word for word, and one that repeats facts which were
hidden in it. The target reads each sample once, and its hidden states are kept in a file.

Shapes: `P` prompt tokens, `T` tokens of an answer, `B` summaries decoded together, `C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from specextend.data.prompts import Prompts
from specextend.training.task import MAX_QUOTE, MIN_QUOTE, TrainOptions

LEADS = (
    'The report states: "',
    'According to the document, "',
    'In its own words: "',
    'One passage reads as follows: "',
    'As the text puts it, "',
)
FACTS = (
    "The reference number of {name} is {code}.",
    "{name} is registered under {code}.",
    "The file of {name} carries the number {code}.",
)
SENTENCE_TOKENS = 64
"""Most tokens of one of these sentences."""
_SYLLABLES = ("bar", "del", "fen", "gor", "hal", "jin", "kes", "lom", "mar", "nis", "pol", "ras", "sun", "tor", "vek")
NUM_QUOTES = 4
"""Answers that quote a piece."""
NUM_FACTS = 3
"""Facts that are hidden in a piece and repeated in one answer."""
NUM_SUMMARIES = 3
"""The target's summaries of a piece; the first is greedy, the others are sampled."""
TEMPERATURE = 0.7
KINDS_OF_TEXT = ("text", *["quotes"] * NUM_QUOTES, "facts", *["summaries"] * NUM_SUMMARIES)
"""What each part of a recording holds, the prompt first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the answers to it, each read directly behind it."""

    prompt_token_ids: list[int]
    answers: list[list[int]]
    """The quotes, then the facts."""


class SampleMaker:
    """Makes samples of documents; the same seed gives the same samples."""

    def __init__(self, tokenizer: Any, prompts: Prompts, options: TrainOptions) -> None:
        """Check that the target's context has room for the shortest piece, with its answers and a summary.

        Raises ValueError if it does not, and DocumentError as `Prompts.room` does.
        """
        self._tokenizer, self._prompts, self._options = tokenizer, prompts, options
        facts = SENTENCE_TOKENS * NUM_FACTS
        self._answer_tokens = max(options.summary_tokens, MAX_QUOTE + SENTENCE_TOKENS, facts)
        room = prompts.room(self._answer_tokens) - facts - SENTENCE_TOKENS
        if room < options.min_tokens:
            raise ValueError(
                f"the target's context has room for pieces of {max(0, room)} tokens, fewer than min_tokens "
                f"({options.min_tokens}); choose smaller values"
            )
        self._most = min(options.max_tokens, room)

    def fits(self, text: str) -> bool:
        """Return True if a document is long enough for a sample."""
        return len(self.encode(text)) >= self._options.min_tokens

    def make(self, text: str, number: int) -> Sample:
        """Make the sample `number` from a random piece of a document that `fits`."""
        random = Random(f"{self._options.seed}/{number}")
        token_ids = self.encode(text)
        most = min(self._most, len(token_ids))
        # Short pieces are as frequent as long ones on a logarithmic scale.
        size = min(most, round(self._options.min_tokens * (most / self._options.min_tokens) ** random.random()))
        first = random.randrange(len(token_ids) - size + 1)
        piece = token_ids[first : first + size]
        names, sentences = self._facts(random)
        hidden = self._hide(piece, sentences, random)
        prompt = self._prompts.render(self._tokenizer.decode(hidden), self._answer_tokens)
        return Sample(prompt.token_ids, [*self._quotes(piece, random), self.encode(names)])

    def _facts(self, random: Random) -> tuple[str, list[str]]:
        """Make up facts: the answer that repeats them all, and the sentences to hide."""
        sentences = []
        for _ in range(NUM_FACTS):
            name = "".join(random.choices(_SYLLABLES, k=3)).capitalize()
            sentences.append(random.choice(FACTS).format(name=name, code=random.randrange(10_000, 1_000_000)))
        return " ".join(sentences), random.sample(sentences, len(sentences))

    def _hide(self, piece: list[int], sentences: Sequence[str], random: Random) -> list[int]:
        """Insert the sentences into the piece at random places."""
        hidden = list(piece)
        places = sorted((random.randrange(len(piece)) for _ in sentences), reverse=True)
        for at, sentence in zip(places, sentences, strict=True):  # from the end on, so that none is cut by another
            hidden[at:at] = self.encode(f" {sentence} ")
        return hidden

    def _quotes(self, piece: list[int], random: Random) -> Iterator[list[int]]:
        for _ in range(NUM_QUOTES):
            size = random.randint(MIN_QUOTE, MAX_QUOTE)
            first = random.randrange(len(piece) - size + 1)
            quote = self._tokenizer.decode(piece[first : first + size]).strip()
            yield self.encode(f'{random.choice(LEADS)}{quote}"')

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; none of its tokens is a control token."""
        return self._prompts.encode_document(text)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens and the target's hidden states at them."""

    token_ids: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, C] the last, after the final norm, as the LM head reads it"""


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt and its answers, each recorded directly behind the prompt."""

    prompt: Span
    answers: list[Span]

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        tensors = {}
        for name, span in (("prompt", self.prompt), *((f"answer{i}", span) for i, span in enumerate(self.answers))):
            tensors[f"{name}.token_ids"], tensors[f"{name}.hidden"] = span.token_ids, span.hidden
        temporary = path.with_suffix(".tmp")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote."""
        tensors = load_file(path)

        def span(name: str) -> Span:
            return Span(tensors[f"{name}.token_ids"], tensors[f"{name}.hidden"])

        return Recording(span("prompt"), [span(f"answer{i}") for i in range(len(tensors) // 2 - 1)])

    @property
    def num_tokens(self) -> int:
        """Return the number of its tokens."""
        return sum(len(span.token_ids) for span in (self.prompt, *self.answers))


class Recorder:
    """Records samples with a target of transformers."""

    def __init__(self, model: Any, eos_token_ids: frozenset[int], summary_tokens: int) -> None:
        self._model, self._eos_token_ids, self._summary_tokens = model, eos_token_ids, summary_tokens

    @torch.inference_mode()
    def record(self, sample: Sample, seed: int) -> Recording:
        """Record the prompt, the sample's answers and the target's own summaries, sampled with `seed`."""
        cache = DynamicCache(config=self._model.config)
        prompt = self._read(sample.prompt_token_ids, cache)
        answers = []
        for answer in sample.answers:
            answers.append(self._read(answer, cache))
            cache.crop(-len(answer))
        generator = torch.Generator(self._model.device).manual_seed(seed)
        return Recording(prompt, [*answers, *self._summaries(prompt, cache, generator)])

    def _read(self, token_ids: list[int], cache: DynamicCache) -> Span:
        """Run tokens [T] behind those in the cache."""
        tokens = torch.tensor(token_ids)
        return Span(tokens, self._forward(tokens[None], cache)[0].cpu())

    def _forward(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:
        """Compute the last hidden states [B, T, C] of token_ids [B, T]."""
        hidden: Tensor = self._model.model(token_ids.to(self._model.device), past_key_values=cache).last_hidden_state
        return hidden

    def _summaries(self, prompt: Span, cache: DynamicCache, generator: torch.Generator) -> list[Span]:
        """Decode [B] summaries of the prompt in the cache together, and cut each behind its end."""
        cache.batch_repeat_interleave(NUM_SUMMARIES)
        last = prompt.hidden[-1:].to(self._model.device).expand(NUM_SUMMARIES, -1)
        steps = []
        for _ in range(self._summary_tokens):
            chosen = self._choose(last, generator)[:, None]
            hidden = self._forward(chosen, cache)
            steps.append((chosen, hidden))
            last = hidden[:, 0]
        columns = [torch.cat(column, 1).cpu() for column in zip(*steps, strict=True)]
        return [self._cut(*span) for span in zip(*columns, strict=True)]

    def _choose(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the next tokens [B]: greedily for the first sequence, by sampling for the others."""
        logits = self._model.lm_head(hidden).float()
        sampled = (logits / TEMPERATURE).softmax(-1).multinomial(1, generator=generator)[:, 0]
        sampled[0] = logits[0].argmax()
        return sampled

    def _cut(self, token_ids: Tensor, hidden: Tensor) -> Span:
        """Cut a span behind the first token that ends an output."""
        ends = [i for i, token_id in enumerate(token_ids.tolist()) if token_id in self._eos_token_ids]
        size = ends[0] + 1 if ends else len(token_ids)
        return Span(token_ids[:size].clone(), hidden[:size].clone())

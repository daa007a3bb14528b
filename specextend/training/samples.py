"""Training samples: prompts around pieces of documents, with answers that copy from far back in the prompt.

A summary repeats its document, so a draft must learn to find earlier occurrences of a token. Beside the target's own
summaries (`recording.py` adds them), a sample has answers that quote spans of its document word for word, and one
that repeats facts which were hidden in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from specextend.data.prompts import Prompts

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """Shape of the samples. Lengths are in tokens."""

    min_tokens: int = 1024
    """Shortest piece of a document."""
    max_tokens: int = 5120
    """Longest piece of a document."""
    num_quotes: int = 4
    """Number of answers that quote the piece."""
    min_quote: int = 32
    max_quote: int = 96
    num_facts: int = 3
    """Number of facts hidden in a piece and repeated in one answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 * self.max_quote <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be from 2 x max_quote ({2 * self.max_quote}) to max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )
        if self.num_quotes < 0 or self.num_facts < 0:
            raise ValueError("num_quotes and num_facts must be 0 or more")
        if not 1 <= self.min_quote <= self.max_quote:
            raise ValueError(f"min_quote must be from 1 to max_quote ({self.max_quote}), got {self.min_quote}")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the answers to it, each read directly behind it."""

    prompt_token_ids: list[int]
    answers: list[list[int]]
    """The quotes, then the facts if there are any."""


class SampleMaker:
    """Makes samples of documents; the same seed gives the same samples."""

    def __init__(self, tokenizer: Any, prompts: Prompts, options: SampleOptions, max_summary_tokens: int) -> None:
        """Check that the target's context has room for the shortest piece, its answers and `max_summary_tokens`.

        Raises ValueError if it does not, and DocumentError as `Prompts.room` does.
        """
        self._tokenizer, self._prompts, self._options = tokenizer, prompts, options
        facts = SENTENCE_TOKENS * options.num_facts
        self._answer_tokens = max(max_summary_tokens, options.max_quote + SENTENCE_TOKENS, facts)
        room = prompts.room(self._answer_tokens) - facts - SENTENCE_TOKENS
        if room < options.min_tokens:
            raise ValueError(
                f"the target's context has room for pieces of {max(0, room)} tokens, fewer than min_tokens "
                f"({options.min_tokens}); choose smaller values"
            )
        self._most = min(options.max_tokens, room)

    def fits(self, text: str) -> bool:
        """Return True if a document is long enough for a sample."""
        return len(self._prompts.encode_document(text)) >= self._options.min_tokens

    def make(self, text: str, number: int) -> Sample:
        """Make the sample `number` from a random piece of a document that `fits`."""
        random = Random(f"{self._options.seed}/{number}")
        token_ids = self._prompts.encode_document(text)
        most = min(self._most, len(token_ids))
        # Short pieces are as frequent as long ones on a logarithmic scale.
        size = min(most, round(self._options.min_tokens * (most / self._options.min_tokens) ** random.random()))
        first = random.randrange(len(token_ids) - size + 1)
        piece = token_ids[first : first + size]
        names, sentences = self._facts(random)
        hidden = self._hide(piece, sentences, random)
        prompt = self._prompts.render(self._tokenizer.decode(hidden), self._answer_tokens)
        return Sample(prompt.token_ids, [*self._quotes(piece, random), *([self._encode(names)] if names else [])])

    def _facts(self, random: Random) -> tuple[str, list[str]]:
        """Make up facts: the answer that repeats them all, and the sentences to hide."""
        sentences = []
        for _ in range(self._options.num_facts):
            name = "".join(random.choices(_SYLLABLES, k=3)).capitalize()
            sentences.append(random.choice(FACTS).format(name=name, code=random.randrange(10_000, 1_000_000)))
        return " ".join(sentences), random.sample(sentences, len(sentences))

    def _hide(self, piece: list[int], sentences: Sequence[str], random: Random) -> list[int]:
        """Insert the sentences into the piece at random places."""
        hidden = list(piece)
        for sentence in sentences:
            at = random.randrange(len(hidden))
            hidden[at:at] = self._encode(f" {sentence} ")
        return hidden

    def _quotes(self, piece: list[int], random: Random) -> Iterator[list[int]]:
        for _ in range(self._options.num_quotes):
            size = random.randint(self._options.min_quote, self._options.max_quote)
            first = random.randrange(len(piece) - size + 1)
            quote = self._tokenizer.decode(piece[first : first + size]).strip()
            yield self._encode(f'{random.choice(LEADS)}{quote}"')

    def _encode(self, text: str) -> list[int]:
        return self._prompts.encode_document(text)

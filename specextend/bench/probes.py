"""Probes: prompts of real text with a hidden detail that the answer must repeat word for word.

`passkey` hides one number, `needles` four to eight codes, all of which are asked for; `quote` asks for a passage of the
text itself. The answer is known, so a draft can be compared with it token by token. The answer's needle is known too:
the tokens that can only come from the hidden detail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, Literal, get_args

from specextend.data.prompts import PromptOptions, Prompts

ProbeKind = Literal["passkey", "needles", "quote"]
PROBE_KINDS: tuple[ProbeKind, ...] = get_args(ProbeKind)

_INTRODUCTION = "Read the text. A question follows it."
_NAMES = (
    *("Alma", "Boris", "Clara", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Leon"),
    *("Mabel", "Nathan", "Olga", "Pierre", "Rosa", "Simon", "Thelma", "Victor", "Wanda", "Xavier", "Yvonne", "Zeno"),
)
_WORDS = (
    *("amber", "basket", "candle", "dolphin", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "marble", "needle", "orange", "pepper", "quartz", "ribbon", "saddle", "tunnel", "umbrella", "velvet"),
    *("walnut", "yellow", "zebra", "anchor", "bridge", "copper", "diamond", "eagle"),
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_QUOTE_TOKENS = (48, 128)
_QUOTE_QUESTION = "Repeat the passage that begins with"
_GIVEN_WORDS = 6  # words of a quote that the question gives
_FAR = 0.5  # a quote ends in this first part of the text
_MAX_WORDS = 80  # anything longer is not a sentence but a table


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt whose answer is known."""

    doc_id: str
    kind: ProbeKind
    length: int
    """Most prompt tokens."""
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    sources: list[int | None]
    """For each answer token, the prompt position of the needle token that it repeats; None for the rest."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """The text of a probe before tokenization."""

    sentences: list[str]
    question: str
    answer: list[tuple[str, bool]]
    """(text, True if it is part of a needle), in order."""
    kept: frozenset[str]
    """Sentences that must stay if the prompt is too long."""


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences with single spaces, and drop whatever is too long to be one."""
    pieces = _SENTENCE_END.split(" ".join(text.split()))
    return [piece for piece in pieces if piece and len(piece.split()) <= _MAX_WORDS]


class ProbeMaker:
    """Makes probes of any length from the sentences of real texts."""

    def __init__(self, tokenizer: Any, system: str, texts: Sequence[str], seed: int) -> None:
        """Take `prompt.system` and the texts; a probe uses whole texts, in seeded order, until it is long enough."""
        self._tokenizer, self._seed = tokenizer, seed
        self._prompts = Prompts(tokenizer, PromptOptions(instruction="{document}", system=system), 1 << 30)
        self._texts = [sentences_of(text) for text in texts]
        self._sizes = [[self._count(sentence) for sentence in sentences] for sentences in self._texts]

    def make(self, kind: ProbeKind, length: int, number: int) -> Probe:
        """Make probe `number` of a kind, whose prompt has at most `length` tokens and at least a sentence less.

        Raises ValueError if the texts are too short for it.
        """
        random = Random(f"{self._seed}-{kind}-{length}-{number}")
        build: dict[ProbeKind, Callable[[Random, int], _Draft]] = {
            "passkey": self._passkey,
            "needles": self._needles,
            "quote": self._quote,
        }
        draft = build[kind](random, length)
        prompt = self._render(draft)
        while len(prompt) > length:
            free = [index for index, sentence in enumerate(draft.sentences) if sentence not in draft.kept]
            if not free:
                raise ValueError(f"a {kind} probe does not fit {length} tokens; choose a larger length")
            del draft.sentences[free[-1]]
            prompt = self._render(draft)
        answer, needle = self._encode(draft.answer)
        sources = _sources(prompt, answer, needle)
        return Probe(f"{kind}-{length}-{number:02d}", kind, length, prompt, answer, sources)

    def _passkey(self, random: Random, length: int) -> _Draft:
        key = str(random.randrange(10_000, 100_000))
        needle, question = f"The pass key is {key}.", "What is the pass key?"
        sentences = self._scatter(random, self._filler(random, length, [needle, question]), [needle])
        answer = [("The pass key is ", False), (key, True), (".", False)]
        return _Draft(sentences, question, answer, frozenset([needle]))

    def _needles(self, random: Random, length: int) -> _Draft:
        names = random.sample(_NAMES, random.randint(4, 8))
        words = random.sample(_WORDS, len(names))
        codes = [word if random.random() < 0.5 else str(random.randrange(1000, 10_000)) for word in words]
        needles = [f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
        order = random.sample(range(len(names)), len(names))
        asked = f"{', '.join(names[i] for i in order[:-1])} and {names[order[-1]]}"
        question = f"What are the codes of {asked}? Answer in this order."
        sentences = self._scatter(random, self._filler(random, length, [*needles, question]), needles)
        answer = [
            piece for i in order for piece in ((f"The code of {names[i]} is ", False), (codes[i], True), (". ", False))
        ]
        return _Draft(sentences, question, [*answer[:-1], (".", False)], frozenset(needles))

    def _quote(self, random: Random, length: int) -> _Draft:
        filler = self._filler(random, length, [f"{_QUOTE_QUESTION} {'word ' * _GIVEN_WORDS}"])
        passages = self._passages(filler)
        if not passages:
            raise ValueError(
                f"a text of {length} tokens has no passage of {_QUOTE_TOKENS[0]} to {_QUOTE_TOKENS[1]} tokens to quote"
            )
        chosen = random.choice(passages)
        passage = " ".join(filler[chosen.start : chosen.stop])
        begin = " ".join(passage.split()[:_GIVEN_WORDS])
        question = f'{_QUOTE_QUESTION} "{begin}", word for word.'
        return _Draft(
            filler,
            question,
            [(begin, False), (passage[len(begin) :], True)],
            frozenset(filler[chosen.start : chosen.stop]),
        )

    def _passages(self, filler: list[str]) -> list[range]:
        """Find passages to ask for: of the right length, far enough back, and identified by their first words."""
        ends = [0, *accumulate(self._count(sentence) for sentence in filler)]
        text = " ".join(filler)
        found = []
        for start, sentence in enumerate(filler):
            stop = next((i for i in range(start + 1, len(ends)) if ends[i] - ends[start] >= _QUOTE_TOKENS[0]), None)
            if stop is None or ends[stop] > _FAR * ends[-1]:
                break
            begin = " ".join(sentence.split()[:_GIVEN_WORDS])
            if ends[stop] - ends[start] <= _QUOTE_TOKENS[1] and '"' not in begin and text.count(begin) == 1:
                found.append(range(start, stop))
        return [passage for passage in found if len(filler[passage.start].split()) >= _GIVEN_WORDS]

    @staticmethod
    def _scatter(random: Random, filler: list[str], needles: list[str]) -> list[str]:
        """Insert needles between sentences of the filler. Raises ValueError if it has too few."""
        if len(filler) < len(needles):
            raise ValueError(
                f"{len(needles)} needles do not fit between {len(filler)} sentences; choose a larger length"
            )
        sentences = list(filler)
        places = sorted(random.sample(range(len(filler) + 1), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            sentences.insert(place, needle)
        return sentences

    def _filler(self, random: Random, length: int, others: list[str]) -> list[str]:
        """Collect sentences for a prompt of `length` tokens that also holds `others`."""
        room = length - self._prompts.num_template_tokens - sum(map(self._count, [_INTRODUCTION, *others]))
        filler: list[str] = []
        for index in random.sample(range(len(self._texts)), len(self._texts)):
            for sentence, size in zip(self._texts[index], self._sizes[index], strict=True):
                if room < size:
                    return filler
                filler.append(sentence)
                room -= size
        raise ValueError(f"the texts for probes are too short for {length} tokens; choose a smaller length")

    def _render(self, draft: _Draft) -> list[int]:
        text = f"{_INTRODUCTION}\n\n{' '.join(draft.sentences)}\n\n{draft.question}"
        return self._prompts.render(text, 0).token_ids

    def _encode(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Tokenize the answer; return its tokens, and for each whether it holds a part of a needle."""
        text = "".join(piece for piece, _ in pieces)
        is_needle = [flag for piece, flag in pieces for _ in piece]
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], [any(is_needle[start:end]) for start, end in encoding["offset_mapping"]]

    def _count(self, text: str) -> int:
        return len(self._tokenizer(" " + text, add_special_tokens=False)["input_ids"])


def _sources(prompt: list[int], answer: list[int], needle: list[bool]) -> list[int | None]:
    """Find each run of needle tokens in the prompt; None for other tokens and for runs that are not found.

    A run is searched together with the tokens before it, which tell two equal codes apart.
    """
    sources: list[int | None] = [None] * len(answer)
    for first in (i for i, flag in enumerate(needle) if flag and (i == 0 or not needle[i - 1])):
        stop = next((i for i in range(first, len(needle)) if not needle[i]), len(needle))
        before = max(0, first - 3)
        at = _find(prompt, answer[before:stop])
        if at is not None:
            sources[first:stop] = range(at + first - before, at + stop - before)
    return sources


def _find(tokens: list[int], run: list[int]) -> int | None:
    width = len(run)
    return next((i for i in range(len(tokens) - width + 1) if tokens[i : i + width] == run), None)

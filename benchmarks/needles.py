"""The needle study: parts of a document shown by a cache policy, and the draft's use of them.

Documents are probes: real text with a hidden detail to repeat word for word. `passkey` hides a
number, `needles` four to eight codes; `quote` asks for a passage of the text. The target reads
prompt and known answer, then the draft is called as in the engine, step by step. A node of its tree
counts as accepted while its path follows the target's choices. Nothing is timed. Shapes: `T`
tokens, `n` tokens of the answer, `C` hidden size, `F` features, `H` query heads, `K` key heads, `D`
head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchmark import Benchmark, ProbeKind
from benchmarks.documents import bucket_name, read_texts
from specextend import RunConfig, load_engine
from specextend.attention.plan import AttentionPlan
from specextend.data.prompts import PromptOptions, Prompts
from specextend.decoding.device import traits_of
from specextend.decoding.engine import Engine
from specextend.decoding.retrieval import CachePolicy, mean_mass, scored_layers
from specextend.decoding.tree import Decided, Drafter, DraftTrees
from specextend.models.causal_lm import load_tokenizer
from specextend.stats import DecodingStats, ratio

_INTRODUCTION = "Read the text. A question follows it."
_NAMES = (
    "Alma",
    "Boris",
    "Clara",
    "Dorian",
    "Edith",
    "Felix",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karla",
    "Leon",
)
_WORDS = (
    *(
        "amber",
        "basket",
        "candle",
        "dolphin",
        "engine",
        "feather",
        "garden",
        "hammer",
        "island",
        "jacket",
        "kettle",
    ),
    *(
        "ladder",
        "marble",
        "needle",
        "orange",
        "pepper",
        "quartz",
        "ribbon",
        "saddle",
        "tunnel",
        "umbrella",
        "velvet",
    ),
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_MOST_WORDS = 80
"""Maximum words of a sentence; longer ones are tables."""
_MOST_CHARACTERS = 20_000
"""Maximum characters of a text; drafts may have been trained on longer ones."""
_QUOTE = range(48, 129)
"""Tokens of a quoted passage."""
_GIVEN_WORDS = 6
"""Words of the passage given in the question."""
_FAR = 0.5
"""Quotes end in this first part of the text."""
_SLOT = 0
"""Batch slot of the only sequence."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt with a known answer."""

    doc_id: str
    kind: ProbeKind
    bucket: str
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    sources: list[int | None]
    """Prompt position of the needle token repeated by each answer token; None for others."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The text of a probe before tokenization."""

    sentences: list[str]
    question: str
    answer: list[tuple[str, bool]]
    """Pairs of text and True for parts of a needle, in order."""


def replay_probes(
    benchmark: Benchmark, configs: Mapping[str, RunConfig], say: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each variant, a row per probe. Raises ValueError if a length is too
    short.
    """
    first = next(iter(configs.values()))
    tokenizer = load_tokenizer(first.target.model)
    maker = ProbeMaker(tokenizer, first.prompt.system, [text for _, text in read_texts(first)])
    grid = product(benchmark.buckets, benchmark.probes, range(benchmark.per_bucket))
    probes = [maker.make(kind, length, number) for length, kind, number in grid]
    for name, config in configs.items():
        say(f"{name}: {len(probes)} probes")
        replayer = Replayer(config)
        yield [{"variant": name, **replayer.run(probe)} for probe in probes]


class ProbeMaker:
    """Makes probes of any length from sentences of real texts."""

    def __init__(self, tokenizer: Any, system: str, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._prompts = Prompts(
            tokenizer, PromptOptions(instruction="{{ document }}", system=system), 1 << 30
        )
        self._texts = [
            [(sentence, self._count(sentence)) for sentence in sentences_of(text)]
            for text in texts
            if len(text) <= _MOST_CHARACTERS
        ]

    def make(self, kind: ProbeKind, length: int, number: int) -> Probe:
        """Make a probe with at most `length` prompt tokens.

        Raises:
            ValueError: The texts are too short.
        """
        random, room = Random(f"{kind}-{length}-{number}"), length
        build = {"passkey": self._passkey, "needles": self._needles, "quote": self._quote}[kind]
        while True:
            hidden = build(Random(random.random()), room)
            text = f"{_INTRODUCTION}\n\n{' '.join(hidden.sentences)}\n\n{hidden.question}"
            prompt = self._prompts.render(text, 0).token_ids
            if len(prompt) <= length:
                break
            room -= len(prompt) - length
        answer, is_needle = self._encode(hidden.answer)
        sources = find_sources(prompt, answer, is_needle)
        return Probe(
            f"{kind}-{length}-{number:02d}", kind, bucket_name(length), prompt, answer, sources
        )

    def _passkey(self, random: Random, length: int) -> Hidden:
        key = str(random.randrange(10_000, 100_000))
        needle, question = f"The pass key is {key}.", "What is the pass key?"
        sentences = _scatter(random, self._filler(random, length, [needle, question]), [needle])
        return Hidden(sentences, question, [("The pass key is ", False), (key, True), (".", False)])

    def _needles(self, random: Random, length: int) -> Hidden:
        names = random.sample(_NAMES, random.randint(4, 8))
        words = random.sample(_WORDS, len(names))
        codes = [
            word if random.random() < 0.5 else str(random.randrange(1000, 10_000)) for word in words
        ]
        needles = [
            f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)
        ]
        order = random.sample(range(len(names)), len(names))
        asked = f"{', '.join(names[i] for i in order[:-1])} and {names[order[-1]]}"
        question = f"What are the codes of {asked}? Answer in this order."
        sentences = _scatter(random, self._filler(random, length, [*needles, question]), needles)
        answer = [
            piece
            for i in order
            for piece in ((f"The code of {names[i]} is ", False), (codes[i], True), (". ", False))
        ]
        return Hidden(sentences, question, [*answer[:-1], (".", False)])

    def _quote(self, random: Random, length: int) -> Hidden:
        ask = "Repeat the passage that begins with"
        filler = self._filler(random, length, [f"{ask} {'word ' * _GIVEN_WORDS}"])
        if not (passages := self._passages(filler)):
            raise ValueError(
                f"a text of {length} tokens has no passage of {_QUOTE[0]} to {_QUOTE[-1]} tokens "
                "to quote"
            )
        passage = random.choice(passages)
        begin = " ".join(passage.split()[:_GIVEN_WORDS])
        return Hidden(
            filler,
            f'{ask} "{begin}", word for word.',
            [(begin, False), (passage[len(begin) :], True)],
        )

    def _passages(self, filler: list[str]) -> list[str]:
        """Find passages to quote: of the right length, far back, and identified by their first
        words.
        """
        ends, text = (
            [0, *accumulate(self._count(sentence) for sentence in filler)],
            " ".join(filler),
        )
        found = []
        for start, sentence in enumerate(filler):
            stop = next(
                (i for i in range(start + 1, len(ends)) if ends[i] - ends[start] >= _QUOTE[0]), None
            )
            if stop is None or ends[stop] > _FAR * ends[-1]:
                break
            words = sentence.split()[:_GIVEN_WORDS]
            begin = " ".join(words)
            is_clear = len(words) == _GIVEN_WORDS and '"' not in begin and text.count(begin) == 1
            if is_clear and ends[stop] - ends[start] in _QUOTE:
                found.append(" ".join(filler[start:stop]))
        return found

    def _filler(self, random: Random, length: int, others: list[str]) -> list[str]:
        room = (
            length
            - self._prompts.num_template_tokens
            - sum(map(self._count, [_INTRODUCTION, *others]))
        )
        filler: list[str] = []
        for text in random.sample(self._texts, len(self._texts)):
            for sentence, size in text:
                if room < size:
                    return filler
                filler.append(sentence)
                room -= size
        raise ValueError(
            f"the texts for probes are too short for {length} tokens; choose a smaller length"
        )

    def _encode(self, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        text = "".join(piece for piece, _ in pieces)
        is_needle = [flag for piece, flag in pieces for _ in piece]
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], [
            any(is_needle[start:end]) for start, end in encoding["offset_mapping"]
        ]

    def _count(self, text: str) -> int:
        return len(self._tokenizer(" " + text, add_special_tokens=False)["input_ids"])


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences, without overlong ones."""
    pieces = _SENTENCE_END.split(" ".join(text.split()))
    return [piece for piece in pieces if piece and len(piece.split()) <= _MOST_WORDS]


def _scatter(random: Random, filler: list[str], needles: list[str]) -> list[str]:
    if len(filler) < len(needles):
        raise ValueError(
            f"{len(needles)} needles do not fit between {len(filler)} sentences; choose a larger "
            "length"
        )
    sentences = list(filler)
    places = sorted(random.sample(range(len(filler) + 1), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        sentences.insert(place, needle)
    return sentences


def find_sources(prompt: list[int], answer: list[int], is_needle: list[bool]) -> list[int | None]:
    """Find each run of needle tokens in the prompt; None for other tokens and missing runs.

    The tokens before a run are included in the search, to distinguish equal codes.
    """
    sources: list[int | None] = [None] * len(answer)
    for first in (
        i for i, flag in enumerate(is_needle) if flag and (i == 0 or not is_needle[i - 1])
    ):
        stop = next((i for i in range(first, len(is_needle)) if not is_needle[i]), len(is_needle))
        before = max(0, first - 3)
        run = answer[before:stop]
        at = next(
            (i for i in range(len(prompt) - len(run) + 1) if prompt[i : i + len(run)] == run), None
        )
        if at is not None:
            sources[first:stop] = range(at + first - before, at + stop - before)
    return sources


@dataclass(frozen=True, slots=True)
class Trace:
    """The target's result for a prompt and its known answer."""

    choice_token_ids: list[int]
    """Choice of the target for each answer token [n], given the earlier ones."""
    features: Tensor
    """Features for the draft [prompt + n - 1, F]."""
    queries: list[Tensor]
    """Queries of each scoring layer [n, H, D], from the prompt's last position."""
    keys: list[Tensor]
    """Keys of each scoring layer [K, prompt + n - 1, D]."""


class Replayer:
    """Target and draft of a variant, with its cache policy."""

    def __init__(self, config: RunConfig) -> None:
        if config.active_draft is None:
            raise ValueError("the needle study needs a draft; set decoding.mode to specextend")
        whole = replace(config.decoding, mode="tree")  # whole trees, and room for the whole text
        self._engine: Engine = load_engine(config.model_copy(update={"decoding": whole}))
        self._drafter: Drafter = self._engine.drafter
        sees_all = config.active_draft.kind == "ngram"
        self._options = replace(config.cache, policy="full") if sees_all else config.cache
        self._layers = scored_layers(self._options, self._engine.target.layers)

    @torch.inference_mode()
    def run(self, probe: Probe) -> dict[str, Any]:
        """Replay a probe and return its row. Raises ValueError if a cache is too small."""
        target, drafter, num_new = self._engine.target, self._drafter, len(probe.answer_token_ids)
        region = target.cache.rows.take(len(probe.prompt_token_ids) + num_new)
        if region is None or not drafter.admit(_SLOT, len(probe.prompt_token_ids), num_new):
            raise ValueError(f"a cache has no room for {probe.doc_id}; choose smaller lengths")
        try:
            trace = self._trace(probe, region.start)
            return self._row(probe, trace, self._replay(probe, trace))
        finally:
            drafter.release(_SLOT)
            target.cache.rows.give_back(region)

    def _trace(self, probe: Probe, start: int) -> Trace:
        target = self._engine.target
        prompt, known = probe.prompt_token_ids, probe.answer_token_ids[:-1]
        chunk_size = traits_of(target.device).prefill_chunk
        parts = [prompt[first : first + chunk_size] for first in range(0, len(prompt), chunk_size)]
        outputs = [
            self._forward(part, number * chunk_size, start) for number, part in enumerate(parts)
        ]
        answer = self._forward(known, len(prompt), start)
        # the last prompt position decides a token
        deciding, skipped = [outputs[-1], answer], len(parts[-1]) - 1
        rows = slice(start, start + len(prompt) + len(known))
        return Trace(
            choice_token_ids=target.logits(torch.cat([each[0] for each in deciding])[skipped:])
            .argmax(-1)
            .tolist(),
            features=torch.cat([each[1] for each in [*outputs, answer]]),
            queries=[
                torch.cat([each[2][layer] for each in deciding])[skipped:] for layer in self._layers
            ],
            keys=[target.cache.layers[layer][0, :, rows] for layer in self._layers],
        )

    def _forward(
        self, token_ids: list[int], length: int, start: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Run tokens [T] after `length` others; return hidden [T, C], features [T, F], queries [T,
        H, D].
        """
        target, device = self._engine.target, self._engine.target.device
        positions = torch.arange(length, length + len(token_ids), device=device).unsqueeze(0)
        plan = AttentionPlan(
            [start], [length + len(token_ids)], len(token_ids), keep_layers=frozenset(self._layers)
        )
        inputs = torch.tensor([token_ids], device=device)
        hidden, features = target.forward_with_features(
            inputs, positions, plan, self._drafter.hidden_layers
        )
        return (
            hidden[0],
            features[0],
            {layer: query[0].clone() for layer, query in plan.queries.items()},
        )

    def _replay(self, probe: Probe, trace: Trace) -> list[Step]:
        drafter, num_prompt = self._drafter, len(probe.prompt_token_ids)
        chunk_size = traits_of(trace.features.device).prefill_chunk
        prompt = torch.tensor(probe.prompt_token_ids, device=trace.features.device)
        chunks = zip(
            prompt.split(chunk_size), trace.features[:num_prompt].split(chunk_size), strict=True
        )
        for chunk, features in chunks:
            drafter.prefill(_SLOT, chunk, features)
        policy = CachePolicy(self._options)
        shown = self._select(policy, trace, num_prompt, 0)
        self._absorb(probe, trace, 0, 1)
        steps, decided = [], 1
        while decided < len(probe.answer_token_ids):
            [tree] = drafter.propose([_SLOT])
            num_accepted = accepted(tree, probe.answer_token_ids, trace.choice_token_ids, decided)
            steps.append(Step(decided, num_accepted, shown))
            before, decided = decided, decided + num_accepted + 1
            if decided < len(probe.answer_token_ids):
                policy.count_step()
                if policy.is_due(num_prompt + decided - 1):
                    shown = self._select(policy, trace, num_prompt, decided - 1)
                self._absorb(probe, trace, before, decided)
        return steps

    def _select(
        self, policy: CachePolicy, trace: Trace, num_prompt: int, decided: int
    ) -> frozenset[int]:
        num_tokens, mass = num_prompt + decided, torch.empty(0)
        if self._layers:
            queries = [each[decided] for each in trace.queries]
            keys = [each[:, :num_tokens] for each in trace.keys]
            mass = mean_mass(
                queries, keys, self._options.chunk_size, self._engine.target.scale
            ).cpu()
        positions = policy.select(num_tokens, mass, DecodingStats())
        self._drafter.select(_SLOT, positions)
        return frozenset(positions.tolist())

    def _absorb(self, probe: Probe, trace: Trace, start: int, stop: int) -> None:
        """Give the draft the answer tokens `start` to `stop`; the last becomes the root."""
        first = len(probe.prompt_token_ids) - 1
        decided = Decided.pad(
            [probe.answer_token_ids[start:stop]], [trace.features[first + start : first + stop]]
        )
        self._drafter.read(_SLOT, decided.token_ids[0])
        self._drafter.read_selected([_SLOT])
        self._drafter.absorb([_SLOT], decided)

    def _row(self, probe: Probe, trace: Trace, steps: Sequence[Step]) -> dict[str, Any]:
        """Count needle tokens, from the second token chosen by the target."""
        answer, chosen = probe.answer_token_ids, trace.choice_token_ids
        needle = [
            i
            for i, source in enumerate(probe.sources)
            if i and source is not None and answer[i] == chosen[i]
        ]
        step_of = {
            i: step for step in steps for i in range(step.first, step.first + step.num_accepted + 1)
        }
        in_view = sum(probe.sources[i] in step_of[i].shown for i in needle)
        from_tree = sum(i < step_of[i].first + step_of[i].num_accepted for i in needle)
        mean_accepted = ratio(sum(step.num_accepted for step in steps), len(steps))
        return {
            "documents": [probe.doc_id],
            "bucket": probe.bucket,
            "kind": probe.kind,
            "repeat": 0,
            "num_documents": 1,
            "num_prompt_tokens": len(probe.prompt_token_ids),
            "num_needle_tokens": len(needle),
            "in_view": ratio(in_view, len(needle)),
            "from_tree": ratio(from_tree, len(needle)),
            "mean_acceptance_length": None if mean_accepted is None else 1 + mean_accepted,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """A verification."""

    first: int
    """First answer token of the step."""
    num_accepted: int
    shown: frozenset[int]
    """Positions visible to the draft at its last retrieval; later text is visible as well."""


def accepted(tree: DraftTrees, answer: Sequence[int], chosen: Sequence[int], first: int) -> int:
    """Count accepted nodes from answer token `first`, as long as target and answer agree."""
    edges = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    child = {edge: node for node, edge in enumerate(edges)}
    node, at = 0, first
    while (
        at < len(answer) and answer[at] == chosen[at] and (node := child.get((node, answer[at]), 0))
    ):
        at += 1
    return at - first

"""The study of sources: find the passage that supports a sentence, by text or attention.

    python -m benchmarks.sources --bucket 2048 --json benchmarks/results/sources-smollm2-xeon.json

Ten facts are planted in each report at all depths. Names are shared, so a name does not identify a
fact. Answers are made from templates, so the true passage of each sentence is known:

- `verbatim`: the fact itself; `light`: its words in another order; `heavy`: other words with the
  same names and numbers; `named`: other words with the same names; `free`: only other words
- `quote`: sentences of the report; `cut`: the same with a third of their words left out

A ranking orders all document sentences for an answer sentence. Rows count hits in first place, and
among the first three. Attention is summed by passage over the answer's tokens, in a single pass.
The best heads are chosen on the other half of the documents. Shapes: `H` heads of all layers, `T`
tokens of an answer, `S` keys, `A` sentences of an answer, `P` passages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from rapidfuzz import fuzz, process
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.needles import sentences_of
from specextend.data.quality import split_words
from specextend.decoding.device import device_name

Floats = NDArray[np.float64]
MODEL = ".models/SmolLM2-135M-Instruct"
SCORED_LAYER = 18
"""Layer whose attention selects the draft's view."""
NUM_HEADS = 8
"""Number of chosen heads."""
LEVELS = ("verbatim", "light", "heavy", "named", "free", "quote", "cut")
NUM_QUOTES = 10
TOWNS = ("Velden", "Orsay Point")
PEOPLE = ("Greta Halloran", "Dr. Anton Weiss")
FACTS = (
    (
        "The harbour authority of {town} paid {number} dollars for a second ferry in {year}.",
        "In {year}, {town}'s harbour authority spent {number} dollars on a second ferry.",
        "{town} bought another boat for its port at a price of ${number}.",
        "{town} bought another boat for its port.",
        "A further vessel was acquired to carry passengers over the water.",
    ),
    (
        "Inspectors found that {number} pupils in {town} were taught in buildings without running "
        "water.",
        "In {town}, {number} pupils were taught in buildings that had no running water, "
        "inspectors found.",
        "Some {number} children in {town} went to schools that lack taps.",
        "Children in {town} went to schools that lack taps.",
        "Many students sat in classrooms where nobody could wash their hands.",
    ),
    (
        "{person} resigned as director of the observatory after a dispute about its telescope.",
        "After a dispute about the telescope, {person} stepped down as the observatory's director.",
        "{person} quit as head of the astronomy station when staff quarrelled over an instrument.",
        "{person} left the astronomy station when staff quarrelled over an instrument.",
        "The chief of the stargazing institute left office following an argument over equipment.",
    ),
    (
        "A survey of orchards near {town} counted {number} hives of bees, twice as many as in "
        "{year}.",
        "Orchards around {town} had {number} hives of bees, a survey showed, double the count of "
        "{year}.",
        "Around {town} honey colonies doubled to {number}.",
        "Around {town} there are twice as many honey colonies.",
        "Pollinating insects have become far more common among the fruit trees.",
    ),
    (
        "Bakers in {town} stopped work for {number} days because flour had become too expensive.",
        "Because flour was too expensive, the bakers of {town} struck for {number} days.",
        "Bread makers in {town} laid down tools for {number} days over costly grain.",
        "Bread makers in {town} laid down tools over costly grain.",
        "Those who produce loaves walked out over the price of their ingredients.",
    ),
    (
        "Thieves took {number} silver coins from the museum of {town} on a winter night in {year}.",
        "One winter night in {year}, {number} silver coins were stolen from {town}'s museum.",
        "Burglars robbed a collection in {town} of {number} pieces of old money.",
        "Burglars robbed a collection of old money in {town}.",
        "Valuable currency disappeared from an exhibition after dark.",
    ),
    (
        "{person} tested the new vaccine on {number} sheep before the ministry approved it.",
        "Before the ministry approved the new vaccine, {person} tried it on {number} sheep.",
        "{person} gave the shot to {number} farm animals ahead of official clearance.",
        "{person} gave the shot to farm animals ahead of official clearance.",
        "Livestock received the injection first, and regulators allowed it afterwards.",
    ),
    (
        "Engineers closed the old bridge at {town} because rust had weakened its cables.",
        "The old bridge at {town} was closed by engineers, since its cables were weakened by rust.",
        "Corroded wires led to the shutdown of {town}'s river crossing.",
        "Corroded wires led to the shutdown of {town}'s river crossing.",
        "Drivers must take another way because metal parts had decayed.",
    ),
    (
        "{person} left {number} books to the public library on condition that it opens on Sundays.",
        "On condition that it opens on Sundays, the public library received {number} books from "
        "{person}.",
        "{person} donated {number} volumes provided that readers are let in at weekends.",
        "{person} donated volumes provided that readers are let in at weekends.",
        "A gift of literature came with a demand about opening hours.",
    ),
    (
        "The flood of {year} destroyed {number} houses in {town}, most of them made of wood.",
        "Most of the {number} houses that the flood of {year} destroyed in {town} were made of "
        "wood.",
        "High water wrecked {number} homes in {town}, mainly timber ones.",
        "High water wrecked timber homes in {town}.",
        "Rising rivers ruined dwellings that were built from logs.",
    ),
)


@dataclass(frozen=True)
class Study:
    """A document and its answers."""

    bucket: int
    passages: list[str]
    answers: dict[str, list[tuple[str, int]]]
    """Sentences by level, each with its passage number."""


def make_study(random: Random, bucket: int, sentences: Sequence[str]) -> Study:
    """Plant all facts at even depths and write the answers in random order."""
    passages = list(sentences)
    facts = [_told(random, forms) for forms in random.sample(FACTS, len(FACTS))]
    count = len(facts)
    places = [int((number + random.random()) * len(passages) / count) for number in range(count)]
    for number in reversed(range(count)):
        passages.insert(places[number], facts[number][0])
    planted = [place + number for number, place in enumerate(places)]
    answers = {
        level: [(forms[index], place) for forms, place in zip(facts, planted, strict=True)]
        for index, level in enumerate(LEVELS[:5])
    }
    usual = [
        number
        for number, text in enumerate(passages)
        if 12 <= len(text.split()) <= 40 and number not in planted
    ]
    quoted = random.sample(usual, NUM_QUOTES)
    answers["quote"] = [(passages[number], number) for number in quoted]
    answers["cut"] = [(_cut(random, passages[number]), number) for number in quoted]
    return Study(
        bucket,
        passages,
        {level: random.sample(answers[level], len(answers[level])) for level in LEVELS},
    )


def _told(random: Random, forms: Sequence[str]) -> list[str]:
    values = {
        "town": random.choice(TOWNS),
        "person": random.choice(PEOPLE),
        "number": f"{random.randrange(11, 9000):,}",
        "year": random.randrange(1950, 2020),
    }
    return [form.format(**values) for form in forms]


def _cut(random: Random, text: str) -> str:
    words = text.split()
    kept = sorted(random.sample(range(len(words)), 2 * len(words) // 3))
    return " ".join(words[number] for number in kept)


def read_studies(
    path: str, tokenizer: Any, buckets: Sequence[int], per_bucket: int
) -> Iterator[Study]:
    """Yield studies with about as many prompt tokens as their bucket."""
    texts = pq.read_table(path, columns=["text"])["text"].to_pylist()
    for bucket in buckets:
        for number in range(per_bucket):
            random = Random(f"{bucket}-{number}")
            sentences: list[str] = []
            room = bucket - 850  # for the facts, the longest answer and the template
            for text in random.sample(texts, len(texts)):
                for sentence in sentences_of(text):
                    room -= len(tokenizer(" " + sentence)["input_ids"])
                    if room > 0:
                        sentences.append(sentence)
            yield make_study(random, bucket, sentences)


def by_fuzz(scorer: Callable[..., float]) -> Callable[[Sequence[str], Sequence[str]], Floats]:
    """Return a ranking by a similarity of rapidfuzz."""

    def score(sentences: Sequence[str], passages: Sequence[str]) -> Floats:
        plain = [[text.lower() for text in texts] for texts in (sentences, passages)]
        return process.cdist(*plain, scorer=scorer).astype(np.float64)

    return score


def pieces_of(text: str, size: int) -> list[str]:
    """Return the words of a text, or their character n-grams with marked word starts."""
    words = split_words(text)
    if not size:
        return words
    marked = [f"_{word}_" for word in words]
    return [
        word[begin : begin + size]
        for word in marked
        for begin in range(max(1, len(word) - size + 1))
    ]


def by_rarity(size: int = 0, k1: float | None = None, b: float = 0.75) -> Callable[..., Floats]:
    """Return a ranking by shared words, weighted by rarity; with `k1` it is BM25.

    Without `k1`, it is the weighted share of a sentence's words found in the passage.
    """

    def score(sentences: Sequence[str], passages: Sequence[str]) -> Floats:
        held = [Counter(pieces_of(passage, size)) for passage in passages]
        lengths = [count.total() for count in held]
        usual = sum(lengths) / len(lengths)
        documents = Counter(word for count in held for word in count)
        rows = []
        for sentence in sentences:
            words = set(pieces_of(sentence, size))
            weights = {
                word: math.log(1 + (len(held) + 0.5) / (documents[word] + 0.5)) for word in words
            }
            total = sum(weights.values())
            if k1 is None:
                rows.append(
                    [sum(weights[word] for word in words & count.keys()) / total for count in held]
                )
                continue
            norms = [k1 * (1 - b + b * length / usual) for length in lengths]
            rows.append(
                [
                    sum(
                        weights[word] * count[word] * (k1 + 1) / (count[word] + norm)
                        for word in words & count.keys()
                    )
                    for count, norm in zip(held, norms, strict=True)
                ]
            )
        return np.array(rows)

    return score


def ranks(scores: Floats) -> Floats:
    """Return the rank of each passage [A, P], from 0; ties in document order."""
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.argsort(order, axis=1).astype(np.float64)


def together(*rankings: Floats) -> Floats:
    """Combine rankings by reciprocal ranks."""
    return sum((1 / (10 + ranks(each)) for each in rankings), np.zeros(rankings[0].shape))


TEXT = {
    "fuzz: partial_ratio": by_fuzz(fuzz.partial_ratio),
    "fuzz: token_set_ratio": by_fuzz(fuzz.token_set_ratio),
    "words": by_rarity(),
    "BM25 of words": by_rarity(k1=1.2),
    "runs of 4 letters": by_rarity(size=4),
    "BM25 of 4 letters": by_rarity(size=4, k1=1.2),
}
SHIPPED = "BM25 of 4 letters"
"""Ranking of `output.sources`."""


class Reader:
    """The target: reads a document once, then each answer."""

    def __init__(self, model: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._spans: list[tuple[int, int]] = []  # token spans of the passages
        self._rows: list[tuple[int, int]] = []  # token spans of an answer's sentences
        self._found: list[Floats] = []
        for layer in self._model.model.layers:
            layer.self_attn.register_forward_hook(self._take)
        self._takes = False
        self.num_heads = int(self._model.config.num_attention_heads)

    @torch.inference_mode()
    def read(self, study: Study) -> tuple[dict[str, Floats], dict[str, float]]:
        """Return the attention [H, A, P] by level, and the seconds of both passes."""
        ask = [{"role": "user", "content": "\0\n\nSummarize the report."}]
        template = str(
            self.tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
        )
        before, after = template.split("\0")
        prompt, self._spans = self._joined([before, *study.passages, after])
        self._spans = self._spans[1:-1]
        begin = time.perf_counter()
        self._model.set_attn_implementation("sdpa")
        cache = self._model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        seconds = {"prefill_s": time.perf_counter() - begin, "attention_s": 0.0}
        self._model.set_attn_implementation("eager")
        found = {}
        for level, answer in study.answers.items():
            tokens, self._rows = self._joined([sentence for sentence, _ in answer])
            begin = time.perf_counter()
            self._takes, self._found = True, []
            self._model(tokens, past_key_values=cache, logits_to_keep=1)
            self._takes = False
            found[level] = np.concatenate(self._found)
            seconds["attention_s"] += (time.perf_counter() - begin) / len(LEVELS)
            cache.crop(-tokens.shape[1])
        return found, seconds

    def _joined(self, texts: Sequence[str]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        token_ids: list[int] = []
        spans = []
        for number, text in enumerate(texts):
            begin = len(token_ids)
            token_ids += self.tokenizer((" " if number else "") + text, add_special_tokens=False)[
                "input_ids"
            ]
            spans.append((begin, len(token_ids)))
        return torch.tensor([token_ids]), spans

    def _take(
        self, module: Any, given: Any, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> None:
        if not self._takes:
            return
        assert output[1] is not None, "attention is eager while it is looked at"
        weights = output[1][0].float()  # [H, T, S]
        # [H, A, S]
        sentences = torch.stack([weights[:, begin:end].sum(1) for begin, end in self._rows], 1)
        sums = torch.nn.functional.pad(sentences.double().cumsum(2), (1, 0))
        first, last = (torch.tensor([span[end] for span in self._spans]) for end in (0, 1))
        self._found.append((sums[:, :, last] - sums[:, :, first]).numpy())  # [H, A, P]


def contrasted(attention: Floats) -> Floats:
    """Divide attention by the mean over sentences, because some passages attract every token."""
    return attention / (attention.mean(-2, keepdims=True) + 1e-9)


def hits(scores: Floats, truth: Sequence[int], most: int) -> Floats:
    """Return 1 for each sentence with its passage among the first `most`, else 0."""
    places = ranks(scores)
    return np.array([places[row, place] < most for row, place in enumerate(truth)], np.float64)


def best_heads(studies: Sequence[Study], attention: Sequence[dict[str, Floats]]) -> list[int]:
    """Return the best heads [NUM_HEADS] over all levels."""
    found: Any = 0.0
    for study, by_level in zip(studies, attention, strict=True):
        for level, answer in study.answers.items():
            truth = [place for _, place in answer]
            found = found + np.array(
                [hits(head, truth, 3).sum() for head in contrasted(by_level[level])]
            )
    return np.argsort(-np.asarray(found), kind="stable")[:NUM_HEADS].tolist()


def attention_rankings(
    weights: Floats, heads: Sequence[int], num_per_layer: int
) -> dict[str, Floats]:
    """Return the rankings by attention [A, P]."""
    scored = weights[SCORED_LAYER * num_per_layer : (SCORED_LAYER + 1) * num_per_layer]
    return {
        f"attention of layer {SCORED_LAYER}": scored.mean(0),
        f"attention of layer {SCORED_LAYER}, contrasted": contrasted(scored.mean(0)),
        "attention of all layers, contrasted": contrasted(weights.mean(0)),
        f"attention of the {NUM_HEADS} best heads, contrasted": contrasted(
            weights[list(heads)]
        ).mean(0),
    }


def measure(reader: Reader, studies: Sequence[Study]) -> Iterator[dict[str, Any]]:
    """Yield a row per document, level and ranking."""
    looked = [reader.read(study) for study in studies]
    attention = [found for found, _ in looked]
    halves = [[*range(half, len(studies), 2)] for half in (0, 1)]
    chosen = [
        best_heads([studies[n] for n in half], [attention[n] for n in half]) for half in halves
    ]
    for number, study in enumerate(studies):
        for level, answer in study.answers.items():
            sentences = [sentence for sentence, _ in answer]
            truth = [place for _, place in answer]
            seconds = dict.fromkeys(TEXT, 0.0)
            found = {}
            for name, ranking in TEXT.items():
                begin = time.perf_counter()
                found[name] = ranking(sentences, study.passages)
                seconds[name] = time.perf_counter() - begin
            seen = attention_rankings(
                attention[number][level], chosen[1 - number % 2], reader.num_heads
            )
            both = {
                f"{SHIPPED} + {name}": together(found[SHIPPED], each) for name, each in seen.items()
            }
            for name, scores in (found | seen | both).items():
                yield {
                    "by": name,
                    "document": f"{study.bucket}-{number}",
                    "bucket": study.bucket,
                    "level": level,
                    "sentences": len(truth),
                    **{f"first_{most}": int(hits(scores, truth, most).sum()) for most in (1, 3)},
                    "seconds": round(seconds.get(name, looked[number][1]["attention_s"]), 4),
                    "prefill_s": round(looked[number][1]["prefill_s"], 3),
                }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the hits among the first three, and the median seconds of an answer."""
    print(f"{'':65}" + "".join(f"{level:>10}" for level in (*LEVELS, "all", "seconds")))
    for name in dict.fromkeys(row["by"] for row in rows):
        mine = [row for row in rows if row["by"] == name]
        shares = []
        for level in (*LEVELS, None):
            counted = [row for row in mine if level in (row["level"], None)]
            shares.append(
                sum(row["first_3"] for row in counted) / sum(row["sentences"] for row in counted)
            )
        seconds = median(row["seconds"] for row in mine)
        print(f"{name:65}" + "".join(f"{share:10.0%}" for share in shares) + f"{seconds:10.3f}")


def main() -> None:
    """Measure documents of a length, print a table and store the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--documents", default="examples/govreport.parquet")
    parser.add_argument("--bucket", type=int, default=2048)
    parser.add_argument("--per-bucket", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    reader = Reader(options.model)
    studies = [
        *read_studies(options.documents, reader.tokenizer, [options.bucket], options.per_bucket)
    ]
    before = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    rows = [row for row in before if row["bucket"] != options.bucket] + [*measure(reader, studies)]
    show(rows)
    head = {
        "about": "Which passage a sentence rests on, by text and by attention",
        "target": Path(options.model).name,
        "dtype": "bfloat16",
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "documents": options.documents,
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    options.json.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()

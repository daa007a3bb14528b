"""The rounds of a training: answers of the target, its hidden states, the draft, and an evaluation.

Rounds end when the tokens per step on held-out documents stop rising. The output folder holds the
best draft; its subfolder `work` lets an interrupted training resume.
"""

import gc
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from specextend.config import RunConfig
from specextend.core import Values
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import Source
from specextend.data.storage import resolve, write_bytes
from specextend.decoding.decoding_options import DraftOptions
from specextend.decoding.model import CachedModel
from specextend.drafters.formats import WEIGHTS_FILE
from specextend.models.causal_lm import load_tokenizer
from specextend.models.loading import load_cached_target
from specextend.models.model_files import VOCABULARY
from specextend.models.pairing import check_pair
from specextend.proof.prover import Kernels
from specextend.training.eagle_head import TRAINING, Task, frozen_weights, train_eagle
from specextend.training.recording import (
    Answer,
    PromptMaker,
    Show,
    Text,
    TrainOptions,
    add_answers,
    read_answers,
    record,
    tokens_per_step,
    with_draft,
)

HELD_OUT = 10
"""Documents per held-out document, and answers per evaluation prompt."""
LEAST_HELD = 4
MOST_HELD = 64
PATIENCE = 2
"""Rounds without a better draft before training ends."""
FILES = ("config.json", WEIGHTS_FILE)


def distil(
    config: RunConfig, source: Source, options: TrainOptions, output: Path, show: Show
) -> Values:
    """Train a draft for the configuration's target on the source's text, and return its figures.

    The same arguments resume an interrupted training; `num_rounds` may differ.

    Raises:
        ValueError: `output` holds another training, the text or the target's context is too short,
            or the draft to start from does not fit.
    """
    rounds = _Rounds(config, source, options, output, show)
    while rounds.may_go_on:
        rounds.take_next()
    return rounds.figures()


def _read_texts(source: Source, prompts: Prompts, options: TrainOptions) -> list[Text]:
    rows = (source.read(scanned.key) for scanned in source.scan() if scanned.error_class is None)
    texts = [
        Text(
            torch.tensor(prompts.encode_document(row.text), dtype=torch.int32),
            row.instruction,
        )
        for row in rows
    ]
    long = [text for text in texts if len(text.token_ids) >= options.min_tokens]
    if len(long) < 2:
        raise ValueError(
            f"at least two texts must have the {options.min_tokens} tokens that a piece needs, "
            f"because one is held out: found {len(long)} of {len(texts)}"
        )
    return long


def _split(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    first = min(HELD_OUT // 2, len(texts) - 1)
    learned = [text for number, text in enumerate(texts) if number % HELD_OUT != first]
    return learned, texts[first::HELD_OUT]


def frequent_tokens(texts: Sequence[Tensor], special: Sequence[int], size: int) -> Tensor:
    """Return `size` ascending token ids: special ids and the most frequent of texts [T].

    Ties go to the lower id. Raises ValueError for too few tokens.
    """
    kept = torch.tensor(sorted(set(special)), dtype=torch.int64)
    counts = torch.bincount(torch.cat(list(texts)), minlength=max(special, default=0) + 1)
    counts[kept] = 0
    if (num_found := len(kept) + int(counts.count_nonzero())) < size:
        raise ValueError(
            f"a vocabulary of {size} cannot be made: the text has {num_found} different tokens; "
            "give more text, or choose a smaller vocabulary"
        )
    others = counts.sort(descending=True, stable=True).indices[: size - len(kept)]
    return torch.cat([kept, others]).sort().values


def _vocabulary_of(options: TrainOptions) -> Tensor:
    file = Path(options.start_from, WEIGHTS_FILE)
    tensors = load_file(file) if file.exists() else {}
    if VOCABULARY not in tensors:
        raise ValueError(
            f"{options.start_from} cannot be gone on from: it is no draft that this command made"
        )
    return tensors[VOCABULARY]


class _Rounds:
    """The rounds of a training; each adds a point to a curve in a file."""

    def __init__(
        self, config: RunConfig, source: Source, options: TrainOptions, output: Path, show: Show
    ):
        self._config, self._options, self._output, self._show = (
            config,
            options,
            output.absolute(),
            show,
        )
        start = DraftOptions(kind="eagle", model=options.start_from) if options.start_from else None
        facts = check_pair(config.target, start)
        if not facts.is_fused:
            raise ValueError(
                f"{facts.name} runs on transformers' own layers, for which no head is trained"
            )
        limit = config.max_tokens(facts.context_length)
        tokenizer = load_tokenizer(config.target.model)
        try:
            prompts = Prompts(tokenizer, config.prompt, limit)
            self._maker = PromptMaker(tokenizer, prompts, options, config.decoding.max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"the prompt does not fit the target: {error.message}") from None
        self._learned, self._held = _split(_read_texts(source, prompts, options))
        texts = [text.token_ids for text in self._learned]
        special = tokenizer.all_special_ids
        self._vocabulary = (
            _vocabulary_of(options)
            if start
            else frequent_tokens(texts, special, options.vocabulary)
        )
        self._settings = {
            "target": config.target.model,
            "prompt": asdict(config.prompt),
            "decoding": asdict(config.decoding),
            "files": [[file.relative_path, file.num_rows] for file in source.files],
            "options": asdict(replace(options, num_rounds=1)),
        }
        self._work = self._output / "work"
        for name in ("answers", "recordings"):
            (self._work / name).mkdir(parents=True, exist_ok=True)
        _claim(self._work / "settings.json", self._settings)
        self._file = self._work / "curve.json"
        self._curve: list[Values] = (
            json.loads(self._file.read_text()) if self._file.exists() else []
        )

    @property
    def _best(self) -> Values | None:
        return max(self._curve, key=lambda point: point["tokens_per_step"], default=None)

    @property
    def may_go_on(self) -> bool:
        best = self._best
        last = self._curve[-1]["round"] if self._curve else 0
        return best is None or (last < self._options.num_rounds and last - best["round"] < PATIENCE)

    def figures(self) -> Values:
        best = self._best
        return {"best_round": best and best["round"], "rounds": self._curve}

    def take_next(self) -> None:
        """Train and measure a draft; copy it to the output folder if it is the best.

        A round ends when the curve is written; until then it can be resumed.
        """
        number = (
            self._curve[-1]["round"] + 1 if self._curve else 0 if self._options.start_from else 1
        )
        num_answers = number * self._options.num_answers
        folder = self._folder(number)
        self._show("round", number, self._options.num_rounds)
        if number:
            self._train(num_answers, folder)
        num_held = min(max(LEAST_HELD, self._options.num_answers // HELD_OUT), MOST_HELD)
        held = self._prompts(self._held, range(num_held))
        found = tokens_per_step(with_draft(self._config, folder), held, self._show)
        self._curve.append(
            {"round": number, "answers": num_answers, "tokens_per_step": round(found, 4)}
        )
        if self._best is self._curve[-1]:
            for name in FILES:
                # unlike 0600 of safetensors
                shutil.copyfile(folder / name, self._output / name)
        write_card(self._output, self._settings, self.figures())
        write_bytes(resolve(str(self._file)), json.dumps(self._curve, indent=1).encode())
        shutil.rmtree(self._work / f"round-{number}" / TRAINING, ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return self._work / f"round-{number}" if number else Path(self._options.start_from)

    def _prompts(self, texts: Sequence[Text], numbers: Iterable[int]) -> dict[int, list[int]]:
        """Make prompts from the documents in turn; first from whole documents, if they fit."""
        size = len(texts)
        return {n: self._maker.prompt(texts[n % size], n, whole=n < size) for n in numbers}

    def _train(self, num_answers: int, folder: Path) -> None:
        start = None if self._best is None else self._folder(self._best["round"])
        answers = self._answers(num_answers, start)
        gc.collect()  # frees the target of the engine, a reference cycle
        num_rows = max(
            len(each.prompt_token_ids) + len(each.output_token_ids) for each in answers.values()
        )
        target, lm_head = load_cached_target(self._config, num_rows, Kernels())
        paths = self._record(target, answers)
        shape = target.model.config
        weights = frozen_weights(target.model, lm_head)
        del target, lm_head
        (folder / TRAINING).mkdir(parents=True, exist_ok=True)
        task = Task(
            self._options,
            self._config.target,
            shape,
            self._vocabulary,
            paths,
            start,
            folder,
            self._show,
            *weights,
        )
        train_eagle(task)

    def _answers(self, count: int, start: Path | None) -> dict[int, Answer]:
        """Return the first `count` answers; the target and the best draft make missing ones."""
        folder = self._work / "answers"
        found = read_answers(folder)
        if missing := [number for number in range(count) if number not in found]:
            config = with_draft(self._config, start)
            add_answers(config, self._prompts(self._learned, missing), folder, self._show)
            found = read_answers(folder)
        return {number: found[number] for number in range(count)}

    def _record(self, target: CachedModel, answers: dict[int, Answer]) -> list[Path]:
        folder = self._work / "recordings"
        paths = []
        for number, answer in answers.items():
            paths.append(folder / f"answer-{number:06}.safetensors")
            if not paths[-1].exists():
                record(target, self._vocabulary, answer).save(paths[-1])
                self._show("recordings", len(paths), len(answers))
        return paths


def _claim(path: Path, settings: Values) -> None:
    text = json.dumps(settings, indent=1, sort_keys=True)
    if path.exists() and path.read_text() != text:
        raise ValueError(
            f"{path} belongs to a training with other settings; choose another output folder, or "
            "delete it"
        )
    path.write_text(text)


CARD = """\
# {name}

A draft for {target}: an EAGLE head in the project's own format, with copy heads
(`specextend/drafters/formats.py`). It proposes the tokens that the target is likely to choose, and
the target verifies each one: the draft decides how fast text comes, never which text.

It was trained by `specextend train` on the target's own answers to pieces of the documents in
`files`, with the prompt and the sampling below. {begun}

| round | own answers | tokens per step |
|---|---|---|
{curve}

Tokens per step are those that the target decides in one step, on average over its answers to
documents that no round learned from: one document in ten is held out. This draft is that of round
{best}.

```json
{settings}
```
"""


def write_card(output: Path, settings: Values, figures: Values) -> None:
    """Write the model card `README.md`: target, text, recipe and the acceptance of each round."""
    target = Path(settings["target"]).name
    start = Path(settings["options"]["start_from"]).name
    options = settings["options"] | {"start_from": start}
    begun = f"Round 0 is the draft that it went on from, `{start}`."
    card = CARD.format(
        name=output.resolve().name,
        target=target,
        begun=begun if start else "",
        curve="\n".join(
            f"| {p['round']} | {p['answers']:,} | {p['tokens_per_step']:.3f} |"
            for p in figures["rounds"]
        ),
        best=figures["best_round"],
        settings=json.dumps(settings | {"target": target, "options": options}, indent=1),
    )
    (output / "README.md").write_text(card, encoding="utf-8")

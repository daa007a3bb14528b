"""A whole training: samples, the target's recordings of them, the draft, its evaluation and its model card.

One document in ten is held out: no draft learns from it, and every draft is evaluated on it. The output folder holds
the draft; its subfolder `work` holds what an interrupted training needs to resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specextend.config import RunConfig
from specextend.core import counted
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import Source
from specextend.models import check_model, load_target, load_tokenizer, tokens_sha256
from specextend.training.eagle_head import train_eagle
from specextend.training.fit import Say
from specextend.training.language_model import train_language_model
from specextend.training.recording import Recorder, Sample, SampleMaker, count_tokens
from specextend.training.task import Task, TrainedKind, TrainOptions, frozen_parts

Item = TypeVar("Item")
HELD_OUT = 10
"""One in this many documents, and one in this many samples, is held out."""
TRAIN: dict[TrainedKind, Callable[[Task], dict[str, Any]]] = {
    "eagle": train_eagle,
    "model": train_language_model,
}


def distil(config: RunConfig, source: Source, options: TrainOptions, output: Path, say: Say) -> dict[str, Any]:
    """Train a draft for the configuration's target on the source's text, and return its figures.

    Called again with the same arguments after an interruption, it resumes. Raises ValueError, before the target reads
    anything, if `output` holds another training, if there is too little text, or if the target's context is too short.
    """
    facts = check_model(config.target.model, config.target.revision)
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    try:
        maker = SampleMaker(tokenizer, Prompts(tokenizer, config.prompt, facts.context_length), options)
    except DocumentError as error:
        raise ValueError(f"the prompt does not fit the target: {error.message}") from None
    learned, held, short = _read_texts(source, maker, options)
    texts = [torch.tensor(maker.encode(text), dtype=torch.int64) for text in (*learned, *short)]
    vocabulary = frequent_tokens(texts, tokenizer.all_special_ids, options.vocabulary)
    samples = _make_samples(maker, learned, held, options.num_samples)
    recordings = output / "work" / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    settings = {
        "target": config.target.model,
        "prompt": asdict(config.prompt),
        "files": [[file.relative_path, file.num_rows] for file in source.files],
        "options": asdict(options),
    }
    _claim(output / "work" / "settings.json", settings)
    model = load_target(config.target)
    recorder = Recorder(model, frozenset(facts.eos_token_ids), options.summary_tokens)
    paths = _record(recorder, samples, recordings, options.seed, say)
    target = frozen_parts(config, model, tokens_sha256(tokenizer))
    del model
    task = Task(options, target, vocabulary, texts, *split(paths), output, say)
    figures = {"recordings": len(task.learned), "held_out": len(task.held)}
    figures |= {"tokens": sum(map(count_tokens, task.learned)), **TRAIN[options.kind](task)}
    write_card(task, settings, figures)
    return figures


def _read_texts(source: Source, maker: SampleMaker, options: TrainOptions) -> tuple[list[str], list[str], list[str]]:
    """Read all texts: those to learn from, those held out, and those too short for a sample, to learn from as well.

    Raises ValueError if fewer than two are long enough.
    """
    texts = [source.read(scanned.key).document.text for scanned in source.scan() if scanned.error_class is None]
    fits = [maker.fits(text) for text in texts]
    if sum(fits) < 2:
        raise ValueError(
            f"at least two texts must have the {options.min_tokens} tokens that a sample needs, because one is held "
            f"out: found {sum(fits)} of {len(texts)}"
        )
    learned, held = split([text for text, fit in zip(texts, fits, strict=True) if fit])
    return learned, held, [text for text, fit in zip(texts, fits, strict=True) if not fit]


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Split two or more items into those to learn from and those held out."""
    first = min(HELD_OUT // 2, len(items) - 1)
    return [item for number, item in enumerate(items) if number % HELD_OUT != first], items[first::HELD_OUT]


def frequent_tokens(texts: Sequence[Tensor], special: Sequence[int], size: int) -> Tensor:
    """Return `size` token ids in ascending order: the special ids and the most frequent others of the texts [T].

    Ties go to the lower id. Raises ValueError if the texts have fewer different tokens.
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


def _make_samples(maker: SampleMaker, learned: list[str], held: list[str], count: int) -> list[Sample]:
    """Make samples, cycling over the documents; one in `HELD_OUT` comes from a held-out document."""
    to_learn, to_hold = split(list(range(count)))
    texts = dict(zip(to_learn, cycle(learned), strict=False)) | dict(zip(to_hold, cycle(held), strict=False))
    return [maker.make(text, number) for number, text in sorted(texts.items())]


def _record(recorder: Recorder, samples: Sequence[Sample], folder: Path, seed: int, say: Say) -> list[Path]:
    """Record each sample with the target, and return the paths. Existing recordings are kept."""
    paths = [folder / f"{number:05d}.safetensors" for number in range(len(samples))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    for count, number in enumerate(missing, start=1):
        recorder.record(samples[number], seed + number).save(paths[number])
        say(f"recording {count}/{len(missing)}: {len(samples[number].prompt_token_ids)} prompt tokens")
    return paths


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings into the folder. Raises ValueError if it belongs to a training with other settings."""
    text = json.dumps(settings, indent=1, sort_keys=True)
    if path.exists() and path.read_text() != text:
        raise ValueError(
            f"{path} belongs to a training with other settings; choose another output folder, or delete it"
        )
    path.write_text(text)


DESCRIPTIONS: dict[TrainedKind, str] = {
    "eagle": "an EAGLE head in the project's own format, with copy heads (`specextend/drafters/formats.py`)",
    "model": "a small standalone Llama with a reduced vocabulary (`specextend/drafters/small_lm.py`)",
}
CARD = """\
# {name}

A draft for {target}: {description}. It proposes the tokens that the target is likely to choose, and the target verifies
each one: the draft decides how fast text comes, never which text.

It was trained by `specextend train` on {prompts} around pieces of the documents in `files`, each followed by quotes
from it, facts that were hidden in it, and the target's own summaries of it.

```json
{settings}
```

`agreement` is how often its first choice for the first and the second drafted token is the target's, by kind of text,
with a full cache, on {held_out} around documents that it was not trained on: one in ten is held out.

```json
{figures}
```
"""


def write_card(task: Task, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write the model card `README.md` beside the draft: target, text, recipe and held-out agreement."""
    card = CARD.format(
        name=task.output.resolve().name,
        target=task.target.name,
        description=DESCRIPTIONS[task.options.kind],
        prompts=counted(figures["recordings"], "prompt"),
        held_out=counted(figures["held_out"], "such prompt"),
        settings=json.dumps(settings, indent=1),
        figures=json.dumps(figures, indent=1),
    )
    (task.output / "README.md").write_text(card, encoding="utf-8")

"""A whole training: samples, the target's recordings of them, the draft, its evaluation and its model card.

The output folder holds the draft; its subfolder `work` holds what an interrupted training needs to resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specextend.config import RunConfig
from specextend.core import counted
from specextend.data.source import Source
from specextend.drafters.draft_options import DraftOptions
from specextend.drafters.formats import load_eagle_config
from specextend.models import check_model, load_target
from specextend.pairing import check_pair
from specextend.training.eagle_head import train_eagle
from specextend.training.fit import Say
from specextend.training.language_model import train_language_model
from specextend.training.recording import count_tokens
from specextend.training.task import Corpus, Task, TrainedKind, TrainOptions, frozen_parts, open_corpus, split

TRAIN: dict[TrainedKind, Callable[[Task], dict[str, Any]]] = {
    "eagle": train_eagle,
    "model": train_language_model,
}


def distil(config: RunConfig, source: Source, options: TrainOptions, output: Path, say: Say) -> dict[str, Any]:
    """Train a draft for the configuration's target on the source's text, and return its figures.

    Called again with the same arguments after an interruption, it resumes. Raises ValueError, before the target reads
    anything, if `output` holds another training, if there is too little text, or if the head to start from does not
    fit.
    """
    check_model(config.target.model, config.target.revision)
    if options.start_from is not None:
        check_pair(config.target, DraftOptions(kind="eagle", model=options.start_from))
        load_eagle_config(options.start_from)
    corpus = open_corpus(config, source, options)
    vocabulary = corpus.vocabulary() if options.start_from is None else None
    samples = corpus.samples()
    (output / "work").mkdir(parents=True, exist_ok=True)
    _claim(output / "work" / "settings.json", corpus)
    model = load_target(config.target)
    learned, held = split(corpus.record(model, samples, output / "work" / "recordings", say))
    target = frozen_parts(config, model)
    del model
    task = Task(corpus, target, vocabulary, learned, held, output, say)
    counts = {"recordings": len(learned), "held_out": len(held), "tokens": sum(map(count_tokens, learned))}
    figures = {**counts, **TRAIN[options.kind](task)}
    write_card(task, figures)
    return figures


def _claim(path: Path, corpus: Corpus) -> None:
    """Write the settings into the folder. Raises ValueError if it belongs to a training with other settings."""
    settings = {
        "target": corpus.config.target.model,
        "prompt": asdict(corpus.config.prompt),
        "files": [[file.relative_path, file.num_rows] for file in corpus.source.files],
        "options": asdict(corpus.options),
    }
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

## What it was trained on

{prompts} of `jobs/train_draft.py` around pieces of the documents below, each followed by quotes from it, facts
that were hidden in it, and the target's own summaries of it: {tokens:,} tokens, {passes}.{text}

| file | documents |
|---|---|
{files}

## Recipe

```json
{recipe}
```

## How often it is right

Agreement with the target's first choice, with a full cache, on {held_out} around documents that it was not trained on:
one in ten of the above is held out.

{agreement}
"""


def write_card(task: Task, figures: dict[str, Any]) -> None:
    """Write the model card `README.md` beside the draft: target, text, recipe and held-out agreement."""
    options, read = task.options, figures.get("text_tokens")
    before = f" Before that, {read:,} tokens of the text alone, {counted(options.text_passes, 'time')}." if read else ""
    card = CARD.format(
        name=task.output.resolve().name,
        target=task.target.name,
        description=DESCRIPTIONS[options.kind],
        prompts=counted(figures["recordings"], "prompt"),
        tokens=figures["tokens"],
        passes=counted(options.fit.passes, "time"),
        text=before,
        files="\n".join(f"| `{file.relative_path}` | {file.num_rows} |" for file in task.corpus.source.files),
        recipe=json.dumps(asdict(options), indent=1),
        held_out=counted(figures["held_out"], "such prompt"),
        agreement=_agreement(figures["agreement"]),
    )
    (task.output / "README.md").write_text(card, encoding="utf-8")


def _agreement(shares: dict[str, list[float]]) -> str:
    """Format the table of agreement: a row for each kind of text, a column for each drafted token."""
    steps = ("first token", "second token")[: max(map(len, shares.values()))]
    rows = [f"| {name} | {' | '.join(f'{share:.3f}' for share in row)} |" for name, row in shares.items()]
    return "\n".join([f"| tokens of | {' | '.join(steps)} |", f"|---{'|---' * len(steps)}|", *rows])

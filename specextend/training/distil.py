"""A whole training: samples, the target's recordings of them, the draft, and what it came to.

The output folder holds the draft; its subfolder `work` what is needed to go on after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specextend.config import RunConfig
from specextend.data.documents import Source
from specextend.drafters.eagle_config import load_eagle_config
from specextend.drafters.options import DraftOptions
from specextend.models import check_model
from specextend.pairing import check_pair
from specextend.training.card import write_card
from specextend.training.corpus import Corpus, open_corpus, split
from specextend.training.eagle3 import fused_layers
from specextend.training.fit import Say
from specextend.training.options import TrainedKind, TrainOptions
from specextend.training.recording import count_tokens
from specextend.training.task import Task, load_frozen
from specextend.training.train_eagle import train_eagle
from specextend.training.train_eagle3 import train_eagle3
from specextend.training.train_language_model import train_language_model

TRAIN: dict[TrainedKind, Callable[[Task], dict[str, Any]]] = {
    "eagle": train_eagle,
    "eagle3": train_eagle3,
    "model": train_language_model,
}


def distil(config: RunConfig, source: Source, options: TrainOptions, output: Path, say: Say) -> dict[str, Any]:
    """Train a draft for the configuration's target on the source's text; returns what was measured of it.

    Run again with the same arguments after an interruption, it goes on. Raises ValueError where `output` holds another
    training, where the text is too little, and where the head to start from is not one for the target; the target has
    read nothing then.
    """
    num_layers = check_model(config.target.model, config.target.revision).num_layers
    layers = fused_layers(num_layers) if options.kind == "eagle3" else ()
    if options.start_from is not None:
        load_eagle_config(options.start_from)
        check_pair(config.target, DraftOptions(kind="eagle", model=options.start_from))
    corpus = open_corpus(config, source, options)
    vocabulary = corpus.vocabulary() if options.start_from is None else None
    samples = corpus.samples()
    (output / "work").mkdir(parents=True, exist_ok=True)
    _claim(output / "work" / "settings.json", corpus)
    paths = corpus.record(samples, layers, output / "work" / "recordings", say)
    learned, held = split(paths)
    task = Task(corpus, load_frozen(config), vocabulary, learned, held, output, say)
    counts = {"recordings": len(learned), "held_out": len(held), "tokens": sum(map(count_tokens, learned))}
    figures = {**counts, **TRAIN[options.kind](task)}
    write_card(task, figures)
    return figures


def _claim(path: Path, corpus: Corpus) -> None:
    """A folder belongs to one training."""
    settings = {
        "target": corpus.config.target.model,
        "prompt": asdict(corpus.config.prompt),
        "files": [[file.relative_path, file.num_rows] for file in corpus.source.files],
        "options": asdict(corpus.options),
    }
    text = json.dumps(settings, indent=1, sort_keys=True)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{path} is of a training with other settings; name another output, or delete it")
    path.write_text(text)

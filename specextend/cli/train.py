"""Distil a draft for a target from text in Parquet files.

    python jobs/train_draft.py --config configs/smollm2.yaml --text books.parquet --output models/mine --kind eagle
    python jobs/train_draft.py --config configs/smollm2.yaml --text books.parquet --output models/small --kind model

The target of the configuration reads pieces of the documents and summarises them; the draft learns its choices. Kind
`eagle` is a head over the target's last hidden state with copy heads, `model` a small standalone LM. One document in
ten is held out; OUTPUT/README.md says how often the draft agrees with the target on those. After an interruption (exit
code 75) the same command resumes. OUTPUT/work can be deleted afterwards. Exit code 2: the configuration, the text or
the output folder cannot be used.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from specextend.config import RunConfig
from specextend.data.source import open_source
from specextend.terminal import complain
from specextend.training.distil import distil
from specextend.training.task import TrainedKind, TrainOptions

INTERRUPTED = 75


def main(argv: Sequence[str]) -> int:
    """Train the draft and write it with `training.json`. Returns the exit code."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # a shell may have started us in the background, with SIGINT ignored
        signal.signal(stop, signal.default_int_handler)
    given = _parser().parse_args(argv)
    try:
        config = RunConfig.load(given.config, [*given.set, f"input.path={json.dumps(given.text)}"])
        text = replace(config.input, text_column=given.text_column, id_column=None, passthrough=())
        figures = distil(config, open_source(text), _options(given), given.output, _say)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
    written = json.dumps(figures, indent=1, sort_keys=True)
    (given.output / "training.json").write_text(written + "\n")
    print(written)
    print(f"draft: {given.output}")
    return 0


def _options(given: argparse.Namespace) -> TrainOptions:
    return TrainOptions(
        kind=given.kind,
        num_samples=given.samples,
        vocabulary=given.vocabulary,
        copy_heads=given.copy_heads,
        min_tokens=given.min_tokens,
        max_tokens=given.max_tokens,
        summary_tokens=given.summary_tokens,
        hidden_size=given.hidden_size,
        num_layers=given.layers,
        passes=given.passes,
        learning_rate=given.learning_rate,
        seed=given.seed,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    train = TrainOptions()
    parser.add_argument("--config", default="configs/smollm2.yaml", help="configuration with the target and the prompt")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a value of the configuration"
    )
    parser.add_argument(
        "--text", required=True, metavar="PATH", help="Parquet file or folder with the documents to learn from"
    )
    parser.add_argument("--text-column", default="text", help="column that holds the text")
    parser.add_argument("--output", required=True, type=Path, help="folder to write the draft to")
    parser.add_argument("--kind", choices=get_args(TrainedKind), default=train.kind, help="kind of draft")
    parser.add_argument("--samples", type=int, default=train.num_samples, help="number of prompts to record")
    parser.add_argument(
        "--min-tokens", type=int, default=train.min_tokens, help="tokens of the shortest piece of a document"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=train.max_tokens, help="tokens of the longest piece of a document"
    )
    parser.add_argument("--summary-tokens", type=int, default=train.summary_tokens, help="most tokens of a summary")
    parser.add_argument(
        "--vocabulary", type=int, default=train.vocabulary, help="number of tokens that the draft can propose"
    )
    parser.add_argument("--copy-heads", type=int, default=train.copy_heads, help="eagle: number of KV heads that copy")
    parser.add_argument("--hidden-size", type=int, default=train.hidden_size, help="model: hidden size")
    parser.add_argument("--layers", type=int, default=train.num_layers, help="model: number of layers")
    parser.add_argument("--passes", type=int, default=train.passes, help="passes over the recordings")
    parser.add_argument("--learning-rate", type=float, default=train.learning_rate, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of samples and training")
    return parser

"""The command `train`: distil a draft for a target from text in Parquet files."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specextend.cli.command import SET, config_option, in_one_line, show, takes


@click.command()
@config_option(default=["smollm2"])
@SET
@click.option("--text", required=True, metavar="PATH", help="Parquet file or folder with the documents to learn from")
@click.option("--text-column", default="text", help="column that holds the text")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="folder to write the draft to")
@click.option("--kind", type=click.Choice(["eagle", "model"]), help="kind of draft")
@takes(
    click.option("--samples", "num_samples", type=int, help="number of prompts to record"),
    click.option("--min-tokens", type=int, help="tokens of the shortest piece of a document"),
    click.option("--max-tokens", type=int, help="tokens of the longest piece of a document"),
    click.option("--summary-tokens", type=int, help="most tokens of a summary"),
    click.option("--vocabulary", type=int, help="number of tokens that the draft can propose"),
    click.option("--copy-heads", type=int, help="eagle: number of KV heads that copy"),
    click.option("--hidden-size", type=int, help="model: hidden size"),
    click.option("--layers", "num_layers", type=int, help="model: number of layers"),
    click.option("--passes", type=int, help="passes over the recordings"),
    click.option("--learning-rate", type=float, help="peak learning rate"),
    click.option("--seed", type=int, help="seed of samples and training"),
)
@in_one_line
def train(
    config: tuple[str, ...], settings: tuple[str, ...], text: str, text_column: str, output: Path, **options: Any
) -> int:
    """Distil a draft for the target of a configuration.

    The target reads pieces of the documents and summarises them; the draft learns its choices. Kind `eagle` is a head
    over the target's last hidden state with copy heads, `model` a small standalone LM. One document in ten is held out;
    OUTPUT/README.md says how often the draft agrees with the target on those. After an interruption (exit code 75) the
    same command resumes. OUTPUT/work can be deleted afterwards. Exit code 2: the configuration, the text or the output
    folder cannot be used.
    """
    for stop in (signal.SIGINT, signal.SIGTERM):  # a shell may have started us in the background, with SIGINT ignored
        signal.signal(stop, signal.default_int_handler)

    from specextend.config import RunConfig
    from specextend.data.source import open_source
    from specextend.training.distil import distil
    from specextend.training.task import TrainOptions

    loaded = RunConfig.load(config, [*settings, f"input.path={json.dumps(text)}"])
    documents = replace(loaded.input, text_column=text_column, id_column=None, passthrough=())
    given = TrainOptions(**{name: value for name, value in options.items() if value is not None})
    figures = distil(loaded, open_source(documents), given, output, _say)
    written = json.dumps(figures, indent=1, sort_keys=True)
    (output / "training.json").write_text(written + "\n")
    show(f"{written}\ndraft: {output}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

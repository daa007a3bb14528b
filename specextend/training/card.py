"""The model card of a trained draft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from specextend.training.options import TrainedKind
from specextend.training.task import Task

WHAT: dict[TrainedKind, str] = {
    "eagle": "an EAGLE head in the project's own format, with copy heads (`specextend/drafters/eagle_config.py`)",
    "eagle3": "a head in the published EAGLE-3 layout (`specextend/drafters/formats.py`)",
    "model": "a small standalone Llama with a reduced vocabulary (`specextend/drafters/reduced.py`)",
}
STEPS = ("first token", "second token", "third token")


def write_card(task: Task, figures: dict[str, Any]) -> None:
    """Write `README.md` beside the draft: target, text, recipe and held-out agreement."""
    text = "\n\n".join(_sections(task, figures))
    (task.output / "README.md").write_text(text + "\n", encoding="utf-8")


def _sections(task: Task, figures: dict[str, Any]) -> Iterator[str]:
    options = task.options
    yield f"# {task.output.resolve().name}"
    yield (
        f"A draft for {task.target.name}: {WHAT[options.kind]}. It guesses the tokens that the target will choose; the "
        "target checks each guess, so the draft decides how fast text comes, never which text."
    )
    yield "## What it has read"
    yield (
        f"{figures['recordings']} prompts of `jobs/train_draft.py` around pieces of the documents below, each followed "
        "by quotes from it, facts that were hidden in it, and the target's own summaries of it: "
        f"{figures['tokens']:,} tokens, {options.fit.passes} times."
    )
    if read := figures.get("text_tokens"):
        yield f"Before that, {read:,} tokens of the text alone, {options.text_passes} times."
    files = [f"| `{file.relative_path}` | {file.num_rows} |" for file in task.corpus.source.files]
    yield "\n".join(["| file | documents |", "|---|---|", *files])
    yield "## Recipe"
    yield f"```json\n{json.dumps(asdict(options), indent=1)}\n```"
    yield "## How well it guesses"
    yield (
        f"Agreement with the target's first choice, with a full cache, on {figures['held_out']} such prompts around "
        "documents that it has not seen: one in ten of the above is held out."
    )
    yield _agreement(figures["agreement"])


def _agreement(shares: dict[str, list[float]]) -> str:
    steps = STEPS[: max(map(len, shares.values()))]
    rows = [f"| {name} | {' | '.join(f'{share:.3f}' for share in row)} |" for name, row in shares.items()]
    return "\n".join([f"| tokens of | {' | '.join(steps)} |", f"|---{'|---' * len(steps)}|", *rows])

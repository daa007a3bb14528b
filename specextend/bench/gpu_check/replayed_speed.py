"""Documents an hour, computed: times measured on the device, acceptance recorded elsewhere.

The recording holds real documents, but of another, much smaller target with its own draft, n-grams and smaller trees.
So these figures say what the device would do with that acceptance, and not what a pair of this shape accepts.
Waiting, input and output are not in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specextend.bench.gpu_check.stage import Row, read_rows

RECORDING = Path("benchmarks/results/compare-smollm2-epyc.json")
LABEL = (
    "computed from step and prefill times of random weights and from acceptance that SmolLM2-135M recorded on a CPU "
    f"({RECORDING}); no document was decoded at these shapes"
)
_PARTS = ("plain", "verify", "draft", "absorb", "retrieve")


@dataclass(frozen=True, slots=True)
class RecordedAcceptance:
    """The acceptance of some documents, as means of a document."""

    num_documents: int
    steps: float
    """Steps of speculative decoding."""
    decoded_tokens: float
    """Tokens after the first, which are as many plain steps."""


def replay_documents(out: Path) -> Row:
    """Compute the rows of every cell with all parts; return them as a stage, skipped if there is nothing to compute."""
    if not RECORDING.is_file():
        return {"status": "skipped", "reason": f"{RECORDING} is not here", "rows": []}
    recording = read_recording(RECORDING)
    rows = [*_replay(read_rows(out, "steps"), read_rows(out, "prefill"), recording)]
    if not rows:
        return {"status": "skipped", "reason": "no cell has both step times and prefill times", "rows": []}
    return {"status": "ok", "reason": "", "label": LABEL, "documents": recording.num_documents, "rows": rows}


def read_recording(path: Path) -> RecordedAcceptance:
    """Read the engine's side of a recorded comparison."""
    documents = json.loads(path.read_text(encoding="utf-8"))["documents"]
    sides = [document["sides"]["specextend"] for document in documents]
    steps = sum(side["num_steps"] for side in sides)
    tokens = sum(side["num_output_tokens"] - side["num_first_tokens"] for side in sides)
    return RecordedAcceptance(len(sides), steps / len(sides), tokens / len(sides))


def _replay(steps: Sequence[Row], prefills: Sequence[Row], recording: RecordedAcceptance) -> Iterator[Row]:
    """Yield a row for each cell with all parts whose prompt has a length that prefill was measured at."""
    cells: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in steps:
        if "ms" in row:
            cells.setdefault((row["pair"], row["backend"], row["tokens"], row["batch"]), {})[row["part"]] = row
    for (pair, backend, num_tokens, batch), parts in cells.items():
        target, draft = (_prefill_ms(prefills, pair, num_tokens, model) for model in ("target", "draft"))
        if target is None or draft is None or not parts.keys() >= {*_PARTS}:
            continue
        plain_ms, step_ms = parts["plain"]["ms"]["median"], speculative_step_ms(parts)
        document_ms = target + draft + recording.steps * step_ms / batch
        plain_document_ms = target + recording.decoded_tokens * plain_ms / batch
        yield {
            "pair": pair,
            "backend": backend,
            "tokens": num_tokens,
            "batch": batch,
            "step_ms": step_ms,
            "plain_step_ms": plain_ms,
            "documents_per_hour": 3.6e6 / document_ms,
            "plain_documents_per_hour": 3.6e6 / plain_document_ms,
        }


def speculative_step_ms(parts: Mapping[str, Row]) -> float:
    """Add up the parts of a step, with the share of a retrieval that falls to it."""
    ms: dict[str, float] = {name: row["ms"]["median"] for name, row in parts.items()}
    return ms["draft"] + ms["verify"] + ms["absorb"] + ms["retrieve"] / parts["retrieve"]["every"]


def _prefill_ms(prefills: Sequence[Row], pair: str, num_tokens: int, model: str) -> float | None:
    """Return the milliseconds of a prompt with the best kernel and chunks; None if it was not measured."""
    wanted = {"pair": pair, "tokens": num_tokens, "model": model}
    return min((row["ms"]["median"] for row in prefills if wanted.items() <= row.items()), default=None)

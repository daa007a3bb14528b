"""The process that compares candidate kernels with plain torch, and writes each verdict at once."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from specextend.attention.backends import Trial
from specextend.core import first_line
from specextend.decoding.device import (
    CudaCapture,
    is_device_error,
    make_current,
)
from specextend.proof.kernel_checks import calls_of, wrong_attention, wrong_layer
from specextend.proof.subject import TREES, Candidate, Kernels, Subject
from specextend.proof.tiny_pair import make_requests, wrong_steps

_RUNS = 5


def judge(subject: Subject, kernels: Kernels, candidate: Candidate) -> Trial:
    """Prove a candidate on top of `kernels`. Errors of a kernel propagate."""
    left_out = partial(Trial, name=candidate.name, taken=False)
    if candidate.field == "graphs" and kernels.steps == Kernels.steps:
        return left_out(why=f"it needs {TREES.name}")
    changed = candidate.among(kernels)
    device = torch.device(subject.device)
    try:
        changed.attend(device), changed.of_layers(device)
    except ValueError as error:
        return left_out(why=str(error))
    with torch.inference_mode():
        if wrong := find_fault(subject, changed, candidate.field):
            return left_out(why=wrong, is_wrong=True)
    return Trial(name=candidate.name, taken=True, why="it is right here")


def find_fault(subject: Subject, kernels: Kernels, field: str) -> str:
    """Compare kernels with plain torch; return an error message, if any."""
    device = torch.device(subject.device)
    dtype = getattr(torch, subject.dtype)
    if field == "graphs":
        return wrong_steps(subject, kernels, CudaCapture(), make_requests())
    with device:
        for shape in subject.layers:
            if field != "layers":
                wrong = wrong_attention(
                    kernels.attend(device), calls_of(subject, field), shape, dtype
                )
            else:
                sizes = 1, subject.num_drafts + 1, subject.chunk
                layer = kernels.of_layers(device)
                each = (
                    wrong_layer(layer, size, shape, dtype, scheme=subject.quantize)
                    for size in sizes
                )
                wrong = next(filter(None, each), "")
            if wrong:
                return wrong
    return ""


def prove_all(
    subject: Subject, kernels: Kernels, candidates: Sequence[Candidate]
) -> Iterator[Trial]:
    """Yield the verdict on each candidate, on top of earlier right ones.

    Errors leave the verdict open. After the loss of the device, another process proves the rest.
    """
    for candidate in candidates:
        try:
            trial = judge(subject, kernels, candidate)
        except Exception as error:  # noqa: BLE001  whatever it is, it is told and tried again
            why = f"not there yet: {first_line(error)}"
            yield Trial(name=candidate.name, taken=False, why=why, is_final=False)
            if is_device_error(error):
                return
            continue
        if trial.taken:
            kernels = candidate.among(kernels)
        yield trial


def main() -> None:
    """Prove the task on standard input; append each verdict to the file in the first argument."""
    task = json.load(sys.stdin)
    subject = Subject(**task["subject"])
    make_current(torch.device(subject.device))
    candidates = [Candidate(**each) for each in task["candidates"]]
    with Path(sys.argv[1]).open("a", encoding="utf-8") as out:
        for trial in prove_all(subject, Kernels(**task["kernels"]), candidates):
            print(json.dumps(asdict(trial)), file=out, flush=True)


if __name__ == "__main__":
    main()

"""The trial of one rung, in a process of its own: is it right, and how long does it take beside
what it would replace.

Shapes: `B` sequences, `T` rows of each.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import ModuleList

from specextend.attention.backends import shortest_runs
from specextend.attention.plain import MAX_QUERIES
from specextend.attention.plan import AttentionPlan
from specextend.core import Request, Values, counted
from specextend.decoding.device import (
    CALLS_BEFORE_CAPTURE,
    Capture,
    CudaCapture,
    Graphs,
    is_device_error,
    is_out_of_memory,
    make_current,
    synchronise,
)
from specextend.decoding.measurements import make_step
from specextend.decoding.model import CachedModel
from specextend.proof.subject import Kernels, Subject
from specextend.proof.tiny_pair import TinyPair, random_model
from specextend.proof.trials import (
    prompt_calls,
    rows_before,
    step_calls,
    what_is_wrong,
    what_is_wrong_in_a_layer,
)

Times = dict[str, float]
"""Seconds of whole forwards of a model of the target's size, which reads a `prompt`, or takes a
`plain` step or one with a `tree`, which a `draft` of one layer grows.
"""
_TIMED_LENGTH = 16384
"""Rows before those of a forward that is timed, at most."""
_DRAFT_LENGTH = 2048
"""Rows that a draft sees."""
_RUNS = 5
_LENGTHS = ((1, 24), (63, 8), (300, 20), (17, 33))
"""Tokens of a prompt, and new tokens, of requests of a tiny pair, in turns; one more is longer than
a chunk.
"""
_LEAST_ACCEPTED = 0.9
"""Share of the draft tokens that eager steps accept; trees may differ where two tokens are nearly
tied.
"""


def try_rung(subject: Subject, base: Kernels, rung: Kernels) -> Values:
    """Return why a rung is `absent` here, what is `wrong` with it, or the `Times` of both.

    Raises whatever a kernel raises.
    """
    device = torch.device(subject.device)
    make_current(device)
    try:
        rung.attend(device), rung.of_layers(device)
    except ValueError as error:
        return {"absent": str(error)}
    with torch.inference_mode():
        wrong = find_fault(subject, base, rung)
        if wrong:
            return {"wrong": wrong}
        return measure(subject, base, rung)


def find_fault(subject: Subject, base: Kernels, rung: Kernels) -> str:
    """Compare what a rung changes with plain torch, then a tiny pair's tokens with those of plain
    decoding.
    """
    heads = subject.heads()
    device = torch.device(subject.device)
    attend = rung.attend(device)
    calls = []
    # a cache may just hold one sequence and its tree
    longest = min(subject.longest, subject.num_rows - MAX_QUERIES)
    if rung.prompts != base.prompts:
        calls += prompt_calls(min(subject.chunk, longest), longest)
    if rung.steps != base.steps:
        calls += step_calls(subject.num_nodes, subject.depth, subject.batch, longest)
    for call in calls:
        if wrong := what_is_wrong(attend, call, heads, subject.num_rows):
            return wrong
    if rung.layers != base.layers:
        config = subject.config()
        for num_rows in (1, subject.num_nodes + 1, min(subject.chunk, subject.longest)):
            sizes = num_rows, config.hidden_size, config.intermediate_size
            has_norms = config.model_type.startswith("qwen3")
            if wrong := what_is_wrong_in_a_layer(
                rung.of_layers(device), *sizes, heads, head_norms=has_norms
            ):
                return wrong
    return compare_tokens(subject, rung)


def compare_tokens(subject: Subject, rung: Kernels, capture: Capture | None = None) -> str:
    """Decode with a tiny pair in fp32 and the configured tree, one request at a time and in a
    batch.

    The tokens must be those of plain decoding in plain torch. Others join where requests end, so
    that captured steps are replayed at other lengths and places; they must accept as many draft
    tokens as eager ones, because a draft that reads the wrong rows changes no token.
    """
    pair = TinyPair(subject)
    requests = make_requests(subject.chunk, subject.batch)
    expected = pair.decode(
        Kernels(prompts="reference", steps="reference"), requests, 1, speculates=False
    )
    capture = CudaCapture() if rung.graphs and capture is None else capture
    for batch in dict.fromkeys((1, subject.batch)):
        found = pair.decode(rung, requests, batch, Graphs(capture, 1))
        if different := [
            name for name, done in expected.items() if found[name].token_ids != done.token_ids
        ]:
            return f"{counted(len(different), 'text')} of a tiny pair differ in batches of {batch}"
        if capture is not None:
            eager = pair.decode(rung, requests, batch, Graphs(capture, sys.maxsize))
            accepted = [
                sum(done.stats.num_accepted_tokens for done in each.values())
                for each in (found, eager)
            ]
            if accepted[0] < _LEAST_ACCEPTED * accepted[1]:
                return (
                    f"{accepted[0]} instead of {accepted[1]} draft tokens are accepted in "
                    f"batches of {batch}"
                )
    return ""


def make_requests(chunk: int, batch: int) -> list[Request]:
    """Make requests of random tokens, more than a batch."""
    generator = torch.Generator().manual_seed(0)
    lengths = ((chunk + 70, 20), *_LENGTHS * (1 + batch // len(_LENGTHS)))
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=torch.randint(
                TinyPair.vocabulary, (length,), generator=generator
            ).tolist(),
            max_new_tokens=num_new,
        )
        for number, (length, num_new) in enumerate(lengths)
    ]


def measure(subject: Subject, base: Kernels, rung: Kernels) -> dict[str, Times]:
    """Time forwards with two choices of kernels, in turns, on a model of the target's size with
    random weights.

    Returns the `Times` of both as `base_s` and `rung_s`.
    """
    sides = {"base_s": make_forwards(subject, base), "rung_s": make_forwards(subject, rung)}
    found: dict[str, Times] = {side: {} for side in sides}
    for name in timed_shapes(subject):
        runs = {side: forwards[name] for side, forwards in sides.items()}
        for run in runs.values():
            for _ in range(0 if name == "prompt" else CALLS_BEFORE_CAPTURE):
                run()
        for side, seconds in shortest_runs(runs, _RUNS).items():
            found[side][name] = seconds
    return found


def make_forwards(subject: Subject, kernels: Kernels) -> dict[str, Callable[[], None]]:
    """Make the forwards that are timed, each of which is waited for.

    All layers are one, with random weights and its own cache, which is more than the GPU keeps near
    at hand: so a whole step, and what the host asks for it, takes the memory of a layer.
    """
    device = torch.device(subject.device)
    config = subject.config(num_hidden_layers=1, layer_types=None)
    attend = kernels.attend(device)
    layers = kernels.of_layers(device)
    model = random_model(config, device, getattr(torch, subject.dtype))
    target = CachedModel(model, attend, subject.num_rows, layers, subject.quantize)
    target.cache.stored.normal_()
    graphs = Graphs(CudaCapture() if kernels.graphs else None)
    layer = model.model.layers
    whole = ModuleList([*layer] * subject.config().num_hidden_layers)

    def forward(name: str, batch: int, num_new: int, length: int) -> None:
        model.model.layers = layer if name == "draft" else whole
        token_ids = torch.zeros(batch, num_new, dtype=torch.int64, device=device)
        if name == "prompt":
            positions = torch.arange(length, length + num_new, device=device).unsqueeze(0)
            target.forward(token_ids, positions, AttentionPlan([0], [length + num_new], num_new))
        else:
            step = make_step(target, "dense", batch, num_new, length, graphs)
            for _ in range(subject.depth if name == "draft" else 1):
                step(token_ids)
        synchronise(device)

    return {name: partial(forward, name, *shape) for name, shape in timed_shapes(subject).items()}


def timed_shapes(subject: Subject) -> dict[str, tuple[int, int, int]]:
    """Return the forwards that are timed: the sequences of each, the new rows, and the rows before
    them.
    """
    chunk = min(subject.chunk, subject.longest)
    behind = rows_before(chunk, min(_TIMED_LENGTH, subject.longest, subject.num_rows))
    size = subject.num_nodes + 1
    each = min(
        _TIMED_LENGTH, subject.longest, subject.num_rows // subject.batch // 256 * 256 - size
    )
    return {
        "prompt": (1, chunk, behind),
        "plain": (subject.batch, 1, each),
        "tree": (subject.batch, size, each),
        "draft": (subject.batch, subject.num_nodes, min(_DRAFT_LENGTH, each)),
    }


def main() -> None:
    """Try the rung of a task, which comes in as JSON; what was found goes to the file that the
    first argument names.

    Memory that somebody else had, or a device that failed, says little of a kernel: another try is
    due.
    """
    task = json.load(sys.stdin)
    try:
        found = try_rung(
            Subject(**task["subject"]), Kernels(**task["base"]), Kernels(**task["rung"])
        )
    except Exception as error:  # noqa: BLE001  whatever a kernel raises is what is wrong with it
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        found = {"wrong": said, "late": is_out_of_memory(error) or is_device_error(error)}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

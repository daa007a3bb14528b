"""The trial of one rung, in a process of its own: is it right, and how long does it take beside what it would replace.

Shapes: `B` sequences, `T` rows of each.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specextend.attention.backends import shortest_runs
from specextend.attention.plan import AttentionPlan
from specextend.attention.reference import MAX_MASKED
from specextend.attention.trials import prompt_calls, step_calls, what_is_wrong, what_is_wrong_in_a_layer
from specextend.core import Request, Values, counted
from specextend.decoding.cache import aligned
from specextend.decoding.device import CudaCapture, Graphs, make_current, synchronise
from specextend.decoding.measurements import count_work, load_limits
from specextend.decoding.model import CachedModel
from specextend.decoding.quantized import saved_bytes
from specextend.decoding.tree import tree_mask
from specextend.proof.subject import Kernels, Subject
from specextend.proof.tiny_pair import TinyPair, random_model

Times = dict[str, float]
"""Seconds of a forward of one layer of the target's size: `prompt`, `plain` and `tree`."""
_TIMED_LENGTH = 16384
"""Rows before those of a forward that is timed, at most."""
_RUNS = 5
_SMALL_VOCABULARY = 1024
_LENGTHS = ((1, 24), (63, 8), (300, 20), (17, 33))
"""Tokens of a prompt, and new tokens, of each request of a tiny pair; one more is longer than a chunk."""


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
        base_s, rung_s = measure(subject, base, rung)
    return {"base_s": base_s, "rung_s": rung_s}


def find_fault(subject: Subject, base: Kernels, rung: Kernels) -> str:
    """Compare what a rung changes with plain torch, then a tiny pair's tokens with those of plain decoding."""
    heads, device = subject.heads(), torch.device(subject.device)
    attend, calls = rung.attend(device), []
    longest = min(subject.longest, subject.num_rows - MAX_MASKED)  # a cache may just hold one sequence and its tree
    if rung.prompts != base.prompts:
        calls += prompt_calls(min(subject.chunk, longest), longest)
    if rung.steps != base.steps:
        calls += step_calls(subject.num_nodes, subject.batch, longest)
    for call in calls:
        if wrong := what_is_wrong(attend, call, heads, subject.num_rows):
            return wrong
    if rung.layers != base.layers:
        config = subject.config()
        for num_rows in (1, subject.num_nodes + 1, min(subject.chunk, subject.longest)):
            sizes = num_rows, config.hidden_size, config.intermediate_size
            has_norms = config.model_type.startswith("qwen3")
            if wrong := what_is_wrong_in_a_layer(rung.of_layers(device), *sizes, heads, head_norms=has_norms):
                return wrong
    return compare_tokens(subject, rung)


def compare_tokens(subject: Subject, rung: Kernels) -> str:
    """Decode with a tiny pair in fp32 and the configured tree, one request at a time and in a batch.

    The tokens must be those of plain decoding in plain torch. Requests join while others run, so that captured steps
    are replayed at other lengths and places.
    """
    pair = TinyPair(subject)
    requests = make_requests(subject.chunk)
    expected = pair.decode(Kernels(prompts="reference", steps="reference"), requests, 1, speculates=False)
    for batch in dict.fromkeys((1, subject.batch)):
        found = pair.decode(rung, requests, batch, speculates=True)
        if different := [name for name, tokens in expected.items() if found[name] != tokens]:
            return f"{counted(len(different), 'text')} of a tiny pair differ in batches of {batch}"
    return ""


def make_requests(chunk: int) -> list[Request]:
    """Make requests of random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = (*_LENGTHS, (chunk + 70, 20))
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=torch.randint(TinyPair.vocabulary, (length,), generator=generator).tolist(),
            max_new_tokens=num_new,
        )
        for number, (length, num_new) in enumerate(lengths)
    ]


def measure(subject: Subject, base: Kernels, rung: Kernels) -> tuple[Times, Times]:
    """Time forwards with two choices of kernels, in turns, on a layer of the target's size with random weights."""
    device = torch.device(subject.device)
    layers = [OneLayer(subject, kernels) for kernels in (base, rung)]
    found: tuple[Times, Times] = {}, {}
    for name in ("prompt", "plain", "tree"):
        runs = {str(i): partial(layer.run, name) for i, layer in enumerate(layers)}
        for run in runs.values():
            for _ in range(layers[1].graphs.num_warm_ups):
                run()
        for i, seconds in shortest_runs(runs, _RUNS).items():
            found[int(i)][name] = seconds
    synchronise(device)
    return found


class OneLayer:
    """A layer of the target with a cache of its size, and forwards to time."""

    def __init__(self, subject: Subject, kernels: Kernels):
        """Make the weights, random ones."""
        self._device = torch.device(subject.device)
        config = subject.config(num_hidden_layers=1, vocab_size=_SMALL_VOCABULARY, layer_types=None)
        attend, layers = kernels.attend(self._device), kernels.of_layers(self._device)
        model = random_model(config, self._device, getattr(torch, subject.dtype))
        self._target = CachedModel(model, attend, subject.num_rows, layers, subject.quantize)
        self._target.cache.stored.normal_()
        self.graphs = Graphs(CudaCapture() if kernels.graphs else None)
        self._forwards = {name: self._forward(name, *shape) for name, shape in timed_shapes(subject).items()}

    def run(self, name: str) -> None:
        """Run a forward, and wait for it."""
        self._forwards[name]()
        synchronise(self._device)

    def _forward(self, name: str, batch: int, num_new: int, length: int) -> Callable[[], object]:
        region = aligned(length + num_new)
        starts = [b * region for b in range(batch)]
        first = torch.tensor(starts, device=self._device).unsqueeze(1)
        rows = first + length + torch.arange(num_new, device=self._device)
        parents = torch.arange(-1, num_new - 1, device=self._device).repeat(batch, 1)

        def forward(token_ids: Tensor, parents: Tensor, first: Tensor, rows: Tensor) -> tuple[Tensor]:
            mask = tree_mask(parents, num_new) if name == "tree" else None
            plan = AttentionPlan(
                starts,
                [length + num_new] * batch,
                num_new,
                mask,
                tree="dense",
                on_device=(first, rows),
                captured=self.graphs.capturing,
            )
            return (self._target.forward(token_ids, rows - first, plan),)

        if name == "prompt":
            return partial(forward, torch.zeros_like(rows), parents, first, rows)
        return partial(self.graphs.run, name, forward, torch.zeros_like(rows), parents, first, rows)


def timed_shapes(subject: Subject) -> dict[str, tuple[int, int, int]]:
    """Return the forwards that are timed: the sequences of each, the new rows, and the rows before them."""
    chunk = min(subject.chunk, subject.longest)
    behind = min(_TIMED_LENGTH, subject.longest, subject.num_rows) - chunk
    size = subject.num_nodes + 1
    each = min(_TIMED_LENGTH, subject.longest, subject.num_rows // subject.batch // 256 * 256 - size)
    return {
        "prompt": (1, chunk, max(0, behind)),
        "plain": (subject.batch, 1, each),
        "tree": (subject.batch, size, each),
    }


def least_times(subject: Subject) -> Times:
    """Return the least seconds that those forwards can take: memory is read once, or products run at the best rate."""
    device, dtype = torch.device(subject.device), getattr(torch, subject.dtype)
    limits = load_limits(device, dtype)
    with torch.device("meta"):
        model = random_model(subject.config(num_hidden_layers=1, layer_types=None), torch.device("meta"), dtype)
    work, least = count_work(model, dtype), {}
    weights = work.layer_parameters * dtype.itemsize - saved_bytes(model, subject.quantize, dtype)
    for name, (batch, num_new, length) in timed_shapes(subject).items():
        num_pairs = batch * num_new * (length + num_new)
        num_flop = 2 * batch * num_new * work.layer_parameters + work.attention_flop_per_pair * num_pairs
        num_bytes = weights + batch * (length + num_new) * work.kv_bytes_per_token
        least[name] = max(num_flop / limits.flop_per_s, num_bytes / limits.read_bytes_per_s)
    return least


def main() -> None:
    """Try the rung of a task, which comes in as JSON; what was found goes to the file that the first argument names."""
    task = json.load(sys.stdin)
    found = try_rung(Subject(**task["subject"]), Kernels(**task["base"]), Kernels(**task["rung"]))
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The process that compares candidate kernels with plain torch, and writes each verdict at once.

Attention is compared in all plans of a forward, after up to 16,000 tokens, then a layer's
functions. Whole steps are compared on tiny random models in fp32 with the configured tree.
"""

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specextend.attention.backends import Trial, shortest_runs
from specextend.attention.plain import (
    MAX_QUERIES,
    HeadNorms,
    LayerKernels,
    what_differs,
    what_is_wrong,
)
from specextend.attention.plan import Attend, KeySpan
from specextend.attention.torch_kernels import PLANNED, TORCH
from specextend.core import Completion, Request, Values, counted, first_line
from specextend.decoding.cache import aligned
from specextend.decoding.decoding_options import CacheOptions, TreeOptions
from specextend.decoding.device import (
    Capture,
    CudaCapture,
    Graphs,
    is_device_error,
    make_current,
    synchronise,
)
from specextend.decoding.engine import Engine
from specextend.decoding.layers import RoundedLinear, linear
from specextend.decoding.model import CachedModel
from specextend.decoding.quantized import Scheme
from specextend.decoding.tree import DraftTrees, tree_mask
from specextend.drafters.causal import CausalDrafter
from specextend.drafters.lm_networks import ModelNetwork
from specextend.proof.prover import LONGEST, TREES, Candidate, Kernels, LayerShape, Subject

_SHAPE: Values = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_CACHE = CacheOptions(
    chunk_size=8, top_k_chunks=8, recent=16, refresh_every=3, score_layers=(-1, 2)
)
_OTHER = 0.02
"""Standard deviations between weights of draft and target: some guesses are wrong."""
_LENGTHS = ((1, 24), (63, 8), (300, 20), (17, 33)) * 2
"""Prompt tokens and new tokens of requests after the longest."""
_STEP_BATCHES = (1, 4)
_LEAST_SHARED = 0.9
"""Least share of eager trees that replayed steps also grow; near ties may differ."""

Trees = Counter[tuple[tuple[float, ...], ...]]


def wrong_steps(
    subject: Subject, kernels: Kernels, capture: Capture, requests: Sequence[Request]
) -> str:
    """Decode with captured steps; return an error message, if any.

    Tokens must equal plain decoding in plain torch, and trees must equal eager steps: drafts that
    read wrong rows change no token. Requests join as others end, so steps are replayed at other
    lengths and places.
    """
    pair = TinyPair(subject)
    reference = Kernels(prompts="reference", steps="reference")
    expected = pair.decode(reference, requests, 1, speculates=False)
    for batch in _STEP_BATCHES:
        replayed, eager = Trees(), Trees()
        graphs = Graphs(capture, 1)
        found = pair.decode(kernels, requests, batch, graphs, trees=replayed)
        if not graphs.enabled:
            raise RuntimeError("steps cannot be captured")
        if different := [
            name for name, done in expected.items() if found[name].token_ids != done.token_ids
        ]:
            return f"{counted(len(different), 'text')} of a tiny pair differ in batches of {batch}"
        pair.decode(kernels, requests, batch, Graphs(capture, sys.maxsize), trees=eager)
        shared = (replayed & eager).total() / max(1, eager.total())
        if shared < _LEAST_SHARED:
            return f"{shared:.0%} of its trees are those of eager steps, in batches of {batch}"
    return ""


def make_requests(longest: int = LONGEST) -> list[Request]:
    """Make more requests than a batch, of random tokens; the first prompt has `longest`."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=torch.randint(
                TinyPair.vocabulary, (length,), generator=generator
            ).tolist(),
            max_new_tokens=num_new,
        )
        for number, (length, num_new) in enumerate(((longest, 20), *_LENGTHS))
    ]


def random_model(config: Values, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    """Make a causal LM with random weights from a changed `config.json`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # by a process that proves nothing

    values = config | changes
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype
        )
    return model.eval().requires_grad_(False)


class TinyPair:
    """A target with heads of the subject's size, and a similar draft."""

    vocabulary: ClassVar[int] = 500

    def __init__(self, subject: Subject):
        self._subject, self._device = subject, torch.device(subject.device)
        self._target = random_model(
            _SHAPE,
            self._device,
            torch.float32,
            head_dim=subject.layers[0].head_dim,
            vocab_size=self.vocabulary,
        )
        self._draft = copy.deepcopy(self._target)
        for weight in self._draft.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * _OTHER)

    def decode(
        self,
        kernels: Kernels,
        requests: Sequence[Request],
        batch: int,
        graphs: Graphs | None = None,
        *,
        speculates: bool = True,
        trees: Trees | None = None,
    ) -> dict[str, Completion]:
        """Decode the same requests in batches of at most `batch`; return results by name.

        `trees` counts proposed trees, which waits for the device.
        """
        subject = self._subject
        tree = TreeOptions(nodes=subject.num_drafts, depth=subject.depth)
        num_tokens = max(len(each.prompt_token_ids) + each.max_new_tokens for each in requests)
        rows = batch * aligned(num_tokens + tree.most_drafts + tree.depth + 2)
        attend = kernels.attend(self._device)
        layers = kernels.of_layers(self._device)
        target = CachedModel(_own(self._target), attend, rows, layers)
        drafter = None
        if speculates:
            scratch = batch * aligned(tree.most_drafts * tree.depth)
            cached = CachedModel(_own(self._draft), attend, rows + scratch, layers)
            network = ModelNetwork(cached, _CACHE.chunk_size, subject.chunk)
            visible = _CACHE.top_k_chunks * _CACHE.chunk_size
            drafter = _NotingDrafter(network, tree, "dense", visible, batch, graphs)
            drafter.trees = trees
        engine = Engine(
            TokenNumbers(),
            target,
            drafter,
            eos_token_ids=frozenset(),
            max_tokens=num_tokens,
            max_batch_size=batch,
            tree=tree,
            tree_attention="dense",
            cache=_CACHE,
            graphs=graphs,
        )
        engine.decode_share = 0.0  # joins must not depend on time
        return {done.request_id: done for done in engine.generate(requests)}


class _NotingDrafter(CausalDrafter):
    """A drafter that counts the trees it proposes."""

    trees: Trees | None

    def propose(self, slots: Sequence[int], num_drafts: int | None = None) -> DraftTrees:
        """Grow trees, and count them."""
        proposed = super().propose(slots, num_drafts)
        if self.trees is not None:
            self.trees.update(
                tuple(tuple(node[:3]) for node in nodes) for nodes in proposed.nodes()
            )
        return proposed


class TokenNumbers:
    """A tokenizer that names tokens by number."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, token_ids: list[int], **_: bool) -> str:
        """Join the numbers by spaces."""
        return " ".join(map(str, token_ids))


def _own(model: Any) -> Any:
    """Copy a model, sharing weights, so that the engine may replace its layers."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


_BATCHES = ((LONGEST,), (63, 500, LONGEST, 0, 4_000))
"""Tokens before the queries of each sequence."""
_RUNS = 5


@dataclass(frozen=True, slots=True)
class Call:
    """The shape of a call of attention."""

    kind: Literal["plain", "causal", "tree"]
    num_queries: int
    prefixes: tuple[int, ...]
    """Rows before the masked rows [B]."""
    num_earlier: int = 0
    """Masked rows before the queries' rows, as in levels of a tree."""

    @property
    def num_masked(self) -> int:
        """Rows after the prefix."""
        return self.num_earlier + self.num_queries

    def __str__(self) -> str:
        return f"T = {self.num_queries} ({self.kind}) after {', '.join(map(str, self.prefixes))}"


def step_calls(num_drafts: int, depth: int) -> Iterator[Call]:
    """Yield calls of plain steps, trees, the last level of trees, and readings of a draft."""
    for prefixes in _BATCHES:
        for size in {1, num_drafts + 1, MAX_QUERIES}:
            yield Call("tree" if size > 1 else "plain", size, prefixes)
        yield Call("causal", depth + 1, prefixes)
        yield Call("tree", num_drafts, prefixes, num_drafts * max(0, depth - 2))


def prompt_calls(chunk: int) -> Iterator[Call]:
    """Yield calls of prompt chunks, at planned and other lengths."""
    for prefix in (0, 65, 4_000, LONGEST // PLANNED * PLANNED, LONGEST):
        yield Call("causal", chunk, (prefix,))


def calls_of(subject: Subject, field: str) -> Iterator[Call]:
    """Yield the calls of attention in prompts or in steps."""
    if field == "prompts":
        return prompt_calls(subject.chunk)
    return step_calls(subject.num_drafts, subject.depth)


def wrong_attention(
    attend: Attend, calls: Iterable[Call], shape: LayerShape, dtype: torch.dtype
) -> str:
    """Attend with NaN in unused cache rows; return an error message, if any."""
    for call in calls:
        if wrong := what_is_wrong(attend, *make_call(call, shape, dtype)):
            return f"{wrong} at {call}"
    return ""


def make_call(
    call: Call, shape: LayerShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, KeySpan, float]:
    """Make queries [B, T, H, D], keys and values [K, R, D], span and scale of a call."""
    torch.manual_seed(call.num_queries + sum(call.prefixes))
    lengths = [prefix + call.num_masked for prefix in call.prefixes]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + aligned(length))
    cache = torch.full(
        (2, shape.num_key_heads, starts.pop(), shape.head_dim), torch.nan, dtype=dtype
    )
    for start, length in zip(starts, lengths, strict=True):
        cache[:, :, start : start + length].normal_()
    q = torch.randn(len(starts), call.num_queries, shape.num_heads, shape.head_dim, dtype=dtype)
    mask = None
    if call.kind == "tree":  # any earlier node may be a node's parent
        nodes = torch.arange(call.num_masked)
        parents = (torch.rand(len(starts), call.num_masked) * nodes).long() - (nodes == 0).long()
        mask = tree_mask(parents, call.num_masked)[:, call.num_earlier :]
    span = KeySpan(starts, lengths, mask, call.kind == "causal")
    return q, *cache, span, shape.head_dim**-0.5


def wrong_layer(
    kernels: LayerKernels,
    num_rows: int,
    shape: LayerShape,
    dtype: torch.dtype,
    *,
    scheme: Scheme | None = None,
) -> str:
    """Run the functions of a layer on random rows; return an error message, if any.

    With the schemes `fp8` and `int8`, products round their inputs.
    """
    results = partial(_layer_results, num_rows, shape, dtype)
    exact = dict(results(TORCH, torch.float32))
    for name, result in results(kernels, dtype):
        if wrong := what_differs(name, result, exact[name]):
            return f"{wrong} at R = {num_rows}"
    if scheme == "int8":
        return _wrong_integers(kernels, num_rows, shape)
    return _wrong_rounding(kernels, num_rows, shape) if scheme == "fp8" else ""


def _layer_results(
    num_rows: int,
    shape: LayerShape,
    dtype: torch.dtype,
    kernels: LayerKernels,
    computed_in: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(num_rows)

    def draw(*size: int) -> Tensor:
        return torch.randn(size).to(dtype).to(computed_in)

    weight = draw(shape.hidden_size)
    rows = (num_rows, shape.hidden_size)
    total, normed = kernels.add_norm(draw(*rows), draw(*rows), weight, 1e-5)
    yield "the sum", total
    yield "the norm", normed
    yield "the norm without a sum", kernels.add_norm(draw(*rows), None, weight, 1e-5)[1]
    yield "the gate", kernels.gate(draw(num_rows, 2 * shape.intermediate_size))
    dim = shape.head_dim
    norms = HeadNorms(draw(dim), draw(dim), 1e-5) if shape.has_norms else None
    # its first heads belong to another layer and must stay
    cache = draw(2, shape.num_key_heads + 1, 2 * num_rows, dim)
    places = torch.randperm(2 * num_rows)[:num_rows]
    qkv = draw(num_rows, shape.num_heads + 2 * shape.num_key_heads, dim)
    angles = draw(num_rows, dim)
    given = qkv, angles.cos(), angles.sin(), norms, *cache[:, 1:], places
    yield "the query", kernels.rotate_heads(*given)
    yield "the cache", cache


def _wrong_rounding(kernels: LayerKernels, num_rows: int, shape: LayerShape) -> str:
    fp8 = torch.float8_e4m3fn
    x = torch.randn(num_rows, shape.intermediate_size).bfloat16()
    weight = torch.randn(shape.hidden_size, shape.intermediate_size).to(fp8)
    scale = torch.randn(shape.hidden_size, 1).exp()
    layer: Any = SimpleNamespace(weight=SimpleNamespace(qdata=weight, scale=scale), bias=None)
    per_row = x.float().abs().amax(1, keepdim=True) / torch.finfo(fp8).max
    rounded = (x.float() / per_row).to(fp8).float() * per_row
    exact = rounded @ (weight.float() * scale).T
    return what_differs("the product in fp8", kernels.multiply(layer, x), exact)


def _wrong_integers(kernels: LayerKernels, num_rows: int, shape: LayerShape) -> str:
    weight = torch.randn(shape.hidden_size, shape.intermediate_size).bfloat16()
    rounded = RoundedLinear(linear(weight), shape.intermediate_size)
    x = torch.randn(num_rows, shape.intermediate_size).bfloat16()
    return what_differs("the product in int8", kernels.multiply(rounded, x), rounded(x).float())


@torch.inference_mode()
def times_of(subject: Subject, kernels: Kernels) -> Iterator[str]:
    """Yield lines with milliseconds of attention by kernels and by torch."""
    device = torch.device(subject.device)
    sides = {"ours": kernels.attend(device), "torch": Kernels().attend(device)}
    for call in (*calls_of(subject, "prompts"), *calls_of(subject, "steps")):
        with device:
            given = make_call(call, subject.layers[0], getattr(torch, subject.dtype))
        runs = {name: partial(_waited, device, each, *given) for name, each in sides.items()}
        ms = {name: 1e3 * seconds for name, seconds in shortest_runs(runs, _RUNS).items()}
        yield f"{ms['ours']:.3g} (torch {ms['torch']:.3g}) at {call}"


def _waited(device: torch.device, run: Callable[..., object], *given: object) -> None:
    run(*given)
    synchronise(device)


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

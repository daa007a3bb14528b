"""`kernels`: every attention kernel of a CPU by its times, by its errors and by what it does to acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from specextend.attention.backends import attend_reference, cpu_kernels
from specextend.attention.plan import Attend
from specextend.bench.kernel_errors import NUM_STEPS, exact_logits, kernel_errors, stock_errors
from specextend.bench.kernel_times import (
    NUM_QUERIES,
    REFERENCE,
    attention_times,
    chunk_rates,
    fill,
    step_times,
)
from specextend.bench.measurement import Measurement
from specextend.bench.sides import EngineSide, in_mode
from specextend.bench.workload import BenchDocument, BenchOptions, Say, describe, use_configured_threads
from specextend.config import RunConfig
from specextend.core import counted
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import open_source
from specextend.decoding.decoding_options import Backend
from specextend.decoding.device import CPU
from specextend.decoding.limits import measure_limits
from specextend.decoding.model import CachedModel
from specextend.loading import load_cached_target, load_engine
from specextend.models import DTYPES, load_tokenizer, read_facts, resolve_device
from specextend.report.statistics import bucket_of
from specextend.stats import DecodingStats

NUM_NODES = 15
"""Draft tokens of a step while acceptance is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelOptions:
    """Says what is measured with each kernel."""

    keys: tuple[int, ...] = (1024, 2048, 8192)
    """Keys of decoding steps."""
    chunk_keys: tuple[int, ...] = (1024, 4096, 8192)
    """Keys of chunks of a prompt, the chunk's own included."""
    rounds: int = 5
    """Rounds in which the kernels take turns."""
    num_documents: int = 3
    """Documents for errors and acceptance."""
    tokens: int = 2048
    """Tokens of a prompt, to which the documents are cut."""
    max_new_tokens: int = 64
    """Most tokens to decode for each document."""

    def __post_init__(self) -> None:
        for name in ("rounds", "num_documents", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tokens <= NUM_STEPS:
            raise ValueError(
                f"tokens must be above {NUM_STEPS}, of which the last are read in steps; got {self.tokens}"
            )
        for name, least in (("keys", max(NUM_QUERIES)), ("chunk_keys", CPU.prefill_chunk)):
            if min(getattr(self, name), default=0) < least:
                raise ValueError(f"{name} must be one number or more, each at least {least}")

    @property
    def num_rows(self) -> int:
        """Return the cache rows that the longest measurement needs."""
        return max(*self.keys, *self.chunk_keys, self.tokens)


def kernels(config: RunConfig, options: KernelOptions, say: Say) -> dict[str, Any]:
    """Force each kernel in turn, and return figures as JSON values.

    Raises ValueError, before weights are loaded, if the target is not on a CPU or the input holds too few documents.
    """
    device = resolve_device(config.target.device)
    if device.type != "cpu":
        raise ValueError(f"these are the kernels of a CPU, but the target is on {device}; set target.device to cpu")
    use_configured_threads(config)
    documents = cut_documents(config, options)
    header = describe(config, BenchOptions(max_new_tokens=options.max_new_tokens), documents)
    say("measuring the machine's limits")
    limits = measure_limits(device, DTYPES[config.target.dtype])
    figures = measure_target(config, options, documents, limits.read_bytes_per_s, say)
    acceptance = None
    if config.draft is not None:
        acceptance = measure_acceptance(config, [*figures["errors"]["kernels"]], documents, options.max_new_tokens, say)
    return {
        "kind": "kernels",
        **header,
        "options": asdict(options),
        "machine": {"limits": asdict(limits)},
        **figures,
        "acceptance": acceptance,
    }


def measure_target(
    config: RunConfig, options: KernelOptions, documents: Sequence[BenchDocument], bytes_per_s: float, say: Say
) -> dict[str, Any]:
    """Measure errors and times of the target with each kernel."""
    prompts = [document.prompt_token_ids for document in documents]
    say("errors: float32")
    exact = exact_logits(config.target, prompts)
    say("errors: transformers")
    stock = stock_errors(config.target, prompts, exact)
    target = load_plain_target(config, options.num_rows)
    available = available_kernels(target)
    say(f"errors: {', '.join(available)}")
    own = kernel_errors(target, available, prompts, exact)
    fill(target.cache.stored)
    say("times: attention of a step")
    attention = attention_times(target, available, options.keys, options.rounds, bytes_per_s)
    say("times: chunks")
    chunks = chunk_rates(target, available, options.chunk_keys, options.rounds)
    say("times: whole steps")
    steps = step_times(target, available, options.keys, options.rounds)
    return {
        "attention": attention,
        "chunks": chunks,
        "steps": steps,
        "errors": {"kernels": own, "transformers": stock},
    }


def load_plain_target(config: RunConfig, num_rows: int) -> CachedModel:
    """Load the target with a cache of `num_rows` rows, without the measurement by which `auto` chooses kernels."""
    forced = config.model_copy(update={"attention": replace(config.attention, backend=REFERENCE)})
    return load_cached_target(forced, num_rows)[0]


def available_kernels(target: CachedModel) -> dict[str, Attend]:
    """Return `reference`, and every kernel that can run here with the target's heads."""
    return {REFERENCE: attend_reference, **cpu_kernels(target.head_dim, target.dtype)}


def measure_acceptance(
    config: RunConfig, names: Sequence[str], documents: Sequence[BenchDocument], max_new_tokens: int, say: Say
) -> dict[str, Any]:
    """Decode with mode `specextend` and each kernel; whole trees, so that no measured time decides anything."""
    measured: dict[str, list[Measurement]] = {}
    for name in names:
        say(f"acceptance: {name}")
        side = EngineSide(load_engine(forced_config(config, name)))
        measured[name] = [side.run(document.prompt_token_ids, max_new_tokens) for document in documents]
    return {name: _acceptance(each, measured[REFERENCE]) for name, each in measured.items()}


def forced_config(config: RunConfig, name: str) -> RunConfig:
    """Force a kernel and the size of trees; the kind of tree attention is `dense` if it were chosen by times."""
    tree = "dense" if config.attention.tree == "auto" else config.attention.tree
    update = {
        "attention": replace(config.attention, backend=cast(Backend, name), tree=tree),
        "tree": replace(config.tree, nodes=NUM_NODES),
    }
    return in_mode(config.model_copy(update=update), "specextend")


def _acceptance(measured: Sequence[Measurement], reference: Sequence[Measurement]) -> dict[str, Any]:
    total, lengths = DecodingStats(), []
    for each in measured:
        assert each.stats is not None, "our engine counts"
        total.add(each.stats)
        lengths.append(each.stats.mean_acceptance_length)
    same = sum(each.token_ids == other.token_ids for each, other in zip(measured, reference, strict=True))
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "num_spec_steps": total.num_spec_steps,
        "by_document": lengths,
        "same_outputs": same,
    }


def cut_documents(config: RunConfig, options: KernelOptions) -> list[BenchDocument]:
    """Render the first documents whose prompts reach `options.tokens`, with their middles cut out.

    Raises ValueError if there are fewer than `options.num_documents`.
    """
    found = []
    for document in _rendered(config, options):
        found.append(document)
        if len(found) == options.num_documents:
            return found
    raise ValueError(
        f"{config.input.path} has {counted(len(found), 'document')} for prompts of {options.tokens} tokens "
        f"that fit the context with {options.max_new_tokens} new ones, not {options.num_documents}; "
        "ask for fewer or shorter ones"
    )


def _rendered(config: RunConfig, options: KernelOptions) -> Iterator[BenchDocument]:
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    facts = read_facts(config.target.model, config.target.revision)
    prompt = replace(config.prompt, length_policy="middle", max_prompt_tokens=options.tokens)
    prompts = Prompts(tokenizer, prompt, _limit(config, facts.context_length))
    source = open_source(config.input)
    for scanned in source.scan():
        if scanned.error_class is not None:
            continue
        document = source.read(scanned.key).document
        try:
            token_ids = prompts.render(document.text, options.max_new_tokens).token_ids
        except DocumentError as error:
            raise ValueError(f"{document.doc_id}: {error}") from None
        if len(token_ids) == options.tokens:
            yield BenchDocument(document.doc_id, bucket_of(len(token_ids)), token_ids)


def _limit(config: RunConfig, context_length: int) -> int:
    """Return the tokens that prompt and output may take together beside the forced trees."""
    sized = config.model_copy(update={"tree": replace(config.tree, nodes=NUM_NODES)})
    return sized.max_tokens(context_length)

"""The workload of a benchmark: the choice of its documents, and the description of documents and machine."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from specextend.config import RunConfig
from specextend.core import counted
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.data.source import Source, open_source
from specextend.decoding.device import device_name
from specextend.models import load_tokenizer, read_facts, resolve_device
from specextend.pairing import pair_hashes
from specextend.report.statistics import bucket_name, bucket_of
from specextend.versions import code_commit, code_sha256, package_version

Say = Callable[[str], None]
"""Takes one line of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Documents to measure on. Decoding is always greedy and one document at a time."""

    buckets: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Length buckets: upper bounds of the prompt in tokens."""
    per_bucket: int = 3
    """Number of documents in each bucket."""
    max_new_tokens: int = 64
    """Most tokens to decode for each document."""

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError("buckets must not be empty")
        for name in ("per_bucket", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """A rendered prompt and where it comes from."""

    doc_id: str
    bucket: int
    """Upper bound of its length in tokens."""
    prompt_token_ids: list[int]


def bench_documents(config: RunConfig, options: BenchOptions, sides: Sequence[RunConfig] = ()) -> list[BenchDocument]:
    """Choose and render the documents to run on; each fits the contexts of the configuration and of `sides` whole."""
    return choose_documents(
        open_source(config.input),
        make_prompts(config, sides),
        buckets=options.buckets,
        per_bucket=options.per_bucket,
        max_new_tokens=options.max_new_tokens,
    )


def make_prompts(config: RunConfig, sides: Sequence[RunConfig] = ()) -> Prompts:
    """Load the tokenizer, and limit prompts to the contexts of the configuration and of `sides`."""
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    facts = read_facts(config.target.model, config.target.revision)
    return Prompts(tokenizer, config.prompt, min(each.max_tokens(facts.context_length) for each in (config, *sides)))


def say_what_is_missing(options: BenchOptions, documents: Sequence[BenchDocument], say: Say) -> None:
    """Say which buckets have fewer documents than were asked for."""
    found = Counter(document.bucket for document in documents)
    for bucket in options.buckets:
        if found[bucket] < options.per_bucket:
            wanted = counted(options.per_bucket, "document")
            say(f"{bucket_name(bucket)}: only {found[bucket]} of {wanted} found that fit whole, with their output")


def _publishable(config: RunConfig) -> dict[str, Any]:
    """Dump the configuration for publication: without the output, local paths relative to the working folder."""
    values = config.model_dump(mode="json", exclude={"output"})
    for section, key in (("input", "path"), ("target", "model"), ("draft", "model")):
        path = (values.get(section) or {}).get(key)
        if path and os.path.isabs(path):
            values[section][key] = os.path.relpath(path)
    return values


def describe(config: RunConfig, options: BenchOptions, documents: Sequence[BenchDocument]) -> dict[str, Any]:
    """Describe what a reader must know to judge the figures."""
    return {
        "environment": describe_machine(config),
        "config": _publishable(config),
        "model_sha256": pair_hashes(config.target, config.draft),
        "max_new_tokens": options.max_new_tokens,
        "doc_ids": [document.doc_id for document in documents],
    }


def choose_documents(
    source: Source, prompts: Prompts, *, buckets: Sequence[int], per_bucket: int, max_new_tokens: int
) -> list[BenchDocument]:
    """Choose the first `per_bucket` documents, in input order, of each length bucket (upper bounds in tokens).

    A document's length is that of its whole prompt; documents that would have to be shortened are left out. Raises
    ValueError if a bucket is no power of two from 512 up, or if no document falls into any bucket.
    """
    for bucket in buckets:
        if bucket != bucket_of(bucket):
            raise ValueError(f"a bucket must be a power of two, 512 or more, got {bucket}")
    chosen: list[BenchDocument] = []
    counts: Counter[int] = Counter()
    for document in _rendered(source, prompts, max_new_tokens):
        if document.bucket in buckets and counts[document.bucket] < per_bucket:
            counts[document.bucket] += 1
            chosen.append(document)
        if all(counts[bucket] == per_bucket for bucket in buckets):
            break
    if not chosen:
        raise ValueError(
            f"no document of {source.options.path} has a prompt in the buckets {', '.join(map(str, buckets))}; "
            "choose others"
        )
    return sorted(chosen, key=lambda document: document.bucket)


def _rendered(source: Source, prompts: Prompts, max_new_tokens: int) -> Iterable[BenchDocument]:
    for scanned in source.scan():
        if scanned.error_class is not None:
            continue
        document = source.read(scanned.key).document
        try:
            prompt = prompts.render(document.text, max_new_tokens)
        except DocumentError:
            continue  # too long under `length_policy: error`: an error row in a run, nothing to measure here
        if prompt.num_dropped_tokens == 0:
            yield BenchDocument(document.doc_id, bucket_of(len(prompt.token_ids)), prompt.token_ids)


_PACKAGES = ("specextend", "torch", "transformers")


def use_configured_threads(config: RunConfig) -> None:
    """Let torch use as many threads as a worker of the job has, if the device is a CPU."""
    if resolve_device(config.target.device).type == "cpu":
        cores = config.job.cpus_per_worker
        torch.set_num_threads((os.cpu_count() or 1) if cores == "auto" else cores)


def describe_machine(config: RunConfig) -> dict[str, Any]:
    """Describe device, versions, threads and the machine's load before the measurement."""
    device = resolve_device(config.target.device)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_type": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}},
        "commit": code_commit(),
        "code_sha256": code_sha256(),
    }

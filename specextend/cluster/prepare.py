"""Checks before a run: everything that can be checked without loading a model, and `--dry-run`, which reports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from specextend.attention.backends import load_backend
from specextend.cluster.environment import check_resources, is_local
from specextend.cluster.exits import OtherRunError, RefusedError, StoreError
from specextend.cluster.planning import Plan, make_plan
from specextend.cluster.progress import TokenEstimate
from specextend.cluster.stores import knock, reading, within
from specextend.config import RunConfig
from specextend.core import DocumentKey, first_line
from specextend.data.audit import describe_skipped
from specextend.data.fingerprint import build_manifest, differences, read_manifest
from specextend.data.inputs import DocumentError, InputError, InputUnreachableError
from specextend.data.parts import Progress, Retry, StrangePartError, pending, read_parts
from specextend.data.prompts import Prompts
from specextend.data.quality import check_library
from specextend.data.source import Source, open_source
from specextend.data.storage import Location, resolve
from specextend.decoding.retrieval import scored_layers
from specextend.hub import HubUnreachableError
from specextend.loading import GIB, rows_per_sequence
from specextend.model_files import current_commit, resolve_revision
from specextend.models import ModelFacts, load_tokenizer, resolve_device
from specextend.pairing import check_pair, pair_hashes

_WRONG = (ValueError, PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors that no later try mends by itself."""
Models = dict[str, dict[str, str | None]]
"""`target` and `draft`: the `model` and `revision` that were asked for, and the `commit` that this names on the Hub."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may begin: it has passed every check that needs no model."""

    config: RunConfig
    """The configuration, with commits in the place of the models' branches and tags."""
    output: Location
    source: Source
    facts: ModelFacts
    prompts: Prompts
    manifest: dict[str, Any]
    """The one in the output folder if it holds this run already."""
    models: Models
    notes: tuple[str, ...]
    """Lines for the user about the models' revisions."""


def prepare(config: RunConfig, checkpoint: Callable[[], object] = lambda: None) -> Prepared:
    """Check input, models and prompt without writing anything. Raises RefusedError, StoreError, OtherRunError.

    checkpoint: called while a store is waited for; may raise.
    """
    check_resources(config.target, config.job)
    for key, path in (("input.path", config.input.path), ("output.path", config.output.path)):
        knock(key, path, config.job.store_s, checkpoint)
    with _refusals():
        output = resolve(config.output.path)
        source = open_source(config.input, config.output)
    recorded = _recorded_in_time(output, config.job.store_s, checkpoint)
    with _refusals():
        config, models, notes = pin_models(config, (recorded or {}).get("models", {}))
        draft = config.active_draft
        facts = check_pair(config.target, draft)
        scored_layers(config.cache, facts.num_layers)
        tokenizer = load_tokenizer(config.target.model, config.target.revision)
        prompts = Prompts(tokenizer, config.prompt, config.max_tokens(facts.context_length))
        _check_run(config, prompts)
        _check_cache(config, facts)
        manifest = build_manifest(source, config.model_dump(mode="json"), pair_hashes(config.target, draft), models)
    if recorded is not None and not differences(recorded, manifest):
        manifest = recorded
    return Prepared(config, output, source, facts, prompts, manifest, models, notes)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of a block into RefusedError, or into StoreError if a later try may succeed."""
    try:
        yield
    except (InputUnreachableError, HubUnreachableError) as error:
        raise StoreError(str(error)) from error
    except _WRONG as error:
        raise RefusedError(first_line(error)) from error
    except OSError as error:
        raise StoreError(f"{first_line(error)}; run again") from error


def read_recorded(output: Location) -> dict[str, Any] | None:
    """Read the manifest in the output folder, if there is one. Raises OtherRunError if it is not ours, StoreError."""
    try:
        return read_manifest(output)
    except ValueError as error:
        raise OtherRunError(str(error)) from error
    except OSError as error:
        raise StoreError(f"{output.path} cannot be read: {first_line(error)}") from error


def _recorded_in_time(output: Location, limit_s: float, checkpoint: Callable[[], object]) -> dict[str, Any] | None:
    """Return what `read_recorded` does; raise StoreError if the store does not answer within `limit_s`."""
    try:
        return within(limit_s, lambda: read_recorded(output), checkpoint)
    except TimeoutError as error:
        raise StoreError(f"{output.path} cannot be read: {error}; run again") from error


def pin_models(config: RunConfig, recorded: Mapping[str, Any]) -> tuple[RunConfig, Models, tuple[str, ...]]:
    """Put commits in the place of branches and tags, so that every worker loads the same files.

    A name that the run's manifest has `recorded` keeps the commit that it stood for then. Returns the configuration,
    what goes into the manifest, and notes for the user. Raises ModelError.
    """
    models: Models = {}
    notes: list[str] = []
    changed: dict[str, Any] = {}
    for name, options in (("target", config.target), ("draft", config.active_draft)):
        if options is None or not options.model:
            continue
        asked = {"model": options.model, "revision": options.revision}
        known = recorded.get(name, {})
        is_known = bool(known.get("commit")) and known.items() >= asked.items()
        commit = known["commit"] if is_known else resolve_revision(options.model, options.revision)
        models[name] = asked | {"commit": commit}
        if commit is not None and commit != options.revision:
            changed[name] = replace(options, revision=commit)
            newer = current_commit(options.model, options.revision) if is_known else commit
            notes.append(_say_commit(name, options.model, options.revision, commit, newer))
    return config.model_copy(update=changed), models, tuple(notes)


def _say_commit(name: str, model: str, revision: str | None, commit: str, newer: str | None) -> str:
    line = f"{name} {model} ({revision or 'default branch'}) is commit {commit}"
    if newer in (None, commit):
        return line
    return f"{line}, with which this run began; the Hub has {newer} by now, which only a run of its own takes"


def _check_run(config: RunConfig, prompts: Prompts) -> None:
    """Raise ValueError for what would fail every row, or every worker of a private Ray."""
    check_library(config.quality)
    if is_local():
        load_backend(config.attention.backend, resolve_device(config.target.device))
    if config.input.max_new_tokens_column is None:
        try:
            prompts.room(config.decoding.max_new_tokens)
        except DocumentError as error:
            raise ValueError(f"decoding.max_new_tokens or prompt.max_prompt_tokens: {error.message}") from error


def _check_cache(config: RunConfig, facts: ModelFacts) -> None:
    """Raise ValueError if the cache cannot hold one full prompt and its output."""
    longest = config.max_tokens(facts.context_length)
    if config.prompt.max_prompt_tokens is not None:
        longest = min(longest, config.prompt.max_prompt_tokens + config.decoding.max_new_tokens)
    needed = rows_per_sequence(config, longest) * facts.kv_bytes_per_token(config.target.dtype) / GIB
    if config.decoding.cache_gib < needed:
        raise ValueError(
            f"decoding.cache_gib is {config.decoding.cache_gib:g}, but a prompt and its output may take {longest:,} "
            f"tokens = {needed:.3f} GiB: raise it, or lower prompt.max_prompt_tokens"
        )


def check_same_run(prepared: Prepared) -> bool:
    """Return True if the output folder holds this run already. Raises OtherRunError if it holds another one."""
    recorded = read_recorded(prepared.output)
    if recorded is None:
        return False
    if lines := differences(recorded, prepared.manifest):
        raise OtherRunError(f"{prepared.output.path} belongs to another run:\n  " + "\n  ".join(lines))
    return True


def read_progress(prepared: Prepared) -> Progress:
    """Read what the parts hold. Raises RefusedError for a damaged part, OtherRunError for one of another run."""
    try:
        return read_parts(prepared.output, prepared.manifest["fingerprint"])
    except StrangePartError as error:
        raise OtherRunError(str(error)) from error
    except ValueError as error:
        raise RefusedError(str(error)) from error


def dry_run(prepared: Prepared, *, retry_errors: Retry = "none") -> dict[str, Any]:
    """Plan a start and return what it would do as JSON values, without loading weights or writing anything.

    Raises OtherRunError if the folder holds another run, OutputError, RefusedError and StoreError.
    """
    config, source = prepared.config, prepared.source
    with reading(prepared.output):
        progress = read_progress(prepared) if check_same_run(prepared) else None
    rows = [file.num_rows for file in source.files]
    keys = set(pending(rows, progress, retry_errors=retry_errors)) if progress else _all_keys(rows)
    decoding = config.decoding
    try:
        plan = make_plan(source, prepared.prompts, keys, decoding.max_new_tokens, decoding.seed, lambda: None)
    except InputUnreachableError as error:
        raise StoreError(str(error)) from error
    except InputError as error:
        raise RefusedError(str(error)) from error
    return {
        "rows": source.num_rows,
        "rows_to_do": len(keys),
        "error_rows_left_out": len(progress.final) if progress and retry_errors == "retryable" else 0,
        "rows_rejected": dict(plan.rejected),
        "rows_over_length": plan.num_over_length,
        "audit": _audit(prepared, plan),
        "length_policy": config.prompt.length_policy,
        "prompt_tokens": plan.num_prompt_tokens(),
        "output_tokens_at_most": sum(estimate.max_new_tokens for estimate in plan.estimates.values()),
        "tokens_per_byte": plan.tokens_per_byte,
        "prompt_lengths": plan.buckets(),
        "cache": _cache(prepared, plan),
        "time": "not measured",
        "models": prepared.models,
        "fingerprint": prepared.manifest["fingerprint"],
    }


def describe_dry_run(plan: dict[str, Any]) -> str:
    """Describe the plan for people."""
    audit = [(each["check"], _say_rows(each["rows"]), each["outcome"]) for each in plan["audit"]]
    lengths = [(name, f"{count:,}") for name, count in plan["prompt_lengths"].items()]
    lines = [
        f"{plan['rows_to_do']} of {plan['rows']} rows to do, {sum(plan['rows_rejected'].values())} of them rejected",
        *([say_left_out(plan["error_rows_left_out"])] if plan["error_rows_left_out"] else []),
        *_table(("input", "rows", "they are"), audit),
        f"about {plan['prompt_tokens']:,} prompt tokens, {plan['output_tokens_at_most']:,} output tokens at most",
        *_table(("prompt tokens", "rows"), lengths),
    ]
    if cache := plan["cache"]:
        lines.append(
            f"cache: {cache['median_sequence_gib']:.3f} GiB for the median sequence, "
            f"{cache['longest_sequence_gib']:.3f} GiB for the longest; {cache['longest_sequences_that_fit']} of the "
            f"longest fit in decoding.cache_gib ({cache['cache_gib']:g}), {cache['max_batch_size']} may run together"
        )
    return "\n".join([*lines, f"time: {plan['time']}"])


def say_left_out(num_final: int) -> str:
    """Describe the error rows that `--retry-errors` leaves out."""
    return (
        f"{num_final} error rows are left as they are: by their `retryable` another try does not mend them; "
        "--retry-errors=all does them, too"
    )


def _all_keys(rows: list[int]) -> set[DocumentKey]:
    return {DocumentKey(file, row) for file, num_rows in enumerate(rows) for row in range(num_rows)}


def _audit(prepared: Prepared, plan: Plan) -> list[dict[str, Any]]:
    """List the checks of the rows to do: `check`, `rows` found (None: not checked) and the `outcome` for such rows."""
    policy, counts = prepared.config.prompt.length_policy, plan.rejected
    is_read = prepared.source.options.num_tokens_column is None
    text = {"null text": "NullText", "empty text": "EmptyText", "text not UTF-8": "UndecodableText"}
    found = [(check, counts[name] if is_read else None, "error rows") for check, name in text.items()]
    found += [
        ("max_new_tokens below 1", counts["BadMaxNewTokens"], "error rows"),
        ("no room for a document", counts["PromptTooLong"], "error rows"),
        ("over the prompt limit", plan.num_over_length, "error rows" if policy == "error" else f"cut ({policy})"),
    ]
    refused = ("columns of a wrong type", "null ids", "repeated ids")  # `prepare` has found none
    found += [(check, 0, "refused") for check in refused]
    if skipped := prepared.source.skipped:
        found.append(("files of another kind", None, f"skipped: {describe_skipped(skipped)}"))
    return [{"check": check, "rows": rows, "outcome": outcome} for check, rows, outcome in found]


def _say_rows(count: int | None) -> str:
    return "not read" if count is None else f"{count:,}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lay out lines of columns, the second one aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  " + "  ".join(f"{{:{'>' if i == 1 else '<'}{width}}}" for i, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in (head, *rows)]


def _cache(prepared: Prepared, plan: Plan) -> dict[str, Any] | None:
    """Compute the cache memory per sequence and how many fit; None if there is no document."""
    config = prepared.config
    sizes = [_gib(prepared, estimate) for estimate in plan.estimates.values() if estimate.num_prompt_tokens]
    if not sizes:
        return None
    return {
        "bytes_per_token": prepared.facts.kv_bytes_per_token(config.target.dtype),
        "median_sequence_gib": median(sizes),
        "longest_sequence_gib": max(sizes),
        "longest_sequences_that_fit": int(config.decoding.cache_gib / max(sizes)),
        "cache_gib": config.decoding.cache_gib,
        "max_batch_size": config.decoding.max_batch_size,
    }


def _gib(prepared: Prepared, estimate: TokenEstimate) -> float:
    """Compute the GiB that a document takes in the target's cache."""
    config = prepared.config
    rows = rows_per_sequence(config, estimate.total)
    return rows * prepared.facts.kv_bytes_per_token(config.target.dtype) / GIB

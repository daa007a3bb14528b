"""The audit of a finished run: some of its rows are decoded again in this process, without a draft.

It says whether their texts are the target's own, and how many times as fast the run was. Rows are decoded in batches as
large as the run's, because a smaller one pays more for each token of plain decoding.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specextend.cluster.checks import Prepared, prepare
from specextend.cluster.environment import cores_per_worker, this_machine
from specextend.cluster.records import read_status
from specextend.config import RunConfig
from specextend.core import Completion, DocumentKey, Request
from specextend.data.fingerprint import differences, read_manifest
from specextend.data.inputs import DocumentError, InputError
from specextend.data.rows import Row
from specextend.data.storage import resolve
from specextend.decoding.device import device_name
from specextend.decoding.sampling import FARTHEST
from specextend.document_requests import Summary
from specextend.loading import load_engine, usable_bytes, with_batch_size
from specextend.models import target_device
from specextend.report.result_rows import find_rows
from specextend.stats import PHASES, DecodingStats, ratio
from specextend.summarizer import DecodedRow, RowDecoder

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Gap in logits, by the target's dtype, up to which a difference is one of rounding (`docs/log.md`)."""
OUTCOMES = ("equal", "near_tie", "different", "failed")
_STATS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", *PHASES)
_COLUMNS = ("doc_id", "summary", "reasoning", "part_summaries", "choices", "content_sha256", "num_requests", *_STATS)
_PLACES = 4
"""Tokens before the first difference of two texts among which that of their tokens is looked for."""
_LONGEST_PIECE = 24
"""Characters of the longest token that is looked for."""
_ENDED = ("complete", "finished with errors")
Stored = Mapping[str, Any]
"""A row of `summaries/`."""
Case = tuple[Stored, DecodedRow]
"""A row of the run beside its plain decoding."""


def audit(output: str, num_rows: int, seed: int, factory: Callable[[RunConfig], Any] = load_engine) -> dict[str, Any]:
    """Decode rows of a finished run again. Returns what its report has as `audit`.

    Raises ValueError if the run has not ended, or if its input or its models are not what they were.
    """
    prepared, devices = _prepare(output)
    rows = [*_draw(prepared, num_rows, seed)]
    if not rows:
        raise ValueError(f"{output} has no summary to decode again")
    config = _without_draft(prepared, [stored for stored, _ in rows])
    if not config.job.gpus_per_worker:
        torch.set_num_threads(cores_per_worker(config.job, [this_machine()]))
    decoder, size = RowDecoder(config, factory(config)), config.decoding.batch_size
    cases = list[Case]()
    for begin in range(0, len(rows), size):
        stored, read = zip(*rows[begin : begin + size], strict=True)
        cases += zip(stored, decoder.decode(read), strict=True)
    compared = _compare(cases, decoder, NEAR_TIES[config.target.dtype])
    is_same_device = devices == {device_name(target_device(config.target))}
    return {
        "documents": len(rows),
        **{name: Counter(each["outcome"] for each in compared)[name] for name in OUTCOMES},
        "largest_gap": max((each["gap"] for each in compared if each["gap"] is not None), default=None),
        "not_equal": [each for each in compared if each["outcome"] != "equal"],
        "batch_size": size,
        "speedup": _speedup(cases[: len(cases) // size * size]) if is_same_device else None,
    }


def _prepare(output: str) -> tuple[Prepared, set[str | None]]:
    """Check that a run has ended and could be made again; return it with the devices of its workers.

    Raises ValueError, and StoreError.
    """
    place = resolve(output)
    status, recorded = read_status(place), read_manifest(place)
    assert recorded is not None, "what has a status has a manifest"
    if status["state"] not in _ENDED:
        raise ValueError(f"{output} holds a run that has not ended ({status['state']}); audit it when it has")
    values = recorded["config"]
    prepared = prepare(RunConfig.from_values(values | {"output": values["output"] | {"path": output}}))
    if lines := differences(recorded, prepared.manifest):
        raise ValueError(f"{output} cannot be audited: its input or a model has changed since ({lines[0]})")
    workers = (worker for start in status["starts"] for worker in start.workers or ())
    return prepared, {worker.device for worker in workers if worker.device}


def _draw(prepared: Prepared, num_rows: int, seed: int) -> Iterator[tuple[Stored, Row]]:
    """Yield rows of the run, drawn at random, each with its row of the input; those that failed are left out.

    Raises InputError.
    """
    source = prepared.source
    drawn = sorted(random.Random(seed).sample(range(source.num_rows), min(num_rows, source.num_rows)))
    for file in source.files:
        wanted = source.rows(file.number)
        keys = [DocumentKey(file.number, wanted[place]) for place in drawn if place < len(wanted)]
        drawn = [place - len(wanted) for place in drawn if place >= len(wanted)]
        rows = dict[str, Row]()
        for key in keys:
            with suppress(DocumentError):
                row = source.read(key)
                rows[row.document.doc_id] = row
        for stored in find_rows(prepared.output, file.number, [*rows], _COLUMNS):
            row = rows[stored["doc_id"]]
            if row.content_sha256 != stored["content_sha256"]:
                raise InputError(f"{source.place(row.document.key)} is not what the run has read; restore it")
            yield stored, row


def _without_draft(prepared: Prepared, rows: list[Stored]) -> RunConfig:
    """Return the run's configuration for plain decoding, in batches of the same size."""
    config, device = prepared.config, target_device(prepared.config.target)
    lengths = [(row["num_prompt_tokens"] + row["num_output_tokens"]) // row["num_requests"] for row in rows]
    num_tokens = sum(lengths) // len(lengths), max(lengths)
    config = with_batch_size(config, prepared.facts, device, usable_bytes(config, device), num_tokens)
    return config.model_copy(update={"decoding": replace(config.decoding, mode="autoregressive")})


def _compare(cases: list[Case], decoder: RowDecoder, near_tie: float) -> list[dict[str, Any]]:
    """Say of each row whether it is equal; if not, how far apart in logits the tokens are where texts first differ.

    For that its request is decoded once more, beside tokens of the run's text.
    """
    found, requests = list[dict[str, Any]](), list[Request]()
    for number, (stored, plain) in enumerate(cases):
        case: dict[str, Any] = {"doc_id": stored["doc_id"], "outcome": "equal", "gap": None, "error": None}
        if not isinstance(plain.state, Summary):
            case |= {"outcome": "failed", "error": str(plain.state)}
        elif (request := _different(stored, plain, plain.state, decoder.tokenizer)) is not None:
            case |= {"outcome": "different", "gap": _gap_of_choices(stored, plain.state)}
            requests.append(replace(request, request_id=str(number)))
        found.append(case)
    for name, (again, _) in decoder.outcomes(requests).items():
        case = found[int(name)]
        if isinstance(again, Completion) and again.gap is not None:
            case["gap"] = min(case["gap"], again.gap)
        if case["gap"] <= near_tie:
            case["outcome"] = "near_tie"
    return found


def _different(stored: Stored, plain: DecodedRow, summary: Summary, tokenizer: Any) -> Request | None:
    """Return the first request to which the run has another text, with rivals of that text; None if there is none."""
    last = plain.completions[-1]
    requests = [*plain.completions[: len(summary.part_rows or ())], last, last]
    ours = [*_parts(summary.part_rows), summary.reasoning or "", summary.completion.text]
    theirs = [*_parts(stored["part_summaries"]), stored["reasoning"] or "", stored["summary"]]
    for (request, completion), text, other in zip(requests, ours, theirs, strict=True):
        if text != other:
            whole = completion.text[: completion.text.find(text)] + other
            return replace(request, rivals=_rivals(tokenizer, completion.token_ids, whole))
    return None


def _rivals(tokenizer: Any, token_ids: list[int], other: str) -> dict[int, set[int]]:
    """Return by place the tokens that lead to another text, where it parts from this one, or shortly before.

    A run keeps no tokens. A text may be divided in several ways, so each of its next pieces counts.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    starts = [decode(token_ids[:place]).rstrip("\ufffd") for place in range(len(token_ids))]
    places = [place for place, start in enumerate(starts) if other.startswith(start)]
    rivals: defaultdict[int, set[int]] = defaultdict(set)
    for place in places[-_PLACES:]:
        rest = other[len(starts[place]) :]
        for size in range(min(len(rest), _LONGEST_PIECE) + 1):
            piece = tokenizer.encode(rest[:size], add_special_tokens=False)
            ends = [tokenizer.eos_token_id] if size == len(rest) else []
            pairs = enumerate(zip([*piece, *ends], token_ids[place:], strict=False), place)
            at, rival = next(((at, rival) for at, (rival, own) in pairs if rival != own), (place, None))
            if rival is not None:
                rivals[at].add(rival)
    return dict(rivals)


def _gap_of_choices(stored: Stored, summary: Summary) -> float:
    """Return how far apart the values are of the first choice that differs; as far as can be said if none does."""
    ours, theirs = defaultdict[str, dict[str, float]](dict), defaultdict[str, dict[str, float]](dict)
    for field, value, log_prob in summary.completion.scored:
        ours[field][value] = log_prob
    for each in stored["choices"] or ():
        theirs[each["field"]][each["value"]] = each["log_prob"]
    for field, values in ours.items():
        best, other = (max(each, key=each.__getitem__) for each in (values, theirs[field]))
        if best != other:
            return values[best] - values[other]
    return FARTHEST


def _parts(rows: list[dict[str, Any]] | None) -> list[str]:
    return [row["text"] for row in rows or ()]


def _speedup(cases: list[Case]) -> dict[str, Any] | None:
    """Compare seconds per token with and without a draft, summed over documents of two tokens or more."""
    sums, documents, firsts = (DecodingStats(), DecodingStats()), 0, 0
    for stored, decoded in cases:
        if not isinstance(decoded.state, Summary):
            continue
        both = decoded.state.completion.stats, DecodingStats(**{name: stored[name] for name in _STATS})
        if min(each.num_output_tokens for each in both) > stored["num_requests"]:
            # To read a prompt is the same work in both, unless more of it was copied from another one.
            prefill_s = min(both, key=lambda each: each.num_cached_tokens).prefill_s
            for total, each in zip(sums, both, strict=True):
                total.add(replace(each, prefill_s=prefill_s))
            documents, firsts = documents + 1, firsts + stored["num_requests"]
    if not documents:
        return None
    decode = [(each.draft_prefill_s + each.step_s) / (each.num_output_tokens - firsts) for each in sums]
    whole = [(each.prefill_s + each.draft_prefill_s + each.step_s) / each.num_output_tokens for each in sums]
    return {"documents": documents, "decode": ratio(*decode), "end_to_end": ratio(*whole)}

"""Rates: how fast a pair of models decodes on a kind of device, fitted to documents that were decoded, and kept.

They are kept in the user's cache folder, by pair and device, so that a later forecast needs no measurement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specextend.cluster.messages import Done
from specextend.config import RunConfig
from specextend.core import counted
from specextend.decoding.kept import keep_value, read_kept
from specextend.decoding.step_costs import Line, fit_line
from specextend.stats import ratio
from specextend.versions import library_versions

MIN_DOCUMENTS = 2
"""Fewest documents that rates can be fitted to: one says nothing about how documents differ."""
MIN_RUN_DOCUMENTS = 8
"""Fewest documents of a start of a run whose rates are kept: they replace those of a calibration."""
MAX_COSTS = 2000
"""Documents of a start whose costs are held in memory; of more than these, a sample of this size."""
_KIND = "rates"
_SECTIONS = ("prompt", "decoding", "attention", "tree", "cache")
_LIBRARIES = ("specextend", "torch", "transformers")

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """The seconds of its worker that a decoded document took; those that a batch shares are divided among it."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_new_tokens: int
    prefill_s: float
    decode_s: float
    num_requests: int = 1
    """Requests among which the tokens are divided: parts and merges of a document in parts."""

    @classmethod
    def of(cls, done: Done, max_new_tokens: int) -> DocumentCost:
        """Take the cost from a document's result, as if nothing of its prompt had been read for another one."""
        stats, num_requests = done.stats, done.row["num_requests"]
        tokens = (stats.num_prompt_tokens, stats.num_output_tokens, max_new_tokens)
        share_read = 1 - (ratio(stats.num_cached_tokens, stats.num_prompt_tokens) or 0.0)
        return cls(*tokens, stats.prefill_s / share_read + stats.draft_prefill_s, stats.step_s, num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Seconds per token of one worker whose batch is full, by length, and how much single documents differ."""

    prefill: Line
    """(a, b): each of the P tokens of a prompt takes `a + b * P` seconds, because attention grows with the length."""
    decode: Line
    """(a, b): an output token behind T others takes `a + b * T` seconds."""
    output_share: float
    """Output tokens for each one that `max_new_tokens` allowed."""
    mean_s: float
    """Mean seconds of a document that was measured."""
    spread_s: float
    """Standard deviation of the difference between a document's seconds and what the lines say."""
    num_documents: int
    """Number of documents that were measured."""
    start_s: float
    """Seconds from the beginning of a start's Ray to the first worker with loaded models."""
    device: str
    """Name of the GPU, or of the processor."""
    origin: str
    """Where they were measured, for people: `a calibration` or `run <run id>`."""
    measured_at: float
    """Seconds since 1970."""

    def __post_init__(self) -> None:
        numbers = (*self.prefill, *self.decode, self.output_share, self.mean_s, self.spread_s, self.start_s)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.mean_s <= 0:
            raise ValueError(f"rates must be finite numbers of 0 or more, got {numbers}")
        if self.num_documents < MIN_DOCUMENTS:
            raise ValueError(f"rates need {counted(MIN_DOCUMENTS, 'document')}, got {self.num_documents}")

    def prefill_s(self, prompts: Numbers, requests: Numbers) -> Numbers:
        """Return the seconds that the prompts of documents take, which so many requests share in equal parts."""
        first, slope = self.prefill
        return prompts * (first + slope * prompts / requests)

    def decode_s(self, prompts: Numbers, limits: Numbers, requests: Numbers) -> Numbers:
        """Return the seconds that the outputs for these prompts take; `limits` are their `max_new_tokens`."""
        first, slope = self.decode
        outputs = self.output_share * limits
        return outputs * (first + slope * (prompts + outputs / 2) / requests)


def fit_rates(
    costs: Sequence[DocumentCost], *, start_s: float, device: str, origin: str, measured_at: float
) -> Rates | None:
    """Fit rates to the costs of decoded documents; None if these are too few, or took no time.

    Seconds per token are fitted as lines over the length, and both lines are then scaled to add up to all seconds.
    """
    told = [cost for cost in costs if cost.num_prompt_tokens > 0 and cost.num_output_tokens > 0]
    prompts, outputs, limits, requests = (
        np.array([getattr(cost, name) for cost in told], dtype=np.float64)
        for name in ("num_prompt_tokens", "num_output_tokens", "max_new_tokens", "num_requests")
    )
    prefill_s, decode_s = (np.array([getattr(cost, name) for cost in told]) for name in ("prefill_s", "decode_s"))
    total_s = float(prefill_s.sum() + decode_s.sum())
    if len(told) < MIN_DOCUMENTS or total_s <= 0:
        return None
    fitted = Rates(
        prefill=fit_line((prompts / requests).tolist(), (prefill_s / prompts).tolist()),
        decode=fit_line(((prompts + outputs / 2) / requests).tolist(), (decode_s / outputs).tolist()),
        output_share=float(outputs.sum() / limits.sum()),
        mean_s=total_s / len(told),
        spread_s=0.0,
        num_documents=len(told),
        start_s=start_s,
        device=device,
        origin=origin,
        measured_at=measured_at,
    )
    expected_s = fitted.prefill_s(prompts, requests) + fitted.decode_s(prompts, limits, requests)
    scale = total_s / float(expected_s.sum())
    rest_s = prefill_s + decode_s - scale * expected_s
    return replace(
        fitted,
        prefill=_scaled(fitted.prefill, scale),
        decode=_scaled(fitted.decode, scale),
        spread_s=math.sqrt(float((rest_s**2).sum()) / (len(told) - 1)),
    )


def _scaled(line: Line, factor: float) -> Line:
    return line[0] * factor, line[1] * factor


class CostSample:
    """Costs of a start's documents: all of them, or a sample in which each has the same chance."""

    def __init__(self) -> None:
        self._costs: list[DocumentCost] = []
        self.num_offered = 0
        self._random = random.Random(0)
        self._devices: set[str] = set()
        self._first_ready_s: float | None = None

    def worker_ready(self, device: str, now: float) -> None:
        """Note that a worker on a device has loaded its models. now: seconds since the driver began."""
        self._devices.add(device)
        if self._first_ready_s is None:
            self._first_ready_s = now

    def offer(self, cost: DocumentCost) -> None:
        """Take the cost of a document in, if the draw falls on it."""
        self.num_offered += 1
        if len(self._costs) < MAX_COSTS:
            self._costs.append(cost)
        elif (place := self._random.randrange(self.num_offered)) < MAX_COSTS:
            self._costs[place] = cost

    def rates(self, *, connect_s: float, origin: str, measured_at: float) -> Rates | None:
        """Fit rates; None if there are too few documents, or the workers ran on devices of several kinds.

        connect_s: seconds that the connection to Ray took, before the driver began.
        """
        if self.num_offered < MIN_RUN_DOCUMENTS or len(self._devices) != 1 or self._first_ready_s is None:
            return None
        start_s = connect_s + self._first_ready_s
        [device] = self._devices
        return fit_rates(self._costs, start_s=start_s, device=device, origin=origin, measured_at=measured_at)


def pair_key(config: RunConfig, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return what the rates of a pair depend on, besides the device, as JSON values.

    hashes: of the weights and the tokenizer, by `target`, `draft` and `tokenizer`. The prompt is part of it, because
    the length of outputs depends on it.
    """
    values, versions = config.model_dump(mode="json"), library_versions()
    sections = (*_SECTIONS, "chunks") if config.prompt.length_policy == "chunk" else _SECTIONS
    options = {name: dict(values[name]) for name in sections}
    for name in ("seed", "audit_fraction"):
        del options["decoding"][name]
    draft = config.active_draft
    return {
        "hashes": dict(hashes),
        "dtype": config.target.dtype,
        "draft": None if draft is None else [draft.kind, draft.ngram],
        "options": options,
        "cpus_per_worker": config.job.cpus_per_worker,
        "gpus_per_worker": config.job.gpus_per_worker,
        "versions": {name: versions[name] for name in _LIBRARIES},
    }


def keep_rates(key: Mapping[str, Any], rates: Rates) -> bool:
    """Keep rates in place of earlier ones of the pair on their device; return False if the folder cannot be written."""
    kept = {device: asdict(each) for device, each in _all_kept(key).items()}
    return keep_value(_KIND, key, kept | {rates.device: asdict(rates)})


def find_rates(key: Mapping[str, Any], device: str | None) -> Rates | None:
    """Return the rates that are kept for a pair, or None. device: that of the workers; None: the newest of any."""
    kept = _all_kept(key)
    if device is not None:
        return kept.get(device)
    return max(kept.values(), key=lambda rates: rates.measured_at, default=None)


def _all_kept(key: Mapping[str, Any]) -> dict[str, Rates]:
    """Read the rates of a pair by device; what cannot be read is left out."""
    kept = read_kept(_KIND, key)
    found = {name: _parse(values) for name, values in kept.items()} if isinstance(kept, dict) else {}
    return {device: rates for device, rates in found.items() if rates is not None}


def _parse(values: Any) -> Rates | None:
    try:
        lines = {name: (float(values[name][0]), float(values[name][1])) for name in ("prefill", "decode")}
        return Rates(**(values | lines))
    except (ValueError, TypeError, KeyError, IndexError):
        return None

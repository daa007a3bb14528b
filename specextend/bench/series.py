"""Series: variants of a configuration on the same prompts, in turns, each measurement kept at once."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

from specextend.attention.measured import MeasuredAttention
from specextend.bench.compare import WARM_UP_TOKENS, rotated
from specextend.bench.workload import (
    BenchDocument,
    BenchOptions,
    Say,
    describe,
    say_what_is_missing,
    use_configured_threads,
)
from specextend.config import RunConfig
from specextend.core import Request, SamplingParams
from specextend.data.fingerprint import flattened
from specextend.data.storage import check_writable, read_bytes, resolve, write_bytes
from specextend.decoding.engine import Engine
from specextend.decoding.stopping import is_loop
from specextend.loading import load_engine
from specextend.report.statistics import bucket_name
from specextend.stats import DecodingStats, ratio

_SHOWN = 3
"""Most names of differences in a message."""
_VARIES = ("time", "load_average_1min", "commit")
"""Fields of the environment that may differ between two starts of one series. `code_sha256` may not: a commit that
changes no code does no harm, and writing a tracked file of figures makes `commit` end in `-dirty`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesOptions(BenchOptions):
    """Documents of a series, and how often each is measured."""

    repeats: int = 1
    """Measurements of each document on each variant."""

    def __post_init__(self) -> None:
        BenchOptions.__post_init__(self)
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of a series."""

    name: str
    config: RunConfig | None
    """None: it does the same as the variant before it, and is not measured."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description of the variant as JSON values, for the file and the tables."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that an engine gets together, and the limit of each output."""

    name: str
    group: str
    """Column of the tables that the prompts belong to, such as `2K`."""
    token_ids: Sequence[list[int]]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Says what is to be measured."""

    kind: str
    """Section of `jobs/bench.py`."""
    options: SeriesOptions
    documents: Sequence[BenchDocument]
    variants: Sequence[Variant]
    prompts: Sequence[PromptSet]
    base: str
    """Name of the variant to which the others are compared."""
    how: str = "greedy, one document at a time"
    """How it is decoded, for the sentence below the tables."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: a set of prompts on a variant."""

    variant: str
    prompt_set: str
    group: str
    repeat: int
    num_documents: int
    wall_s: float
    """From handing over the prompts to the last completion."""
    kernels: str
    """Attention kernels of the engine, the one that it uses for most kinds of calls first."""
    loops: bool
    """True if an output ends in a loop."""
    output_sha256: str
    """Of the output tokens."""
    stats: DecodingStats
    """Sums over the documents."""

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Compute the tokens after each document's first per second from its first token to its last."""
        num_tokens = self.stats.num_output_tokens - self.num_documents
        return ratio(num_tokens, self.stats.decode_s) if num_tokens else None

    @property
    def documents_per_hour(self) -> float:
        """Compute documents an hour by the wall clock."""
        return 3600 * self.num_documents / self.wall_s


class SeriesFile:
    """A JSON file that holds the description of a series and its timings so far; it is rewritten after each of them."""

    def __init__(self, path: str | None, header: dict[str, Any]) -> None:
        """Open the file of the series that `header` describes; without a path, timings are kept in memory only.

        Raises ValueError if the file holds anything else than a part of this series, or cannot be written.
        """
        self._path, self._header = path, header
        self.timings: list[Timing] = []
        self._content: bytes | None = None
        if path is None:
            return
        check_writable(resolve(path).parent)
        self._content = read_bytes(resolve(path))
        if self._content is not None:
            self._resume(path, self._content)

    def add(self, timing: Timing) -> None:
        """Append a timing, and write the file. Raises ValueError if somebody else has written it in the meantime."""
        self.timings.append(timing)
        if self._path is None:
            return
        if read_bytes(resolve(self._path)) != self._content:
            raise ValueError(
                f"{self._path} was changed by another process, whose measurements would be lost, and both slow each "
                "other down; end one of them, then run the same command again"
            )
        self._content = self._text().encode(errors="backslashreplace")
        write_bytes(resolve(self._path), self._content)

    def result(self) -> dict[str, Any]:
        """Return the series as JSON values, as the file holds it."""
        return {**self._header, "timings": [asdict(timing) for timing in self.timings]}

    def _text(self) -> str:
        head = json.dumps(self._header, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        lines = ",\n  ".join(json.dumps(asdict(timing), allow_nan=False) for timing in self.timings)
        return f'{head},\n "timings": [\n  {lines}\n ]\n}}\n'

    def _resume(self, path: str, data: bytes) -> None:
        try:
            found = json.loads(data)
            timings, others = read_timings(found), _identity(found)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} holds no series of measurements; name another file, or remove it") from None
        own = _identity(self._header)
        if different := [name for name in {**own, **others} if own.get(name) != others.get(name)]:
            more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(
                f"{path} was measured with other options or another version (it differs in "
                f"{', '.join(different[:_SHOWN])}{more}); name another file, or remove it"
            )
        self._header = {name: value for name, value in found.items() if name != "timings"}
        self.timings = whole_rounds(timings, measured_variants(found))


def read_timings(result: Mapping[str, Any]) -> list[Timing]:
    """Return the timings of a series. Raises KeyError, or TypeError if `result` is something else."""
    return [_read_timing(each) for each in result["timings"]]


def _read_timing(values: Mapping[str, Any]) -> Timing:
    """Read a timing that another version may have written, with fields that this one does not have."""
    own: dict[str, Any] = {each.name: values[each.name] for each in fields(Timing)}
    return Timing(**own | {"stats": _read_stats(own["stats"])})


def measured_variants(result: Mapping[str, Any]) -> list[str]:
    """Name the variants of a series, without those that change nothing."""
    return [name for name, about in result["variants"].items() if "changes_nothing" not in about]


def whole_rounds(timings: Iterable[Timing], variants: Sequence[str]) -> list[Timing]:
    """Keep the timings of rounds, one set of prompts each, in which every one of `variants` was measured.

    The measurements of a round belong to one start, minutes apart at most, and may be divided by each other.
    """
    timings = [timing for timing in timings if timing.variant in variants]
    counts = Counter((timing.prompt_set, timing.repeat) for timing in timings)
    return [timing for timing in timings if counts[timing.prompt_set, timing.repeat] == len(variants)]


def _read_stats(values: Mapping[str, Any]) -> DecodingStats:
    """Read statistics that another version may have written, with counts that this one does not have."""
    return DecodingStats(**{each.name: values[each.name] for each in fields(DecodingStats) if each.name in values})


def _identity(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two parts of one series share, in JSON's own types, by dotted names."""
    values = json.loads(json.dumps({name: value for name, value in header.items() if name != "timings"}))
    for name in _VARIES:
        values["environment"].pop(name, None)
    return dict(flattened(values))


def document_prompts(documents: Sequence[BenchDocument], max_new_tokens: int) -> list[PromptSet]:
    """Make a set of each document's prompt alone, in the group of its length."""
    return [
        PromptSet(each.doc_id, bucket_name(each.bucket), [each.prompt_token_ids], max_new_tokens) for each in documents
    ]


def measure_series(config: RunConfig, series: Series, path: str | None, say: Say) -> dict[str, Any]:
    """Measure what the file at `path` lacks of a series, and return the whole series as JSON values.

    Raises ValueError if the file holds another series, or a model cannot be used.
    """
    use_configured_threads(config)
    say_what_is_missing(series.options, series.documents, say)
    header = {
        "kind": series.kind,
        **describe(config, series.options, series.documents),
        "repeats": series.options.repeats,
        "base": series.base,
        "how": series.how,
        "variants": {variant.name: dict(variant.about) for variant in series.variants},
        "prompts": {prompt_set.name: _describe_prompts(prompt_set) for prompt_set in series.prompts},
    }
    file = SeriesFile(path, header)
    run_series([each for each in series.variants if each.config], series.prompts, series.options.repeats, file, say)
    return file.result()


def _describe_prompts(prompt_set: PromptSet) -> dict[str, Any]:
    return {
        "group": prompt_set.group,
        "num_prompt_tokens": [*map(len, prompt_set.token_ids)],
        "sha256": _sha256_of_json(prompt_set.token_ids),
    }


def _sha256_of_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def run_series(
    variants: Sequence[Variant], prompts: Sequence[PromptSet], repeats: int, file: SeriesFile, say: Say
) -> None:
    """Measure every set of prompts on every variant, except the rounds that the file has already.

    In a round the variants take turns on one set, and each time another one goes first, so that a slow phase of the
    machine slows all of them. Each is warmed up on the shortest prompts.
    """
    names = [variant.name for variant in variants]
    done = {(timing.prompt_set, timing.repeat) for timing in file.timings}
    rounds = [*enumerate(product(range(repeats), prompts), start=1)]
    missing = [(number, repeat, each) for number, (repeat, each) in rounds if (each.name, repeat) not in done]
    if not missing:
        return
    engines = _load(variants, min(prompts, key=lambda prompt_set: max(map(len, prompt_set.token_ids))), say)
    for number, repeat, prompt_set in missing:
        for name in rotated(names, number - 1):
            file.add(measure(name, engines[name], prompt_set, repeat))
        say(f"{number}/{len(rounds)} {prompt_set.name}: {_speeds(file.timings, prompt_set.name, repeat)} tokens/s")


def _load(variants: Sequence[Variant], shortest: PromptSet, say: Say) -> dict[str, Engine]:
    """Load the engines, and let each decode a few tokens of all prompts of a set, as many at a time as it will have."""
    engines = {}
    for variant in variants:
        say(f"loading {variant.name}")
        assert variant.config is not None, "a variant without a configuration is not measured"
        engine = engines[variant.name] = load_engine(variant.config)
        warm_up = replace(shortest, max_new_tokens=min(WARM_UP_TOKENS, shortest.max_new_tokens))
        measure(variant.name, engine, warm_up, repeat=0)
    return engines


def measure(variant: str, engine: Engine, prompt_set: PromptSet, repeat: int) -> Timing:
    """Decode a set of prompts, and measure by the wall clock and by the engine's own statistics."""
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=prompt,
            max_new_tokens=prompt_set.max_new_tokens,
            sampling=prompt_set.sampling,
        )
        for i, prompt in enumerate(prompt_set.token_ids)
    ]
    begin = time.perf_counter()
    completions = sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))
    wall_s = time.perf_counter() - begin
    stats = DecodingStats()
    for completion in completions:
        stats.add(completion.stats)
    outputs = [completion.token_ids for completion in completions]
    return Timing(
        variant=variant,
        prompt_set=prompt_set.name,
        group=prompt_set.group,
        repeat=repeat,
        num_documents=len(outputs),
        wall_s=wall_s,
        kernels=_kernels(engine),
        loops=any(map(is_loop, outputs)),
        output_sha256=_sha256_of_json(outputs),
        stats=stats,
    )


def _kernels(engine: Engine) -> str:
    attend = engine.target.attend
    if not isinstance(attend, MeasuredAttention):
        return attend.__name__.removeprefix("attend_")
    chosen = [*attend.choices.values()]
    return ", ".join(sorted(set(chosen), key=lambda name: (-chosen.count(name), name)))


def _speeds(timings: Sequence[Timing], prompt_set: str, repeat: int) -> str:
    return ", ".join(
        f"{timing.variant} {timing.decode_tokens_per_s or 0:.1f}"
        for timing in timings
        if (timing.prompt_set, timing.repeat) == (prompt_set, repeat)
    )

"""A benchmark described by a YAML file: documents x variants.

A variant is a set of configuration overrides, or a peer: another system with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specextend import RunConfig, SamplingParams
from specextend.config import read_yaml

PeerName = Literal[
    "transformers",
    "transformers-lookup",
    "llama.cpp",
    "llama.cpp-ngram",
    "openvino",
    "openvino-lookup",
    "openvino-int8",
    "openvino-int8-keys",
    "openvino-int8-lookup",
]
ProbeKind = Literal["passkey", "needles", "quote"]


class Benchmark(BaseModel):
    """A benchmark. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    """Purpose of the benchmark, in a sentence."""
    config: str = "configs/smollm2.yaml"
    """Configuration of the pair."""
    set: dict[str, Any] = {}
    """Overrides for all variants: `section.key` to value."""
    documents: str = "examples/govreport.parquet"
    """Parquet file or folder with the columns of the configuration's `input` section."""
    buckets: tuple[int, ...] = Field(default=(1024, 2048, 4096, 8192), min_length=1)
    """Upper bounds of prompt lengths: powers of two from 512 (with `probes` any number from
    512).
    """
    per_bucket: int = Field(default=3, ge=1)
    """Documents per bucket (with `probes`: per bucket and kind)."""
    cut_to: int | None = Field(default=None, ge=1)
    """Cut the first `per_bucket` documents to this number of tokens, instead of using buckets."""
    probes: tuple[ProbeKind, ...] = ()
    """Replay documents with known answers to study the draft's view, without timing."""
    verdicts: int = Field(default=0, ge=0)
    """Sentences per summary for the target to judge, instead of timing documents."""
    together: int = Field(default=1, ge=1)
    """Documents per call. `decoding.max_batch_size` of a variant defaults to 1."""
    mixed: bool = False
    """Mix documents of all buckets in each call."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum output tokens per document."""
    sampling: dict[str, Any] = {}
    """Values of `SamplingParams`. Greedy by default, and always with a peer."""
    repeats: int = Field(default=1, ge=1)
    """Measurements of each document on each variant."""
    base: str
    """Variant whose outputs are the reference. Documents it decodes into a loop are counted
    separately.
    """
    variants: dict[str, PeerName | dict[str, Any] | None] = Field(min_length=1)
    """Overrides of each variant, or the name of a peer; empty for the plain configuration."""
    tables: tuple[str, ...]
    """Tables to print, see `tables.py`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.base not in self.variants:
            raise ValueError(
                f"base {self.base!r} is none of the variants {', '.join(self.variants)}"
            )
        if self.peers and (self.sampling or self.probes or self.verdicts):
            raise ValueError(
                f"{next(iter(self.peers))} decodes greedily only; leave out sampling, probes and "
                "verdicts"
            )
        for bucket in self.buckets:
            if bucket < 512 or (not self.probes and bucket & (bucket - 1)):
                raise ValueError(f"a bucket must be a power of two, 512 or more, got {bucket}")
        self.sampling_params  # noqa: B018 raises for unknown options
        return self

    @property
    def peers(self) -> dict[str, PeerName]:
        """Return the variants with peers."""
        return {name: value for name, value in self.variants.items() if isinstance(value, str)}

    @property
    def sampling_params(self) -> SamplingParams:
        """Return the sampling options. Raises ValueError for unknown names or values."""
        try:
            return SamplingParams(**self.sampling)
        except TypeError as error:
            raise ValueError(f"sampling: {error}") from None

    def configs(self) -> dict[str, RunConfig]:
        """Return the configuration of each variant; peers use the common configuration."""
        return {name: self._config(value) for name, value in self.variants.items()}

    def _config(self, variant: PeerName | dict[str, Any] | None) -> RunConfig:
        sizes = {"decoding.max_batch_size": 1, "decoding.max_new_tokens": self.max_new_tokens}
        shared = {**sizes, **self.set, "input.path": self.documents}
        values = shared | variant if isinstance(variant, dict) else shared
        config = RunConfig.load(
            self.config, [f"{key}={json.dumps(value)}" for key, value in values.items()]
        )
        if config.tasks:
            raise ValueError("a benchmark measures one task")
        return config

    @classmethod
    def load(
        cls, path: str, overrides: Iterable[str] = (), only: Iterable[str] | None = None
    ) -> Self:
        """Read a YAML file and apply overrides.

        Args:
            overrides: `key=value` for keys of the file, `section.key=value` for all variants.
            only: Variants to keep. If the base is not among them, the first becomes the base.

        Raises:
            ValueError: A key or value is not allowed.
        """
        values = read_yaml(Path(path))
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals:
                raise ValueError(f"--set takes key=value, got {override!r}")
            section = values if key in cls.model_fields else values.setdefault("set", {})
            try:
                section[key] = yaml.safe_load(text)
            except yaml.YAMLError:
                raise ValueError(
                    f"--set {key}: {text!r} is not a valid YAML value; quote it"
                ) from None
        try:
            whole = cls.model_validate(values)
            return whole if only is None else whole._limited_to([*only])
        except ValidationError as error:
            raise ValueError("; ".join(dict.fromkeys(map(_sentence, error.errors())))) from None

    def _limited_to(self, names: list[str]) -> Self:
        if unknown := [name for name in names if name not in self.variants]:
            raise ValueError(f"{unknown[0]!r} is none of the variants {', '.join(self.variants)}")
        base = self.base if self.base in names else names[0]
        variants = {name: value for name, value in self.variants.items() if name in names}
        left_out = tuple(f" {name}" for name in self.variants if name not in names)
        tables = tuple(name for name in self.tables if not name.endswith(left_out))
        return self.model_copy(update={"variants": variants, "base": base, "tables": tables})


def _sentence(detail: Any) -> str:
    key = ".".join(str(part) for part in detail["loc"][:2])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key}; known keys are {', '.join(Benchmark.model_fields)}"
    if detail["loc"][:1] == ("variants",) and detail["type"] == "literal_error":
        return (
            f"{key} must be overrides or one of {', '.join(get_args(PeerName))}, got "
            f"{detail['input']!r}"
        )
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}" if key else message

"""The configuration of a run: options of all modules, read from YAML and validated by key.

Start with `RunConfig.load`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from specextend.core import ReadOnly, Values, did_you_mean, first_line, mended
from specextend.data.inputs import InputOptions, OutputOptions
from specextend.data.prompts import PartOptions, PromptOptions
from specextend.data.quality import QualityOptions
from specextend.data.schema import summary_fields, text_columns
from specextend.decoding.decoding_options import (
    NOT_TAKEN,
    AttentionOptions,
    CacheOptions,
    DecodingOptions,
    DraftOptions,
    TreeOptions,
    at_least,
)
from specextend.folders import (
    CONFIGS,
    MODELS,
    SHIPPED,
    find_config,
    models_folder,
    shipped_configs,
)
from specextend.models.model_files import TargetOptions, looks_like_path

MAX_WORKERS = 10_000
"""A single driver could not coordinate more."""
LEAST_SILENCE_S = 3600.0
"""Minimum of `JobOptions.silence_s`."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """`job.*`: Workers, commits, and limits for giving up documents, workers and runs.

    These values never change a summary.
    """

    workers: int = 1
    """Number of Ray actors, from 1 to 10,000. Each holds its own models and batch."""
    gpus_per_worker: float = 0.0
    """GPUs reserved per worker, at most 1. Workers can share a GPU (0.5); 0 runs on the CPU."""
    cpus_per_worker: int | Literal["auto"] = "auto"
    """CPU cores reserved per worker; on a CPU also the number of torch threads. `auto`: the cores
    of a machine divided by its workers. Nodes added later do not count.
    """
    max_attempts: int = 3
    """Failed attempts before a document becomes an error row: a dead or hung worker, a failed
    batch, a passed deadline or unreadable text. Attempts lost with a node do not count.
    """
    max_error_fraction: float = 0.0
    """Share of error rows, from 0 to 1, accepted with exit code 0; more give exit code 3. A start
    stops early if more than half of its finished documents, and more than this share, have failed.
    The check begins after 100 documents and 1% of the open ones.
    """
    commit_every_s: float = 30.0
    """Maximum seconds before a finished document is written."""
    document_deadline_s: float = 600.0
    """Seconds allowed for a document from the start of its prefill, plus the same per 1,000 tokens
    of prompt and maximum output. A document that takes longer is charged an attempt.
    """
    stall_s: float = 600.0
    """Seconds without progress after which a worker counts as hung and is replaced."""
    deadline_s: float = 0.0
    """Time limit of a start in seconds. The run then stops with exit code 75; 0 sets no limit."""

    def __post_init__(self) -> None:
        whole = dict.fromkeys(("workers", "max_attempts", "cpus_per_worker"), 1)
        least = whole | dict.fromkeys(("gpus_per_worker", "commit_every_s", "deadline_s"), 0)
        for name, value in least.items():
            if getattr(self, name) != "auto":
                at_least(f"job.{name}", getattr(self, name), value)
        if self.workers > MAX_WORKERS:
            raise ValueError(f"job.workers must be at most {MAX_WORKERS}, got {self.workers}")
        if self.gpus_per_worker > 1:
            raise ValueError(
                f"job.gpus_per_worker must be at most 1, got {self.gpus_per_worker:g}: a model "
                "runs on a single GPU; set job.workers to the number of GPUs"
            )
        for name in ("document_deadline_s", "stall_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"job.{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.max_error_fraction <= 1:
            raise ValueError(
                f"job.max_error_fraction must be in [0, 1], got {self.max_error_fraction}"
            )

    @property
    def device(self) -> str:
        """Return the torch device type of a worker."""
        return "cuda" if self.gpus_per_worker else "cpu"

    @property
    def num_cores(self) -> int:
        """Return `cpus_per_worker`, after a start has replaced `auto`."""
        assert isinstance(self.cpus_per_worker, int)
        return self.cpus_per_worker

    @property
    def silence_s(self) -> float:
        """Return the seconds without a token from any worker after which the run ends.

        A document that hangs at every attempt is given up earlier.
        """
        return max(LEAST_SILENCE_S, 2 * self.max_attempts * self.stall_s)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """`report.*`: Values for reports and dry runs. They never change a summary."""

    price_per_worker_hour: float | None = None
    """Price per worker and hour, in any currency, for the cost of documents and tokens."""

    def __post_init__(self) -> None:
        if self.price_per_worker_hour is not None:
            at_least("report.price_per_worker_hour", self.price_per_worker_hour, 0)


class RunConfig(BaseModel):
    """The complete configuration of a run. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    input: InputOptions
    output: OutputOptions
    target: TargetOptions
    draft: DraftOptions | None = None
    prompt: PromptOptions = Field(default_factory=PromptOptions)
    parts: PartOptions = Field(default_factory=PartOptions)
    decoding: DecodingOptions = Field(default_factory=DecodingOptions)
    attention: AttentionOptions = Field(default_factory=AttentionOptions)
    tree: TreeOptions = Field(default_factory=TreeOptions)
    cache: CacheOptions = Field(default_factory=CacheOptions)
    quality: QualityOptions = Field(default_factory=QualityOptions)
    job: JobOptions = Field(default_factory=JobOptions)
    report: ReportOptions = Field(default_factory=ReportOptions)
    tasks: dict[str, Values] = Field(default_factory=dict)
    """Keys of each task by name, if a run has several tasks. The sections above are the first
    task's.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.draft is None and self.decoding.mode != "autoregressive":
            raise ValueError(
                f"draft.kind and draft.model are missing: decoding.mode {self.decoding.mode} needs "
                "a draft (autoregressive needs none, draft.kind mtp and ngram no model)"
            )
        least = self.tree.depth + 2
        if self.cache.policy == "retrieval" and self.cache.recent < least:
            raise ValueError(
                f"cache.recent must be at least {least} (tree.depth + 2), so that the draft sees "
                f"the text it continues; got {self.cache.recent}"
            )
        if self.output.verify and self.prompt.length_policy == "parts":
            raise ValueError(
                "output.verify asks about a document that was read whole, and prompt.length_policy "
                "is parts: take another policy, or leave out output.verify"
            )
        return self

    @property
    def active_draft(self) -> DraftOptions | None:
        """Return the draft's options; None in mode `autoregressive`."""
        return None if self.decoding.mode == "autoregressive" else self.draft

    @property
    def active_cache(self) -> CacheOptions:
        """Return the cache options of the draft. Mode `tree` and n-gram drafts see everything."""
        is_ngram = self.draft is not None and self.draft.kind == "ngram"
        sees_all = self.decoding.mode == "tree" or is_ngram
        return CacheOptions(policy="full") if sees_all else self.cache

    @property
    def num_tree_levels(self) -> int:
        """Return the maximum depth of a draft's tree."""
        has_ngrams = self.draft is not None and self.draft.has_ngrams
        return max(self.tree.depth, self.tree.ngram_depth) if has_ngrams else self.tree.depth

    @property
    def each_task(self) -> dict[str, RunConfig]:
        """Return a single-task configuration for each task; the name of an only task is ""."""
        if not self.tasks:
            return {"": self}
        whole = self.model_dump(mode="json", exclude={"tasks"})
        return {
            name: self.from_values(whole | {key: whole[key] | own[key] for key in own})
            for name, own in self.tasks.items()
        }

    def of_tasks(self, names: Iterable[str], path: str) -> RunConfig:
        """Select tasks of the run. `path` becomes its `output.path`."""
        there = self.model_copy(update={"output": replace(self.output, path=path)})
        each = there.each_task
        found = joined({name: each[name] for name in names})
        of_others = _fields(self) - _fields(found)
        gold = {name: column for name, column in self.input.gold.items() if name not in of_others}
        return found.model_copy(update={"input": replace(found.input, gold=gold)})

    @property
    def verifies(self) -> bool:
        """Return True if a task has `output.verify`."""
        return self.output.verify or any(keys["output"]["verify"] for keys in self.tasks.values())

    @property
    def most_new_tokens(self) -> int:
        """Return the largest `decoding.max_new_tokens` of all tasks."""
        own = [keys["decoding"]["max_new_tokens"] for keys in self.tasks.values()]
        return max(own, default=self.decoding.max_new_tokens)

    def max_tokens(self, context_length: int) -> int:
        """Return the maximum tokens of a request, prompt and output; the rest holds a draft tree.

        The value is the same for every mode and draft, so that all see equal prompts. N-gram drafts
        may be deeper, but never draft beyond the last requested token.
        """
        return context_length - self.tree.depth - 1

    @classmethod
    def load(
        cls,
        config: Configs,
        overrides: Iterable[str] = (),
        *,
        allow_relative: bool = True,
        run_date: date | None = None,
        needs_paths: bool = True,
    ) -> RunConfig:
        """Read, merge and validate configurations.

        Args:
            config: A YAML file, a shipped name, a dictionary of values or a RunConfig; or several,
                such as a pair and a task. Later ones win key by key. `base` names earlier ones.
            overrides: `key.path=value` with values in YAML.
            allow_relative: If False, relative local paths are errors. Otherwise they are relative
                to their file; paths of shipped files and overrides to the working directory.
            run_date: Value of `{run_date}` in the paths of input and output; default: today.
            needs_paths: If False, the paths of input and output may be missing.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        overrides = list(overrides)
        if isinstance(config, RunConfig) and not overrides:
            return config
        given = [config] if isinstance(config, Mapping | str | Path | RunConfig) else [*config]
        values, origins = merge(given, overrides)
        if asked := _asked(values.pop("tasks", None)):
            others = [each for each in overrides if each.partition("=")[0].strip() != "tasks"]
            return joined(
                {
                    name: cls.load(
                        [*given, {"tasks": None}, task],
                        others,
                        allow_relative=allow_relative,
                        run_date=run_date,
                        needs_paths=needs_paths,
                    )
                    for name, task in asked.items()
                }
            )
        known = {
            "run_date": (run_date or date.today()).isoformat(),
            "models": models_folder(),
            "shipped": SHIPPED,
        }
        for section, key in _PATHS:
            options = _keys(values, section)
            if key in options:
                base = origins[f"{section}.{key}"].folder
                whole = partial(_whole_path, section, key, base, known, allow_relative)
                value = options[key]
                options[key] = [*map(whole, value)] if isinstance(value, list) else whole(value)
        for section in () if needs_paths else ("input", "output"):
            _keys({section: values.setdefault(section, {})}, section).setdefault("path", os.devnull)
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Values) -> RunConfig:
        """Make a configuration from nested values. Raises ConfigError."""
        try:
            return cls.model_validate_json(_as_json(values))
        except ValidationError as error:
            raise ConfigError(
                "; ".join(dict.fromkeys(_sentence(detail) for detail in error.errors()))
            ) from None


OneConfig = RunConfig | ReadOnly | str | Path | tuple[ReadOnly | str, str]
"""A configuration, its values, a YAML file or a shipped name; a tuple adds the folder of paths."""
Configs = OneConfig | Sequence[OneConfig]


class Origin(NamedTuple):
    """Source of a value: a configuration or `--set`, and the folder of its paths."""

    name: str
    folder: str
    is_shipped: bool = False


def merge(
    configs: Iterable[OneConfig], overrides: Sequence[str]
) -> tuple[Values, dict[str, Origin]]:
    """Merge configurations; return the values and the origin of each key. Raises ConfigError."""
    merged: Values = {}
    origins: dict[str, Origin] = {}
    read = [*chain.from_iterable(map(_read, configs))]
    _drop_demo(read)
    for values, origin in read:
        _drop_model_of_draft(merged, _keys(values, "draft").get("kind"))
        are_listed = bool(merged.get("tasks"))
        for section, options in values.items():
            of_tasks = _keys(values, section).keys() & OF_TASKS.get(section, set())
            if are_listed and of_tasks:
                raise ConfigError(
                    f"{origin.name} sets {section}.{min(of_tasks)} after a list of tasks, but each "
                    "task has its value; put it before the list, or use --set"
                )
            if section == "tasks":
                options = _placed(options, origin.folder)
            merged[section] = (
                _keys(merged, section) | options if isinstance(options, dict) else options
            )
            origins |= {f"{section}.{key}": origin for key in _keys(values, section)}
    given = [_parsed(override) for override in overrides]
    _drop_model_of_draft(merged, dict(given).get(("draft", "kind")))
    for path, value in given:
        _set(merged, path, value)
        section, *keys = path
        for key in keys[:1] or _keys(merged, section):
            origins[f"{section}.{key}"] = Origin("--set", os.getcwd())
    return merged, origins


def _keys(values: Values, section: str) -> Values:
    options = values.get(section)
    return options if isinstance(options, dict) else {}


def _drop_demo(read: Iterable[tuple[Values, Origin]]) -> None:
    """Drop the demo's paths and columns if the user sets any; of several demos, keep the last."""
    own = {
        f"{section}.{key}"
        for values, origin in read
        if not origin.is_shipped
        for section in values
        for key in _keys(values, section)
    }
    demos = [values for values, origin in read if origin.is_shipped and _keys(values, "input")]
    for demo in demos:
        demo["input"] = {
            key: value
            for key, value in demo["input"].items()
            if demo is demos[-1] and own.isdisjoint(("input.path", f"input.{key}"))
        }
        if "output.path" in own:
            _keys(demo, "output").pop("path", None)


def _read(config: OneConfig, above: tuple[Path, ...] = ()) -> Iterator[tuple[Values, Origin]]:
    """Yield the values of all `base` configurations, then its own; `above` shows cycles."""
    if isinstance(config, RunConfig):
        yield config.model_dump(mode="json"), Origin("RunConfig", os.getcwd())
        return
    config, folder = config if isinstance(config, tuple) else (config, "")
    if isinstance(config, Mapping):
        origin = Origin("values", os.path.abspath(folder))
        values = json.loads(_as_json(dict(config)))
    else:
        file = find_config(config, folder)
        path = file.resolve()
        if path in above:
            raise ConfigError(
                f"base: {config} leads back to itself; take it out of one of the files"
            )
        above = (*above, path)
        is_shipped = path.is_relative_to(CONFIGS.resolve())
        folder = os.getcwd() if is_shipped else os.path.abspath(file.parent)
        origin = Origin(str(config), folder, is_shipped)
        values = read_yaml(file)
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"base must name a configuration, or several in a list, got {shown(bases)}"
        )
    for base in bases:
        yield from _read((base, origin.folder), above)
    yield values, origin


OF_TASKS = {
    "prompt": {"instruction", "examples", "verification", "system", "length_policy"},
    "parts": {"tokens", "instruction", "merge_instruction"},
    "output": {
        *("column", "schema", "sources", "figures", "confidence", "verify", "verify_below"),
        "rules",
    },
    "decoding": {
        *("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_repetition"),
        *("repetition_penalty", "no_repeat_ngram_size"),
    },
}


def _placed(tasks: Any, folder: str) -> Any:
    if isinstance(tasks, str):
        tasks = [tasks]
    if isinstance(tasks, dict):
        tasks = [
            keys | {"name": name} if isinstance(keys, dict) else keys
            for name, keys in tasks.items()
        ]
    return [(task, folder) for task in tasks] if isinstance(tasks, list) else tasks


def _asked(tasks: Any) -> dict[str, OneConfig]:
    found: dict[str, OneConfig] = {}
    if not isinstance(tasks, list | None):
        tasks = [tasks]
    for each in tasks or ():
        task, folder = each if isinstance(each, tuple) else (each, "")
        keys = dict(task) if isinstance(task, dict) else {"name": Path(str(task)).stem}
        name = keys.pop("name", None)
        if not isinstance(task, str | dict) or not isinstance(name, str) or not name:
            raise ConfigError(
                "tasks must be a list of names of tasks, or of mappings with a `name`, got "
                f"{shown(task)}"
            )
        if name in found:
            raise ConfigError(f"tasks has {name} twice; rename one of them")
        if not keys and isinstance(task, dict):
            raise ConfigError(f"tasks: {name} has no keys; write just its name")
        if wrong := sorted(keys.keys() - OF_TASKS.keys() - {"base"}):
            raise ConfigError(f"tasks: {name} has {wrong[0]}; a task has {', '.join(OF_TASKS)}")
        found[name] = keys if isinstance(task, dict) else task, folder
    return found


def _fields(config: RunConfig) -> set[str]:
    return {each.name for each in summary_fields(text_columns(config.model_dump(mode="json")))}


def joined(each: Mapping[str, RunConfig]) -> RunConfig:
    """Join single-task configurations. Raises ConfigError."""
    name_of_first, first = next(iter(each.items()))
    if len(each) < 2:
        return first
    if nested := [name for name, config in each.items() if config.tasks]:
        raise ConfigError(f"tasks: {nested[0]} lists tasks itself; list them in its place")
    if first.input.instruction_column is not None or first.input.has_limits:
        raise ConfigError(
            "tasks: input columns of instructions, limits or options need a single task"
        )
    columns = [config.output.column for config in each.values()]
    if twice := [column for column in columns if columns.count(column) > 1]:
        raise ConfigError(f"tasks: two write the column {twice[0]}; change output.column of one")
    shared = first.model_dump(mode="json", exclude=OF_TASKS)
    for name, config in each.items():
        for section, own in config.model_dump(mode="json", exclude=OF_TASKS).items():
            before = shared[section] or {}
            if wrong := [key for key in own or () if before.get(key, ...) != own[key]]:
                raise ConfigError(
                    f"tasks: {name} has another {section}.{wrong[0]} than {name_of_first}, but "
                    "tasks of a run share it: set it beside `tasks`"
                )
    tasks = {
        name: config.model_dump(mode="json", include=OF_TASKS) for name, config in each.items()
    }
    return first.model_copy(update={"tasks": tasks})


def _parsed(override: str) -> tuple[tuple[str, ...], Any]:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set takes key.path=value, got {shown(override)}")
    return path, parse(key, text)


def _set(values: Values, path: Sequence[str], value: Any) -> None:
    *sections, name = path
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"--set {'.'.join(path)}: {section} is a value, not a section")
    values[name] = value


_PATHS = (
    ("input", "path"),
    ("input", "except_done_in"),
    ("output", "path"),
    ("output", "schema"),
    ("target", "model"),
    ("target", "adapter"),
    ("draft", "model"),
)
"""Keys with variables."""


def _drop_model_of_draft(values: Values, kind: object) -> None:
    draft = _keys(values, "draft")
    if draft and draft.get("kind") != kind:
        not_taken = NOT_TAKEN.get(str(kind), ())
        values["draft"] = {key: draft[key] for key in draft if key not in not_taken}


_UPLOADED = "/_ray_pkg_"
"""Folder of files uploaded with a Ray job."""
_VARIABLE = re.compile(r"\$\{([^{}]*)\}|\{([A-Za-z_]\w*)\}|(\$\{)|\$([A-Za-z_]\w*)")
"""`${NAME}`, `{name}`, and mistakes: an unclosed `${`, or `$NAME`."""


def _whole_path(
    section: str, key: str, base: str, known: Mapping[str, object], allow_relative: bool, path: Any
) -> Any:
    """Replace variables in a path, and make it absolute if it is local. Raises ConfigError.

    Other types are left to validation.
    """
    if not isinstance(path, str) or path.startswith('{"'):
        return path
    if key in ("model", "adapter"):  # nodes have different folders
        known = {**known, "models": MODELS, "shipped": "{shipped}"}
    path = _expanded(f"{section}.{key}", path, known)
    if _UPLOADED in path:
        raise ConfigError(
            f"{section}.{key} is in the project uploaded with the job, a copy removed by Ray: give "
            "an absolute path valid on each node, or a URI"
        )
    if not path or "://" in path or os.path.isabs(path) or path.startswith("{"):
        return path
    is_file = section in ("input", "output") or key == "adapter" or path.endswith(".gguf")
    if not (is_file or looks_like_path(path) or os.path.exists(os.path.join(base, path))):
        return path
    if not allow_relative:
        raise ConfigError(
            f"{section}.{key} must be an absolute path or a URI inside a submitted job, got "
            f"{path!r}"
        )
    return os.path.abspath(os.path.join(base, os.path.expanduser(path)))


def _expanded(key: str, text: str, known: Mapping[str, object]) -> str:

    def value_of(found: re.Match[str]) -> str:
        variable, name, unclosed, bare = found.groups()
        if unclosed:
            raise ConfigError(
                f"{key} has an unclosed ${{; write ${{NAME}} for an environment variable"
            )
        if bare:
            raise ConfigError(
                f"{key} has {found[0]}; write ${{{bare}}} for an environment variable"
            )
        value = known.get(name) if variable is None else os.environ.get(variable)
        if not value:
            takes = f"it takes {{{'}, {'.join(known)}}} and environment variables as ${{NAME}}"
            raise ConfigError(f"{key} has {found[0]}, but it is not set; {takes}")
        return str(value)

    return _VARIABLE.sub(value_of, text)


def _sentence(detail: ErrorDetails) -> str:
    """Name the key and its allowed values."""
    # pydantic adds the types that it tried
    key = ".".join(
        str(part) for at, part in enumerate(detail["loc"]) if at < 2 or isinstance(part, int)
    )
    kind = detail["type"]
    message = " ".join(detail["msg"].split())
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(key)
    if kind in ("missing", "missing_keyword_only_argument"):
        return f"{key} is missing" + (
            "; a pair brings it: --config smollm2" if key == "target" else ""
        )
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "dataclass_type":
        return (
            f"{key} must be a section ({', '.join(_known_keys(key))}), got {shown(detail['input'])}"
        )
    wanted = message.removeprefix("Input should be ").replace("a valid ", "a ")
    wanted = {"a integer": "an integer", "a array": "a list"}.get(wanted, wanted)
    is_unquoted = kind == "string_type" and isinstance(detail["input"], dict)
    quote = f"; quote a text: --set '{key}=\"...\"'" if is_unquoted else ""
    return f"{key} must be {wanted}, got {shown(detail['input'])}{quote}"


def _unknown_key(key: str) -> str:
    section, _, name = key.rpartition(".")
    known = _known_keys(section)
    kind = "key" if section else "section"
    whole = [f"{each}.{own}" for each in known for own in _known_keys(each)]
    hint = did_you_mean(name, known + whole) or f"; known {kind}s are {', '.join(known)}"
    return f"unknown {kind} {key}{hint}"


def _known_keys(section: str) -> list[str]:
    if not section:
        return list(RunConfig.model_fields)
    field = RunConfig.model_fields.get(section)
    owner = field and (get_args(field.annotation) or (field.annotation,))[0]
    return [each.name for each in fields(owner)] if is_dataclass(owner) else []


def _as_json(values: Values) -> str:
    """Replace unpaired surrogates by U+FFFD in prompts, never in paths. Raises ConfigError."""
    try:
        return json.dumps(values | {"prompt": mended(values.get("prompt", {}))}, default=str)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a value cannot be read: {first_line(error)}") from None


MOST_SHOWN = 200


class ConfigError(ValueError):
    """A key or value is not allowed. The message is a single line."""


def read_yaml(path: Path) -> Values:
    """Read a mapping from a YAML file.

    Raises:
        ConfigError: The file is no mapping, repeats a key or uses an alias.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration {path} cannot be read: {error}{_other_name(path)}"
        ) from None
    try:
        values = yaml.load(text, _PlainValues)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"configuration {path} is not valid YAML: {_yaml_problem(error)}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys with their values")
    return values


def _other_name(path: Path) -> str:
    if os.path.isfile(path):  # also False without permission
        return ""
    if os.path.isfile(f"{path}.yaml"):
        return f"; did you mean {path}.yaml?"
    shipped = shipped_configs()
    near = did_you_mean(path.name.removesuffix(".yaml"), shipped)
    return near or f"; the names of shipped ones are {', '.join(shipped)}"


def _yaml_problem(error: Exception) -> str:
    """Leave out the text, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    what = (
        str(getattr(error, "problem", None) or type(error).__name__) if mark else first_line(error)
    )
    return f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else what


class _PlainValues(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML keeps the last, and endless aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "an alias is not taken, write the value itself", mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), names[-1])
            raise yaml.constructor.ConstructorError(
                None, None, f"key {twice} is repeated", node.start_mark
            )
        return mapping

    def construct_exact_float(self, node: yaml.ScalarNode) -> float:
        value: float = self.construct_yaml_float(node)
        with suppress(ArithmeticError):  # infinity and NaN have other names in YAML
            if Decimal(node.value.replace("_", "")) != Decimal(repr(value)):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{node.value} has more digits than a number holds", node.start_mark
                )
        return value


_PlainValues.add_constructor("tag:yaml.org,2002:float", _PlainValues.construct_exact_float)


def parse(key: str, text: str) -> Any:
    """Parse the value of `--set key=text`. Raises ConfigError for invalid YAML and comments."""
    try:
        value = yaml.load(text, _PlainValues)
        tokens = [token for token in yaml.scan(text) if not isinstance(token, yaml.StreamEndToken)]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"--set {key}: {shown(text)} is not a valid YAML value ({_yaml_problem(error)})"
        quoted = json.dumps(text, ensure_ascii=False) if shown(text) == repr(text) else '"..."'
        raise ConfigError(
            f"{problem}; quote a text: --set {shlex.quote(f'{key}={quoted}')}"
        ) from None
    if comment := text[tokens[-1].end_mark.index :].strip():
        raise ConfigError(
            f"--set {key}: {shown(comment)} is a comment in YAML and would be left out; quote the "
            "value"
        )
    return value


def shown(value: object) -> str:
    """Format a value for a message; hide long values and URIs, which may hold secrets."""
    text = repr(value)
    return (
        text
        if "://" not in text and len(text) <= MOST_SHOWN
        else f"a value of type {type(value).__name__}"
    )

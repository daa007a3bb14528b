"""The configuration of a run: it composes the options of the other modules, is read from YAML and
checked by key.
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
    AttentionOptions,
    CacheOptions,
    DecodingOptions,
    DraftOptions,
    TreeOptions,
    at_least,
)
from specextend.model_files import TargetOptions, looks_like_path
from specextend.shipped import (
    CONFIGS,
    MODELS,
    SHIPPED,
    find_config,
    models_folder,
    shipped_configs,
)

MAX_WORKERS = 10_000
"""Largest value of `job.workers`; one driver could not coordinate more."""
LEAST_SILENCE_S = 3600.0
"""Seconds without a token from any worker after which the run ends, unless its workers may take
longer.
"""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """`job.*`: The workers, the commits, and the limits at which a document, a worker or the run is
    abandoned.

    None of these values changes a summary.
    """

    workers: int = 1
    """Number of Ray actors, from 1 to 10,000. Each holds its own target, draft and batch."""
    gpus_per_worker: float = 0.0
    """GPUs reserved for each worker, at most 1; workers can share one (0.5), and 0 runs the models
    on the CPU.
    """
    cpus_per_worker: int | Literal["auto"] = "auto"
    """CPU cores reserved for each worker; on a CPU also the number of torch threads. `auto`: all
    cores of a machine divided by its workers. Nodes that a cluster adds later do not count."""
    max_attempts: int = 3
    """Failed attempts after which a document becomes an error row: a dead or hung worker, a failed
    batch, a passed deadline, text that cannot be read. Those lost with their node do not count."""
    max_error_fraction: float = 0.0
    """Share of error rows, from 0 to 1, up to which a run ends with exit 0, else with exit 3. A
    start stops early once more than half of its documents, and more than this share, have failed;
    that is checked from 100 documents and 1% of those to process on."""
    commit_every_s: float = 30.0
    """Most seconds that a finished document waits before it is written."""
    document_deadline_s: float = 600.0
    """Seconds that a document may take from the start of its prefill, and as much again for each
    1,000 tokens of its prompt and longest output; then it is charged an attempt."""
    stall_s: float = 600.0
    """Seconds without progress after which a worker counts as hung and is replaced."""
    deadline_s: float = 0.0
    """Time limit of one start in seconds, which then stops with exit 75; 0 sets no limit."""

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
                "runs on one GPU; set job.workers to the number of GPUs"
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
        """Return the kind of device that a worker computes on, as torch calls it."""
        return "cuda" if self.gpus_per_worker else "cpu"

    @property
    def num_cores(self) -> int:
        """Return `cpus_per_worker` once it is a number: a start replaces `auto` when it knows its
        nodes.
        """
        assert isinstance(self.cpus_per_worker, int)
        return self.cpus_per_worker

    @property
    def silence_s(self) -> float:
        """Return the seconds without a token from any worker after which the run ends.

        One document that hangs at every attempt is abandoned before.
        """
        return max(LEAST_SILENCE_S, 2 * self.max_attempts * self.stall_s)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """`report.*`: What reports and dry runs cannot know by themselves. No summary depends on it."""

    price_per_worker_hour: float | None = None
    """Price of one worker for one hour, in any currency, for the cost of documents and tokens."""

    def __post_init__(self) -> None:
        if self.price_per_worker_hour is not None:
            at_least("report.price_per_worker_hour", self.price_per_worker_hour, 0)


class RunConfig(BaseModel):
    """The whole configuration of a run. Frozen; an unknown key raises."""

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
    """Of a run that asks several things of each document: by name, the keys of each in which tasks
    may differ. Those above are the first one's.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.draft is None and self.decoding.mode != "autoregressive":
            raise ValueError(
                f"draft.kind and draft.model are missing: decoding.mode {self.decoding.mode} needs "
                "a draft (autoregressive needs none, draft.kind ngram no model)"
            )
        least = self.tree.depth + 2
        if self.cache.policy == "retrieval" and self.cache.recent < least:
            raise ValueError(
                f"cache.recent must be at least {least}, tree.depth + 2, so that the draft always "
                f"sees what it continues; got {self.cache.recent}"
            )
        return self

    @property
    def active_draft(self) -> DraftOptions | None:
        """Return the draft's options; None in the mode that loads no draft."""
        return None if self.decoding.mode == "autoregressive" else self.draft

    @property
    def active_cache(self) -> CacheOptions:
        """Return what the draft sees: everything in mode `tree`, and if it is n-grams alone."""
        is_ngram = self.draft is not None and self.draft.kind == "ngram"
        sees_all = self.decoding.mode == "tree" or is_ngram
        return CacheOptions(policy="full") if sees_all else self.cache

    @property
    def num_tree_levels(self) -> int:
        """Return the levels of the deepest tree that the draft may propose."""
        has_ngrams = self.draft is not None and self.draft.has_ngrams
        return max(self.tree.depth, self.tree.ngram_depth) if has_ngrams else self.tree.depth

    @property
    def each_task(self) -> dict[str, RunConfig]:
        """Return by name, for each task, the configuration of a run that has no other; "" is the
        only one.
        """
        if not self.tasks:
            return {"": self}
        whole = self.model_dump(mode="json", exclude={"tasks"})
        return {
            name: self.from_values(whole | {key: whole[key] | own[key] for key in own})
            for name, own in self.tasks.items()
        }

    def of_tasks(self, names: Iterable[str], path: str) -> RunConfig:
        """Return the configuration of a run of those tasks alone. path: its `output.path`."""
        there = self.model_copy(update={"output": replace(self.output, path=path)})
        each = there.each_task
        found = joined({name: each[name] for name in names})
        of_others = _fields(self) - _fields(found)
        gold = {name: column for name, column in self.input.gold.items() if name not in of_others}
        return found.model_copy(update={"input": replace(found.input, gold=gold)})

    @property
    def most_new_tokens(self) -> int:
        """Return the largest `decoding.max_new_tokens` of a task."""
        own = [keys["decoding"]["max_new_tokens"] for keys in self.tasks.values()]
        return max(own, default=self.decoding.max_new_tokens)

    def max_tokens(self, context_length: int) -> int:
        """Return the most prompt and output tokens of one request: the tree behind them must fit
        the context.

        It is the same in every mode and with every draft, so that all see the same prompt: n-gram
        drafts, which may be deeper, never reach past the last token that a request asks for.
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
        """Read a configuration, apply `key.path=value` overrides, check everything, and make local
        paths absolute.

        config: a YAML file, the name of a shipped one, the values of one, or one that was made
        already; or several, such as a pair and a task, of which a later one wins key by key; `base`
        in one names those that come before it. Relative paths of a file are relative to its folder;
        all others, and those of a shipped file, to the current folder. Values of overrides are
        YAML. allow_relative: if False, a relative local path is refused instead. run_date: stands
        for `{run_date}` in the paths of input and output; None: today. needs_paths: if False, the
        paths of input and output may be missing. Raises ConfigError.
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
        """Make a configuration from nested values as YAML gives them. Raises ConfigError."""
        try:
            return cls.model_validate_json(_as_json(values))
        except ValidationError as error:
            raise ConfigError(
                "; ".join(dict.fromkeys(_sentence(detail) for detail in error.errors()))
            ) from None


OneConfig = RunConfig | ReadOnly | str | Path | tuple[ReadOnly | str, str]
"""A configuration, its values, a YAML file, or the name of a shipped one; or one of these with the
folder that its paths are relative to.
"""
Configs = OneConfig | Sequence[OneConfig]
"""One, or several of which a later one wins key by key."""


class Origin(NamedTuple):
    """Say where a value came from: a configuration as it was named, or `--set`; and what its paths
    are relative to.
    """

    name: str
    folder: str
    is_shipped: bool = False


def merge(
    configs: Iterable[OneConfig], overrides: Sequence[str]
) -> tuple[Values, dict[str, Origin]]:
    """Return the values of configurations and overrides, later ones above earlier ones, and the
    origin of each key.

    Raises ConfigError.
    """
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
                    f"{origin.name} sets {section}.{min(of_tasks)} behind a list of tasks, which "
                    "have their own; put it before the list, or use --set"
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
    """Return the keys of a section with their values; none if it is no section."""
    options = values.get(section)
    return options if isinstance(options, dict) else {}


def _drop_demo(read: Iterable[tuple[Values, Origin]]) -> None:
    """Take the demo's paths and columns out of shipped configurations where somebody's own are
    given, and out of all but the last.
    """
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
    """Yield the values of the configurations that `base` names, then its own, each with their
    origin.

    above: the files that led here. Raises ConfigError, also for a file that is its own base.
    """
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
    "prompt": {"instruction", "examples", "system", "length_policy"},
    "parts": {"tokens", "instruction", "merge_instruction"},
    "output": {"column", "schema", "sources", "figures", "confidence", "rules"},
    "decoding": {
        *("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_repetition"),
        *("repetition_penalty", "no_repeat_ngram_size"),
    },
}
"""What tasks of one run may differ in."""


def _placed(tasks: Any, folder: str) -> Any:
    """Return a list of tasks, each with the folder that its paths are relative to."""
    if isinstance(tasks, str):
        tasks = [tasks]
    if isinstance(tasks, dict):
        tasks = [
            keys | {"name": name} if isinstance(keys, dict) else keys
            for name, keys in tasks.items()
        ]
    return [(task, folder) for task in tasks] if isinstance(tasks, list) else tasks


def _asked(tasks: Any) -> dict[str, OneConfig]:
    """Return by name what each of several tasks adds to the configuration. Raises ConfigError."""
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
            raise ConfigError(f"tasks has {name} twice; give one of them another name")
        if not keys and isinstance(task, dict):
            raise ConfigError(f"tasks: {name} has no keys; write its name alone for a known task")
        if wrong := sorted(keys.keys() - OF_TASKS.keys() - {"base"}):
            raise ConfigError(f"tasks: {name} has {wrong[0]}; a task has {', '.join(OF_TASKS)}")
        found[name] = keys if isinstance(task, dict) else task, folder
    return found


def _fields(config: RunConfig) -> set[str]:
    """Return the names of the columns of results that are not of the input."""
    return {each.name for each in summary_fields(text_columns(config.model_dump(mode="json")))}


def joined(each: Mapping[str, RunConfig]) -> RunConfig:
    """Make the configuration of a run with several tasks of those of runs with one. Raises
    ConfigError.
    """
    name_of_first, first = next(iter(each.items()))
    if len(each) < 2:
        return first
    if nested := [name for name, config in each.items() if config.tasks]:
        raise ConfigError(f"tasks: {nested[0]} lists tasks itself; list them in its place")
    if first.input.instruction_column is not None or first.input.has_limits:
        raise ConfigError(
            "tasks: a column of instructions, limits or options is about one task; leave it out"
        )
    columns = [config.output.column for config in each.values()]
    if twice := [column for column in columns if columns.count(column) > 1]:
        raise ConfigError(
            f"tasks: two write the column {twice[0]}; give one of them another output.column"
        )
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
    """Read one `key.path=value`. Returns the names of its path, and the value."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set takes key.path=value, got {shown(override)}")
    return path, parse(key, text)


def _set(values: Values, path: Sequence[str], value: Any) -> None:
    """Set a value of nested ones."""
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
    ("input", "redo_in"),
    ("output", "path"),
    ("output", "schema"),
    ("target", "model"),
    ("target", "adapter"),
    ("draft", "model"),
)
"""Keys whose values may be local paths; variables in them are replaced."""
_NOT_OF_NGRAM = ("model", "ngram")
"""Keys of the draft's section that the kind `ngram` does not take."""


def _drop_model_of_draft(values: Values, kind: object) -> None:
    """Take out of the draft's section what the kind that comes in its place does not take; None:
    none comes.
    """
    draft = _keys(values, "draft")
    if kind == "ngram" and draft and draft.get("kind") != kind:
        values["draft"] = {key: draft[key] for key in draft if key not in _NOT_OF_NGRAM}


_UPLOADED = "/_ray_pkg_"
"""Begins the name of the folder into which Ray unpacks what was uploaded with a job."""
_VARIABLE = re.compile(r"\$\{([^{}]*)\}|\{([A-Za-z_]\w*)\}|(\$\{)|\$([A-Za-z_]\w*)")
"""`${NAME}`, `{name}`, and what was meant as a variable: a `${` that is not closed, and `$NAME`."""


def _whole_path(
    section: str, key: str, base: str, known: Mapping[str, object], allow_relative: bool, path: Any
) -> Any:
    """Replace the variables of a path of the configuration, and make it absolute if it is local;
    base: its folder.

    What is no path is left to the check of types. Raises ConfigError.
    """
    if not isinstance(path, str) or path.startswith('{"'):
        return path
    if key in ("model", "adapter"):  # each machine of the run has folders of its own
        known = {**known, "models": MODELS, "shipped": "{shipped}"}
    path = _expanded(f"{section}.{key}", path, known)
    if _UPLOADED in path:
        raise ConfigError(
            f"{section}.{key} is in the copy of the project that was uploaded with the job, which "
            "Ray removes: give an absolute path that each node has, or a URI"
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
    """Replace the variables of one path. Raises ConfigError for an unknown one, and for one that is
    written wrongly.
    """

    def value_of(found: re.Match[str]) -> str:
        variable, name, unclosed, bare = found.groups()
        if unclosed:
            raise ConfigError(
                f"{key} has a ${{ that is not closed; write ${{NAME}} for a variable of the "
                "environment"
            )
        if bare:
            raise ConfigError(
                f"{key} has {found[0]}; write ${{{bare}}} for a variable of the environment"
            )
        value = known.get(name) if variable is None else os.environ.get(variable)
        if not value:
            takes = f"it takes {{{'}, {'.join(known)}}} and ${{NAME}} of the environment"
            raise ConfigError(f"{key} has {found[0]}, which is not set; {takes}")
        return str(value)

    return _VARIABLE.sub(value_of, text)


def _sentence(detail: ErrorDetails) -> str:
    """Turn one of pydantic's errors into a line that names the key and what is allowed."""
    # Behind section and key: the entry of a list, or which of several types was tried.
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
    """Write values of YAML as JSON, with U+FFFD for halves of surrogate pairs in the prompt alone,
    never in a path.

    Raises ConfigError for a number of thousands of digits, or endless nesting.
    """
    try:
        return json.dumps(values | {"prompt": mended(values.get("prompt", {}))}, default=str)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a value cannot be read: {first_line(error)}") from None


# YAML of people: files, and the values of `--set`; what is wrong is said in one line, which shows
# no secret


MOST_SHOWN = 200
"""Characters of a value that a message repeats."""


class ConfigError(ValueError):
    """A key or value is not allowed; the message is one line that names the key and what is
    allowed.
    """


def read_yaml(path: Path) -> Values:
    """Read a YAML file's mapping. Raises ConfigError for anything else, a repeated key and an
    alias.
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
    """Say which configuration may be meant by a path that cannot be read; empty if it is that
    file.
    """
    if os.path.isfile(path):  # False, too, if nobody may look there
        return ""
    if os.path.isfile(f"{path}.yaml"):
        return f"; did you mean {path}.yaml?"
    shipped = shipped_configs()
    near = did_you_mean(path.name.removesuffix(".yaml"), shipped)
    return near or f"; the names of shipped ones are {', '.join(shipped)}"


def _yaml_problem(error: Exception) -> str:
    """Say what is wrong with a text and where, without the text, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    what = (
        str(getattr(error, "problem", None) or type(error).__name__) if mark else first_line(error)
    )
    return f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else what


class _PlainValues(yaml.SafeLoader):
    """A loader that refuses a repeated key, of which YAML silently keeps the last, and aliases.

    A few lines of aliases can stand for more values than any memory holds.
    """

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
        with suppress(ArithmeticError):  # infinity and the like have other names in YAML
            if Decimal(node.value.replace("_", "")) != Decimal(repr(value)):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{node.value} has more digits than a number holds", node.start_mark
                )
        return value


_PlainValues.add_constructor("tag:yaml.org,2002:float", _PlainValues.construct_exact_float)


def parse(key: str, text: str) -> Any:
    """Read the value of `--set key=text`. Raises ConfigError for what is no YAML, or would be read
    in part.
    """
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
    """Write a value for a message, but not one that holds an address, which may hold a secret, nor
    a long one.
    """
    text = repr(value)
    return (
        text
        if "://" not in text and len(text) <= MOST_SHOWN
        else f"a value of type {type(value).__name__}"
    )

"""Checks before a run: everything that needs no loaded model. Start with `check_run`."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specextend.attention.backends import load_backend
from specextend.cluster.backlog import RowSet
from specextend.cluster.environment import check_resources, is_local
from specextend.cluster.exits import OtherRunError, RefusedError, RunError
from specextend.cluster.records import ended_with_errors
from specextend.config import RunConfig
from specextend.core import Checkpoint, ReadOnly, Values, counted, first_line
from specextend.data.answers import choices_of, shortest_answer
from specextend.data.check import check_task_columns
from specextend.data.commits import (
    DamagedCommitError,
    Progress,
    StrangeCommitError,
    pending,
    read_commits,
)
from specextend.data.fingerprint import ABOUT_INPUT, build_manifest, differences, read_manifest
from specextend.data.flags import check_rules
from specextend.data.inputs import DocumentError, InputError, InputUnreachableError
from specextend.data.prompts import CLOCK, Prompts, with_time
from specextend.data.quality import check_library
from specextend.data.run_folder import (
    ADDED,
    REDONE,
    Counts,
    Retry,
    check_kinds,
    check_results,
    inner_run,
    inner_runs,
    read_starts,
    read_success,
)
from specextend.data.schema import text_columns
from specextend.data.selection import find_earlier, recall_selection, select_rows
from specextend.data.source import Source, open_source
from specextend.data.storage import Location, is_passing, path_below, resolve
from specextend.decoding.grammar import Grammars
from specextend.decoding.retrieval import scored_layers
from specextend.models.causal_lm import ModelFacts, load_tokenizer, target_device
from specextend.models.loading import (
    GIB,
    cache_bytes,
    check_verify,
    longest_request,
    rows_per_sequence,
    with_batch_size,
)
from specextend.models.model_files import HubUnreachableError, resolve_revision, split_revision
from specextend.models.pairing import check_pair, describe_asks, describe_features, pair_hashes
from specextend.report.gold import check_gold
from specextend.requests.rounds import check_requests
from specextend.requests.tasks import Task, tasks_of

Models = dict[str, dict[str, str | None]]
"""`target` and `draft` with the requested `model` and its Hub `commit`; `asks` of the target."""


@dataclass(frozen=True)
class CheckedRun:
    """A run that needs only its models loaded."""

    config: RunConfig
    """Names commits in place of Hub branches and tags."""
    output: Location
    source: Source
    facts: ModelFacts
    tasks: list[Task]
    manifest: Values
    """The recorded manifest if the output folder has the same run."""
    models: Models
    notes: list[str]
    retry_errors: Retry = "none"

    @property
    def hashes(self) -> dict[str, str]:
        """Model hashes by name."""
        found: dict[str, str] = self.manifest["identity"]["hashes"]
        return found


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors to RefusedError, or to RunError if a later try may succeed."""
    try:
        yield
    except RunError:
        raise
    except (InputUnreachableError, HubUnreachableError) as error:
        raise RunError(str(error)) from error
    except ValueError as error:
        raise RefusedError(first_line(error)) from error
    except OSError as error:
        if not is_passing(error):
            raise RefusedError(first_line(error)) from error
        raise RunError(_run_again(error)) from error


def _run_again(error: OSError) -> str:
    return f"{first_line(error).removesuffix('; run again')}; run again"


@_refusals()
def check_run(
    config: RunConfig,
    checkpoint: Checkpoint = lambda: None,
    retry_errors: Retry = "none",
) -> CheckedRun:
    """Check input, models and prompt without writing anything.

    The result does not depend on this machine: workers may run elsewhere (see `check_machine`).

    Raises:
        RefusedError: The configuration or the input cannot be run.
        OtherRunError: The output folder holds a run with other options.
        RunError: A store or the Hub does not answer.
    """
    output = resolve(config.output.path)
    check_kinds(output)
    recorded = read_recorded(output)
    begun = _begun_selection(config, recorded)
    if begun is None and config.input.redo is not None and output.parent.name != REDONE:
        raise RefusedError("input.redo chooses from the results of a run; give it with --redo")
    source = _open_input(config, begun)
    before = recorded or {"models": {}, "identity": {"config": {}}}
    pinned, models, notes = pin_models(config, before.get("models", {}))
    config = config.model_copy(update={"input": source.options, **pinned})
    draft = config.active_draft
    facts = check_pair(config.target, draft)
    for asks in describe_asks(facts):
        models["target"]["asks"] = asks
        notes.append(asks)
    notes += describe_features(draft, facts.num_layers)
    scored_layers(config.cache, facts.layers)
    tokenizer = load_tokenizer(config.target.model)
    clock = before["identity"]["config"].get(f"prompt.template_options.{CLOCK}")
    config = config.model_copy(update={"prompt": with_time(config.prompt, tokenizer, clock)})
    tasks = tasks_of(config, tokenizer, config.max_tokens(facts.context_length))
    _check_cache(config, facts)
    for task in tasks:
        _check_task(task, tokenizer, facts)
    values = config.model_dump(mode="json")
    if recorded is not None:  # before the slow hashing of weights
        here = build_manifest(source, values, {}, models)
        _check_same(output, _options_alone(recorded), _options_alone(here), config)
    hashes = pair_hashes(config.target, draft)
    if begun is None:
        whole = build_manifest(source, values, hashes, models)
        earlier = find_earlier(config.input.except_done_in, output, whole, checkpoint)
        source = select_rows(source, *earlier, checkpoint, output)
    else:
        source = recall_selection(source, output, begun)
    manifest = build_manifest(source, values, hashes, models)
    if recorded is not None and not differences(recorded, manifest):
        manifest = recorded
    notes += _that_read_again(tasks)
    return CheckedRun(config, output, source, facts, tasks, manifest, models, notes, retry_errors)


def _open_input(config: RunConfig, begun: Values | None) -> Source:
    each_task = config.each_task.values()
    source = open_source(
        config.input,
        config.output,
        None if begun is None else begun["identity"]["files"],
        [each.prompt.template for each in each_task],
        {name for each in each_task for name in each.output.rule_columns},
    )
    for each in each_task:
        check_rules(each.output, source.passthrough_fields)
    config = config.model_copy(update={"input": source.options})
    columns = text_columns(config.model_dump(mode="json"))
    check_task_columns(source.options.copied_columns, columns)
    check_gold(source.options.gold, source.passthrough_fields, columns)
    return source


def _that_read_again(tasks: list[Task]) -> Iterator[str]:
    openings = [task.prompts.opening for task in tasks]
    for place, task in enumerate(tasks):
        if place and task.prompts.opening not in openings[:place]:
            yield (
                f"task {task.name} reads each document again, because its prompt begins differently"
            )


def _check_task(task: Task, tokenizer: Any, facts: ModelFacts) -> None:
    try:
        _check_options(task.config, task.prompts)
        check_verify(task.config, facts)
        if (schema := task.config.output.json_schema) is not None:
            Grammars(tokenizer, frozenset(facts.eos_token_ids), facts.vocab_size).begin(schema)
            _check_room_for_an_answer(task.config, tokenizer)
    except ValueError as error:
        raise ValueError(f"task {task.name}: {error}" if task.name else str(error)) from error


def _check_room_for_an_answer(config: RunConfig, tokenizer: Any) -> None:
    schema = config.output.json_schema or ""
    most = config.decoding.max_new_tokens
    least = len(tokenizer(shortest_answer(schema), add_special_tokens=False)["input_ids"])
    if least > most and not config.input.has_limits and not choices_of(schema):
        raise ValueError(
            f"decoding.max_new_tokens is {most}, and the shortest answer of output.schema takes "
            f"about {least} tokens; raise it"
        )


@_refusals()
def check_machine(config: RunConfig) -> None:
    """Raise RefusedError if this machine could not run any worker."""
    if is_local():
        check_resources(config.job)
        load_backend(config.attention.backend, target_device(config.target, config.job.device))


def needed_on_each_node(config: RunConfig) -> list[str]:
    """List local paths that every node of a cluster needs; empty for a private Ray."""
    draft = config.active_draft
    models = [
        config.target.model,
        config.target.adapter or "",
        "" if draft is None else draft.model,
    ]
    named = [*models, config.input.path]
    return [] if is_local() else [path for path in named if os.path.isabs(path)]


def _begun_selection(config: RunConfig, recorded: Values | None) -> Values | None:
    has_chosen = (
        recorded is not None and "selection" in recorded["identity"] and "selection" in recorded
    )
    return recorded if has_chosen and config.input.depends_on_runs else None


def read_recorded(output: Location) -> Values | None:
    """Read the manifest in the output folder; None if there is none.

    Raises:
        OtherRunError: The manifest is not readable by this version.
        RunError: The folder cannot be read.
    """
    try:
        return read_manifest(output)
    except ValueError as error:
        raise OtherRunError(str(error)) from error
    except NotADirectoryError:
        return None  # the input check reports it
    except OSError as error:
        raise RunError(f"{output.path} cannot be read: {_run_again(error)}") from error


def pin_models(config: RunConfig, recorded: ReadOnly) -> tuple[Values, Models, list[str]]:
    """Replace branches and tags by commits, so that every worker loads the same files.

    Args:
        recorded: Models of the run's manifest, whose commits are kept.

    Returns:
        The changed sections, the models for the manifest, and notes for the user.
    """
    models: Models = {}
    notes: list[str] = []
    changed: Values = {}
    for name, options in (("target", config.target), ("draft", config.active_draft)):
        if options is None or not options.model:
            continue
        known = recorded.get(name, {})
        is_known = bool(known.get("commit")) and known["model"] == options.model
        commit = known["commit"] if is_known else resolve_revision(options.model)
        models[name] = {"model": options.model, "commit": commit}
        on_hub, revision = split_revision(options.model)
        if commit is not None and commit != revision:
            changed[name] = replace(options, model=f"{on_hub}@{commit}")
            begun = ", as when this run began" if is_known else ""
            notes.append(
                f"{name} {on_hub} ({revision or 'default branch'}) is commit {commit}{begun}"
            )
    return changed, models, notes


def _check_options(config: RunConfig, prompts: Prompts) -> None:
    check_library(config.quality)
    if not config.input.has_limits:
        try:
            prompts.room(config.decoding.max_new_tokens)
        except DocumentError as error:
            raise ValueError(
                f"decoding.max_new_tokens or prompt.max_prompt_tokens: {error.message}"
            ) from error
    check_requests(config, prompts)


def _check_cache(config: RunConfig, facts: ModelFacts) -> None:
    longest = longest_request(config, facts)
    held = cache_bytes(with_batch_size(config, facts, None), facts)
    needed = (rows_per_sequence(config, longest) * held.of_row + held.of_windows) / GIB
    if config.decoding.cache_gib < needed:
        raise ValueError(
            f"decoding.cache_gib is {config.decoding.cache_gib:g}, but a prompt and its output "
            f"may take {longest:,} "
            f"tokens = {needed:.3f} GiB: raise it, or lower prompt.max_prompt_tokens"
        )


def _options_alone(manifest: Values) -> Values:
    without: Values = {"files": {}, "hashes": {}, "selection": None}
    return manifest | {"identity": manifest["identity"] | without}


def _check_same(output: Location, recorded: Values, here: Values, config: RunConfig) -> None:
    if not (lines := differences(recorded, here)):
        return
    said = "choose another output.path, or undo these differences:"
    if _are_about_input(lines):
        what = "its input has changed"
        leaving_out = f" and input.except_done_in=['{config.output.path}']"
        if config.input.except_done_in:
            what = "files that determined its rows have changed or are gone"
            leaving_out = ""
        said = (
            f"{what}: to do only new rows, choose another output.path{leaving_out}; to resume, "
            "undo these differences:"
        )
    there, now = (", ".join(_tasks_there(each)) or "one" for each in (recorded, here))
    if there != now:
        lines = [f"tasks: {there} there, {now} here"]
    raise OtherRunError("\n  ".join([f"{output.path} belongs to another run; {said}", *lines]))


def _are_about_input(lines: list[str]) -> bool:
    return bool(lines) and all(line.startswith(ABOUT_INPUT) for line in lines)


def check_same_run(checked: CheckedRun) -> bool:
    """Return True if the output folder already holds this run. Raises OtherRunError."""
    recorded = read_recorded(checked.output)
    if recorded is None:
        return False
    _check_same(checked.output, recorded, checked.manifest, checked.config)
    with _refusals():
        check_results(checked.output, len(recorded["identity"]["files"]))
    return True


@_refusals()
def only_new_tasks(config: RunConfig, say: Callable[[str], object]) -> RunConfig:
    """Return a run of the tasks missing from a finished run, in its folder `added`.

    Returns `config` if no task is missing.

    Raises:
        RefusedError: The run has not ended, or the tasks cannot be added.
    """
    output = resolve(config.output.path)
    if (recorded := read_recorded(output)) is None:
        return config
    added = [each.name for each in inner_runs(output, ADDED)]
    done = _tasks_there(recorded) or [
        name
        for name, each in config.each_task.items()
        if each.output.column == recorded["config"]["output"]["column"]
    ]
    left = [name for name in config.tasks if name not in done]
    if not done or not left or {*done} - {*config.tasks}:
        return config
    if config.input.except_done_in:
        raise RefusedError(
            f"{output.path} chose its rows by input.except_done_in, so no task can be added to it: "
            "give another output.path"
        )
    if strange := [name for name in left if not re.fullmatch(r"\w[\w-]*", name)]:
        raise RefusedError(
            f"tasks: an added task is a folder, so name {strange[0]} with letters, digits, - and _"
        )
    if len("+".join(left).encode()) > 255:
        raise RefusedError(
            f"tasks: {len(left)} are new, with too long names for one folder; add fewer at once"
        )
    pinned = _check_ended(config.of_tasks(done, config.output.path))
    # a branch may have moved
    config = config.model_copy(update={"target": pinned.target, "draft": pinned.draft})
    for folder in added:
        names = folder.split("+")
        if {*names} == {*left}:
            left = names
            break
        if {*names} < {*left}:
            _check_ended(config.of_tasks(names, _place_of_added(config, names)))
            left = [name for name in left if name not in names]
    inner_run(output, ADDED, "+".join(left))
    say(f"tasks: only {', '.join(left)}; the others are done")
    return config.of_tasks(left, _place_of_added(config, left))


@_refusals()
def redo(config: RunConfig, condition: str | None, name: str | None) -> RunConfig:
    """Return a run that repeats rows of a finished run, in its folder `redone`.

    Args:
        condition: SQL on the newest result of a row; None returns `config`.
        name: Folder of the new run; None is `again`.

    Raises:
        RefusedError: There is no run, or the name or the columns do not fit.
    """
    if condition is None:
        if name is not None:
            raise RefusedError("--redo-as needs --redo")
        return config
    name = name or "again"
    output = resolve(config.output.path)
    recorded = read_recorded(output)
    if recorded is None:
        raise RefusedError(f"--redo: {output.path} holds no run")
    if not re.fullmatch(r"\w[\w-]*", name):
        raise RefusedError(f"--redo-as: {name!r} becomes a folder, so use letters, digits, - and _")
    there, here = map(text_columns, (recorded["config"], config.model_dump(mode="json")))
    # of a data set, the column with the pages is unknown yet
    if there != here._replace(has_pages=there.has_pages):
        raise RefusedError(
            f"--redo: results have the columns of {output.path}, so leave output.column, "
            "output.schema and tasks unchanged"
        )
    inner_run(output, REDONE, name)
    path = config.output.path
    # it covers earlier runs
    chosen = replace(config.input, except_done_in=(), redo=condition)
    output_options = replace(config.output, path=path_below(path, f"{REDONE}/{name}"))
    return config.model_copy(update={"input": chosen, "output": output_options})


def _place_of_added(config: RunConfig, names: list[str]) -> str:
    return path_below(config.output.path, f"{ADDED}/{'+'.join(names)}")


def _tasks_there(manifest: ReadOnly) -> list[str]:
    return list(manifest["identity"].get("tasks", ()))


def _check_ended(config: RunConfig) -> RunConfig:
    checked = check_run(config)
    is_over = check_same_run(checked) and (
        read_success(checked.output) is not None
        or (ended_with_errors(read_starts(checked.output)) and not len(open_rows(checked)[1]))
    )
    if not is_over:
        raise RefusedError(
            f"{checked.output.path} has not ended: finish it with its present tasks before you "
            "add others"
        )
    return checked.config


def counts_of_ended(checked: CheckedRun) -> Counts | None:
    """Return the counts of a complete run if only its input has changed since, else None."""
    recorded = read_recorded(checked.output)
    is_retry = checked.retry_errors != "none"
    if is_retry or recorded is None or _begun_selection(checked.config, recorded) is None:
        return None
    is_input = _are_about_input(differences(recorded, checked.manifest))
    return read_success(checked.output) if is_input else None


@contextmanager
def input_errors() -> Iterator[None]:
    """Convert errors about the input and the commits to errors of the run.

    Raises:
        RefusedError: The input is incomplete or has changed, or a commit is damaged.
        OtherRunError: A commit belongs to another run.
        RunError: The input cannot be reached.
    """
    try:
        yield
    except InputUnreachableError as error:
        raise RunError(f"{error}; finished work is kept") from error
    except StrangeCommitError as error:
        raise OtherRunError(str(error)) from error
    except (InputError, DamagedCommitError) as error:
        raise RefusedError(str(error)) from error


def open_rows(checked: CheckedRun) -> tuple[Progress, RowSet]:
    """Return the progress and the rows left to do. Raises as `input_errors`."""
    source = checked.source
    with input_errors():
        fingerprint = checked.manifest["fingerprint"]
        progress = read_commits(checked.output, fingerprint, checked.retry_errors)
    wanted = (source.rows(file.number) for file in source.files)
    keys = pending(wanted, progress, retry_errors=checked.retry_errors)
    return progress, RowSet([file.num_rows for file in source.files], keys)


def check_retry(checked: CheckedRun) -> None:
    """Check that a retry has a run to resume: without one it would run every row.

    Raises:
        RefusedError: The folder holds no run.
        OtherRunError: The folder holds another run.
    """
    is_begun = check_same_run(checked)
    if not is_begun and checked.retry_errors != "none":
        raise RefusedError(
            f"--retry-errors: {checked.output.path} holds no run; leave it out to begin one"
        )


def num_left_out(checked: CheckedRun, progress: Progress) -> int:
    """Count the error rows skipped by `--retry-errors`."""
    return len(progress.final) if checked.retry_errors == "retryable" else 0


def say_left_out(number: int) -> list[str]:
    """Describe skipped error rows, if any."""
    if not number:
        return []
    return [
        f"not tried again: {counted(number, 'error row')} with `retryable` false; "
        "--retry-errors=all tries every error row"
    ]


_OUTCOMES = {
    "not_matching": "not matching input.filter",
    "not_in_sample": "not in input.sample",
    "unchanged": "done before and unchanged",
    "failed_before": "failed before and would again",
    "not_redone": "not to be done again",
    "over_limit": "over input.limit",
    "changed": "changed",
    "new": "new",
}


def describe_selection(source: Source) -> tuple[str, ...]:
    """Describe the selected rows, unless all are."""
    selection = source.selection
    if selection is None:
        return ()
    counts = selection.counts
    said = ", ".join(
        f"{counts[name]:,} {words}" for name, words in _OUTCOMES.items() if name in counts
    )
    return (
        f"this run is about {counts['selected']:,} of {counted(counts['input'], 'row')}: {said}",
        *selection.notes,
    )

"""The manifest of a run, and the provenance stored in its files."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from specextend.core import ReadOnly, Values, counted, printable
from specextend.data.parquet import Ints
from specextend.data.prompts import CLOCK
from specextend.data.run_folder import Start, manifest_file
from specextend.data.schema import TextColumns, text_columns
from specextend.data.source import Source
from specextend.data.storage import Location, read_parsed, write_bytes

VERSION = 3

_FREE = (
    "input.path",
    "input.except_done_in",
    "output.path",
    "job",
    "report",
    "decoding.max_batch_size",
    "decoding.cache_gib",
    "attention.backend",
)
"""Options that do not affect output rows: places, machines, order of work, reports."""
_HASHED = ("target.model", "target.adapter", "draft.model")
"""Options that name weights, which the manifest has as hashes."""
_PASSED_OVER = (
    "input.filter",
    "input.sample",
    "input.limit",
    "input.redo",
    "input.passthrough",
    "input.pages_column",
    "input.gold",
    f"prompt.template_options.{CLOCK}",
)
"""Options that choose rows or copied columns, and the time in prompts."""


def build_manifest(
    source: Source,
    config: ReadOnly,
    hashes: Mapping[str, str],
    models: Mapping[str, Mapping[str, str | None]] | None = None,
) -> Values:
    """Build the manifest of a run.

    Args:
        config: Configuration as JSON values (`RunConfig.model_dump(mode="json")`).
        hashes: Hashes of weights and tokenizer by name (`target`, `draft`, `tokenizer`).
        models: Requested names and resolved commits of target and draft.

    Returns:
        The keys `version`, `fingerprint`, `identity` (`files`, `hashes`, the options that affect
        rows, `selection`), `config`, `models`, `modified_ns` of the files, and `selection` with the
        number of rows by outcome.
    """
    files = {file.relative_path: file.facts for file in source.files}
    free = tuple(f"{name}." for name in _FREE + _HASHED)
    binding = {name: value for name, value in flattened(config) if not f"{name}.".startswith(free)}
    identity: Values = {"files": files, "hashes": dict(hashes), "config": binding}
    if config.get("tasks"):
        identity["tasks"] = [*config["tasks"]]  # in their order
    selection = source.selection
    if selection is not None:
        identity["selection"] = {
            "rows": source.num_rows,
            "sha256": rows_digest(files, selection.rows),
        }
    return {
        "version": VERSION,
        "fingerprint": fingerprint(identity),
        "identity": identity,
        "config": dict(config),
        "models": dict(models or {}),
        "modified_ns": {file.relative_path: file.modified_ns for file in source.files},
        **({} if selection is None else {"selection": dict(selection.counts)}),
    }


def rows_digest(names: Iterable[str], rows: Iterable[Ints]) -> str:
    """Return the SHA-256 of the chosen rows of each file."""
    digest = hashlib.sha256()
    for name, each in zip(names, rows, strict=True):
        digest.update(f"{name}\0{len(each)}\0".encode() + each.astype("<i8").tobytes())
    return digest.hexdigest()


def fingerprint(values: ReadOnly) -> str:
    """Return the SHA-256 of canonical JSON."""
    text = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def output_columns(output: Location) -> TextColumns:
    """Return the text columns of a run. Raises ValueError for a bad manifest."""
    return text_columns((read_manifest(output) or {"config": {}})["config"])


def check_one_task(manifest: ReadOnly | None, what: str) -> None:
    """Raise ValueError for a run of several tasks."""
    if manifest is not None and manifest["config"].get("tasks"):
        raise ValueError(f"{what} takes a run of one task, and this one has several")


def read_manifest(output: Location) -> Values | None:
    """Read the manifest of an output folder; None if there is none.

    Raises:
        ValueError: It is damaged or of another version.
        OSError: It is out of reach.
    """
    location = manifest_file(output)
    try:
        return read_parsed(location, _checked_manifest)
    except ValueError as error:
        raise ValueError(
            f"{location.path} is damaged, or is not a manifest that this version can read "
            f"({error}); use another "
            "output folder, or move it away to resume with the same configuration"
        ) from error


def _checked_manifest(content: bytes) -> Values:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        manifest = dict(json.loads(content))
        if manifest.pop("sha256") == fingerprint(manifest) and manifest["version"] == VERSION:
            return manifest
    raise ValueError("its version or digest is wrong")


def num_input_rows(manifest: ReadOnly) -> int:
    """Return the number of input rows of a run."""
    identity = manifest["identity"]
    if "selection" in identity:
        return int(identity["selection"]["rows"])
    return sum(file["rows"] for file in identity["files"].values())


ABOUT_INPUT = ("input file ", "selected rows: ")
"""Prefixes of lines of `differences` about the input."""


def write_manifest(output: Location, manifest: ReadOnly) -> None:
    """Write the manifest of a new run. The lock prevents a second one."""
    signed = {**manifest, "sha256": fingerprint(manifest)}
    content = json.dumps(signed, indent=2, sort_keys=True) + "\n"
    write_bytes(manifest_file(output), content.encode())


_SCHEMA = "output.schema"


def differences(recorded: ReadOnly, current: ReadOnly) -> list[str]:
    """Compare two manifests; return a line per difference, none for the same run.

    Schemas are compared field by field, unless only their order differs.
    """
    before = dict(_flat_identity(recorded))
    after = dict(_flat_identity(current))
    texts = before.get(_SCHEMA), after.get(_SCHEMA)
    if all(texts) and texts[0] != texts[1]:
        inner = [dict(flattened(json.loads(str(text)), f"{_SCHEMA}.")) for text in texts]
        if inner[0] != inner[1]:
            for values, named in zip((before, after), inner, strict=True):
                del values[_SCHEMA]
                values |= named
    return [
        printable(f"{name}: {_say(before, name)} there, {_say(after, name)} here")
        for name in dict.fromkeys((*before, *after))
        if _say(before, name) != _say(after, name)
    ]


def other_configuration(recorded: ReadOnly, current: ReadOnly) -> list[str]:
    """Return the differences in models and options that affect the rows of a document."""
    without_input = (
        {"identity": each["identity"] | {"files": {}, "selection": None}}
        for each in (recorded, current)
    )
    lines = differences(*without_input)
    passed_over = tuple(name + end for name in _PASSED_OVER for end in ":.")
    return [line for line in lines if not line.startswith(passed_over)]


def flattened(values: ReadOnly, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested sections to pairs of dotted name and value. Dots in names are escaped."""
    for name, value in values.items():
        place = prefix + name.replace(".", "\\.")
        if isinstance(value, Mapping) and (value or not prefix):
            yield from flattened(value, f"{place}.")
        else:
            yield place, value


def _flat_identity(manifest: ReadOnly) -> Iterator[tuple[str, Any]]:
    identity = manifest["identity"]
    yield from identity["config"].items()
    yield from ((f"weights of {name}", value[:12]) for name, value in identity["hashes"].items())
    if tasks := identity.get("tasks"):
        yield "tasks", tasks
    if selection := identity.get("selection"):
        yield (
            "selected rows",
            f"{counted(selection['rows'], 'row')}, {str(selection['sha256'])[:12]}",
        )
    for path, file in identity["files"].items():
        size = f"{counted(file['rows'], 'row')}, {counted(file['size'], 'byte')}"
        yield f"input file {path}", f"{size}, footer {file['footer_sha256'][:12]}"


def _say(values: ReadOnly, name: str) -> str:
    return (
        json.dumps(values[name], ensure_ascii=False, sort_keys=True)
        if name in values
        else "nothing"
    )


PROVENANCE = b"specextend"
"""Metadata key of the provenance, which is JSON."""


def provenance(manifest: ReadOnly | None, starts: Iterable[Start], run_ids: Iterable[str]) -> bytes:
    """Encode the origin of rows as JSON; unknown values are null.

    Returns:
        `{"fingerprint", "models", "starts"}`, with versions, git commit and kernels of each start
        in `run_ids`.
    """
    known = {start.run_id: start for start in starts}
    names = ("run_id", "begin", "versions", "git_commit")
    found = [known.get(run_id, Start(run_id)) for run_id in run_ids]
    return json.dumps(
        {
            "fingerprint": None if manifest is None else manifest["fingerprint"],
            "models": {} if manifest is None else models_of(manifest),
            "starts": [
                {name: getattr(start, name) for name in names} | {"kernels": tried_kernels([start])}
                for start in found
            ],
        }
    ).encode()


def tried_kernels(starts: Iterable[Start]) -> list[Values]:
    """Count workers by kernel: `name`, `taken`, `why` of the first, and `workers`."""
    found: dict[tuple[str, bool], Values] = {}
    for kernel in (
        each for start in starts for worker in start.workers or () for each in worker.kernels
    ):
        row = found.setdefault((kernel.name, kernel.taken), asdict(kernel) | {"workers": 0})
        row["workers"] += 1
    return [*found.values()]


def models_of(manifest: ReadOnly) -> Values:
    """Return request, commit and hash of each model by name."""
    asked = manifest.get("models") or {}
    hashes = manifest["identity"]["hashes"]
    return {
        name: {**asked.get(name, {}), "sha256": hashes.get(name)}
        for name in sorted({*asked, *hashes})
    }

"""What a run is made of: the manifest, its fingerprint, and how two differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from specextend.data.documents import Source
from specextend.data.storage import Location, create_bytes, read_bytes

VERSION = 1

_FREE = ("input.path", "output.path", "job", "decoding.max_batch_size", "target.device")
"""May change from one start to the next: where things lie, and how many machines do them."""
_HASHED = ("target.model", "draft.model")
"""Paths of weights, whose hashes stand for them."""


def build_manifest(source: Source, config: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a run: `{"version", "fingerprint", "identity": {"files", "hashes", "config"}, "config"}`.

    config: the whole configuration as nested JSON values (`RunConfig.model_dump(mode="json")`); what may change
    without making it another run is left out of `identity`. hashes: of target and draft weights and tokenizer, by
    name (`target`, `draft`, `tokenizer`).
    """
    files = {
        file.relative_path: {"size": file.size, "rows": file.num_rows, "footer_sha256": file.footer_sha256}
        for file in source.files
    }
    values = {name: value for name, value in _flat(config) if not _is_free(name)}
    identity = {"files": files, "hashes": dict(hashes), "config": values}
    return {"version": VERSION, "fingerprint": fingerprint(identity), "identity": identity, "config": dict(config)}


def fingerprint(identity: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON: keys sorted, no spaces, no NaN."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(output: Location) -> dict[str, Any] | None:
    """The manifest of an output folder, or None. Raises ValueError for one that cannot be read."""
    location = _place(output)
    data = read_bytes(location)
    if data is None:
        return None
    try:
        manifest = json.loads(data)
        if manifest["version"] != VERSION or manifest["fingerprint"] != fingerprint(manifest["identity"]):
            raise ValueError("its version or fingerprint is not what it should be")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{location.path} is not a manifest of ours ({error}); use another output folder") from error
    return dict(manifest)


def write_manifest(output: Location, manifest: Mapping[str, Any]) -> None:
    """Write the manifest once; raises FileExistsError where there is one."""
    location = _place(output)
    if not create_bytes(location, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()):
        raise FileExistsError(location.path)


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each value in which two manifests' identities differ; empty if the fingerprints are equal.

    A line names the value, what the output folder has, and what this run has.
    """
    before, after = dict(_flat_identity(recorded)), dict(_flat_identity(current))
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {_say(before, name)} there, {_say(after, name)} here"
        for name in names
        if _say(before, name) != _say(after, name)
    ]


def _place(output: Location) -> Location:
    return output.child("_run", "manifest.json")


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in _FREE + _HASHED)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested sections as (dotted name, value)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _flat_identity(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    identity = manifest["identity"]
    yield from identity["config"].items()
    for name, value in identity["hashes"].items():
        yield f"weights of {name}", value[:12]
    for path, file in identity["files"].items():
        yield f"input file {path}", f"{file['rows']} rows, {file['size']} bytes, footer {file['footer_sha256'][:12]}"


def _say(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "nothing"

"""Provenance of a Parquet file of a run: the starts, models, versions and code that its rows come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specextend.data.run_folder import Start

PROVENANCE = b"specextend"
"""Key of the provenance in a file's metadata; the value is JSON."""


def provenance(manifest: Mapping[str, Any] | None, starts: Iterable[Start], run_ids: Iterable[str]) -> bytes:
    """Encode where rows come from, as JSON: `{"fingerprint", "models", "starts"}`; what is not known is null.

    models: by name, what was asked for, its commit, and the hash of its files. starts: those of `run_ids`, each with
    the versions of the libraries and the git commit of the code.
    """
    known = {start.run_id: start for start in starts}
    return json.dumps(
        {
            "fingerprint": None if manifest is None else manifest["fingerprint"],
            "models": {} if manifest is None else models_of(manifest),
            "starts": [_start(known.get(run_id, Start(run_id))) for run_id in run_ids],
        }
    ).encode()


def models_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the models of a run by name: what was asked for, its commit, and the hash of its files."""
    asked, hashes = manifest.get("models") or {}, manifest["identity"]["hashes"]
    return {name: {**asked.get(name, {}), "sha256": hashes.get(name)} for name in sorted({*asked, *hashes})}


def _start(start: Start) -> dict[str, Any]:
    names = ("run_id", "begin", "versions", "git_commit")
    return {name: getattr(start, name) for name in names}

"""What a run is made of: the manifest, its fingerprint, and how two differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specextend.data.documents import Source
from specextend.data.storage import Location


def build_manifest(source: Source, config: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a run: `{"version", "fingerprint", "identity": {"files", "hashes", "config"}, "config"}`.

    config: the whole configuration as nested JSON values (`RunConfig.model_dump(mode="json")`); what may change
    without making it another run is left out of `identity`. hashes: of target and draft weights and tokenizer, by
    name (`target`, `draft`, `tokenizer`).
    """
    raise NotImplementedError


def read_manifest(output: Location) -> dict[str, Any] | None:
    """The manifest of an output folder, or None. Raises ValueError for one that cannot be read."""
    raise NotImplementedError


def write_manifest(output: Location, manifest: Mapping[str, Any]) -> None:
    """Write the manifest once; raises FileExistsError where there is one."""
    raise NotImplementedError


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each value in which two manifests' identities differ; empty if the fingerprints are equal."""
    raise NotImplementedError

"""`_run/attempts/<run id>.json`: one record per start of a run."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from specextend.cluster.leases import Tried
from specextend.cluster.messages import WorkerInfo
from specextend.cluster.places import Spot
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.run_folder import read_starts, starts_folder
from specextend.data.storage import Location, write_bytes

_PACKAGES = ("specextend", "torch", "transformers", "ray", "pyarrow", "numpy")


def library_versions() -> dict[str, str]:
    """Python and the libraries that a result may depend on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return versions


class Attempt:
    """One start of a run: begun when it holds the lock, ended with its exit code."""

    def __init__(
        self,
        output: Location,
        run_id: str,
        config: RunConfig,
        models: Mapping[str, Mapping[str, str | None]] | None = None,
    ) -> None:
        """models: as they were asked for and the commits that they are, by name."""
        self._file = starts_folder(output).child(f"{run_id}.json")
        self._record: dict[str, Any] = {
            "run_id": run_id,
            "begin": _now(),
            "end": None,
            "exit_code": None,
            "driver": {"host": socket.gethostname(), "pid": os.getpid()},
            "versions": library_versions(),
            "models": dict(models or {}),
            "job": asdict(config.job),
            "workers": [],
            "charges": {},
        }

    def ending(self, exit_code: int) -> dict[str, Any]:
        """What the record will say if the run ends now, for a report that is written before."""
        return {"run_id": self._record["run_id"], "end": _now(), "exit_code": exit_code}

    def begin(self) -> None:
        """Write the record, its end open."""
        self._write()

    def worker_started(self, info: WorkerInfo) -> None:
        """Remember where a worker runs; written at the end."""
        self._record["workers"].append(asdict(info))

    def charged(self, charges: Mapping[DocumentKey, Tried]) -> None:
        """Write down how often open documents have been tried, by earlier starts too: the next start counts on."""
        self._record["charges"] = {
            f"{key.file}:{key.row}": {"attempts": tried.attempts, "struck": sorted(tried.struck)}
            for key, tried in charges.items()
        }
        self._write()

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """Write the record with its end."""
        self._record |= {"end": _now(), "exit_code": exit_code, "reason": reason}
        self._write()

    def _write(self) -> None:
        write_bytes(self._file, json.dumps(self._record, indent=2).encode())


def read_charges(output: Location) -> dict[DocumentKey, Tried]:
    """Read how often documents have been tried: those that a start had charged, and had still to do when it ended.

    An entry that cannot be read counts for nothing: at worst its document is tried anew.
    """
    charges: dict[DocumentKey, Tried] = {}
    for name, charge in (entry for start in read_starts(output) for entry in start.charges.items()):
        if (found := _parse_charge(name, charge)) is None:
            continue
        key, tried = found
        before = charges.get(key, Tried(0))
        charges[key] = Tried(max(before.attempts, tried.attempts), before.struck | tried.struck)
    return charges


def _parse_charge(name: str, charge: Any) -> tuple[DocumentKey, Tried] | None:
    """Return a document and how often it was tried, from an entry of a record; None for one that is damaged."""
    file, _, row = name.partition(":")
    try:
        tried = Tried(
            int(charge["attempts"]), frozenset(Spot(str(host), str(device)) for host, device in charge["struck"])
        )
        return DocumentKey(int(file), int(row)), tried
    except (KeyError, TypeError, ValueError):
        return None


def version_changes(output: Location) -> list[str]:
    """List the libraries that have changed since the last start, one line each."""
    before = next((start.versions for start in reversed(read_starts(output)) if start.versions), {})
    now = library_versions()
    return [
        f"{name} was {before[name]} and is {version}"
        for name, version in now.items()
        if before.get(name, version) != version
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""`_run/attempts/<run id>.json`: one record per start of a run."""

from __future__ import annotations

import json
import os
import platform
import socket
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from specextend.cluster.messages import WorkerInfo
from specextend.config import RunConfig
from specextend.data.storage import Location, list_files, read_bytes, write_bytes

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

    def __init__(self, output: Location, run_id: str, config: RunConfig) -> None:
        self._file = output.child("_run", "attempts", f"{run_id}.json")
        self._record: dict[str, Any] = {
            "run_id": run_id,
            "begin": _now(),
            "end": None,
            "exit_code": None,
            "driver": {"host": socket.gethostname(), "pid": os.getpid()},
            "versions": library_versions(),
            "models": _models(config),
            "job": asdict(config.job),
            "workers": [],
        }

    def begin(self) -> None:
        """Write the record, its end open."""
        self._write()

    def worker_started(self, info: WorkerInfo) -> None:
        """Remember where a worker runs; written at the end."""
        self._record["workers"].append(asdict(info))

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """Write the record with its end."""
        self._record |= {"end": _now(), "exit_code": exit_code, "reason": reason}
        self._write()

    def _write(self) -> None:
        write_bytes(self._file, json.dumps(self._record, indent=2).encode())


def read_attempts(output: Location) -> list[dict[str, Any]]:
    """Every start's record, oldest first."""
    folder = output.child("_run", "attempts")
    contents = [read_bytes(folder.child(name)) for name in list_files(folder) if name.endswith(".json")]
    records: list[dict[str, Any]] = [json.loads(content) for content in contents if content]
    return sorted(records, key=lambda record: str(record["begin"]))


def version_changes(output: Location) -> list[str]:
    """What has changed among the libraries since the last start, one line each."""
    records = read_attempts(output)
    before = records[-1]["versions"] if records else {}
    now = library_versions()
    return [
        f"{name} was {before[name]} and is {version}"
        for name, version in now.items()
        if before.get(name, version) != version
    ]


def _models(config: RunConfig) -> dict[str, dict[str, str | None]]:
    named = {"target": config.target, "draft": config.draft}
    return {
        name: {"model": options.model, "revision": options.revision}
        for name, options in named.items()
        if options is not None and options.model
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

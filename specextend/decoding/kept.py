"""Measurements that are kept between two starts: one JSON file each in the user's cache folder.

A measurement is kept only if nothing else used the cores meanwhile: beside another busy process, kernels of several
threads can take thirty times as long, and the wrong one looks fastest. If a file is missing, damaged or about something
else, there is nothing; if the folder cannot be written, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

VERSION = 3
_MOST_PREEMPTIONS_PER_S = 100.0
"""Two idle cores show 20 to 45, beside one more busy process 150 and more."""
_PATIENCE_S = 1.5
"""Seconds within which a disturbed measurement is repeated."""


def kept_or_measured(kind: str, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """Return the JSON value that was kept as `kind` for `key`, JSON values that say what it is about, or measure it."""
    path = _path(kind, key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        stored = {}
    if isinstance(stored, dict) and stored.get("version") == VERSION and stored.get("key") == dict(key):
        return stored["value"]
    value, is_quiet = measure_undisturbed(measure)
    if is_quiet and path:
        with suppress(OSError):
            _write(path, json.dumps({"version": VERSION, "key": dict(key), "value": value}, indent=1))
    return value


def measure_undisturbed(measure: Callable[[], Any]) -> tuple[Any, bool]:
    """Measure until the machine was quiet, for a second or two; return the last result, and True if it was quiet."""
    started_at = time.perf_counter()
    while True:
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        result = measure()
        end, preemptions = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        is_quiet = preemptions <= _MOST_PREEMPTIONS_PER_S * (end - begin) + 1
        if is_quiet or end - started_at > _PATIENCE_S:
            return result, is_quiet


def cache_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`; None if there is no home either."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard says to ignore relative ones
        return Path(base, "specextend")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "specextend") if os.path.isabs(home) else None


def _path(kind: str, key: Mapping[str, Any]) -> Path | None:
    folder = cache_folder()
    text = json.dumps(dict(key), sort_keys=True)
    return folder and folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""SHA-256 of files. Each large file is read once per machine: its hash is kept in the user's cache folder.

A kept hash counts only as long as the file's size, times and inode are those of the file that was hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KEPT_FROM_BYTES = 16 << 20
"""Smaller files are hashed each time, which takes no longer than a look-up."""
SETTLED_S = 2.0
"""Resolution that a file system's clock may have: a file that changed more recently could change again unnoticed."""


def cache_folder() -> Path | None:
    """Return `$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`; None if there is no home either."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard says to ignore relative ones
        return Path(base, "specextend")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "specextend") if os.path.isabs(home) else None


def file_sha256(path: Path, clock: Callable[[], int] = time.time_ns) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits; from an earlier call if the file is unchanged.

    `clock` returns the file system's time in nanoseconds.
    """
    before = _identity(path)
    is_kept = before["size"] >= KEPT_FROM_BYTES
    if is_kept and (known := _read(before)) is not None:
        return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    is_settled = clock() - max(before["mtime_ns"], before["ctime_ns"]) > SETTLED_S * 1e9
    if is_kept and is_settled and _identity(path) == before:
        _write(before, found)
    return found


def _identity(path: Path) -> dict[str, Any]:
    """Collect a file's place and what changes with its bytes; ctime, unlike mtime, cannot be set by copying."""
    real = os.path.realpath(path)
    stat = os.stat(real)
    times = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    return {"path": real, "size": stat.st_size, "inode": stat.st_ino, **times}


def _place(identity: dict[str, Any]) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(os.fsencode(identity["path"])).hexdigest()[:16]
    return folder and folder / f"file-hash-{name}.json"


def _read(identity: dict[str, Any]) -> str | None:
    """Read the hash that is kept for a file; None if there is none for its present state."""
    if (place := _place(identity)) is None:
        return None
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        known = str(kept["sha256"])
        return known if kept["file"] == identity and re.fullmatch("[0-9a-f]{64}", known) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(identity: dict[str, Any], sha256: str) -> None:
    """Keep a hash, if the folder can be written."""
    if (place := _place(identity)) is None:
        return
    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"file": identity, "sha256": sha256}), encoding="utf-8")
        os.replace(temporary, place)
    except OSError:
        with suppress(OSError):
            temporary.unlink()

"""Keeps what is made of a GGUF file in the user's cache folder: converting it takes many seconds, a large one minutes.

An entry is a folder, which is there whole or not at all. It is named for the file's content and for the libraries that
converted it, and it counts only while its own files have the hashes that were written beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from specextend.file_hashes import cache_folder, file_sha256

Part = Literal["headers", "config", "tokenizer", "bfloat16", "float16", "float32"]
"""`headers` is an empty entry: the file was found whole. A number format stands for the weights, unpacked to it."""

_LIBRARIES = ("transformers", "tokenizers", "gguf")
_HASHES = "hashes.json"


def find_kept(file: Path, part: Part) -> Path | None:
    """Return the folder with what was made of a GGUF file; None if there is none, or it is damaged."""
    place = _place(file, part)
    return place if place is not None and _is_whole(place) else None


def keep(file: Path, part: Part, save: Callable[[Path], Any], num_bytes: int = 0) -> bool:
    """Let `save` write what was made of a GGUF file into a folder, and keep that; return False if it cannot be kept.

    Nothing is kept unless the disk has room for twice `num_bytes`, so that it never fills up. A damaged entry is
    replaced. If another process has just written the entry, that one stays.
    """
    place = _place(file, part)
    if place is None:
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(place.parent).free < 2 * num_bytes:
            return False
        with TemporaryDirectory(dir=place.parent, prefix="gguf-", suffix=".tmp", ignore_cleanup_errors=True) as name:
            _write(place, Path(name), save)
    except Exception:  # noqa: BLE001  on a full disk tokenizers raises bare Exception
        return False
    return True


def _place(file: Path, part: Part) -> Path | None:
    """Return the folder of an entry, which need not exist; None if there is no cache folder."""
    if (folder := cache_folder()) is None:
        return None
    made_of = {"sha256": file_sha256(file), **{library: version(library) for library in _LIBRARIES}}
    return folder / f"gguf-{part}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}"


def _write(place: Path, temporary: Path, save: Callable[[Path], Any]) -> None:
    """Write an entry in a folder that is removed afterwards, and rename it; a damaged one takes its place there."""
    entry = temporary / "entry"
    entry.mkdir()
    save(entry)
    (entry / _HASHES).write_text(json.dumps(_hashes(entry)), encoding="utf-8")
    if place.exists() and not _is_whole(place):
        os.rename(place, temporary / "damaged")
    if not place.exists():
        os.rename(entry, place)


def _is_whole(place: Path) -> bool:
    try:
        return bool(json.loads((place / _HASHES).read_text(encoding="utf-8")) == _hashes(place))
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in folder.iterdir() if path.name != _HASHES}

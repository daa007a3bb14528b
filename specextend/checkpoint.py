"""What the files of a checkpoint say without any weight being loaded: tensor shapes and hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_VERSION_KEYS = ("transformers_version", "_name_or_path")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    dtype: str
    """As the file spells it: `BF16`, `F16`, `F32`, ..."""
    shape: tuple[int, ...]


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Names, types and shapes of the tensors of a safetensors file, and a check that the file is whole.

    Raises ValueError in one line for a file that is no safetensors file or was cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(f"{path} is not a safetensors file, or is cut short ({size} bytes)")
        header = _parse_header(path, file.read(length))
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if _LENGTH_BYTES + length + end != size:
        raise ValueError(
            f"{path} is cut short: its header promises {_LENGTH_BYTES + length + end} bytes, it has {size}"
        )
    return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        for entry in header.values():
            _ = entry["data_offsets"][1], entry["dtype"], entry["shape"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from None
    return header


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over names and contents, in the order of the names; where the files lie does not matter."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        total.update(f"{path.name}\0".encode() + hash_file(path).digest())
    return total.hexdigest()


def hash_file(path: Path) -> hashlib._Hash:
    """SHA-256 of one file. A model's config is hashed without the library version that wrote it."""
    if path.name in ("config.json", "generation_config.json"):
        values = read_json(path)
        kept = {key: value for key, value in values.items() if key not in _VERSION_KEYS}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError in one line where it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values

"""The files of a checkpoint, without loading any weight: tensor shapes, hashes, and pickles that are refused."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specextend.file_hashes import file_sha256

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
"""Says in which file each tensor is, if there are several."""
_VERSION_KEYS = ("transformers_version", "_name_or_path")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = ("training_args.", "optimizer.", "scheduler.", "rng_state")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; to, *files = sys.argv[1:]; "
    "save_file({n: t.contiguous().clone() for f in files "
    "for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, to, {'format': 'pt'})"
)


class ModelError(ValueError):
    """A model that cannot be found, loaded or served; the message is one line."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    dtype: str
    """As the file spells it: `BF16`, `F16`, `F32`, ..."""
    shape: tuple[int, ...]


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Read names, types and shapes of the tensors of a safetensors file, and check that the file is whole.

    Raises ValueError in one line if it is a pickle, is no safetensors file or was cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            if start.startswith(_PICKLE_STARTS):
                raise ValueError(f"{path} is a pickle, {convert_pickles([path], path)}")
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
            if not {type(number) for number in (*entry["data_offsets"], *entry["shape"])} <= {int}:
                raise ValueError("an offset or a size is not a whole number")
            _ = entry["data_offsets"][1], entry["dtype"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from None
    return header


def indexed_names(folder: Path) -> list[str]:
    """List the names that a folder's index gives for its weight files, in order; none without an index.

    Raises ValueError in one line if the index is broken, or names anything but safetensors files in the same folder:
    what lies elsewhere is neither checked nor hashed.
    """
    if not (folder / INDEX).is_file():
        return []
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{folder / INDEX} names {name!r}; weights must be safetensors files in the same folder as their index"
            )
    return sorted(set(named.values()))


def pickled_files(folder: Path) -> list[Path]:
    """List the files of a folder that are pickled weights by their names, in order; they are never opened."""
    found = sorted(path for pattern in _PICKLED for path in folder.glob(pattern))
    return [path for path in found if not path.name.startswith(_NOT_WEIGHTS)]


def convert_pickles(files: Iterable[Path], to: Path) -> str:
    """Say why pickled weights are refused, and by which command they become the safetensors file `to`."""
    names = " ".join(shlex.quote(str(path)) for path in (to, *files))
    return f'which can run code and is refused; convert it with: python -c "{_CONVERT}" {names}'


def hash_files(paths: Iterable[Path]) -> str:
    """Compute the SHA-256 over names and contents, in the order of the names; the files' folder does not matter."""
    return combine_hashes({path.name: hash_file(path) for path in paths})


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """Compute the SHA-256 over the names and hashes of files; the hashes may come from elsewhere."""
    total = hashlib.sha256()
    for name in sorted(hashes):
        total.update(f"{name}\0".encode() + bytes.fromhex(hashes[name]))
    return total.hexdigest()


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file; of a model's config without the library version that wrote it."""
    if path.name not in ("config.json", "generation_config.json"):
        return file_sha256(path)
    kept = {key: value for key, value in read_json(path).items() if key not in _VERSION_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ValueError in one line if it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    return values

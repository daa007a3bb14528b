"""Files of a model, on disk or from the Hugging Face Hub at a commit: found, checked, hashed.

Without an answer of the Hub, its cache is used.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # type: ignore[attr-defined]  # of httpx, whichever release of it the library uses
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars
from safetensors import SafetensorError, safe_open

from specextend.core import Values, counted, first_line
from specextend.folders import on_this_machine, temporary_folder

Dtype = Literal["bfloat16", "float16", "float32"]
Scheme = Literal["int8", "fp8", "int4"]
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
TIMEOUT_S = 20.0
"""Seconds for an answer of the Hub."""
_LATER = (408, 425, 429)
"""Codes below 500 that allow another try."""
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
_WEIGHTS = "*.safetensors"
_ONE_FILE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = ("training_args.", "optimizer.", "scheduler.", "rng_state")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; to, *files = sys.argv[1:]; "
    "save_file({n: t.contiguous().clone() for f in files for n, t in torch.load(f, "
    "map_location='cpu', weights_only=True).items()}, to, {'format': 'pt'})"
)


FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of weights. Other types need scales."""
VOCABULARY = "draft_token_ids"
"""Token ids that a draft can propose."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """`target.*`: The large model, whose output the run produces."""

    model: str
    """A name on the Hugging Face Hub, or a local folder; `specextend prepare model` unpacks GGUF. A
    branch, tag or commit may follow the name (`owner/name@main`); without it the default branch
    counts. A run keeps its commit.
    """
    adapter: str | None = None
    """A local folder with a LoRA adapter in PEFT's form, which is merged into the weights."""
    dtype: Dtype = "bfloat16"
    """Number format for the weights and caches of target and draft: `bfloat16`, `float16` or
    `float32`.
    """
    quantize: Scheme | None = None
    """Weights of the target's layers in 8 or 4 bits: `int8`, `fp8` (a GPU with compute capability
    8.9 or higher) or `int4`; unset: in `dtype`. Embeddings, LM head, caches and draft stay in
    `dtype`. `fp8` and `int4` need the extra `quantize`.
    """

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("target.model must not be empty")
        if "://" in self.model:  # an address may hold a token
            raise ValueError("target.model must be a Hub id or a local path, not an address")


class ModelError(ValueError):
    """A model that cannot be found, loaded or served. The message is one line."""


class HubUnreachableError(ModelError):
    """The model is not cached and the Hub does not answer. Another try may help."""


class TensorInfo(NamedTuple):
    """A tensor of a safetensors file."""

    file: Path
    name: str
    dtype: str
    """`BF16`, `F16`, `F32`, ..."""
    shape: tuple[int, ...]


def find_folder(model: str, *, weights: bool) -> Path:
    """Return a local folder, or a Hub id's folder in the cache; fetch `weights` if asked.

    Raises ModelError.
    """
    folder = Path(on_this_machine(model))
    if folder.is_dir():
        return folder
    if model.endswith(".gguf") and Path(model).is_file():
        command = f"specextend prepare model {shlex.quote(model)} --output FOLDER"
        raise ModelError(f"{model} must be unpacked once, into a folder to name instead: {command}")
    if looks_like_path(model):
        raise ModelError(
            f"{model} does not exist on {platform.node()}; a model is a Hub id, or a folder that "
            "each machine of the run has at this path"
        )
    told = (*_CONFIG_FILES, *_TOKENIZER_FILES, _NAMED_TEMPLATES, INDEX, ADAPTER_CONFIG)
    folder = _fetch(model, [*told])
    if weights:  # in one of its formats
        _fetch(model, indexed_names(folder) or [_WEIGHTS])
    return folder


def _fetch(model: str, patterns: list[str]) -> Path:
    name, revision = split_revision(model)
    with _said(model), quiet():
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def split_revision(model: str) -> tuple[str, str | None]:
    """Split `name@revision`; None is the default branch."""
    name, _, revision = model.partition("@")
    return name, revision or None


def looks_like_path(model: str) -> bool:
    """Return True for a path. A Hub id is `name` or `owner/name`."""
    is_like_one = model.startswith((".", "~", "{")) or model.endswith(".gguf")
    has_folders = split_revision(model)[0].count("/") > 1
    return is_like_one or has_folders or Path(model).is_absolute() or Path(model).exists()


def resolve_revision(model: str) -> str | None:
    """Return the commit of a Hub id; None for a path."""
    if looks_like_path(model):
        return None
    revision = split_revision(model)[1] or ""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return find_folder(model, weights=False).name


def read_tensors(model: str) -> dict[str, TensorInfo] | None:
    """Read the headers of a model's weights; None if only the Hub has them. Raises ModelError."""
    folder = find_folder(model, weights=False)
    if looks_like_path(model) or all(
        (folder / name).is_file() for name in indexed_names(folder) or [_ONE_FILE]
    ):
        return read_folder(folder, model)
    name, revision = split_revision(model)
    with _said(model):
        files = HfApi().model_info(name, revision=revision, timeout=TIMEOUT_S).siblings or []
    _choose_files([file.rfilename for file in files], folder, model)
    return None


def read_folder(folder: Path, model: str) -> dict[str, TensorInfo]:
    """Read the headers of a folder's weights. Raises ModelError."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder, model):
        found = read_safetensors_header(file)
        if twice := tensors.keys() & found.keys():
            raise ModelError(f"{model} has the tensor {min(twice)} in two files; leave it in one")
        tensors |= found
    return tensors


def weight_files(folder: Path, model: str) -> list[Path]:
    """List the weight files of a folder. Raises ModelError."""
    files = [
        folder / name
        for name in _choose_files([path.name for path in folder.iterdir()], folder, model)
    ]
    for file in files:
        if not file.is_file():  # opening a pipe would never return
            raise ModelError(f"{file} is no file; put the weights there")
    return files


def _choose_files(names: list[str], folder: Path, model: str) -> list[str]:
    files = [name for name in names if Path(name).match(_WEIGHTS) and "/" not in name]
    if not files:
        found = (
            "none (to convert a Hub repository's pickles, fetch it with: hf download ID "
            "--local-dir DIR)"
        )
        if pickled := _pickled_files(folder):
            found = (
                f"only a pickle ({pickled[0].name}), "
                f"{_convert_pickles(pickled, folder / _ONE_FILE)}"
            )
        raise ModelError(f"{model} must have weights as safetensors; it has {found}")
    if indexed := indexed_names(folder):
        if missing := [name for name in indexed if name not in files]:
            raise ModelError(f"{model} has no {missing[0]}, which its {INDEX} names")
        return indexed
    if _ONE_FILE in files:
        return [_ONE_FILE]
    if len(files) > 1:
        raise ModelError(
            f"{model} has several weight files and no {INDEX}, which says whether they are all: "
            "add it, or leave one"
        )
    return files


def indexed_names(folder: Path) -> list[str]:
    """List the weight files of a folder's index, in order. Raises ModelError."""
    if not (folder / INDEX).is_file():
        return []
    index = read_json(folder / INDEX)
    named = index.get("weight_map")
    # needed by transformers, even empty
    if not isinstance(named, dict) or not named or "metadata" not in index:
        raise ModelError(f"{folder / INDEX} must have a weight_map and metadata")
    for name in named.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ModelError(
                f"{folder / INDEX} names {name!r}; weights must be safetensors files in the same "
                "folder as their index"
            )
    return sorted(set(named.values()))


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors of a whole file. Raises ModelError."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            return {
                name: TensorInfo(path, name, each.get_dtype(), tuple(each.get_shape()))
                for name, each in slices.items()
            }
    except SafetensorError as error:
        with path.open("rb") as raw:
            if raw.read(8).startswith(_PICKLE_STARTS):
                raise ModelError(f"{path} is a pickle, {_convert_pickles([path], path)}") from None
        raise ModelError(f"{path} is not a whole safetensors file: {first_line(error)}") from None


def check_tensors(
    where: str,
    found: Mapping[str, TensorInfo],
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, tuple[str, ...]],
) -> None:
    """Check that tensors are the described ones.

    Args:
        where: Begins the message.
        dtypes: Types of tensors that are no floats.

    Raises:
        ModelError: A tensor is missing, unknown, or of another shape or type.
    """
    if missing := sorted(required.keys() - found.keys()):
        raise ModelError(f"{where} lacks the tensor {missing[0]}")
    shapes = {**optional, **required}
    for known, info in sorted(found.items()):
        name = info.name
        if known not in shapes:
            raise ModelError(f"{where} has the tensor {name}, which config.json does not describe")
        if info.shape != shapes[known]:
            raise ModelError(
                f"{where}: {name} is {list(info.shape)}, config.json says {list(shapes[known])}"
            )
        if info.dtype not in (served := dtypes.get(known, FLOATS)):
            raise ModelError(f"{where}: {name} is {info.dtype}; served are {', '.join(served)}")


def read_json(path: Path) -> Values:
    """Read a JSON object from a file. Raises ModelError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not contain a JSON object")
    return values


def _pickled_files(folder: Path) -> list[Path]:
    found = sorted(path for pattern in _PICKLED for path in folder.glob(pattern))
    return [path for path in found if not path.name.startswith(_NOT_WEIGHTS)]


def _convert_pickles(files: Iterable[Path], to: Path) -> str:
    """Return why pickles are refused, and the command to convert them."""
    names = " ".join(shlex.quote(str(path)) for path in (to, *files))
    return f'which can run code and is refused; convert it with: python -c "{_CONVERT}" {names}'


def copy_weights(model: str, folder: Path) -> None:
    """Copy config and weights to a folder; a separate process converts a pickle."""
    commit = resolve_revision(model)
    pinned = model if commit is None else f"{split_revision(model)[0]}@{commit}"
    source = find_folder(pinned, weights=True)
    weights = weight_files(source, model) if any(source.glob(_WEIGHTS)) else []
    for path in (*(source / name for name in (*_CONFIG_FILES, INDEX)), *weights):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if not weights:
        if commit is not None:
            source = _fetch(pinned, [*_PICKLED])
        pickled = _pickled_files(source)
        if len(pickled) != 1:
            raise ModelError(
                f"{model} must have safetensors or one pickle; it has "
                f"{counted(len(pickled), 'pickle')}"
            )
        _unpickle(pickled[0], folder / _ONE_FILE)


def _unpickle(file: Path, to: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, to, file], capture_output=True, text=True
    )
    if ended.returncode != 0:
        errors = re.findall(r"^\S*Error: .*", ended.stderr, re.MULTILINE) or [
            f"exit {ended.returncode}"
        ]
        raise ModelError(f"{file} cannot be read as nothing but tensors: {errors[-1]}")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that becomes `folder`, whole or not at all. Raises ModelError."""
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something already; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(str(folder.parent)) as temporary:
        whole = Path(temporary, "model")
        whole.mkdir()
        yield whole
        for path in whole.iterdir():
            path.chmod(0o644)  # safetensors makes files private
        whole.rename(folder)


def identify(model: str) -> dict[str, str]:
    """Identify `weights`, with config, and `tokenizer` by a commit or a SHA-256."""
    if (commit := resolve_revision(model)) is not None:
        return {"weights": commit, "tokenizer": commit}
    folder = find_folder(model, weights=True)
    read_folder(folder, model)
    weights = [folder / name for name in (*_CONFIG_FILES, INDEX)] + weight_files(folder, model)
    texts = [*(folder / name for name in _TOKENIZER_FILES), *folder.glob(_NAMED_TEMPLATES)]
    return {"weights": hash_files(weights), "tokenizer": hash_files(texts)}


def hash_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of names and contents, in order."""
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.name)
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
        for file, digest in zip(files, pool.map(_sha256, files), strict=True):
            total.update(f"{file.name}\0".encode() + digest)
    return total.hexdigest()


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings and progress bars."""
    disable_progress_bars()
    with warnings.catch_warnings(action="ignore"):
        yield


@contextmanager
def _said(model: str) -> Iterator[None]:
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        line = first_line(error)
        if _may_pass(error):
            what = f"the Hub does not answer for {model}, nor does its cache here: {line}"
            raise HubUnreachableError(f"{what}; run again") from error
        raise ModelError(
            f"{model} is not a local folder (name one by its absolute path) and cannot be fetched "
            f"from the Hub: {line}"
        ) from None


def _may_pass(error: BaseException | None) -> bool:
    if isinstance(error, LocalEntryNotFoundError):  # from the cache, after the Hub failed
        return _may_pass(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in _LATER
    return isinstance(error, HTTPError | ConnectionError | TimeoutError) and not isinstance(
        error, OfflineModeIsEnabled
    )

"""The files of a model: on disk, or from the Hugging Face Hub at a commit; checked and hashed,
never loaded.

If the Hub does not answer, its cache on this machine is used. What neither has raises ModelError,
or HubUnreachableError if another try may help.
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
from specextend.folders import temporary_folder
from specextend.shipped import on_this_machine

Dtype = Literal["bfloat16", "float16", "float32"]
Scheme = Literal["int8", "fp8", "int4"]
ADAPTER_CONFIG = "adapter_config.json"
"""Says that an adapter lies in a folder, and how strong it is."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
"""Says in which file each tensor is, if there are several."""
TIMEOUT_S = 20.0
"""Seconds in which the Hub must answer a question."""
_LATER = (408, 425, 429)
"""HTTP codes below 500 after which another try may succeed."""
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
"""Types of weights; integers and 8-bit floats need scales that no config names."""
VOCABULARY = "draft_token_ids"
"""Tensor of a reduced vocabulary: the token ids that a draft can propose."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """`target.*`: The large model, whose output the run produces."""

    model: str
    """A name on the Hugging Face Hub, or a local folder; `specextend prepare model` unpacks GGUF.
    Behind the name may stand a branch, tag or commit (`owner/name@main`), otherwise the default
    branch is meant; a run keeps its commit."""
    adapter: str | None = None
    """A local folder with a LoRA adapter as PEFT saves it, which is merged into the weights."""
    dtype: Dtype = "bfloat16"
    """Number format of the weights and caches of target and draft: `bfloat16`, `float16` or
    `float32`.
    """
    quantize: Scheme | None = None
    """Weights of the target's layers in 8 or 4 bits: `int8`, `fp8` (a GPU from compute capability
    8.9 on) or `int4`; unset: in `dtype`. Embeddings, LM head, caches and draft stay in `dtype`.
    `fp8` and `int4` need the extra `quantize`."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("target.model must not be empty")
        if "://" in self.model:  # not repeated: an address may hold a token
            raise ValueError("target.model must be a Hub id or a local path, not an address")


class ModelError(ValueError):
    """A model that cannot be found, loaded or served; the message is one line."""


class HubUnreachableError(ModelError):
    """The Hub does not answer, and its cache on this machine lacks what is asked for; another try
    may help.
    """


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file."""

    file: Path
    name: str
    """In the file."""
    dtype: str
    """As the file spells it: `BF16`, `F16`, `F32`, ..."""
    shape: tuple[int, ...]


# Where a model is


def find_folder(model: str, *, weights: bool) -> Path:
    """Find a local folder, or the files of a Hub id, which are fetched into the Hub's cache.

    weights: fetch the weights too. Raises ModelError.
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
    if weights:  # a repository may hold the same weights in several formats
        _fetch(model, indexed_names(folder) or [_WEIGHTS])
    return folder


def _fetch(model: str, patterns: list[str]) -> Path:
    name, revision = split_revision(model)
    with _said(model), quiet():
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def split_revision(model: str) -> tuple[str, str | None]:
    """Return the name of `name@revision` on the Hub, and its revision; None for the default
    branch.
    """
    name, _, revision = model.partition("@")
    return name, revision or None


def looks_like_path(model: str) -> bool:
    """Return True for a name that can only be a place on disk: a Hub id is `name` or
    `owner/name`.
    """
    is_like_one = model.startswith((".", "~", "{")) or model.endswith(".gguf")
    has_folders = split_revision(model)[0].count("/") > 1
    return is_like_one or has_folders or Path(model).is_absolute() or Path(model).exists()


def resolve_revision(model: str) -> str | None:
    """Return the commit of a Hub id's revision, from the Hub or else from its cache; None for files
    on disk.
    """
    if looks_like_path(model):
        return None
    revision = split_revision(model)[1] or ""
    if re.fullmatch("[0-9a-f]{40}", revision):  # can never come to mean anything else
        return revision
    return find_folder(model, weights=False).name


# What its files hold


def read_tensors(model: str) -> dict[str, TensorInfo] | None:
    """Read the headers of a model's safetensors files; None if only the Hub has them, which is
    asked for their names.

    Raises ModelError if a file is not whole, or there is none.
    """
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
    """Read the headers of a folder's safetensors files. Raises ModelError if one is not whole, or
    there is none.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder, model):
        found = read_safetensors_header(file)
        if twice := tensors.keys() & found.keys():
            raise ModelError(f"{model} has the tensor {min(twice)} in two files; leave it in one")
        tensors |= found
    return tensors


def weight_files(folder: Path, model: str) -> list[Path]:
    """List the safetensors files of a folder that are loaded. Raises ModelError if one is missing,
    or not told.
    """
    files = [
        folder / name
        for name in _choose_files([path.name for path in folder.iterdir()], folder, model)
    ]
    for file in files:
        if not file.is_file():  # to open a pipe would never return
            raise ModelError(f"{file} is no file; put the weights there")
    return files


def _choose_files(names: list[str], folder: Path, model: str) -> list[str]:
    """Choose among a model's files those that the folder's index names, or `model.safetensors`, or
    the only one.
    """
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
    """List the names that a folder's index gives for its weight files, in order; none without an
    index.

    Raises ModelError if the index is broken, or names anything but safetensors files in the same
    folder: what lies elsewhere is neither checked nor hashed.
    """
    if not (folder / INDEX).is_file():
        return []
    index = read_json(folder / INDEX)
    named = index.get("weight_map")
    # which transformers needs, if only as {}
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
    """Read names, types and shapes of the tensors of a safetensors file, and check that the file is
    whole.

    Raises ModelError if it is a pickle, is no safetensors file or was cut short.
    """
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
    """Raise ModelError unless the tensors found are the required ones, and optional ones, with
    their shapes, as floats.

    found: by the names in the other arguments. dtypes: of those that are no floats.
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
    """Read a JSON object from a file. Raises ModelError if it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not contain a JSON object")
    return values


def _pickled_files(folder: Path) -> list[Path]:
    """List the files of a folder that are pickled weights by their names, in order; they are never
    opened.
    """
    found = sorted(path for pattern in _PICKLED for path in folder.glob(pattern))
    return [path for path in found if not path.name.startswith(_NOT_WEIGHTS)]


def _convert_pickles(files: Iterable[Path], to: Path) -> str:
    """Say why pickled weights are refused, and by which command they become the safetensors file
    `to`.
    """
    names = " ".join(shlex.quote(str(path)) for path in (to, *files))
    return f'which can run code and is refused; convert it with: python -c "{_CONVERT}" {names}'


def copy_weights(model: str, folder: Path) -> None:
    """Copy config and weights of a model to a folder; a pickle, which a process of its own reads,
    as safetensors.
    """
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
    """Make a folder of what is written into the one that this yields, whole or not at all.

    Raises ModelError if it holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something already; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(str(folder.parent)) as temporary:
        whole = Path(temporary, "model")
        whole.mkdir()
        yield whole
        for path in whole.iterdir():
            path.chmod(0o644)  # safetensors lets nobody but the owner read its files
        whole.rename(folder)


# Which model it is


def identify(model: str) -> dict[str, str]:
    """Return what tells a model's `weights`, with its config, and its `tokenizer` from any others.

    Of a Hub id that is the commit, of a folder the SHA-256 of its files; the folder's place makes
    no difference.
    """
    if (commit := resolve_revision(model)) is not None:
        return {"weights": commit, "tokenizer": commit}
    folder = find_folder(model, weights=True)
    read_folder(folder, model)
    weights = [folder / name for name in (*_CONFIG_FILES, INDEX)] + weight_files(folder, model)
    texts = [*(folder / name for name in _TOKENIZER_FILES), *folder.glob(_NAMED_TEMPLATES)]
    return {"weights": hash_files(weights), "tokenizer": hash_files(texts)}


def hash_files(paths: Iterable[Path]) -> str:
    """Compute the SHA-256 over names and contents of those files that exist, in the order of their
    names.
    """
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.name)
    total = hashlib.sha256()
    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock to others
        for file, digest in zip(files, pool.map(_sha256, files), strict=True):
            total.update(f"{file.name}\0".encode() + digest)
    return total.hexdigest()


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


# The Hub


@contextmanager
def quiet() -> Iterator[None]:
    """Show no warnings, and from now on no progress bars; errors are raised, not logged."""
    disable_progress_bars()
    with warnings.catch_warnings(action="ignore"):
        yield


@contextmanager
def _said(model: str) -> Iterator[None]:
    """Turn what the library raises into a ModelError of one line."""
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
    """Return True if the network or the Hub itself is at fault, not what it was asked for."""
    if isinstance(error, LocalEntryNotFoundError):  # from the cache, after the Hub has failed
        return _may_pass(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in _LATER
    return isinstance(error, HTTPError | ConnectionError | TimeoutError) and not isinstance(
        error, OfflineModeIsEnabled
    )

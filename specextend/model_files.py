"""The files of a model: where they are, whether its weights are whole, and their hashes. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specextend import hub
from specextend.checkpoint import (
    INDEX,
    ModelError,
    TensorInfo,
    combine_hashes,
    convert_pickles,
    hash_file,
    hash_files,
    indexed_names,
    pickled_files,
    read_safetensors_header,
)
from specextend.core import first_line
from specextend.gguf_cache import find_kept, keep

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
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The place of a model's files on this machine."""

    folder: Path
    gguf_file: str | None = None
    """Name of the GGUF file in `folder` that is the whole model; None for a folder of separate files."""

    def gguf_argument(self) -> dict[str, str]:
        """Return the keyword by which transformers reads a GGUF file; none for a folder."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def find_files(model: str, revision: str | None, *, weights: bool, also: str | None = None) -> ModelFiles:
    """Find a GGUF file, a local folder, or the files of a Hub id, which are fetched into the Hub's cache.

    weights: fetch the weights too. also: one more file to fetch, if the model has it. Raises ModelError.
    """
    path = Path(model)
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"{model} does not exist")
        return ModelFiles(path.parent, path.name)
    if path.is_dir():
        return ModelFiles(path)
    if looks_like_path(model):
        raise ModelError(f"{model} does not exist; a model is a Hub id, a local folder or a .gguf file")
    patterns = [*_CONFIG_FILES, *_TOKENIZER_FILES, INDEX, *([_WEIGHTS] if weights else []), *([also] if also else [])]
    return ModelFiles(hub.fetch(model, revision, patterns))


def find_beside(model: str, revision: str | None, name: str) -> Path | None:
    """Return the folder in which the file `name` is, if the model has it; None for a GGUF file, which has no others."""
    files = find_files(model, revision, weights=False, also=name)
    return None if files.gguf_file else files.folder


def looks_like_path(model: str) -> bool:
    """Return True for a name that can only be a place on disk: a Hub id is `name` or `owner/name`."""
    return Path(model).is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or Path(model).exists()


def is_hub_id(model: str) -> bool:
    """Return True for a name that is neither a path nor a GGUF file."""
    return not model.endswith(".gguf") and not looks_like_path(model)


def current_commit(model: str, revision: str | None) -> str | None:
    """Ask the Hub which commit a Hub id's revision is now; None if it does not answer."""
    try:
        return hub.current_commit(model, revision)
    except ModelError:
        return None


def resolve_revision(model: str, revision: str | None) -> str | None:
    """Return the commit of a Hub id's revision, from the Hub or else from its cache; None for files on disk."""
    if not is_hub_id(model):
        return None
    return revision if hub.is_commit(revision) else find_files(model, revision, weights=False).folder.name


def check_weights(files: ModelFiles, model: str) -> None:
    """Raise ModelError unless there are whole safetensors files or a GGUF; pickled weights are never opened."""
    if files.gguf_file:
        _check_gguf(files.folder / files.gguf_file)
    else:
        _read_folder(files.folder, model)


def read_tensors(files: ModelFiles, model: str, revision: str | None) -> dict[str, TensorInfo]:
    """Read the headers of a model's safetensors files, in its folder or else on the Hub, without fetching weights.

    Raises ModelError if a file is not whole, or there is none.
    """
    if not is_hub_id(model) or _has_weights(files.folder):
        return _read_folder(files.folder, model)
    _indexed_names(files.folder)
    names = hub.digests(model, revision, _WEIGHTS)
    return hub.tensors(model, revision, names) if names else _read_folder(files.folder, model)


def weight_hashes(model: str, revision: str | None = None) -> dict[str, str]:
    """Compute the SHA-256 of a model's `weights`, with its config, and of its `tokenizer` from the files here.

    Weights that are not on this machine are fetched. The place of the files and the library version that wrote the
    config make no difference.
    """
    files = find_files(model, revision, weights=True)
    check_weights(files, model)
    if files.gguf_file:
        return dict.fromkeys(("weights", "tokenizer"), hash_files([files.folder / files.gguf_file]))
    return _hashes(files.folder, {file.name: hash_file(file) for file in files.folder.glob(_WEIGHTS)})


def published_hashes(model: str, revision: str | None = None) -> dict[str, str]:
    """Return what `weight_hashes` returns; for a Hub id from the Hub's own hashes, without fetching its weights.

    If the Hub does not answer, the files of its cache are hashed.
    """
    if not is_hub_id(model):
        return weight_hashes(model, revision)
    try:
        weights = hub.digests(model, revision, _WEIGHTS)
    except ModelError:
        if not _has_weights(hub.cached(model, revision)):
            raise
        return weight_hashes(model, revision)
    return _hashes(find_files(model, revision, weights=False).folder, weights)


def _hashes(folder: Path, weights: dict[str, str]) -> dict[str, str]:
    """Combine the hashes of weights with those of the folder's configs and index, and those of its tokenizer files."""
    configs, tokenizer = (
        {name: hash_file(folder / name) for name in names if (folder / name).is_file()}
        for names in ((*_CONFIG_FILES, INDEX), _TOKENIZER_FILES)
    )
    return {"weights": combine_hashes(weights | configs), "tokenizer": combine_hashes(tokenizer)}


def _read_folder(folder: Path, model: str) -> dict[str, TensorInfo]:
    """Read the headers of a folder's safetensors files. Raises ModelError if one is not whole, or there is none."""
    names = _indexed_names(folder)
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        found = "none (to convert a Hub repository's pickles, fetch it with: hf download ID --local-dir DIR)"
        if pickled := pickled_files(folder):
            found = f"only a pickle ({pickled[0].name}), {convert_pickles(pickled, folder / 'model.safetensors')}"
        raise ModelError(f"{model} must have weights as safetensors; it has {found}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{model} has no {missing[0]}, which its {INDEX} names")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        try:
            tensors |= read_safetensors_header(file)
        except ValueError as error:
            raise ModelError(f"{model}: {error}") from None
    return tensors


def _has_weights(folder: Path | None) -> bool:
    """Return True if a folder of the Hub's cache has the weights that transformers would load."""
    if folder is None:
        return False
    return all((folder / name).is_file() for name in _indexed_names(folder) or ["model.safetensors"])


def _indexed_names(folder: Path) -> list[str]:
    """List what `indexed_names` does. Raises ModelError."""
    try:
        return indexed_names(folder)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _check_gguf(file: Path) -> None:
    """Raise ModelError unless a GGUF file is whole; what was found whole once is not parsed again."""
    if find_kept(file, "headers") is not None:
        return
    from gguf import GGUFReader  # safetensors are read without it

    try:
        GGUFReader(file)  # maps every tensor, reads none
    except Exception as error:  # noqa: BLE001  on a broken file it raises anything
        raise ModelError(f"{file} is not a GGUF file, or is cut short: {first_line(error)}") from None
    keep(file, "headers", lambda folder: None)

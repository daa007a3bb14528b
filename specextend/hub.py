"""The Hugging Face Hub: commits, files, and hashes and headers of files that are not on this machine.

If the Hub does not answer, its cache on this machine is used. What neither has raises ModelError, or
HubUnreachableError if another try may help.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # type: ignore[attr-defined]  # of httpx, whichever release of it the library uses
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from specextend.checkpoint import ModelError, TensorInfo
from specextend.core import first_line
from specextend.file_hashes import file_sha256

TIMEOUT_S = 20.0
"""Seconds in which the Hub must answer a question."""
_LATER = (408, 425, 429)
"""HTTP codes below 500 after which another try may succeed."""


class HubUnreachableError(ModelError):
    """The Hub does not answer, and its cache on this machine lacks what is asked for; another try may help."""


def is_commit(revision: str | None) -> bool:
    """Return True for a full commit hash, which can never come to mean anything else."""
    return revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None


def fetch(model: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch the files of these patterns into the cache; the folder returned is named by the commit."""
    with _said(model, revision), _quiet():
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def cached(model: str, revision: str | None) -> Path | None:
    """Return the cache's folder of a revision, complete or not; None if the cache has none."""
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=["config.json"], local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def current_commit(model: str, revision: str | None) -> str:
    """Ask the Hub what a branch or tag stands for now; the cache is not asked."""
    with _said(model, revision):
        sha = HfApi().model_info(model, revision=revision, timeout=TIMEOUT_S).sha
    assert sha is not None, "the Hub names the commit that it tells about"
    return sha


def digests(model: str, revision: str | None, pattern: str) -> dict[str, str]:
    """Ask the Hub for the SHA-256 of top-level files; small ones, for which it has none, are fetched."""
    with _said(model, revision):
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
        found = {file.rfilename: file.lfs for file in info.siblings or () if _is_meant(file.rfilename, pattern)}
        return {
            name: file_sha256(Path(hf_hub_download(model, name, revision=info.sha))) if lfs is None else lfs.sha256
            for name, lfs in found.items()
        }


def tensors(model: str, revision: str | None, names: Iterable[str]) -> dict[str, TensorInfo]:
    """Ask the Hub for the tensors of safetensors files; only their headers are fetched."""
    found: dict[str, TensorInfo] = {}
    with _said(model, revision):
        for name in names:
            header = HfApi().parse_safetensors_file_metadata(model, name, revision=revision)
            found |= {key: TensorInfo(info.dtype, tuple(info.shape)) for key, info in header.tensors.items()}
    return found


def _is_meant(name: str, pattern: str) -> bool:
    return "/" not in name and fnmatch(name, pattern)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and no warnings; errors are raised, not logged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        are_shown = not are_progress_bars_disabled()
        disable_progress_bars()
        try:
            yield
        finally:
            if are_shown:
                enable_progress_bars()


@contextmanager
def _said(model: str, revision: str | None) -> Iterator[None]:
    """Turn what the library raises into a ModelError of one line."""
    try:
        yield
    except (HTTPError, HFValidationError, SafetensorsParsingError, OSError) as error:
        name = f"{model} at revision {revision}" if revision else model
        line = first_line(error)
        if _may_pass(error):
            what = f"the Hub does not answer for {name}, nor does its cache here: {line}"
            raise HubUnreachableError(f"{what}; run again") from error
        raise ModelError(f"{name} is not a local folder and cannot be fetched from the Hub: {line}") from None


def _may_pass(error: BaseException | None) -> bool:
    """Return True if the network or the Hub itself is at fault, not what it was asked for."""
    if isinstance(error, LocalEntryNotFoundError):  # from the cache, after the Hub has failed
        return _may_pass(error.__cause__)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in _LATER
    return isinstance(error, HTTPError | ConnectionError | TimeoutError) and not isinstance(error, OfflineModeIsEnabled)

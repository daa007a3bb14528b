"""Private folders: caches, and temporary folders removed at exit (except after SIGKILL)."""

import atexit
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

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

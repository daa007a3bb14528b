"""Folders that no other user can enter: caches that stay, and temporary folders that are removed
when the process ends, unless that is by SIGKILL.
"""

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
"""The folders to remove, with the process that made each: a fork must not remove its parent's."""


def make_temporary(parent: str | None = None, prefix: str = "specextend-") -> str:
    """Make a folder that is removed when this process ends, if not before. Raises OSError."""
    name = prefix + secrets.token_hex(8)
    folder = os.path.abspath(os.path.join(parent or tempfile.gettempdir(), name))
    _temporary[folder] = os.getpid()  # before it is there: a signal may come in between
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
    """End the process at once, without its temporary folders."""
    remove_all()
    os._exit(code)


def die(number: int, frame: FrameType | None) -> None:
    """Handle a deadly signal: die of it, without temporary folders."""
    remove_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def cache_path() -> Path:
    """Return `$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`, which need not be there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the standard says to ignore relative ones
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "specextend")


def cache_folder() -> Path | None:
    """Return the folder of `cache_path`, which is made if it is missing; None if it cannot be, or
    if another user could write to it.
    """
    folder = cache_path()
    with suppress(OSError):
        if folder.is_absolute():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owners = {folder.lstat().st_uid, folder.stat().st_uid}
            if owners <= {0, os.geteuid()} and not folder.stat().st_mode & 0o022:
                return folder
    return None


def keep_caches_private() -> None:
    """Tell libraries where to keep what they compile, unless the user has told them.

    Torch makes a folder of a known name in TMPDIR when it is imported, where another user can put a
    file in its way, or code.
    """
    names = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}
    if not os.access(Path(__file__).parent, os.W_OK):  # where numba would keep its own
        names["NUMBA_CACHE_DIR"] = "numba"
    if names.keys() <= os.environ.keys():
        return
    with suppress(OSError):  # torch says what is wrong
        folder = cache_folder()
        if folder is None or not os.access(folder, os.W_OK):
            folder = Path(make_temporary())
        for name, own in names.items():
            os.environ.setdefault(name, str(folder / own))

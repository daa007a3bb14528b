"""Asking a store that may never answer: in a thread of its own, which is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from specextend.cluster.exits import StoreError
from specextend.core import first_line
from specextend.data.storage import is_uri, resolve

LOOK_EVERY_S = 0.1

Value = TypeVar("Value")


def within(limit_s: float, call: Callable[[], Value], checkpoint: Callable[[], object] = lambda: None) -> Value:
    """What `call` returns or raises. Raises TimeoutError where it takes longer.

    checkpoint: called meanwhile; may raise. Signal handlers run, too, which they do not while a library is waited for.
    """
    found: list[Value] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001  raised below, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, name="contact", daemon=True)
    thread.start()
    give_up_at = time.monotonic() + limit_s
    while thread.is_alive():
        checkpoint()
        if time.monotonic() >= give_up_at:
            raise TimeoutError(f"no answer for {limit_s:g} s")
        thread.join(LOOK_EVERY_S)
    if failed:
        raise failed[0]
    return found[0]


def knock(key: str, path: str, limit_s: float, checkpoint: Callable[[], object] = lambda: None) -> None:
    """Ask the store of a path for something, once. Raises StoreError where no answer comes.

    What is wrong with the path itself is found, and said, by those who use it. key: names the path in messages.
    """

    def ask() -> None:
        location = resolve(path)
        location.filesystem.get_file_info(location.path)

    try:
        within(limit_s, ask, checkpoint)
    except ValueError:
        return
    except OSError as error:
        if is_uri(path) or isinstance(error, TimeoutError):
            raise StoreError(f"{key} {path} cannot be reached: {first_line(error)}; run again") from error

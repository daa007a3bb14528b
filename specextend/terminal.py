"""Standard streams that accept any text in any encoding, even after their reader has gone."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from specextend.core import printable

_UP = "\x1b[A"


class PlainStream:
    """A stream that escapes control characters, and drops output without a reader.

    `unescaped` is the underlying stream, for drawing with control characters.
    """

    def __init__(self, stream: TextIO, *, bars: bool = False):
        """Wrap a stream. `bars` allows the cursor movements of progress bars."""
        self.unescaped = stream
        self._bars = bars

    def write(self, text: str) -> int:
        """Write text with control characters escaped. Raises TypeError for bytes."""
        if not isinstance(text, str):
            raise TypeError(f"a stream of text takes no {type(text).__name__}")
        try:
            self.unescaped.write(_plain_bar(text) if self._bars else _plain(text))
        except BrokenPipeError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it has a reader."""
        try:
            self.unescaped.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        """Discard later output; otherwise Python would complain at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.unescaped.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def guard_streams() -> None:
    """Make stdout and stderr safe for any text. Call before printing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for the process's life
        getattr(sys, name).reconfigure(errors="backslashreplace")
    wrap_streams()


def wrap_streams() -> None:
    """Wrap the current stdout and stderr."""
    sys.stdout = cast(TextIO, PlainStream(sys.stdout))
    sys.stderr = cast(TextIO, PlainStream(sys.stderr, bars=True))


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream inside a PlainStream, or the stream itself."""
    return cast(TextIO, getattr(stream, "unescaped", stream))


def complain(error: BaseException) -> None:
    """Write an error to stderr as a single line. Failed writes are dropped."""
    message = str(error).strip() or type(error).__name__
    with suppress(OSError):
        sys.stderr.write(f"error: {printable(message.replace(chr(10), ' '))}\n")


def _plain(text: str) -> str:
    return printable(text, keep="\n\t")


def _plain_bar(text: str) -> str:
    """Escape all but the cursor movements and the leading carriage return of progress bars."""
    if not text.replace(_UP, "").strip("\n"):
        return text
    return "\r" + _plain(text[1:]) if text.startswith("\r") else _plain(text)

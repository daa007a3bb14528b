"""Shared parts of all commands: options, error messages and the end of the process."""

import errno
import json
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from specextend.core import ReadOnly, printable
from specextend.folders import leave, shipped_configs
from specextend.terminal import complain, guard_streams

Function = TypeVar("Function", bound=Callable[..., Any])


class ConfigFile(click.Path):
    """A shipped configuration name, or a file."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete shipped names; the shell completes files."""
        names = [CompletionItem(name) for name in shipped_configs() if name.startswith(incomplete)]
        return names + super().shell_complete(ctx, param, incomplete)


def config_option(**attributes: Any) -> Callable[[Function], Function]:
    """Make the repeatable option `--config`."""
    text = (
        "a YAML file or a name from `specextend configs`; may be repeated (a pair, then a task), "
        "later ones win"
    )
    return click.option(
        "--config", type=ConfigFile(), multiple=True, metavar="NAME|FILE", help=text, **attributes
    )


SET = click.option(
    "settings", "--set", multiple=True, metavar="KEY.PATH=VALUE", help="override one value"
)
JSON = click.option(
    "--json", metavar="FILE", help="also write the result as JSON; -: print only the JSON"
)
OUTPUT = click.argument("output", type=click.Path())


def takes(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Combine several options, in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def call(command: click.Command, argv: Sequence[str], name: str) -> int:
    """Run a command and return its exit code: 2, with a line on stderr, for wrong arguments.

    Limits of the process or the machine take a single line, too.
    """
    try:
        return command.main(list(argv), prog_name=name, standalone_mode=False) or 0
    except click.Abort:  # before the command began
        return 75
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else name
        complain(ValueError(f"{error.format_message()} See: {path} --help"))
        return error.exit_code
    except Exception as error:
        number = getattr(error, "errno", None)
        is_memory = (
            isinstance(error, MemoryError)
            or number == errno.ENOMEM
            or _NO_MEMORY.search(str(error))
        )
        if not is_memory and number != errno.EMFILE:
            raise
        traceback.clear_frames(error.__traceback__)  # frees memory for the message
        limit = (
            _limit_of_memory()
            if is_memory
            else f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files (ulimit -n)"
        )
        complain(
            OSError(
                f"the limit of {limit} is reached; raise it and run again "
                f"({type(error).__name__}: {error})"
            )
        )
        return 1


_NO_MEMORY = re.compile("an't start new thread|failed to map segment|an(no|')t allocate memory")
"""Messages of memory errors without a class."""


def _limit_of_memory() -> str:
    limits = {"ulimit -v": resource.getrlimit(resource.RLIMIT_AS)[0]}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or its content is `max`
            limits["cgroup"] = int(Path(path).read_text(encoding="ascii"))
    limits["this machine"] = machine_bytes()
    least, name = min((limit, name) for name, limit in limits.items() if limit >= 0)
    return f"{least / (1 << 30):.1f} GiB of memory ({name})"


def machine_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def run_alone(command: click.Command, argv: Sequence[str], name: str) -> NoReturn:
    """Run a command as this process's only task. SIGTERM acts like Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell may start us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    guard_streams()
    end(call(command, argv, name))


def end(code: int) -> NoReturn:
    """End the process at once.

    Python's exit takes a second, during which SIGTERM would change the code. It also waits for
    stores that never answer, and changes the code if stdout is closed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    leave(code)


Expected = tuple[type[ValueError | OSError], ...]


def in_one_line(
    function: Callable[..., int], expected: Expected = (ValueError, OSError)
) -> Callable[..., int]:
    """Print a command's errors as single lines and return their exit codes.

    Args:
        expected: Error classes besides those of a run. Others keep their traceback.
    """

    @wraps(function)
    def wrapped(**given: Any) -> int:
        try:
            return function(**given)
        except (Exception, KeyboardInterrupt) as error:
            if (code := _say_end(error, given, expected)) is None:
                raise
            return code

    return wrapped


def _say_end(error: BaseException, given: ReadOnly, expected: Expected) -> int | None:
    from specextend.cluster import exits  # pyarrow is too slow for --help

    if isinstance(error, exits.InterruptedRunError):
        retry = given.get("retry_errors")
        how = f" with the same --retry-errors={retry}" if retry else ""
        what = f"interrupted: {error}; finished work is on disk, run again to resume{how}"
        say(what, "interrupted", given)
    elif isinstance(error, exits.RunError):
        # a list of differences takes several lines
        keep = "\n" if isinstance(error, exits.OtherRunError) else ""
        say(f"error: {error}", "error", given, keep)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return exits.EXIT_INTERRUPTED
    elif isinstance(error, expected):
        complain(error)
        return exits.exit_code_of_command(error)
    else:
        return None
    return exits.exit_code(error)


def say(line: str, event: str, given: ReadOnly, keep: str = "") -> None:
    """Write a line to stderr, or an event for `--log json`. Failed writes are dropped."""
    if given.get("log") == "json":
        from specextend.cluster.progress import open_display

        open_display(log="json").note(line, event)
    else:
        with suppress(OSError):
            print(printable(line, keep), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """Print a result. Raises OutputError if stdout cannot be written."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        from specextend.cluster.exits import OutputError

        raise OutputError(
            f"stdout cannot be written: {error}; make room and run the command again"
        ) from error


def show_found(text: str, path: str | None, found: object) -> None:
    """Print a result, and write it as JSON to `path`; `-` prints only the JSON."""
    if path != "-":
        show(text, end="")
    if path is not None:
        write_json(path, found)


def write_json(path: str, value: object) -> None:
    """Write JSON to a file, or print it if `path` is `-`. Raises RefusedError or OutputError."""
    from specextend.cluster.exits import RefusedError

    text = json.dumps(value, indent=2)
    if path == "-":
        return show(text)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RefusedError(
            f"--json {path} cannot be written: {error}; name another file"
        ) from error

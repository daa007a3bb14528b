"""What all commands share: options, how a command is called, and how its process ends."""

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
from specextend.folders import leave
from specextend.shipped import shipped_configs
from specextend.terminal import complain, guard_streams

Function = TypeVar("Function", bound=Callable[..., Any])


class ConfigFile(click.Path):
    """A configuration: the name of a shipped one, or a file."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names, and let the shell complete files."""
        names = [CompletionItem(name) for name in shipped_configs() if name.startswith(incomplete)]
        return names + super().shell_complete(ctx, param, incomplete)


def config_option(**attributes: Any) -> Callable[[Function], Function]:
    """Make the option `--config`, which may be repeated."""
    text = (
        "a YAML file, or a name that `specextend configs` lists; of several (a pair, then a "
        "task) later ones win"
    )
    return click.option(
        "--config", type=ConfigFile(), multiple=True, metavar="NAME|FILE", help=text, **attributes
    )


SET = click.option(
    "settings", "--set", multiple=True, metavar="KEY.PATH=VALUE", help="override one value"
)
JSON = click.option(
    "--json", metavar="FILE", help="write what was found there, too; -: print only that"
)
OUTPUT = click.argument("output", type=click.Path())


def takes(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Give a command several options, in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def call(command: click.Command, argv: Sequence[str], name: str) -> int:
    """Run a command. Returns the exit code: 2, with one line on stderr, if the arguments are wrong.

    An error about a limit of the process or the machine is one line, too.
    """
    try:
        return command.main(list(argv), prog_name=name, standalone_mode=False) or 0
    except click.Abort:  # before the command had begun
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
        traceback.clear_frames(error.__traceback__)  # or there may be no memory to say so
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
"""What errors about memory say that have no class of their own."""


def _limit_of_memory() -> str:
    limits = {"ulimit -v": resource.getrlimit(resource.RLIMIT_AS)[0]}
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is no such file, or it says `max`
            limits["cgroup"] = int(Path(path).read_text(encoding="ascii"))
    limits["this machine"] = machine_bytes()
    least, name = min((limit, name) for name, limit in limits.items() if limit >= 0)
    return f"{least / (1 << 30):.1f} GiB of memory ({name})"


def machine_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def script(command: click.Command) -> NoReturn:
    """Run a command with the arguments of this process, which is a script in `jobs/`, and end the
    process.
    """
    run_alone(command, sys.argv[1:], os.path.basename(sys.argv[0]))


def run_alone(command: click.Command, argv: Sequence[str], name: str) -> NoReturn:
    """Run a command as all that this process does. SIGTERM is as Ctrl-C, so that nothing is left
    half done.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell may have us ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    guard_streams()
    end(call(command, argv, name))


def end(code: int) -> NoReturn:
    """End the process with that code at once.

    Python's own exit takes a second, in which SIGTERM would change the code. It also waits for
    libraries whose store has never answered, and ends with another code if stdout is closed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    leave(code)


Expected = tuple[type[ValueError | OSError], ...]


def in_one_line(
    function: Callable[..., int], expected: Expected = (ValueError, OSError)
) -> Callable[..., int]:
    """Let a command say its errors in one line each, and return their exit codes; 2 for what a user
    got wrong.

    expected: errors beside those of a run; any other has a traceback.
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
    """Say in one line how a command has ended, and return its exit code; None if nobody foresaw
    that.
    """
    from specextend.cluster import exits  # it imports pyarrow: not for --help

    if isinstance(error, exits.InterruptedRunError):
        retry = given.get("retry_errors")
        how = f" with the same --retry-errors={retry}" if retry else ""
        what = f"interrupted: {error}; finished work is on disk, run again to resume{how}"
        say(what, "interrupted", given)
    elif isinstance(error, exits.RunError):
        # of differences, each of which is one line
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
    """Write one line to stderr, if it takes it, because stdout is for results; an event of JSON if
    the command was given that as its `log`. keep: as for `printable`.
    """
    if given.get("log") == "json":
        from specextend.cluster.progress import open_display

        open_display(log="json").note(line, event)
    else:
        with suppress(OSError):
            print(printable(line, keep), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """Print what was asked for. Raises OutputError if stdout takes no more."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        from specextend.cluster.exits import OutputError

        raise OutputError(
            f"stdout cannot be written: {error}; make room and run the command again"
        ) from error


def show_found(text: str, path: str | None, found: object) -> None:
    """Print what a command has found, and write it to the path of `--json`, if there is one; `-`:
    only as JSON.
    """
    if path != "-":
        show(text, end="")
    if path is not None:
        write_json(path, found)


def write_json(path: str, value: object) -> None:
    """Write the value of `--json`, or print it if the path is `-`. Raises RefusedError and
    OutputError.
    """
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

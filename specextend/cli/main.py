"""The command `specextend`. Slow imports happen inside the commands, to keep `--help` fast."""

import sys
from typing import NoReturn

import click

from specextend.cli.command import run_alone
from specextend.cli.prepare import prepare
from specextend.cli.report import audit, compare, export, report
from specextend.cli.run import demo, plan, run, status
from specextend.cli.settings import check, config, configs, init
from specextend.cli.train import train


class InOrder(click.Group):
    """A group that lists its commands in the order of a first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in this order."""
        return list(self.commands)


@click.group(cls=InOrder)
@click.version_option(package_name="specextend", message="%(prog)s %(version)s")
def specextend() -> None:
    """Summarise long documents offline: Parquet in, Parquet out.

    COMMAND --help lists the options of a command. Completion in bash: eval
    "$(_SPECEXTEND_COMPLETE=bash_source specextend)"
    """


for command in (
    demo,
    prepare,
    init,
    run,
    plan,
    status,
    report,
    compare,
    audit,
    export,
    train,
    check,
    configs,
    config,
):
    specextend.add_command(command)


def main() -> NoReturn:
    """Run the command line."""
    run_alone(specextend, sys.argv[1:] or ["--help"], "specextend")

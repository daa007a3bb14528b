"""The command `specextend`. Its modules import what takes long when they are called, so that
`--help` takes no time.
"""

import sys
from typing import NoReturn

import click

from specextend.cli.command import run_alone
from specextend.cli.demo import demo
from specextend.cli.machine import check
from specextend.cli.prepare import prepare
from specextend.cli.report import audit, compare, export, report
from specextend.cli.run import plan, run, status
from specextend.cli.settings import config, configs, init
from specextend.cli.train import train


class InOrder(click.Group):
    """A group whose help lists its commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names."""
        return list(self.commands)


@click.group(cls=InOrder)
@click.version_option(package_name="specextend", message="%(prog)s %(version)s")
def specextend() -> None:
    """Summarise long documents offline: Parquet in, Parquet out.

    COMMAND --help says what each takes. For completion in bash:

    eval "$(_SPECEXTEND_COMPLETE=bash_source specextend)"
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
    """Run the command line of this process."""
    run_alone(specextend, sys.argv[1:] or ["--help"], "specextend")

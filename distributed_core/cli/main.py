"""The program ``distributed-core`` and its sub-commands.

Owns the list of commands. Called by the console script of the same name and by
``python -m distributed_core.cli.main``.
"""

import argparse
import sys
from collections.abc import Sequence

from distributed_core.cli import scheduler
from distributed_core.config.report import render
from distributed_core.config.schema import ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (``sys.argv`` if None) and return the exit status.

    Raises SystemExit for ``--help``, ``--version`` and a command line that cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="distributed-core",
        description="A task scheduler for unmodified Dask clients and workers.",
        allow_abbrev=False,
    )
    scheduler.add_version(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {
        "scheduler": commands.add_parser(
            "scheduler",
            usage="%(prog)s [FLAG ...]",
            help="start a scheduler",
            description="Start a scheduler for Dask clients and workers.",
            allow_abbrev=False,
        ),
        "check-config": commands.add_parser(
            "check-config",
            usage="%(prog)s [FLAG ...]",
            help="print the configuration and where each value comes from",
            description="Print the configuration that `scheduler` with the same flags would use, "
            "and where each value comes from. The status is 1 if it cannot be used.",
            allow_abbrev=False,
        ),
    }
    for command_parser in parsers.values():
        scheduler.add_arguments(command_parser)
        scheduler.add_version(command_parser)
    arguments, surplus = parser.parse_known_args(argv)
    request = scheduler.read_request(parsers[arguments.command], arguments, surplus)
    if arguments.command == "check-config":
        return check_config(request)
    return scheduler.run(request)


def check_config(request: scheduler.Request) -> int:
    """Print the configuration, or what is wrong with it. Return the exit status."""
    try:
        config = scheduler.load_request(request)
    except ConfigError as exc:
        scheduler.report_error(exc)
        return 1
    sys.stdout.write(render(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command that starts a scheduler, with the flags of ``dask scheduler``.

Owns the flags, their help and what is refused. Decides nothing about their meaning: they become
settings (``distributed_core.config.flags``) and the loader does the rest. Called by
``distributed_core.cli.main``; ``python -m distributed_core.cli.scheduler`` is the same command
alone.
"""

import argparse
import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from distributed_core.config import logs
from distributed_core.config.flags import FLAGS
from distributed_core.config.loader import load
from distributed_core.config.schema import Config, ConfigError

__all__ = [
    "Request",
    "add_arguments",
    "add_version",
    "load_request",
    "main",
    "read_request",
    "report_error",
    "run",
]

logger = logging.getLogger(__name__)

_HELP: Mapping[str, tuple[str, str]] = {
    "--host": ("HOST", "host name, address or URI to listen on; 0.0.0.0 is every interface"),
    "--port": ("PORT", "port to listen on, or several with commas (default: 8786)"),
    "--interface": ("NAME", "network interface to listen on, like eth0, or several with commas"),
    "--protocol": ("SCHEME", "tcp or tls, or several with commas"),
    "--tls-ca-file": ("FILE", "certificates of the authorities that sign our peers, as PEM"),
    "--tls-cert": ("FILE", "certificate of the scheduler, as PEM"),
    "--tls-key": ("FILE", "private key of the scheduler, as PEM"),
    "--dashboard-address": (
        "ADDRESS",
        "[host]:port for HTTP; without a host every interface (default: port 8787, as --host)",
    ),
    "--dashboard-prefix": ("PREFIX", "first part of every HTTP path"),
    "--pid-file": ("FILE", "write the process id to this file"),
    "--scheduler-file": ("FILE", "write connection information to this file"),
    "--idle-timeout": ("DURATION", "end after this long without work, like '1h'"),
    "--log-level": ("LEVEL", "debug, info, warning, error or critical"),
    "--log-format": ("FORMAT", "text or json"),
}
_PATH_FLAGS = frozenset({"--tls-ca-file", "--tls-cert", "--tls-key"})
_DEPRECATED = ("show", "use_xheaders")
_NO_PRELOAD = (
    "--preload is not supported yet: loading modules into the scheduler arrives in a later release"
)
_NO_JUPYTER = (
    "--jupyter is not supported yet: it arrives in a later release, as a process of its own"
)


class Request(NamedTuple):
    """What a command line asks for."""

    config_files: tuple[str, ...]
    flags: Mapping[str, object]
    warnings: tuple[str, ...]


class _Refuse(argparse.Action):
    """Ends the program with the reason as soon as the flag is met: what follows may not be ours."""

    def __init__(self, *arguments: Any, reason: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.error(self._reason)


class _Version(argparse.Action):
    """Like argparse's own, but looks the version up only when it is asked for: that is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            version = metadata.version("distributed-core")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        sys.stdout.write(f"distributed-core, version {version}\n")
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the flags of the scheduler."""
    for flag, (metavar, text) in _HELP.items():
        parser.add_argument(flag, metavar=metavar, help=text.replace("%", "%%"))
    parser.add_argument(
        "--dashboard",
        action=argparse.BooleanOptionalAction,
        help="serve the status page; metrics and health are there without it too",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="read settings from this YAML file; may be repeated, later files win",
    )
    parser.add_argument(
        "--preload", action=_Refuse, reason=_NO_PRELOAD, metavar="MODULE", help="not supported yet"
    )
    parser.add_argument(
        "--jupyter", action=_Refuse, reason=_NO_JUPYTER, nargs=0, help="not supported yet"
    )
    parser.add_argument("--no-jupyter", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--show", action=argparse.BooleanOptionalAction, help="deprecated, without effect"
    )
    parser.add_argument("--use-xheaders", metavar="BOOLEAN", help="deprecated, without effect")


def read_request(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, surplus: Sequence[str]
) -> Request:
    """Return what parsed ``arguments`` ask for.

    ``surplus`` is what ``parser`` did not know: if there is any, the program ends with a message
    and status 2.
    """
    if surplus:
        parser.error(_describe_surplus(surplus[0]))
    flags: dict[str, object] = {}
    for flag in FLAGS:
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        # Dask's own default for most of these is the empty string, and deployers pass it on.
        if value is None or value == "":
            continue
        flags[flag] = os.path.abspath(value) if flag in _PATH_FLAGS else value
    warnings = tuple(
        f"--{name.replace('_', '-')} is deprecated and has no effect"
        for name in _DEPRECATED
        if getattr(arguments, name) is not None
    )
    return Request(tuple(arguments.config), flags, warnings)


def load_request(request: Request) -> Config:
    """Return the configuration of a request. Raises ConfigError."""
    config = load(request.config_files, request.flags)
    return dataclasses.replace(config, warnings=(*request.warnings, *config.warnings))


def run(request: Request) -> int:
    """Start the scheduler and return its exit status once it has ended."""
    try:
        config = load_request(request)
    except ConfigError as exc:
        report_error(exc)
        return 1
    logs.setup(config.logging)
    for note in config.notes:
        logger.info("%s", note)
    for warning in config.warnings:
        logger.warning("%s", warning)

    from distributed_core.server import app

    return app.run(config)


def report_error(error: ConfigError) -> None:
    """Write to standard error what is wrong with the configuration."""
    lines = str(error).splitlines()
    sys.stderr.write("distributed-core: the configuration cannot be used:\n")
    sys.stderr.writelines(f"  {line}\n" for line in lines)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the flag ``--version``, which prints the package's version and ends."""
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alone. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="distributed-core scheduler",
        usage="%(prog)s [FLAG ...]",
        description="Start a scheduler for Dask clients and workers.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    add_version(parser)
    return run(read_request(parser, *parser.parse_known_args(argv)))


def _describe_surplus(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    name = argument.partition("=")[0]
    known = [*FLAGS, "--no-dashboard", "--config", "--version"]
    near = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown option {name}{hint}"


if __name__ == "__main__":
    sys.exit(main())

"""Whose versions we work with, and the warning when they differ.

Owns the policy: ``distributed`` and ``dask`` of the 2026.8 line are accepted, everything else is
refused with a sentence that says so, because stream messages have exact field sets and "try
anyway" ends in dead workers. Never imports what it reports about. Called by the server at
registration and by the ``versions`` RPC.

Version maps of peers are interned: a thousand workers of one installation are one entry, and a
registration compares with the few distinct entries, not with the workers.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import struct
import sys
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

__all__ = [
    "SUPPORTED_LINE",
    "VersionBook",
    "judge",
    "local_versions",
    "mismatch_table",
]

SUPPORTED_LINE: Final = "2026.8"
"""The release line of ``distributed`` and ``dask`` whose protocol we speak."""

REPORTED_PACKAGES: Final = (
    "dask",
    "distributed",
    "msgpack",
    "cloudpickle",
    "tornado",
    "toolz",
    "numpy",
    "pandas",
    "lz4",
)

# Our process opens nothing with numpy, pandas or lz4 and does not run on tornado; what it shares
# with its peers is the interpreter and the tools that open a graph.
_COMPARED_WITH_US: Final = frozenset({"python", "dask", "distributed", "cloudpickle", "toolz"})

_Packages = tuple[tuple[str, str | None], ...]


@cache
def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def local_versions(packages: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """The reply to ``versions``: this host, and the packages installed beside us.

    :param packages: names to report besides the usual ones; nil for one that is not installed.
    """
    uname = platform.uname()
    names = (*REPORTED_PACKAGES, *(packages or ()))
    return {
        "host": {
            "python": ".".join(str(part) for part in sys.version_info),
            "python-bits": 8 * struct.calcsize("P"),
            "OS": uname.system,
            "OS-release": uname.release,
            "machine": uname.machine,
            "processor": uname.processor,
            "byteorder": sys.byteorder,
            "LC_ALL": os.environ.get("LC_ALL", "None"),
            "LANG": os.environ.get("LANG", "None"),
        },
        "packages": {
            "python": ".".join(str(part) for part in sys.version_info),
            **{name: _installed_version(name) for name in names},
        },
    }


def judge(versions: Any, who: str) -> str | None:
    """Decide whether a peer may join.

    A peer that says nothing about its versions may; its silence shows in the warning.

    :param versions: its ``versions`` field.
    :param who: ``"client"`` or ``"worker"``, for the sentence.
    :returns: the refusal, or None.
    """
    packages = versions.get("packages") if isinstance(versions, Mapping) else None
    if not isinstance(packages, Mapping):
        return None
    for package in ("distributed", "dask"):
        version = packages.get(package)
        if version is None:
            continue
        if not (isinstance(version, str) and version.startswith(SUPPORTED_LINE + ".")):
            return (
                f"distributed-core speaks the protocol of distributed {SUPPORTED_LINE}; "
                f"this {who} has {package} {version!s:.100}. Install "
                f"{package}=={SUPPORTED_LINE}.* there."
            )
    return None


def mismatch_table(
    source: _Packages | None,
    scheduler: _Packages,
    workers: Collection[_Packages | None],
    source_name: str,
) -> str | None:
    """The warning for a newcomer, or None if all versions agree.

    :param source: the newcomer's packages; None if it did not say.
    :param workers: the distinct entries of all workers.
    """
    columns = [_column(source), _column(scheduler), *map(_column, workers)]
    names = sorted({name for column in columns if column is not None for name in column})
    rows: list[tuple[str, str, str, str]] = []
    for name in names:
        mine = _cell(columns[0], name)
        ours = _cell(columns[1], name)
        theirs = sorted({_cell(column, name) for column in columns[2:]})
        seen = {mine, *theirs}
        if name in _COMPARED_WITH_US:
            seen.add(ours)
        if len(seen) > 1:
            rows.append((name, mine, ours, ", ".join(theirs) or "-"))
    if not rows:
        return None
    return "Mismatched versions found\n\n" + _table(
        ("Package", source_name, "Scheduler", "Workers"), rows
    )


def _column(packages: _Packages | None) -> dict[str, str | None] | None:
    return None if packages is None else dict(packages)


def _cell(column: dict[str, str | None] | None, name: str) -> str:
    if column is None:
        return "UNKNOWN"
    if name not in column:
        return "MISSING"
    return str(column[name])


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(cells: tuple[str, ...]) -> str:
        padded = (f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True))
        return "|" + "|".join(padded) + "|"

    return "\n".join([rule, line(head), rule, *map(line, rows), rule])


class VersionBook:
    """The distinct version maps of the workers that are here, and the warnings they cause."""

    def __init__(self, local: Mapping[str, Any] | None = None) -> None:
        """:param local: our own versions; by default those of this installation."""
        own = _packages_of(local_versions() if local is None else local)
        self._scheduler: _Packages = own or ()
        self._interned: dict[_Packages | None, _Packages | None] = {}
        self._of_worker: dict[str, _Packages | None] = {}
        self._counts: dict[_Packages | None, int] = {}
        self._warnings: dict[tuple[str, _Packages | None], str | None] = {}

    def judge_client(self, versions: Any) -> tuple[str | None, str | None]:
        """Refusal and warning for a client that registers; either may be None."""
        error = judge(versions, "client")
        return error, None if error else self._warning(versions, "Client")

    def judge_worker(self, versions: Any) -> tuple[str | None, str | None]:
        """Refusal and warning for a worker that registers; either may be None."""
        error = judge(versions, "worker")
        return error, None if error else self._warning(versions, "Worker")

    def add_worker(self, address: str, versions: Any) -> None:
        """Count a worker that was accepted."""
        self.remove_worker(address)
        packages = self._intern(versions)
        self._of_worker[address] = packages
        count = self._counts.get(packages, 0)
        self._counts[packages] = count + 1
        if count == 0:
            self._warnings.clear()

    def remove_worker(self, address: str) -> None:
        """Forget a worker; one that was never added is ignored."""
        if address not in self._of_worker:
            return
        packages = self._of_worker.pop(address)
        self._counts[packages] -= 1
        if self._counts[packages] == 0:
            del self._counts[packages]
            self._interned.pop(packages, None)
            self._warnings.clear()

    @property
    def distinct_count(self) -> int:
        """Number of different version maps among the workers."""
        return len(self._counts)

    def _intern(self, versions: Any) -> _Packages | None:
        packages = _packages_of(versions)
        return self._interned.setdefault(packages, packages)

    def _warning(self, versions: Any, source_name: str) -> str | None:
        packages = _packages_of(versions)
        memo = (source_name, packages)
        if memo not in self._warnings:
            if len(self._warnings) > 1000:
                self._warnings.clear()
            self._warnings[memo] = mismatch_table(
                packages, self._scheduler, self._counts, source_name
            )
        return self._warnings[memo]


def _packages_of(versions: Any) -> _Packages | None:
    """The packages of a version map in a form that can be compared and hashed."""
    packages = versions.get("packages") if isinstance(versions, Mapping) else None
    if not isinstance(packages, Mapping) or not packages:
        return None
    return tuple(
        sorted(
            (name, None if version is None else str(version)[:100])
            for name, version in packages.items()
            if isinstance(name, str)
        )
    )

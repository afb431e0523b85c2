"""Errors of the engine's own, as stock clients know them.

Owns the mapping from the engine's kinds of failure to exception classes. Pure: called by the
scheduler machine while it handles an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from distributed_core.protocol.exceptions import (
    PickledException,
    WorkerFacts,
    builtin_error,
    killed_worker,
    no_valid_worker_error,
    no_worker_error,
)

__all__ = ["make_exception"]


def _killed_worker(fields: Mapping[str, Any]) -> PickledException:
    worker = WorkerFacts(
        address=fields["worker"],
        name=fields["name"],
        server_id=fields["server_id"],
        nthreads=fields["nthreads"],
        memory_limit=fields["memory_limit"],
    )
    return killed_worker(fields["key"], worker, fields["allowed_failures"])


def _memory(fields: Mapping[str, Any]) -> PickledException:
    return builtin_error(
        "MemoryError",
        f"Task {fields['key']!r} needs {fields['nbytes']} bytes of inputs, which exceed the "
        f"memory limit of {fields['memory_limit']} bytes of worker {fields['worker']}",
    )


def _actor_lost(fields: Mapping[str, Any]) -> PickledException:
    return builtin_error("RuntimeError", f"Worker holding Actor was lost ({fields['worker']})")


def _no_worker(fields: Mapping[str, Any]) -> PickledException:
    return no_worker_error(fields["key"], fields["timeout"])


def _no_valid_worker(fields: Mapping[str, Any]) -> PickledException:
    return no_valid_worker_error(
        fields["key"],
        fields["hosts"],
        [str(worker) for worker in fields["workers"]],
        fields["resources"],
        fields["timeout"],
    )


def _rejected(fields: Mapping[str, Any]) -> PickledException:
    return builtin_error("RuntimeError", f"{fields['key']!r}: {fields['reason']}")


def _cycle(fields: Mapping[str, Any]) -> PickledException:
    return builtin_error("RuntimeError", f"{fields['key']!r} depends on itself, through other keys")


_MAKERS: Final[Mapping[str, Callable[[Mapping[str, Any]], PickledException]]] = {
    "actor-lost": _actor_lost,
    "cycle": _cycle,
    "killed-worker": _killed_worker,
    "memory": _memory,
    "no-valid-worker": _no_valid_worker,
    "no-worker": _no_worker,
    "rejected": _rejected,
}


def make_exception(kind: str, fields: Mapping[str, Any]) -> tuple[bytes, str]:
    """Payload for clients, and text, of a failure that the engine found.

    :raises KeyError: the engine has a kind of failure that this table lacks.
    """
    made = _MAKERS[kind](fields)
    return made.data, made.text

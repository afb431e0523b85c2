"""Exceptions in the form in which peers receive them: pickles, written by hand.

Users catch errors by class, so the class has to arrive. A pickle is the only form that a peer
turns into an exception of the right class, and it is *written* here from plain values; nothing is
ever read. Owns the writer, the exceptions that a scheduler itself raises, and the error reply.
Called by ``comm`` for errors of handlers and by the server for tasks that fail for a reason of
the scheduler's.
"""

from __future__ import annotations

import builtins
import reprlib
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "MAX_ERROR_LENGTH",
    "Call",
    "Global",
    "Instance",
    "PickledException",
    "WorkerFacts",
    "builtin_error",
    "cancelled_error",
    "error_reply",
    "from_exception",
    "killed_worker",
    "no_valid_worker_error",
    "no_worker_error",
    "registration_refusal",
    "write_pickle",
]

MAX_ERROR_LENGTH: Final = 10_000
"""Longest text of an exception, in characters; the default of ``admin.max-error-length``."""

_MAX_DEPTH: Final = 200


@dataclass(frozen=True, slots=True)
class Global:
    """A module attribute, imported by whoever reads the pickle."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the reader of the pickle makes."""

    function: Global
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance made without its constructor, its slots set one by one."""

    cls: Global
    slots: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PickledException:
    """An exception for a peer: the pickle, and its text for logs and for lenient readers."""

    tree: Call
    text: str

    @property
    def data(self) -> bytes:
        """The pickle."""
        return write_pickle(self.tree)


def write_pickle(value: object) -> bytes:
    """Write ``value`` as a pickle of protocol 4.

    Takes None, bool, int, float, str, bytes, tuple, list, dict, set, frozenset, and trees of
    ``Global``, ``Call`` and ``Instance``.

    :raises TypeError: any other type.
    :raises ValueError: nested more than 200 deep.
    """
    out = bytearray(b"\x80\x04")
    _write(out, value, 0)
    out += b"."
    return bytes(out)


def _write(out: bytearray, value: object, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"value nested more than {_MAX_DEPTH} deep cannot be pickled")
    match value:
        case None:
            out += b"N"
        case bool():
            out += b"\x88" if value else b"\x89"
        case int():
            _write_int(out, value)
        case float():
            out += b"G" + struct.pack(">d", value)
        case str():
            _write_sized(out, value.encode("utf-8", "surrogatepass"), b"\x8c", b"X", b"\x8d")
        case bytes():
            _write_sized(out, value, b"C", b"B", b"\x8e")
        case tuple():
            out += b"("
            _write_all(out, value, depth)
            out += b"t"
        case list():
            out += b"]("
            _write_all(out, value, depth)
            out += b"e"
        case dict():
            out += b"}("
            for key, item in value.items():
                _write(out, key, depth + 1)
                _write(out, item, depth + 1)
            out += b"u"
        case set():
            out += b"\x8f("
            _write_all(out, value, depth)
            out += b"\x90"
        case frozenset():
            out += b"("
            _write_all(out, value, depth)
            out += b"\x91"
        case Global(module, name):
            _write(out, module, depth + 1)
            _write(out, name, depth + 1)
            out += b"\x93"
        case Call(function, args):
            _write(out, function, depth + 1)
            _write(out, args, depth + 1)
            out += b"R"
        case Instance(cls, slots):
            _write(out, cls, depth + 1)
            out += b")\x81"
            _write(out, (None, dict(slots)), depth + 1)
            out += b"b"
        case _:
            raise TypeError(f"{type(value).__name__} has no plain pickle: {reprlib.repr(value)}")


def _write_all(out: bytearray, values: Collection[object], depth: int) -> None:
    for value in values:
        _write(out, value, depth + 1)


def _write_int(out: bytearray, value: int) -> None:
    if 0 <= value < 256:
        out += b"K" + bytes((value,))
    elif -(2**31) <= value < 2**31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) < 256:
            out += b"\x8a" + bytes((len(data),)) + data
        else:
            out += b"\x8b" + struct.pack("<i", len(data)) + data


def _write_sized(out: bytearray, data: bytes, short: bytes, medium: bytes, long: bytes) -> None:
    if len(data) < 256:
        out += short + bytes((len(data),))
    elif len(data) < 2**32:
        out += medium + struct.pack("<I", len(data))
    else:
        out += long + struct.pack("<Q", len(data))
    out += data


def _is_plain(value: object, depth: int = 0) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if depth > 20:
        return False
    if type(value) in (tuple, list, set, frozenset):
        assert isinstance(value, Collection)
        return all(_is_plain(item, depth + 1) for item in value)
    if type(value) is dict:
        assert isinstance(value, dict)
        return all(
            _is_plain(key, depth + 1) and _is_plain(item, depth + 1) for key, item in value.items()
        )
    return False


def _truncated(text: str) -> str:
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 1] + "…"


def _text(name: str, args: tuple[Any, ...]) -> str:
    return _truncated(f"{name}({', '.join(map(repr, args))})")


def _with_cause(call: Call, cause: PickledException | None) -> Call:
    if cause is None:
        return call
    # The reader's own tools write a chained exception with this function of its dependency tblib.
    function = Global("tblib.pickling_support", "unpickle_exception")
    return Call(function, (call.function, call.args, cause.tree, None, None, True))


def builtin_error(name: str, *args: Any, cause: PickledException | None = None) -> PickledException:
    """A builtin exception, say ``builtin_error("KeyError", "x")``.

    :param name: class name in ``builtins``; ``asyncio.TimeoutError`` is ``TimeoutError``.
    :param args: plain values.
    :param cause: becomes its ``__cause__``.
    :raises ValueError: no builtin exception has that name.
    """
    cls = getattr(builtins, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        raise ValueError(f"no builtin exception is named {name!r}")
    short = tuple(_truncated(arg) if isinstance(arg, str) else arg for arg in args)
    call = Call(Global("builtins", name), short)
    return PickledException(_with_cause(call, cause), _text(name, short))


def from_exception(exc: BaseException, causes: int = 5) -> PickledException:
    """The nearest thing to ``exc`` that a peer can be sure to know.

    A builtin exception with plain arguments arrives as it is; any other as the nearest builtin
    base class with the text.

    :param causes: longest chain of ``__cause__`` that goes along.
    """
    cause = None
    if exc.__cause__ is not None and causes > 0:
        cause = from_exception(exc.__cause__, causes - 1)
    cls = type(exc)
    if cls.__module__ == "builtins" and isinstance(exc, Exception) and _is_plain(exc.args):
        return builtin_error(cls.__name__, *exc.args, cause=cause)
    text = str(exc) or cls.__name__
    for base in cls.__mro__:
        if base.__module__ == "builtins" and base.__name__ in _FROM_TEXT:
            return builtin_error(base.__name__, text, cause=cause)
    return builtin_error("RuntimeError", f"{cls.__name__}: {text}", cause=cause)


# Base classes that are made from one text; UnicodeError's children and groups are not.
_FROM_TEXT: Final = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type)
    and issubclass(value, Exception)
    and not issubclass(value, (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError))
    and not issubclass(value, BaseExceptionGroup)
)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a client may ask of the worker inside a ``KilledWorker``."""

    address: str
    name: str | int | float
    server_id: str
    pid: int = 0
    status: str = "closed"
    nthreads: int = 1
    memory_limit: int = 0
    local_directory: str = ""
    nanny: str | None = None
    services: Mapping[str, int] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def _worker_state(worker: WorkerFacts) -> Instance:
    host = worker.address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    slots: dict[str, Any] = {
        "address": worker.address,
        "pid": worker.pid,
        "name": worker.name,
        "nthreads": worker.nthreads,
        "memory_limit": worker.memory_limit,
        "local_directory": worker.local_directory,
        "services": dict(worker.services),
        "versions": {},
        "nanny": worker.nanny,
        "status": Call(Global("distributed.core", "Status"), (worker.status,)),
        # String hashes differ between processes: the reader computes its own.
        "_hash": Call(Global("builtins", "hash"), (worker.server_id,)),
        "nbytes": 0,
        "_memory_unmanaged_old": 0,
        "_memory_unmanaged_history": Call(Global("collections", "deque")),
        "metrics": {},
        "last_seen": 0.0,
        "time_delay": 0.0,
        "bandwidth": 0.0,
        "actors": set(),
        "_has_what": {},
        "processing": set(),
        "long_running": set(),
        "executing": {},
        "resources": {},
        "used_resources": {},
        "extra": dict(worker.extra) if _is_plain(dict(worker.extra)) else {},
        "server_id": worker.server_id,
        "scheduler_ref": None,
        "task_prefix_count": Call(
            Global("collections", "defaultdict"), (Global("builtins", "int"),)
        ),
        "_network_occ": 0,
        "_occupancy_cache": 0.0,
        "needs_what": {},
        "host": host,
    }
    return Instance(Global("distributed.scheduler", "WorkerState"), slots)


def killed_worker(key: Any, last_worker: WorkerFacts, allowed_failures: int) -> PickledException:
    """A task whose workers died one after another, ``allowed_failures + 1`` times."""
    call = Call(
        Global("distributed.scheduler", "KilledWorker"),
        (key, _worker_state(last_worker), allowed_failures),
    )
    return PickledException(
        call,
        _truncated(f"KilledWorker({key!r}, {last_worker.address!r}, {allowed_failures})"),
    )


def no_valid_worker_error(
    key: Any,
    host_restrictions: Collection[str],
    worker_restrictions: Collection[str],
    resource_restrictions: Mapping[str, float],
    timeout_seconds: float,
) -> PickledException:
    """No worker met the restrictions of a task for ``timeout_seconds``."""
    args = (
        key,
        set(host_restrictions),
        set(worker_restrictions),
        dict(resource_restrictions),
        float(timeout_seconds),
    )
    call = Call(Global("distributed.scheduler", "NoValidWorkerError"), args)
    return PickledException(call, _text("NoValidWorkerError", args))


def no_worker_error(key: Any, timeout_seconds: float) -> PickledException:
    """No worker at all was running for ``timeout_seconds``."""
    args = (key, float(timeout_seconds))
    call = Call(Global("distributed.scheduler", "NoWorkerError"), args)
    return PickledException(call, _text("NoWorkerError", args))


def cancelled_error(*args: Any) -> PickledException:
    """``concurrent.futures.CancelledError`` with plain arguments."""
    call = Call(Global("concurrent.futures", "CancelledError"), args)
    return PickledException(call, _text("CancelledError", args))


def error_reply(
    error: PickledException | BaseException | str,
    status: str = "error",
    traceback_text: str = "",
) -> dict[str, Any]:
    """The reply by which a peer learns of an error.

    :param error: a text arrives as a plain ``Exception``.
    :param status: ``"error"`` is data for the caller to look at, ``"uncaught-error"`` is raised
        by the caller's RPC layer.
    """
    if isinstance(error, str):
        error = builtin_error("Exception", error)
    elif isinstance(error, BaseException):
        error = from_exception(error)
    return {
        "status": status,
        "exception": error.data,
        "traceback": None,
        "exception_text": error.text,
        "traceback_text": _truncated(traceback_text),
    }


def registration_refusal(op: str, text: str, now: float) -> Any:
    """The answer to a registration that is refused, as the registering side reads it.

    Registrations ask for no reply, and without one the peer would wait for ever.

    :param op: ``"register-worker"`` or ``"register-client"``.
    :param now: wall clock, seconds since the epoch; a worker reads it first.
    """
    if op == "register-worker":
        return {"status": "error", "message": _truncated(text), "time": now}
    return [{"op": "stream-start", "error": _truncated(text)}]

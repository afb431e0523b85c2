"""Requests of peers: looked up, checked, carried out, answered.

Owns the reserved fields, the order of replies (one request at a time on a connection, further ones
wait) and the form of errors. A handler's exception is never swallowed: an ``RpcError`` or an error
of the transport is the answer; any other is answered too, and handed to ``DispatchHooks.on_error``.
Called by ``Listener`` through ``accept``.
"""

from __future__ import annotations

import asyncio
import reprlib
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from inspect import isawaitable
from typing import Any, Final

from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.errors import CommError, RpcError
from distributed_core.protocol.codec import DecodeError, EncodeError, decode, encode
from distributed_core.protocol.exceptions import (
    builtin_error,
    error_reply,
    registration_refusal,
)
from distributed_core.protocol.ops import ROWS, Channel, Reason, Rejection, Row, check

__all__ = ["NO_REPLY", "DispatchHooks", "Dispatcher", "Handler"]


class _NoReply:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_REPLY"


NO_REPLY: Final = _NoReply()
"""Returned by a handler that answered itself, or turned its connection into a stream."""

Handler = Callable[[Connection, dict[str, Any]], Any]
"""``(connection, fields) -> reply``, plain or a coroutine function.

``fields`` holds exactly the fields of the row, defaults filled in. A coroutine may outlive its
connection: its reply then goes nowhere, and ``Connection.is_closed`` tells.
"""

# For which the requests of one connection may hold the loop, counted from its last turn.
_TURN_SECONDS = 0.005

_REGISTRATIONS: Final = frozenset({"register-client", "register-worker"})

_REASON_CLASS: Final = {
    Reason.MALFORMED: "ValueError",
    Reason.UNKNOWN_OP: "NotImplementedError",
    Reason.ANNOUNCED: "NotImplementedError",
    Reason.MISSING_FIELD: "TypeError",
    Reason.WRONG_TYPE: "TypeError",
    Reason.SURPLUS_FIELD: "TypeError",
}


class DispatchHooks:
    """What the server wants to know; override what it counts or logs."""

    def on_message(self, connection: Connection, op: str) -> None:
        """A request that fits was received."""

    def on_handled(self, op: str, seconds: float, is_async: bool) -> None:
        """A request was carried out; an asynchronous one was mostly waiting."""

    def on_rejected(self, connection: Connection, rejection: Rejection) -> None:
        """A request was rejected; ``rejection.op`` is the peer's text, and unbounded."""

    def on_surplus(self, connection: Connection, op: str, names: list[Any]) -> None:
        """A request had fields that nobody knows; they were ignored."""

    def on_error(self, connection: Connection, op: str, exc: Exception) -> None:
        """A handler raised what it did not mean to: a programming error."""

    def on_job_error(self, name: str, exc: Exception) -> None:
        """So did a job of the server's own."""


class Dispatcher:
    """Carries out requests with a table of handlers.

    :param handlers: operation to handler; each must be a served row of ``protocol.ops``.
    :raises ValueError: a handler for an operation that the table does not know or serve.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        hooks: DispatchHooks | None = None,
        channel: Channel = Channel.SCHEDULER_RPC,
    ) -> None:
        self._rows = ROWS[channel]
        for op in handlers:
            if op not in self._rows or not self._rows[op].served:
                raise ValueError(f"handler for {op!r}, which is not served on {channel.value}")
        self._handlers = dict(handlers)
        self._handlers.setdefault("echo", _echo)
        self._hooks = hooks or DispatchHooks()
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, connection: Connection) -> Receiver:
        """The receiver for a new connection; hand this method to a ``Listener``."""
        return _Session(self, connection)

    @property
    def running_count(self) -> int:
        """Asynchronous requests under way."""
        return len(self._tasks)

    def run(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        """Run a job of the server's own; an exception out of it is a programming error."""
        self._keep(asyncio.ensure_future(self._guarded(name, job)))

    async def _guarded(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as exc:  # noqa: BLE001 - reported to the hooks
            self._hooks.on_job_error(name, exc)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the requests under way and wait for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, message: dict[Any, Any]) -> Row | Rejection:
        op = message.get("op")
        if not isinstance(op, str):
            return Rejection(
                "",
                Reason.MALFORMED,
                f"a request needs the operation as text, got {reprlib.repr(op)}",
            )
        row = self._rows.get(op)
        if row is None:
            return Rejection(op, Reason.UNKNOWN_OP, f"unknown operation {reprlib.repr(op)}")
        if row.announced:
            return Rejection(op, Reason.ANNOUNCED, f"{op}: {row.announced}")
        if op not in self._handlers:
            return Rejection(op, Reason.ANNOUNCED, f"{op}: not served by this scheduler")
        return check(row, message, strict=False) or row


def _echo(connection: Connection, fields: dict[str, Any]) -> Any:
    return fields["data"]


class _Session(Receiver):
    """The requests of one connection, one after the other.

    Further ones wait while one is carried out, while the peer does not read its replies, and,
    when they have held the loop for long, until others had their turn.
    """

    __slots__ = (
        "_connection",
        "_dispatcher",
        "_hooks",
        "_is_running",
        "_is_unread",
        "_is_yielding",
        "_seconds",
    )

    def __init__(self, dispatcher: Dispatcher, connection: Connection) -> None:
        self._dispatcher = dispatcher
        self._hooks = dispatcher._hooks
        self._connection = connection
        self._is_running = False
        self._is_unread = False
        self._is_yielding = False
        self._seconds = 0.0

    def pause_writing(self) -> None:
        self._is_unread = True
        self._connection.hold()

    def resume_writing(self) -> None:
        self._is_unread = False
        self._go_on()

    def _go_on(self) -> None:
        if not (self._is_running or self._is_unread or self._is_yielding):
            self._connection.release()

    def _spent(self, seconds: float) -> None:
        """Let others have their turn, if this connection's requests held the loop for long."""
        self._seconds += seconds
        if self._seconds > _TURN_SECONDS and not self._is_yielding:
            self._is_yielding = True
            self._connection.hold()
            asyncio.get_running_loop().call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._is_yielding = False
        self._seconds = 0.0
        self._go_on()

    def frames_received(self, frames: list[bytes]) -> None:
        connection = self._connection
        try:
            message = decode(frames)
        except DecodeError as exc:
            # The frames were whole, so the next request can be read.
            self._reject(Rejection("", Reason.MALFORMED, str(exc)), True)
            return
        if not isinstance(message, dict):
            text = f"a request must be a map, got {type(message).__name__}"
            self._reject(Rejection("", Reason.MALFORMED, text), True)
            connection.close()
            return
        wants_reply = message.get("reply", True) is not False
        wants_close = message.get("close", False) is True
        if message.get("op") == "close":
            if wants_reply:
                connection.write(encode("OK"))
            connection.close()
            return
        found = self._dispatcher._find(message)
        if isinstance(found, Rejection):
            self._reject(found, wants_reply)
            if wants_close or found.reason is Reason.MALFORMED:
                connection.close()
            return
        self._call(found, message, wants_reply, wants_close)

    def _reject(self, rejection: Rejection, wants_reply: bool) -> None:
        self._hooks.on_rejected(self._connection, rejection)
        self._refuse(
            rejection.op,
            rejection.text,
            error_reply(
                builtin_error(_REASON_CLASS[rejection.reason], rejection.text), "uncaught-error"
            ),
            wants_reply,
        )

    def _refuse(self, op: str, text: str, reply: dict[str, Any], wants_reply: bool) -> None:
        """Send an error; a registration gets it in its own form, though it asks for no reply."""
        if op in _REGISTRATIONS and not self._connection.is_stream:
            self._connection.write(encode(registration_refusal(op, text, time.time())))
            self._connection.close()
        elif wants_reply:
            self._connection.write(encode(reply))

    def _call(
        self, row: Row, message: dict[str, Any], wants_reply: bool, wants_close: bool
    ) -> None:
        hooks = self._hooks
        op = row.name
        hooks.on_message(self._connection, op)
        surplus = row.surplus(message)
        if surplus:
            hooks.on_surplus(self._connection, op, surplus)
        fields = {name: message[name] for name in row.fields if name in message}
        row.complete(fields)
        started = time.perf_counter()
        try:
            result = self._dispatcher._handlers[op](self._connection, fields)
        except Exception as exc:  # noqa: BLE001 - answered, and reported to the hooks
            self._failed(op, exc, wants_reply, wants_close)
            return
        finally:
            hooks.on_handled(op, time.perf_counter() - started, False)
        if isawaitable(result):
            self._is_running = True
            self._connection.hold()
            self._dispatcher._keep(
                asyncio.ensure_future(self._finish(op, result, wants_reply, wants_close))
            )
        else:
            self._answer(op, result, wants_reply, wants_close)
            self._spent(time.perf_counter() - started)

    async def _finish(
        self, op: str, pending: Awaitable[Any], wants_reply: bool, wants_close: bool
    ) -> None:
        started = time.perf_counter()
        try:
            result = await pending
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception as exc:  # noqa: BLE001 - answered, and reported to the hooks
            self._failed(op, exc, wants_reply, wants_close)
        else:
            self._answer(op, result, wants_reply, wants_close)
        finally:
            self._hooks.on_handled(op, time.perf_counter() - started, True)
            self._is_running = False
            self._go_on()

    def _answer(self, op: str, result: Any, wants_reply: bool, wants_close: bool) -> None:
        if result is NO_REPLY:
            return
        if wants_reply:
            try:
                frames = encode(result)
            except EncodeError as exc:
                self._failed(op, exc, wants_reply, wants_close)
                return
            self._connection.write(frames)
        if wants_close:
            self._connection.close()

    def _failed(self, op: str, exc: Exception, wants_reply: bool, wants_close: bool) -> None:
        if isinstance(exc, RpcError):
            reply = error_reply(exc.error, exc.status)
        else:
            text = "".join(traceback.format_tb(exc.__traceback__))
            reply = error_reply(exc, "uncaught-error", text)
            # A lost or slow peer of a handler is part of operation; the rest is our mistake.
            if not isinstance(exc, (CommError, TimeoutError)):
                self._hooks.on_error(self._connection, op, exc)
        if self._connection.is_stream:
            # Half a registration; the peer learns by the end of the connection.
            self._connection.abort(exc)
            return
        self._refuse(op, reply["exception_text"], reply, wants_reply)
        if wants_close:
            self._connection.close()

"""One connection to a peer: bytes in, frames out, and back.

Owns the handshake, the limits, the order of messages and the end of the connection. Knows no
operation and makes no task or future per message. Driven by the event loop; its messages go to a
``Receiver``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from cython_ext.frames import FrameCutter, FrameError, build
from distributed_core.comm.errors import CommClosedError, CommError
from distributed_core.comm.settings import CommSettings, CommStats
from distributed_core.protocol.addresses import join_host_port
from distributed_core.protocol.codec import DecodeError, Frame, decode
from distributed_core.protocol.handshake import (
    Handshake,
    HandshakeError,
    local_handshake,
    read_handshake,
)

__all__ = ["Connection", "Receiver"]


class Receiver:
    """Takes the messages of a connection; all methods are called synchronously by the loop."""

    __slots__ = ()

    def frames_received(self, frames: list[bytes]) -> None:
        """One complete message."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, once: None if the peer or we closed in good order."""

    def pause_writing(self) -> None:
        """The write buffer passed its high mark: the peer is slow."""

    def resume_writing(self) -> None:
        """The write buffer is short again."""


class Connection(asyncio.Protocol):
    """One TCP or TLS connection, of a listener or to a listener.

    :param on_ready: called when the handshake is done; returns the first receiver.
    :param on_failed: called instead if the connection ends before that.
    """

    __slots__ = (
        "_closed",
        "_cutter",
        "_failure",
        "_held",
        "_is_listener",
        "_is_reading",
        "_loop",
        "_on_failed",
        "_on_ready",
        "_receiver",
        "_settings",
        "_stats",
        "_timer",
        "_transport",
        "_waiters",
        "is_stream",
        "kind",
        "local_address",
        "peer",
        "peer_address",
        "peer_host",
    )

    def __init__(
        self,
        settings: CommSettings,
        stats: CommStats,
        *,
        is_listener: bool,
        on_ready: Callable[[Connection], Receiver],
        on_failed: Callable[[Connection, Exception], None] | None = None,
    ) -> None:
        first = settings.handshake_limits
        self._cutter = FrameCutter(first.max_frames, first.max_frame_bytes, first.max_message_bytes)
        self._settings = settings
        self._stats = stats
        self._is_listener = is_listener
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._held: deque[list[bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False
        self._is_reading = True
        self.is_stream = False
        self.kind = "unknown"
        self.peer: Handshake | None = None
        self.local_address = ""
        self.peer_address = ""
        self.peer_host = ""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ready" if self.peer else "handshaking"
        return f"<Connection {self.local_address} -> {self.peer_address} {self.kind} {state}>"

    # Facts.

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._closed

    @property
    def buffered_bytes(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size()

    @property
    def is_held(self) -> bool:
        """Whether messages wait, see ``hold``."""
        return self._held is not None

    # Orders.

    def write(self, frames: Sequence[Frame]) -> bool:
        """Send one message at once; large frames by reference.

        :returns: False if the connection is closed and the message went nowhere.
        """
        return self.write_pieces(build(frames))

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """Send what ``frames.build`` made, possibly of several messages."""
        transport = self._transport
        if transport is None or self._closed:
            return False
        if len(pieces) == 1:
            self._stats.bytes_sent += len(pieces[0])
            transport.write(pieces[0])
        else:
            self._stats.bytes_sent += sum(map(len, pieces))
            transport.writelines(pieces)
        self._stats.messages_sent += 1
        return True

    def start_stream(self, receiver: Receiver) -> None:
        """Hand all further messages to ``receiver``; no replies from now on."""
        self.is_stream = True
        self.set_receiver(receiver)

    def set_receiver(self, receiver: Receiver) -> None:
        """Hand all further messages to ``receiver``.

        If the connection is closed already it is told so in the next turn of the loop.
        """
        self._receiver = receiver
        if self._transport is None and self._closed:
            self._loop.call_soon(receiver.connection_lost, self._failure)

    def hold(self) -> None:
        """Keep further messages back until ``release``; nothing is lost or reordered."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        """Deliver what was held, up to the next ``hold``."""
        held = self._held
        if held is None:
            return
        self._held = None
        while held and not self._closed:
            frames = held.popleft()
            assert self._receiver is not None
            self._receiver.frames_received(frames)
            if self.is_held:
                # Held again meanwhile, by the receiver: nothing has arrived in between.
                self._held = held
                break
        if not self.is_held or len(held) < self._settings.max_queued_requests:
            self._resume_reading()

    def close(self) -> None:
        """Send what was written, then close; abort if that takes too long."""
        transport = self._transport
        if transport is None or self._closed:
            return
        self._closed = True
        transport.close()
        self._set_timer(self._settings.close_timeout_seconds, transport.abort)

    def abort(self, exc: Exception | None = None) -> None:
        """Close at once; ``exc`` is what the receiver is told."""
        if self._failure is None:
            self._failure = exc
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        if self._transport is None and self._closed:
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._stats.connections_opened += 1
        scheme = "tcp" if transport.get_extra_info("ssl_object") is None else "tls"
        self.local_address, _ = _address(scheme, transport.get_extra_info("sockname"))
        self.peer_address, self.peer_host = _address(scheme, transport.get_extra_info("peername"))
        _set_socket_options(transport.get_extra_info("socket"), self._settings.tcp_timeout_seconds)
        transport.set_write_buffer_limits(high=self._settings.write_high_bytes)
        # Both sides speak first; to wait for the other would be a deadlock of two waiters.
        self.write(local_handshake(self._is_listener))
        self._set_timer(self._settings.handshake_timeout_seconds, self._handshake_timed_out)

    def data_received(self, data: bytes) -> None:
        stats = self._stats
        stats.bytes_received += len(data)
        if self._closed:
            return
        try:
            if self.peer is None:
                first = self._cutter.feed(data, 1)
                if not first:
                    return
                self._finish_handshake(first[0])
                if self.is_closed:
                    return
                data = b""
            messages = self._cutter.feed(data)
        except FrameError as exc:
            stats.frame_errors += 1
            self._fail(exc)
            return
        stats.messages_received += len(messages)
        for frames in messages:
            if self._held is None:
                self._receiver.frames_received(frames)  # type: ignore[union-attr]
                if self.is_closed:
                    return
            else:
                self._held.append(frames)
        if self._cutter.error is not None:
            stats.frame_errors += 1
            self._fail(FrameError(self._cutter.error))
        elif self._held is not None and len(self._held) >= self._settings.max_queued_requests:
            self._pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._transport = None
        self._held = None
        self._cancel_timer()
        self._stats.connections_closed += 1
        if self._failure is None:
            self._failure = exc
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        if self._receiver is not None:
            self._receiver.connection_lost(self._failure)
        elif self._on_failed is not None:
            self._on_failed(
                self, self._failure or CommClosedError("closed before the handshake was done")
            )

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.resume_writing()

    # Helpers.

    def _finish_handshake(self, frames: list[bytes]) -> None:
        try:
            self.peer = read_handshake(decode(frames))
        except (DecodeError, HandshakeError) as exc:
            self._stats.handshake_failures += 1
            self._fail(exc)
            return
        self._cancel_timer()
        limits = self._settings.limits
        self._cutter.set_limits(limits.max_frames, limits.max_frame_bytes, limits.max_message_bytes)
        self._receiver = self._on_ready(self)

    def _handshake_timed_out(self) -> None:
        self._stats.handshake_timeouts += 1
        self._fail(
            CommError(
                f"{self.peer_address} sent no handshake within "
                f"{self._settings.handshake_timeout_seconds} s"
            )
        )

    def _fail(self, exc: Exception) -> None:
        self.abort(exc)

    def _set_timer(self, seconds: float, callback: Callable[[], Any]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pause_reading(self) -> None:
        if self._is_reading and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading and self._transport is not None and not self._closed:
            self._is_reading = True
            self._transport.resume_reading()


def _address(scheme: str, name: Any) -> tuple[str, str]:
    """Address and host of a socket name; empty if the socket is already gone."""
    if not isinstance(name, tuple):
        return "", ""
    host = str(name[0])
    return f"{scheme}://{join_host_port(host, name[1])}", host


def _set_socket_options(found: Any, timeout_seconds: float) -> None:
    """No delay, and death of the peer's machine noticed within ``timeout_seconds``.

    The loop lends a view of the socket that takes no options, so they are set on a duplicate.
    """
    if found is None:
        return
    # A peer that is gone already makes every option fail; the loop reports its end anyway.
    with (
        contextlib.suppress(OSError),
        socket.socket(fileno=os.dup(found.fileno())) as duplicate,
    ):
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = 10
        idle = max(2, int(timeout_seconds // 3))
        interval = max(1, int((timeout_seconds - idle) // probes))
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        if sys.platform == "darwin":
            duplicate.setsockopt(socket.IPPROTO_TCP, 0x10, idle)
        else:
            duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        if sys.platform == "linux":
            duplicate.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_seconds * 1000)
            )

"""The scheduler's end of one materializer process's socket: whole messages, one at a time.

Owns the socket's reading state and back-pressure. Never decodes more than a message's prefix on
its own; never holds more than `_MAX_QUEUED` complete messages before it stops reading, so a large
graph waits in the other process. Called by `pool`, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, cast

from distributed_core.materializer.parts import (
    PREFIX_BYTES,
    Buffer,
    MalformedMessage,
    decode_message,
    decode_prefix,
)

__all__ = ["Channel", "ChannelClosed"]

_MAX_QUEUED = 2
_SCRATCH_BYTES = 64 * 1024


class ChannelClosed(Exception):
    """The process at the other end is gone, or said something that is no message."""


class Channel(asyncio.BufferedProtocol):
    """Sends requests and receives whole messages."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._messages: deque[tuple[Buffer, int]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._write_paused = False
        self._error: str | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._carry = b""  # Start of a prefix.
        self._payload: bytearray | None = None
        self._payload_view = memoryview(b"")
        self._filled = 0
        self._head_bytes = 0

    async def send(self, frames: list[Buffer]) -> None:
        """Write one message and wait until the transport has room again.

        Raises ChannelClosed.
        """
        if self._transport is None or self.closed.done():
            raise ChannelClosed(self._error or "the process is gone")
        self._transport.writelines(frames)
        while self._write_paused and not self.closed.done():
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self.closed.done():
            raise ChannelClosed(self._error or "the process is gone")

    async def receive(self) -> tuple[Any, list[memoryview]]:
        """Body and raw segments of the next message. Raises ChannelClosed."""
        while not self._messages:
            if self.closed.done():
                raise ChannelClosed(self._error or "the process is gone")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        payload, head_bytes = self._messages.popleft()
        transport = self._transport
        if transport is not None and len(self._messages) == _MAX_QUEUED - 1:
            with suppress(RuntimeError):  # Being closed already.
                transport.resume_reading()
        try:
            return decode_message(payload, head_bytes)
        except MalformedMessage as error:
            self.abort(str(error))
            raise ChannelClosed(str(error)) from error

    def abort(self, reason: str) -> None:
        """Close at once; receivers get ChannelClosed with `reason`."""
        self._error = self._error or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._error = self._error or str(exc)
        self._transport = None
        self._payload = None
        self._payload_view = memoryview(b"")
        if not self.closed.done():
            self.closed.set_result(None)
        self._wake_reader()
        self._wake_writer()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake_writer()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload is not None:
            return self._payload_view[self._filled :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._payload is not None:
                self._filled += nbytes
                if self._filled == len(self._payload):
                    self._complete(self._payload)
            else:
                self._cut(nbytes)
        except (MalformedMessage, MemoryError) as error:
            self.abort(f"{type(error).__name__}: {error}")

    def _cut(self, nbytes: int) -> None:
        """Take whole messages out of the scratch buffer and start on the incomplete one."""
        data: Buffer = self._scratch[:nbytes]
        if self._carry:
            data = self._carry + data
            self._carry = b""
        position = 0
        while position < len(data):
            body = position + PREFIX_BYTES
            if body > len(data):
                self._carry = bytes(data[position:])
                return
            payload_bytes, self._head_bytes = decode_prefix(data[position:body])
            position = body + payload_bytes
            if position <= len(data):
                self._complete(bytes(data[body:position]))
            else:
                payload = bytearray(payload_bytes)
                self._filled = len(data) - body
                payload[: self._filled] = data[body:]
                self._payload = payload
                self._payload_view = memoryview(payload)

    def _complete(self, payload: Buffer) -> None:
        self._messages.append((payload, self._head_bytes))
        self._payload = None
        self._payload_view = memoryview(b"")
        if len(self._messages) == _MAX_QUEUED and self._transport is not None:
            self._transport.pause_reading()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

"""What the wire tests share: a loop, a served listener, and frames by hand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from distributed.core import Server

from distributed_core.comm import (
    CommSettings,
    CommStats,
    Connection,
    Dispatcher,
    DispatchHooks,
    Listener,
    Receiver,
)

DEADLINE_SECONDS = 20.0


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a test's coroutine on the loop that the daemon uses, with a deadline."""

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until ``condition`` holds; the deadline of ``run`` bounds it."""
    while not condition():  # noqa: ASYNC110 - any condition, not only ours
        await asyncio.sleep(0.002)


def raw(*frames: bytes, block_frames: int | None = None) -> bytes:
    """A message laid out by hand; ``block_frames`` frames belong to the first block."""
    inside = frames if block_frames is None else frames[:block_frames]
    block = 8 * (1 + len(frames)) + sum(map(len, inside))
    head = struct.pack(f"<{2 + len(frames)}Q", block, len(frames), *map(len, frames))
    return head + b"".join(frames)


class Recorder(Receiver):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.is_lost = False
        self.failure: Exception | None = None
        self.events: list[str] = []

    def frames_received(self, frames: list[bytes]) -> None:
        self.messages.append(frames)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.failure = exc

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


class RecordingHooks(DispatchHooks):
    """Keeps what the dispatcher reports."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.handled: list[tuple[str, bool]] = []
        self.rejected: list[Any] = []
        self.surplus: list[tuple[str, list[Any]]] = []
        self.errors: list[tuple[str, Exception]] = []

    def on_message(self, connection: Connection, op: str) -> None:
        self.ops.append(op)

    def on_handled(self, op: str, seconds: float, is_async: bool) -> None:
        assert seconds >= 0
        self.handled.append((op, is_async))

    def on_rejected(self, connection: Connection, rejection: Any) -> None:
        self.rejected.append(rejection)

    def on_surplus(self, connection: Connection, op: str, names: list[Any]) -> None:
        self.surplus.append((op, names))

    def on_error(self, connection: Connection, op: str, exc: Exception) -> None:
        self.errors.append((op, exc))


@asynccontextmanager
async def listening(
    on_ready: Callable[[Connection], Receiver],
    settings: CommSettings | None = None,
    stats: CommStats | None = None,
    **options: Any,
) -> AsyncIterator[Listener]:
    """A listener on loopback."""
    listener = Listener(settings or CommSettings(), stats or CommStats(), on_ready, **options)
    await listener.start("127.0.0.1", 0)
    try:
        yield listener
    finally:
        await listener.close()


@asynccontextmanager
async def serving(
    handlers: dict[str, Any], hooks: DispatchHooks | None = None, **options: Any
) -> AsyncIterator[Listener]:
    """A listener with a dispatcher."""
    dispatcher = Dispatcher(handlers, hooks)
    async with listening(dispatcher.accept, **options) as listener:
        yield listener
        await dispatcher.close()


@asynccontextmanager
async def stock_server(handlers: dict[str, Any], **options: Any) -> AsyncIterator[Any]:
    """A server of the stock package in this process."""
    server = Server(handlers, **options)
    await server.listen("tcp://127.0.0.1:0")
    await server
    try:
        yield server
    finally:
        await server.close()


async def open_raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain socket that speaks only what the test writes."""
    return await asyncio.open_connection("127.0.0.1", port)

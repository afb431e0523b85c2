"""Connections and listeners: handshake, limits, order, back-pressure, end."""

from __future__ import annotations

import asyncio
import socket

import distributed.comm
import pytest
from distributed.comm.core import CommClosedError as StockClosedError

from cython_ext.frames import FrameError, build
from distributed_core.comm import (
    CommError,
    CommSettings,
    CommStats,
    Connection,
    Limits,
    Listener,
    Receiver,
)
from distributed_core.protocol.codec import decode, encode
from distributed_core.protocol.handshake import HandshakeError
from tests.wire.support import Recorder, listening, open_raw, raw, run, until

HELLO = b"".join(build(encode({"pickle-protocol": 5})))


class Door:
    """Collects what a listener lets in."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.recorders: list[Recorder] = []
        self.failures: list[Exception] = []

    def __call__(self, connection: Connection) -> Receiver:
        self.connections.append(connection)
        self.recorders.append(Recorder())
        return self.recorders[-1]

    def failed(self, connection: Connection, exc: Exception) -> None:
        self.failures.append(exc)


def test_stock_connects_and_talks_both_ways() -> None:
    async def main() -> None:
        door, stats = Door(), CommStats()
        async with listening(door, stats=stats) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            assert comm.remote_info["distributed-core"] == {"revision": 1, "features": ()}
            assert comm.handshake_options == {"pickle-protocol": 5, "compression": None}
            await comm.write({"op": "x", "data": b"y" * 300_000})
            await until(lambda: bool(door.recorders and door.recorders[0].messages))
            message = decode(door.recorders[0].messages[0])
            assert message == {"op": "x", "data": b"y" * 300_000}
            connection = door.connections[0]
            assert connection.peer is not None
            assert connection.peer.revision == 0
            assert connection.peer_host == "127.0.0.1"
            assert connection.peer_address == comm.local_address
            connection.write(encode([1, 2]))
            connection.write([b"\xc4\x05hello"])
            assert await comm.read() == (1, 2)
            assert await comm.read() == b"hello"
            await comm.close()
            await until(lambda: door.recorders[0].is_lost)
            assert door.recorders[0].failure is None
            assert connection.is_closed
            assert connection.write([b"\xc0"]) is False
            assert stats.messages_received == 1
            assert stats.bytes_sent > 0
            assert stats.bytes_received > 300_000

    run(main())


def test_listener_speaks_first_and_takes_a_pipelined_request() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            reader, writer = await open_raw(listener.port)
            head = await reader.readexactly(16)
            assert head[8] == 1
            # More than the limits before the handshake allow, in the same packet.
            writer.write(HELLO + raw(b"x" * 200_000) + raw(b"y"))
            await until(lambda: bool(door.recorders and len(door.recorders[0].messages) == 2))
            assert door.recorders[0].messages == [[b"x" * 200_000], [b"y"]]
            writer.close()

    run(main())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", FrameError),
        (raw(b"x" * 70_000)[:100], FrameError),
        (raw(b"\xc1"), HandshakeError),
        (raw(*encode("text")), HandshakeError),
        (raw(*encode({})), HandshakeError),
        (raw(*encode({"pickle-protocol": "5"})), HandshakeError),
    ],
)
def test_wrong_handshakes_close_the_connection(data: bytes, error: type[Exception]) -> None:
    async def main() -> None:
        door, stats = Door(), CommStats()
        async with listening(door, stats=stats, on_failed=door.failed) as listener:
            reader, writer = await open_raw(listener.port)
            writer.write(data)
            await until(lambda: bool(door.failures))
            if error is HandshakeError:
                assert isinstance(door.failures[0], ValueError)
                assert stats.handshake_failures == 1
            else:
                assert isinstance(door.failures[0], error)
                assert stats.frame_errors == 1
            assert door.connections == []
            assert listener.handshaking_count == 0
            writer.close()
            reader.feed_eof()

    run(main())


def test_silent_peer_is_dropped_in_time() -> None:
    async def main() -> None:
        door, stats = Door(), CommStats()
        settings = CommSettings(handshake_timeout_seconds=0.05)
        async with listening(door, settings, stats=stats, on_failed=door.failed) as listener:
            _, writer = await open_raw(listener.port)
            await until(lambda: bool(door.failures))
            assert "no handshake within 0.05 s" in str(door.failures[0])
            assert stats.handshake_timeouts == 1
            writer.close()

    run(main())


def test_caps_on_connections() -> None:
    async def main() -> None:
        door, stats = Door(), CommStats()
        settings = CommSettings(max_connections=2, max_handshakes=1)
        async with listening(door, settings, stats=stats) as listener:
            address = str(listener.addresses[0])
            _, silent = await open_raw(listener.port)
            await until(lambda: listener.handshaking_count == 1)
            _, second = await open_raw(listener.port)
            await until(lambda: stats.connections_refused == 1)
            silent.close()
            await until(lambda: listener.handshaking_count == 0)
            comms = [await distributed.comm.connect(address) for _ in range(2)]
            await until(lambda: len(listener.connections) == 2)
            _, third = await open_raw(listener.port)
            await until(lambda: stats.connections_refused == 2)
            for comm in comms:
                await comm.close()
            await until(lambda: not listener.connections)
            second.close()
            third.close()

    run(main())


def test_limits_after_the_handshake() -> None:
    async def main() -> None:
        door, stats = Door(), CommStats()
        settings = CommSettings(limits=Limits(10, 100_000, 100_000))
        async with listening(door, settings, stats=stats) as listener:
            _, writer = await open_raw(listener.port)
            writer.write(HELLO + raw(b"good") + raw(b"x" * 100_001)[:24])
            await until(lambda: bool(door.recorders and door.recorders[0].is_lost))
            assert door.recorders[0].messages == [[b"good"]]
            assert isinstance(door.recorders[0].failure, FrameError)
            assert stats.frame_errors == 1
            writer.close()

    run(main())


def test_held_messages_keep_their_order_and_stop_the_reading() -> None:
    async def main() -> None:
        door = Door()
        settings = CommSettings(max_queued_requests=4)
        async with listening(door, settings) as listener:
            _, writer = await open_raw(listener.port)
            writer.write(HELLO)
            await until(lambda: bool(door.connections))
            connection, first = door.connections[0], door.recorders[0]
            connection.hold()
            for index in range(10):
                writer.write(raw(b"%d" % index))
                await writer.drain()
            await until(lambda: connection._held is not None and len(connection._held) >= 4)
            assert first.messages == []
            second = Recorder()
            connection.start_stream(second)
            assert connection.is_stream
            connection.release()
            await until(lambda: len(second.messages) == 10)
            assert second.messages == [[b"%d" % index] for index in range(10)]
            assert not connection.is_held
            writer.close()

    run(main())


def test_slow_reader_is_reported() -> None:
    async def main() -> None:
        door = Door()
        settings = CommSettings(write_high_bytes=100_000)
        async with listening(door, settings) as listener:
            reader, writer = await open_raw(listener.port)
            writer.transport.pause_reading()
            writer.write(HELLO)
            await until(lambda: bool(door.connections))
            connection, recorder = door.connections[0], door.recorders[0]
            for _ in range(200):
                connection.write([b"z" * 100_000])
            await until(lambda: recorder.events == ["pause"])
            assert connection.buffered_bytes > 100_000
            writer.transport.resume_reading()
            left = 200 * 100_000
            while left > 0:
                left -= len(await reader.read(1 << 20))
            await until(lambda: recorder.events == ["pause", "resume"])
            writer.close()

    run(main())


def test_close_sends_what_was_written_and_is_bounded() -> None:
    async def main() -> None:
        door = Door()
        settings = CommSettings(close_timeout_seconds=0.1)
        async with listening(door, settings) as listener:
            reader, writer = await open_raw(listener.port)
            writer.write(HELLO)
            await until(lambda: bool(door.connections))
            door.connections[0].write([b"last words"])
            door.connections[0].close()
            assert (await reader.read()).endswith(b"last words")
            writer.close()
            # A peer that never reads cannot keep us from closing.
            _, deaf = await open_raw(listener.port)
            deaf.transport.pause_reading()
            deaf.write(HELLO)
            await until(lambda: len(door.connections) == 2)
            for _ in range(400):
                door.connections[1].write([b"z" * 100_000])
            door.connections[1].close()
            await door.connections[1].wait_closed()
            await door.connections[1].wait_closed()
            assert door.recorders[1].is_lost
            deaf.close()

    run(main())


def test_stream_on_a_lost_connection_is_told() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await until(lambda: bool(door.connections))
            comm.abort()
            await until(lambda: door.recorders[0].is_lost)
            late = Recorder()
            door.connections[0].start_stream(late)
            await until(lambda: late.is_lost)

    run(main())


def test_abort_reaches_the_stock_peer() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await until(lambda: bool(door.connections))
            door.connections[0].abort()
            with pytest.raises(StockClosedError):
                await comm.read()
            comm.abort()

    run(main())


def test_socket_options() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await until(lambda: bool(door.connections))
            transport = door.connections[0]._transport
            assert transport is not None
            found = transport.get_extra_info("socket")
            duplicate = socket.socket(fileno=socket.dup(found.fileno()))
            with duplicate:
                assert duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 10
                assert duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 2
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    option = socket.TCP_USER_TIMEOUT
                    assert duplicate.getsockopt(socket.IPPROTO_TCP, option) == 30_000
            await comm.close()

    run(main())


def test_listener_names_a_port_that_is_taken() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            second = Listener(CommSettings(), CommStats(), door)
            with pytest.raises(CommError, match=rf"cannot listen on .*:{listener.port}"):
                await second.start("127.0.0.1", listener.port)
            with pytest.raises(CommError, match="cannot listen on"):
                await second.start("no.such.host.invalid", 0)

    run(main())


def test_plain_asyncio_serves_as_well() -> None:
    async def main() -> None:
        door = Door()
        async with listening(door) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write([1])
            await until(lambda: bool(door.recorders and door.recorders[0].messages))
            door.connections[0].write([b"\xc4\x01x", b"y" * 100_000])
            await comm.close()

    asyncio.run(asyncio.wait_for(main(), 20))

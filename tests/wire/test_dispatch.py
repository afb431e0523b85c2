"""Requests of stock peers carried out by our dispatcher."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

import distributed.comm
import pytest
from distributed.comm.core import CommClosedError as StockClosedError
from distributed.core import rpc
from distributed.protocol import Serialize, to_serialize

from cython_ext.frames import build
from distributed_core.comm import (
    NO_REPLY,
    CommClosedError,
    CommSettings,
    Connection,
    Dispatcher,
    RpcError,
)
from distributed_core.protocol.codec import Serialized, encode
from distributed_core.protocol.exceptions import builtin_error
from distributed_core.protocol.handshake import local_handshake
from distributed_core.protocol.ops import Reason
from tests.wire.support import Recorder, RecordingHooks, open_raw, raw, run, serving, until


def test_stock_rpc_calls_ours() -> None:
    async def identity(connection: Connection, fields: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return {"type": "Scheduler", **fields}

    def scatter(connection: Connection, fields: dict[str, Any]) -> Any:
        assert all(isinstance(value, Serialized) for value in fields["data"].values())
        return {"back": fields["data"], "timeout": fields["timeout"]}

    async def main() -> None:
        hooks = RecordingHooks()
        handlers = {"identity": identity, "scatter": scatter}
        async with (
            serving(handlers, hooks) as listener,
            rpc(str(listener.addresses[0])) as remote,
        ):
            assert await remote.identity() == {"type": "Scheduler", "n_workers": -1}
            assert await remote.echo(data=(1, "x")) == (1, "x")
            data = {("x", 1): to_serialize([1, 2]), "y": to_serialize(b"z" * 200_000)}
            reply = await remote.scatter(data=data, workers=None, client="c")
            assert reply == {"back": {("x", 1): [1, 2], "y": b"z" * 200_000}, "timeout": 2}
            assert hooks.ops == ["identity", "echo", "scatter"]
            assert ("identity", True) in hooks.handled
            assert not hooks.rejected
            # The surplus field is ignored and reported.
            assert (await remote.identity(n_workers=1, later=2))["n_workers"] == 1
            assert hooks.surplus == [("identity", ["later"])]

    run(main())


def test_errors_arrive_by_class() -> None:
    def get_metadata(connection: Connection, fields: dict[str, Any]) -> Any:
        raise RpcError(builtin_error("KeyError", fields["keys"]))

    async def check_idle(connection: Connection, fields: dict[str, Any]) -> Any:
        raise ZeroDivisionError("a mistake")

    async def gather(connection: Connection, fields: dict[str, Any]) -> Any:
        raise CommClosedError("worker went away")

    def retry(connection: Connection, fields: dict[str, Any]) -> Any:
        raise RpcError("only data", status="error")

    def events(connection: Connection, fields: dict[str, Any]) -> Any:
        return object()

    async def main() -> None:
        hooks = RecordingHooks()
        handlers = {
            "get_metadata": get_metadata,
            "check_idle": check_idle,
            "gather": gather,
            "retry": retry,
            "events": events,
        }
        async with (
            serving(handlers, hooks) as listener,
            rpc(str(listener.addresses[0])) as remote,
        ):
            with pytest.raises(KeyError, match="a"):
                await remote.get_metadata(keys=["a"])
            with pytest.raises(ZeroDivisionError, match="a mistake"):
                await remote.check_idle()
            with pytest.raises(ConnectionError, match="went away"):
                await remote.gather(keys=["x"])
            reply = await remote.retry(keys=["x"])
            assert reply["status"] == "error"
            assert str(pickle.loads(reply["exception"])) == "only data"
            with pytest.raises(ValueError, match="object has no form on the wire"):
                await remote.events()
            # Only mistakes of ours are reported as such.
            assert [op for op, _ in hooks.errors] == ["check_idle", "events"]
            assert await remote.echo(data=1) == 1

    run(main())


@pytest.mark.behaviour("B1.4")
def test_rejections_are_answered_and_the_connection_lives() -> None:
    async def main() -> None:
        hooks = RecordingHooks()
        handlers = {"gather": lambda connection, fields: {"status": "OK"}}
        async with (
            serving(handlers, hooks) as listener,
            rpc(str(listener.addresses[0])) as remote,
        ):
            with pytest.raises(NotImplementedError, match="unknown operation 'nonsense'"):
                await remote.nonsense()
            with pytest.raises(NotImplementedError, match="Lock and Semaphore"):
                await remote.semaphore_acquire(name="x", timeout=1, lease_id="a")
            with pytest.raises(NotImplementedError, match="allow-code-on-scheduler"):
                await remote.run_function(function=b"", args=b"", wait=True)
            with pytest.raises(NotImplementedError, match="identity: not served"):
                await remote.identity()
            with pytest.raises(TypeError, match=r"field 'keys' .* is missing"):
                await remote.gather()
            with pytest.raises(TypeError, match="must be array of key, got str"):
                await remote.gather(keys="x")
            assert await remote.gather(keys=["x"]) == {"status": "OK"}
            assert [rejection.reason for rejection in hooks.rejected] == [
                Reason.UNKNOWN_OP,
                Reason.ANNOUNCED,
                Reason.ANNOUNCED,
                Reason.ANNOUNCED,
                Reason.MISSING_FIELD,
                Reason.WRONG_TYPE,
            ]
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            for _ in range(3):
                await comm.write({"op": "nonsense"})
                assert (await comm.read())["status"] == "uncaught-error"
            await comm.write({"op": "gather", "keys": ["x"]})
            assert await comm.read() == {"status": "OK"}
            await comm.close()

    run(main())


def test_undecodable_body_is_answered() -> None:
    async def main() -> None:
        hooks = RecordingHooks()
        async with serving({}, hooks) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await until(lambda: len(listener.connections) == 1)
            # Beneath the stock codec: a body that is no msgpack.
            comm.stream.write(raw(b"\xc1"))
            reply = await comm.read()
            assert reply["status"] == "uncaught-error"
            await comm.write({"op": "echo", "data": 5})
            assert await comm.read() == 5
            assert hooks.rejected[0].reason is Reason.MALFORMED
            # Neither a request: answered once and closed.
            await comm.write([1, 2])
            assert (await comm.read())["status"] == "uncaught-error"
            with pytest.raises(StockClosedError):
                await comm.read()
            for message in ({"data": 1}, {"op": 5}, {"op": ("x", 1)}, "text", None):
                comm = await distributed.comm.connect(str(listener.addresses[0]))
                await comm.write(message)
                assert (await comm.read())["status"] == "uncaught-error"
                with pytest.raises(StockClosedError):
                    await comm.read()

    run(main())


def test_requests_of_one_connection_run_one_after_the_other() -> None:
    gate: list[asyncio.Event] = []
    seen: list[int] = []

    async def log_event(connection: Connection, fields: dict[str, Any]) -> Any:
        seen.append(fields["msg"])
        if fields["msg"] == 0:
            await gate[0].wait()
        return fields["msg"]

    async def main() -> None:
        gate.append(asyncio.Event())
        async with serving({"log_event": log_event}) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            for index in range(20):
                await comm.write({"op": "log_event", "topic": "t", "msg": index})
            await comm.write({"op": "echo", "data": "end"})
            await until(lambda: seen == [0])
            gate[0].set()
            assert [await comm.read() for _ in range(21)] == [*range(20), "end"]
            await comm.close()

    run(main())


def test_peer_that_does_not_read_is_served_no_further() -> None:
    seen: list[int] = []

    def log_event(connection: Connection, fields: dict[str, Any]) -> Any:
        seen.append(fields["msg"])
        return b"x" * 1_000_000

    async def main() -> None:
        settings = CommSettings(write_high_bytes=2_000_000)
        async with serving({"log_event": log_event}, settings=settings) as listener:
            reader, writer = await open_raw(listener.port)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"".join(build(local_handshake(False))))
            for index in range(200):
                request = {"op": "log_event", "topic": "t", "msg": index}
                writer.write(b"".join(build(encode(request))))
            await until(lambda: len(listener.connections) == 1)
            [connection] = listener.connections
            await until(lambda: connection.is_held)
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write({"op": "echo", "data": 1})
            assert await comm.read() == 1
            assert connection.is_held
            assert connection.buffered_bytes < 4_000_000
            assert len(seen) < 100
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            size = 0
            while size < 200_000_000:
                size += len(await reader.read(2**20))
            assert seen == list(range(200))
            writer.close()
            await comm.close()

    run(main())


def test_requests_that_hold_the_loop_let_others_have_their_turn() -> None:
    seen: list[int] = []

    def log_event(connection: Connection, fields: dict[str, Any]) -> Any:
        seen.append(fields["msg"])
        time.sleep(0.01)
        return fields["msg"]

    async def main() -> None:
        async with serving({"log_event": log_event}) as listener:
            busy = await distributed.comm.connect(str(listener.addresses[0]))
            other = await distributed.comm.connect(str(listener.addresses[0]))
            for index in range(100):
                await busy.write({"op": "log_event", "topic": "t", "msg": index})
            await other.write({"op": "echo", "data": 1})
            assert await other.read() == 1
            assert len(seen) < 100
            assert [await busy.read() for _ in range(100)] == list(range(100))
            await busy.close()
            await other.close()

    run(main())


def test_reply_false_close_true_and_op_close() -> None:
    async def main() -> None:
        async with serving({}) as listener:
            address = str(listener.addresses[0])
            comm = await distributed.comm.connect(address)
            await comm.write({"op": "echo", "data": 1, "reply": False})
            await comm.write({"op": "unknown", "reply": False})
            await comm.write({"op": "echo", "data": 2, "close": True})
            assert await comm.read() == 2
            with pytest.raises(StockClosedError):
                await comm.read()
            comm = await distributed.comm.connect(address)
            await comm.write({"op": "close", "reply": True})
            assert await comm.read() == "OK"
            with pytest.raises(StockClosedError):
                await comm.read()
            comm = await distributed.comm.connect(address)
            await comm.write({"op": "close", "reply": False})
            with pytest.raises(StockClosedError):
                await comm.read()

    run(main())


def test_handler_turns_its_connection_into_a_stream() -> None:
    stream = Recorder()

    async def register(connection: Connection, fields: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        connection.kind = "client"
        connection.write(encode([{"op": "stream-start"}]))
        connection.start_stream(stream)
        return NO_REPLY

    async def main() -> None:
        async with serving({"register-client": register}) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write(
                {"op": "register-client", "client": "c", "versions": {}, "reply": False}
            )
            await comm.write([{"op": "heartbeat-client"}])
            assert await comm.read() == ({"op": "stream-start"},)
            await until(lambda: len(stream.messages) == 1)
            await comm.close()
            await until(lambda: stream.is_lost)

    run(main())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"op": "register-worker", "reply": False}, "is missing"),
        ({"op": "register-client", "client": 5, "versions": {}, "reply": False}, "must be text"),
        ({"op": "register-client", "client": "c", "versions": {}, "reply": False}, "broken"),
    ],
)
def test_registrations_are_refused_in_their_own_form(
    message: dict[str, Any], expected: str
) -> None:
    def register(connection: Connection, fields: dict[str, Any]) -> Any:
        raise LookupError("broken")

    async def main() -> None:
        hooks = RecordingHooks()
        handlers = {"register-worker": register, "register-client": register}
        async with serving(handlers, hooks) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write(message)
            reply = await comm.read()
            if message["op"] == "register-worker":
                assert (reply["status"], type(reply["time"])) == ("error", float)
                assert expected in reply["message"]
            else:
                assert reply[0]["op"] == "stream-start"
                assert expected in reply[0]["error"]
            with pytest.raises(StockClosedError):
                await comm.read()

    run(main())


def test_failure_after_the_stream_began_ends_the_connection() -> None:
    async def register(connection: Connection, fields: dict[str, Any]) -> Any:
        connection.start_stream(Recorder())
        raise LookupError("half way")

    async def main() -> None:
        hooks = RecordingHooks()
        async with serving({"register-client": register}, hooks) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write({"op": "register-client", "client": "c", "versions": {}})
            with pytest.raises(StockClosedError):
                await comm.read()
            assert [op for op, _ in hooks.errors] == ["register-client"]

    run(main())


def test_request_outlives_its_connection() -> None:
    gate: list[asyncio.Event] = []
    done: list[bool] = []

    async def restart(connection: Connection, fields: dict[str, Any]) -> Any:
        await gate[0].wait()
        done.append(connection.is_closed)

    async def main() -> None:
        gate.append(asyncio.Event())
        dispatcher = Dispatcher({"restart": restart})
        async with serving({"restart": restart}) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write({"op": "restart"})
            await until(lambda: bool(listener.connections) and listener.connections[0].is_held)
            comm.abort()
            await until(lambda: not listener.connections)
            gate[0].set()
            await until(lambda: done == [True])
        assert dispatcher.running_count == 0

    run(main())


def test_closing_cancels_requests() -> None:
    cancelled: list[str] = []

    async def restart(connection: Connection, fields: dict[str, Any]) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("restart")
            raise

    async def main() -> None:
        async with serving({"restart": restart}) as listener:
            comm = await distributed.comm.connect(str(listener.addresses[0]))
            await comm.write({"op": "restart"})
            await until(lambda: bool(listener.connections) and listener.connections[0].is_held)
        assert cancelled == ["restart"]
        with pytest.raises(StockClosedError):
            await comm.read()

    run(main())


def test_handlers_must_be_rows_of_the_table() -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        Dispatcher({"nonsense": lambda connection, fields: None})
    with pytest.raises(ValueError, match="'feed'"):
        Dispatcher({"feed": lambda connection, fields: None})


def test_abused_server_keeps_serving() -> None:
    """Garbage from many peers at once; a stock peer sees nothing of it."""

    async def main() -> None:
        async with (
            serving({}) as listener,
            rpc(str(listener.addresses[0])) as remote,
        ):
            writers = []
            for index in range(40):
                _, writer = await open_raw(listener.port)
                writer.write(bytes([index * 6 % 256]) * (7 * index))
                writers.append(writer)
            assert await remote.echo(data="fine") == "fine"
            for writer in writers:
                writer.close()
            assert await remote.echo(data=Serialize("fine")) == "fine"
            await until(lambda: listener.handshaking_count == 0)

    run(main())

"""Our requests to stock servers."""

from __future__ import annotations

import asyncio
from typing import Any

import distributed.comm
import pytest
from distributed.core import Server, Status
from distributed.protocol import to_serialize

from cython_ext.frames import build
from distributed_core.comm import (
    CommClosedError,
    CommError,
    CommSettings,
    CommStats,
    ConnectionPool,
    ConnectTimeout,
    RemoteError,
)
from distributed_core.protocol.codec import Serialized, encode
from tests.wire.support import open_raw, run, stock_server, until

HELLO = b"".join(build(encode({"pickle-protocol": 5})))


def pool(**options: Any) -> ConnectionPool:
    return ConnectionPool(CommSettings(**options), CommStats(), seed=1)


def test_calls_reuse_one_connection_and_keep_payloads_closed() -> None:
    async def main() -> None:
        def double(x: int) -> int:
            return 2 * x

        async def payload() -> Any:
            return {"status": "OK", "result": to_serialize(list(range(5)))}

        async with stock_server({"double": double, "payload": payload}) as server:
            ours = pool()
            for index in range(5):
                message = {"op": "double", "x": index}
                assert await ours.call(server.address, message) == 2 * index
            reply = await ours.call(server.address, {"op": "payload"})
            assert isinstance(reply["result"], Serialized)
            assert (ours.open_count, ours.idle_count) == (1, 1)
            await asyncio.gather(
                *(ours.call(server.address, {"op": "double", "x": 1}) for _ in range(3))
            )
            assert ours.open_count == 3
            await ours.close()
            assert ours.open_count == 0
            with pytest.raises(CommClosedError, match="pool is closed"):
                await ours.call(server.address, {"op": "double", "x": 1})

    run(main())


def test_remote_errors_carry_the_reply() -> None:
    async def main() -> None:
        def fail() -> None:
            raise ValueError("their fault")

        async with stock_server({"fail": fail}) as server:
            ours = pool()
            with pytest.raises(RemoteError, match="their fault") as info:
                await ours.call(server.address, {"op": "fail"})
            assert isinstance(info.value.reply["exception"], Serialized)
            # The connection is as good as before.
            assert ours.idle_count == 1
            await ours.close()

    run(main())


def test_get_data_acknowledges_success_only() -> None:
    acknowledged: list[Any] = []
    busy = [True]

    async def get_data(comm: Any, keys: Any, who: Any = None) -> Any:
        if busy[0]:
            return {"status": "busy"}
        await comm.write({"status": "OK", "data": {k: to_serialize(k) for k in keys}})
        acknowledged.append(await comm.read())
        return Status.dont_reply

    async def main() -> None:
        async with stock_server({"get_data": get_data}) as server:
            ours = pool()
            assert await ours.get_data(server.address, ["x"]) == {"status": "busy"}
            busy[0] = False
            for _ in range(3):
                reply = await ours.get_data(server.address, {"x", ("y", 1)})
                assert set(reply["data"]) == {"x", ("y", 1)}
            await until(lambda: acknowledged == ["OK"] * 3)
            assert ours.open_count == 1
            await ours.close()

    run(main())


def test_timeout_and_cancel_discard_the_connection() -> None:
    async def main() -> None:
        async def slow() -> None:
            await asyncio.sleep(60)

        async with stock_server({"slow": slow, "fast": lambda: 1}) as server:
            ours = pool()
            with pytest.raises(TimeoutError):
                await ours.call(server.address, {"op": "slow"}, timeout_seconds=0.05)
            await until(lambda: ours.open_count == 0)
            task = asyncio.create_task(ours.call(server.address, {"op": "slow"}))
            await until(lambda: ours.open_count == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: ours.open_count == 0)
            assert await ours.call(server.address, {"op": "fast"}) == 1
            await ours.close()

    run(main())


def test_lost_peer_fails_the_call() -> None:
    async def main() -> None:
        async def die(comm: Any) -> None:
            comm.abort()

        async with stock_server({"die": die, "fast": lambda: 1}) as server:
            ours = pool()
            with pytest.raises(CommClosedError, match="was lost"):
                await ours.call(server.address, {"op": "die"})
            assert await ours.call(server.address, {"op": "fast"}) == 1
            ours.close_address(server.address)
            await until(lambda: ours.open_count == 0)
            assert ours.idle_count == 0
            await ours.close()

    run(main())


def test_a_peer_that_is_gone_fails_requests_under_way() -> None:
    async def main() -> None:
        async def slow() -> None:
            await asyncio.sleep(60)

        async with stock_server({"slow": slow}) as server:
            ours = pool()
            task = asyncio.create_task(ours.call(server.address, {"op": "slow"}))
            await until(lambda: ours.open_count == 1)
            ours.close_address(server.address)
            with pytest.raises(CommClosedError, match="is gone"):
                await task
            await ours.close()

    run(main())


def test_limit_is_kept() -> None:
    async def main() -> None:
        async with (
            stock_server({"fast": lambda: 1}) as one,
            stock_server({"fast": lambda: 2}) as two,
        ):
            ours = pool(pool_limit=2)
            most = 0

            async def call(address: str) -> int:
                nonlocal most
                result = await ours.call(address, {"op": "fast"})
                most = max(most, ours.open_count)
                return int(result)

            results = await asyncio.gather(
                *(call(one.address) for _ in range(10)), *(call(two.address) for _ in range(10))
            )
            assert sorted(results) == [1] * 10 + [2] * 10
            assert most <= 2
            await ours.close()

    run(main())


def test_connect_fails_in_words_and_in_time() -> None:
    async def main() -> None:
        async with stock_server({}) as server:
            free = server.address
        ours = pool(connect_timeout_seconds=0.2)
        with pytest.raises(ConnectTimeout, match=r"no connection to .* within 0.2 s: "):
            await ours.call(free, {"op": "x"})
        with pytest.raises(TimeoutError):
            await ours.call(free, {"op": "x"}, timeout_seconds=0.05)
        with pytest.raises(ValueError, match="has no port"):
            await ours.call("tcp://127.0.0.1", {"op": "x"})
        with pytest.raises(CommError, match="no certificates are configured"):
            await ours.call("tls://127.0.0.1:1", {"op": "x"})
        closed = pool(require_encryption=True)
        with pytest.raises(CommError, match="encryption is required"):
            await closed.call(free, {"op": "x"})
        assert ours.open_count == 0

    run(main())


def test_peer_that_comes_up_late_is_reached() -> None:
    async def main() -> None:
        async with stock_server({}) as server:
            port = server.port
        ours = pool(connect_timeout_seconds=10)
        task = asyncio.create_task(ours.call(f"tcp://127.0.0.1:{port}", {"op": "echo", "data": 1}))
        await until(lambda: ours._stats.connect_failures >= 2)
        late = Server({})
        await late.listen(f"tcp://127.0.0.1:{port}")
        await late
        assert await task == 1
        await ours.close()
        await late.close()

    run(main())


async def fake_peer(answer: bytes) -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO + answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_unasked_and_undecodable_answers() -> None:
    async def main() -> None:
        server, address = await fake_peer(b"".join(build([b"\xc1"])))
        ours = pool(connect_timeout_seconds=0.5)
        # The answer comes before the question: nothing of this peer can be trusted.
        with pytest.raises(CommError):
            await ours.call(address, {"op": "x"}, timeout_seconds=5)
        await until(lambda: ours.open_count == 0)
        server.close()

    run(main())


def test_peer_that_is_no_dask_is_named() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ours = pool()
        with pytest.raises(CommError, match="cannot connect to"):
            port = server.sockets[0].getsockname()[1]
            await ours.call(f"tcp://127.0.0.1:{port}", {"op": "x"})
        server.close()

    run(main())


def test_connector_asks_for_pickle_protocol_four() -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def look(comm: Any) -> None:
            seen.append(comm.handshake_options)

        async with stock_server({"look": look}) as server:
            ours = pool()
            await ours.call(server.address, {"op": "look"})
            assert seen == [{"pickle-protocol": 4, "compression": None}]
            await ours.close()
            comm = await distributed.comm.connect(server.address)
            await comm.close()
            _, writer = await open_raw(server.port)
            writer.close()

    run(main())

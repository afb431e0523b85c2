"""The HTTP server: the protocol, its limits and timeouts, and the rules against foreign pages."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from distributed_core.server.http import (
    HttpError,
    HttpLimits,
    HttpServer,
    Request,
    Response,
    Route,
    json_response,
    text_response,
)

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    def runner(main: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await main

        with asyncio.Runner(loop_factory=request.param) as one:
            return one.run(bounded())

    return runner


def echo(request: Request) -> Response:
    return json_response(
        {
            "method": request.method,
            "path": request.path,
            "query": request.query,
            "body": request.body.decode("latin-1"),
            "peer": request.peer,
        }
    )


async def slow(request: Request) -> Response:
    await asyncio.sleep(0.01)
    return text_response("slow")


def broken(request: Request) -> Response:
    raise LookupError("secret detail")


def refusing(request: Request) -> Response:
    raise HttpError(400, "say please")


def large(request: Request) -> Response:
    return Response(200, b"x" * 8_000_000)


ROUTES = [
    Route("/", echo),
    Route("/echo", echo, ("GET", "POST")),
    Route("/slow", slow),
    Route("/broken", broken),
    Route("/refusing", refusing),
    Route("/large", large),
]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(ROUTES, **settings)
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


class Peer:
    """A client that writes raw bytes and reads responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: HttpServer) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = b""
        if has_body:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body

    async def closed(self) -> bytes:
        """What comes until the server closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()


def get(path: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def ask(server: HttpServer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with await Peer.connect(server) as peer:
        peer.send(data)
        return await peer.response()


def test_a_request_is_taken_apart(run: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            status, headers, body = await ask(server, get("/echo/?a=1&a=2&b=%28x%29&c="))
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["date"].endswith("GMT")
        assert (
            body == b'{"method": "GET", "path": "/echo", "query": {"a": ["1", "2"], "b": ["(x)"], '
            b'"c": [""]}, "body": "", "peer": "127.0.0.1"}'
        )

    run(main())


def test_keep_alive_and_pipelining(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(get("/slow") + get("/echo") + get("/nowhere") + get("/slow"))
            statuses = [(await peer.response())[0] for _ in range(4)]
            assert statuses == [200, 200, 404, 200]
            peer.send(get("/echo"))
            assert (await peer.response())[0] == 200
            assert server.stats.connections == 1

    run(main())


def test_a_request_in_single_bytes(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            for byte in get("/echo", method="POST", body=b"hello"):
                peer.send(bytes([byte]))
                await asyncio.sleep(0)
            assert b'"body": "hello"' in (await peer.response())[2]

    run(main())


def test_close_and_http_1_0(run: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            for data in (
                get("/echo", "Connection: close"),
                b"GET /echo HTTP/1.0\r\n\r\n",
            ):
                async with await Peer.connect(server) as peer:
                    peer.send(data)
                    assert (await peer.response())[0] == 200
                    assert await peer.closed() == b""

    run(main())


def test_a_peer_that_closes_its_side_still_gets_its_response(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(get("/slow"))
            peer.writer.write_eof()
            assert (await peer.response())[2] == b"slow\n"
            assert await peer.closed() == b""

    run(main())


def test_head_has_the_length_and_no_body(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(get("/slow", method="HEAD") + get("/slow"))
            status, headers, _ = await peer.response(has_body=False)
            assert (status, headers["content-length"]) == (200, "5")
            assert (await peer.response())[2] == b"slow\n"

    run(main())


def test_chunked_bodies_and_100_continue(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(
                get("/echo", "Transfer-Encoding: chunked", "Expect: 100-continue", method="POST")
            )
            assert (await peer.response(has_body=False))[0] == 100
            peer.send(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
            assert b'"body": "abcde"' in (await peer.response())[2]

    run(main())


def test_unknown_paths_and_methods(run: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            assert (await ask(server, get("/nowhere")))[0] == 404
            assert (await ask(server, get("/echo/x")))[0] == 404
            status, headers, body = await ask(server, get("/slow", method="DELETE"))
            assert (status, headers["allow"]) == (405, "GET, HEAD")
            assert b"/slow takes GET, HEAD, not" not in body or b"DELETE" in body
            assert (await ask(server, get("*", method="OPTIONS")))[0] == 400
            assert (await ask(server, get("http://any/echo")))[0] == 200
            assert server.stats.responses["none", 404] == 2

    run(main())


def test_the_prefix_is_required(run: Any) -> None:
    async def main() -> None:
        async with serving(prefix="/dask/") as server:
            assert (await ask(server, get("/dask/echo")))[0] == 200
            assert b'"path": "/"' in (await ask(server, get("/dask")))[2]
            status, _, body = await ask(server, get("/echo"))
            assert status == 404 and b"/dask/" in body
            assert (await ask(server, get("/daskx/echo")))[0] == 404

    run(main())


def test_a_handler_that_fails_is_answered_logged_and_counted(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(get("/broken") + get("/refusing") + get("/echo"))
            status, _, body = await peer.response()
            assert status == 500 and b"secret" not in body
            assert (await peer.response())[::2] == (400, b"say please\n")
            assert (await peer.response())[0] == 200
            assert server.stats.handler_errors == 1
            assert server.stats.responses["/broken", 500] == 1

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50,
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
        b"GET /" + b"x" * 100_000,
    ],
)
def test_nonsense_is_refused_and_the_connection_closed(run: Any, data: bytes) -> None:
    async def main() -> None:
        async with serving() as server:
            async with await Peer.connect(server) as peer:
                peer.send(data)
                status, headers, _ = await peer.response()
                assert 400 <= status < 600 and headers["connection"] == "close"
                peer.send(get("/echo") * 3)
                assert await peer.closed() == b""
            assert server.stats.protocol_errors == 1
            assert (await ask(server, get("/echo")))[0] == 200

    run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    ],
    ids=["version", "many headers", "long header", "long target"],
)
def test_heads_that_are_refused(run: Any, data: bytes, status: int) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(data)
            assert (await peer.response())[0] == status
            assert await peer.closed() == b""

    run(main())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_too_large_is_refused_with_a_reason(run: Any, is_chunked: bool) -> None:
    async def main() -> None:
        limits = HttpLimits(max_body_bytes=1000)
        async with serving(limits=limits) as server, await Peer.connect(server) as peer:
            if is_chunked:
                head = get("/echo", "Transfer-Encoding: chunked", method="POST")
                peer.send(head + b"400\r\n" + b"x" * 1024 + b"\r\n")
            else:
                peer.send(get("/echo", "Content-Length: 1000000000", method="POST"))
            peer.send(b"x" * 500_000)
            status, _, body = await peer.response()
            assert status == 413 and b"1000 bytes" in body
            assert await peer.closed() == b""

    run(main())


def test_too_many_connections_are_refused(run: Any) -> None:
    async def main() -> None:
        async with serving(limits=HttpLimits(max_connections=2)) as server:
            peers = [await Peer.connect(server) for _ in range(2)]
            for peer in peers:
                peer.send(get("/echo"))
                assert (await peer.response())[0] == 200
            async with await Peer.connect(server) as third:
                assert (await third.response())[0] == 503
                assert await third.closed() == b""
            assert server.stats.connections_refused == 1
            peers[0].writer.close()
            async with asyncio.timeout(5):
                while server.stats.connections > 1:  # noqa: ASYNC110 - it sets no event
                    await asyncio.sleep(0.002)
            assert (await ask(server, get("/echo")))[0] == 200
            peers[1].writer.close()

    run(main())


def test_a_request_that_does_not_come_to_an_end_times_out(run: Any) -> None:
    async def main() -> None:
        limits = HttpLimits(request_timeout_seconds=0.05)
        async with serving(limits=limits) as server, await Peer.connect(server) as peer:
            peer.send(b"GET /echo HT")
            assert (await peer.response())[0] == 408
            assert await peer.closed() == b""
            assert server.stats.timeouts == 1

    run(main())


def test_an_idle_connection_is_closed(run: Any) -> None:
    async def main() -> None:
        limits = HttpLimits(idle_timeout_seconds=0.05)
        async with serving(limits=limits) as server, await Peer.connect(server) as peer:
            peer.send(get("/echo"))
            assert (await peer.response())[0] == 200
            assert await peer.closed() == b""
            assert server.stats.timeouts == 0

    run(main())


def test_a_peer_that_reads_nothing_is_cut(run: Any) -> None:
    async def main() -> None:
        limits = HttpLimits(write_timeout_seconds=0.1)
        async with serving(limits=limits) as server, await Peer.connect(server) as peer:
            peer.writer.transport.pause_reading()
            peer.send(get("/large") * 20)
            async with asyncio.timeout(10):
                while server.stats.timeouts == 0:  # noqa: ASYNC110 - it sets no event
                    await asyncio.sleep(0.01)
            # One response waits for its reader; the others were not even made.
            assert server.stats.responses["/large", 200] <= 2

    run(main())


def test_a_large_response_arrives_whole(run: Any) -> None:
    async def main() -> None:
        async with serving() as server, await Peer.connect(server) as peer:
            peer.send(get("/large") + get("/echo"))
            assert len((await peer.response())[2]) == 8_000_000
            assert (await peer.response())[0] == 200

    run(main())


def test_close_cuts_connections_and_ends_handlers(run: Any) -> None:
    started = []
    ended = []

    async def endless(request: Request) -> Response:
        started.append(request)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request)
        return text_response("never")

    async def main() -> None:
        server = HttpServer([Route("/", endless)])
        with pytest.raises(RuntimeError):
            _ = server.port
        await server.start("127.0.0.1", 0)
        assert server.addresses == [("127.0.0.1", server.port)]
        async with await Peer.connect(server) as peer:
            peer.send(get("/"))
            async with asyncio.timeout(5):
                while not started:  # noqa: ASYNC110 - it sets no event
                    await asyncio.sleep(0.002)
            await server.close()
            assert await peer.closed() == b""
        assert ended

    run(main())


def test_two_routes_with_one_path_are_refused() -> None:
    with pytest.raises(ValueError, match="/echo"):
        HttpServer([Route("/echo", echo), Route("/echo", echo)])


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "localhost:8787", 200),
        ("http://localhost:8787", "localhost:8787", 200),
        ("http://LOCALHOST:8787", "localhost:8787", 200),
        ("http://box", "box:80", 200),
        ("https://box", "box:443", 200),
        ("http://[::1]:8787", "[::1]:8787", 200),
        ("http://evil.example", "localhost:8787", 403),
        ("http://localhost", "localhost:8787", 403),
        ("http://localhost:8788", "localhost:8787", 403),
        ("null", "localhost:8787", 403),
        ("", "localhost:8787", 403),
        ("file://", "localhost:8787", 403),
        ("http://localhost:8787x", "localhost:8787", 403),
    ],
)
def test_pages_of_other_origins_change_nothing(origin: str | None, host: str, status: int) -> None:
    async def main() -> None:
        server = HttpServer(ROUTES)
        headers = {"host": host} | ({} if origin is None else {"origin": origin})
        request = Request("POST", "/echo", headers=headers)
        assert (await server.respond(request))[1].status == status
        request = Request("GET", "/echo", headers=headers)
        assert (await server.respond(request))[1].status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("peer", "headers", "is_local"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("10.0.0.1", {}, False),
        ("", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.1"}, False),
        ("127.0.0.1", {"origin": "http://localhost", "host": "localhost"}, True),
        ("127.0.0.1", {"origin": "http://[::1]:1", "host": "[::1]:1"}, True),
        ("127.0.0.1", {"origin": "http://evil.example", "host": "evil.example"}, False),
    ],
)
def test_who_counts_as_local(peer: str, headers: dict[str, str], is_local: bool) -> None:
    assert Request("POST", "/", headers=headers, peer=peer).is_local is is_local


def test_tls(run: Any, tmp_path: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=20,
    )
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    theirs = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    theirs.check_hostname = False

    async def main() -> None:
        server = HttpServer(ROUTES)
        await server.start("127.0.0.1", 0, ssl=ours)
        peer = Peer(*await asyncio.open_connection("127.0.0.1", server.port, ssl=theirs))
        peer.send(get("/echo") + get("/large"))
        assert (await peer.response())[0] == 200
        assert len((await peer.response())[2]) == 8_000_000
        peer.send(b"nonsense\r\n\r\n")
        assert (await peer.response())[0] == 400
        peer.writer.close()
        await server.close()

    run(main())


def test_json_of_what_json_cannot_express() -> None:
    response = json_response({("a", 1): float("inf"), "b": {1, 2}, 3: b"x", "c": [float("nan")]})
    assert response.body == (b'{"(\'a\', 1)": null, "b": [1, 2], "3": "b\'x\'", "c": [null]}')


def test_a_date_is_that_of_http(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            _, headers, _ = await ask(server, get("/echo"))
        assert time.strptime(headers["date"], "%a, %d %b %Y %H:%M:%S GMT")

    run(main())

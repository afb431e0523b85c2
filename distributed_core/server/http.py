"""A small HTTP/1.1 server: connections in, requests to handlers, responses out.

Owns the protocol, its limits and its timeouts, and the rules against foreign web pages. Knows no
route of its own and nothing of the scheduler; ``http_routes`` does. Nothing that a peer sends, and
nothing that a handler raises, gets out of a connection: the first is answered with a status from
400 upwards, the second with 500, logged and counted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from typing import Any, Final, cast
from urllib.parse import parse_qs, unquote

import h11

from distributed_core.metrics.counters import HttpStats

__all__ = [
    "Handler",
    "HttpError",
    "HttpLimits",
    "HttpServer",
    "Request",
    "Response",
    "Route",
    "json_response",
    "text_response",
]

logger = logging.getLogger(__name__)

_SECURITY_HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
_VERSIONS: Final = (b"1.0", b"1.1")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip")
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = [
    "Jan",
    "Feb",
    "Mar",
    "Apr",
    "May",
    "Jun",
    "Jul",
    "Aug",
    "Sep",
    "Oct",
    "Nov",
    "Dec",
]
_REASONS: Final = {
    200: "OK",
    302: "Found",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_TOO_MANY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
_NO_ROUTE: Final = "none"  # The label of requests that no route fits.


class HttpError(Exception):
    """A handler's refusal: the status, and a text for the peer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one peer, and all of them, may use. Times in seconds, sizes in bytes."""

    max_header_bytes: int = 32 * 1024
    max_headers: int = 100
    max_body_bytes: int = 1024 * 1024
    max_connections: int = 512
    # From a connection's first byte of a request to the request's last.
    request_timeout_seconds: float = 15.0
    # Between two requests of a connection.
    idle_timeout_seconds: float = 75.0
    # For which a peer may read nothing of a response.
    write_timeout_seconds: float = 30.0
    # For which a refused peer may go on sending, so that it gets to read why.
    linger_seconds: float = 1.0

    def allow(self, head: h11.Request) -> bool:
        """Whether the head of a request is small enough; h11 bounds incomplete ones only."""
        size = len(head.target) + sum(len(name) + len(value) for name, value in head.headers)
        return len(head.headers) <= self.max_headers and size <= self.max_header_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One request, complete.

    ``path`` is decoded, for a handler without the server's prefix; ``query`` has the values of
    each name; ``headers`` has lower-case names, and of a repeated header all values with commas
    between.
    ``peer`` is the address of the other end, without a port.
    """

    method: str
    path: str
    query: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it comes from this machine, and neither through a proxy nor a foreign page.

        A page can be made to look local by a name that resolves to loopback, so a request
        of a browser must also be addressed to loopback by its usual names.
        """
        if not _is_loopback(self.peer) or any(name in self.headers for name in _FORWARDED):
            return False
        if "origin" not in self.headers:
            return True
        host = _split_host(self.headers.get("host", ""))
        return host is not None and (host[0] == "localhost" or _is_loopback(host[0]))

    def first(self, name: str) -> str | None:
        """The first value of a query name, or None."""
        values = self.query.get(name)
        return values[0] if values else None


@dataclass(frozen=True, slots=True)
class Response:
    """What a handler returns. ``headers`` come in addition to those of every response."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


def text_response(text: str, status: int = 200) -> Response:
    """A plain text; a line end is added."""
    return Response(status, f"{text}\n".encode("utf-8", "backslashreplace"))


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON.

    Numbers that JSON cannot express become null, and objects that it does not know their text.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_plain(value), allow_nan=False)
    return Response(status, text.encode("utf-8", "backslashreplace"), "application/json")


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= 50:
        return "..."
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, str) else str(name): _plain(item, depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return repr(value)


Handler = Callable[[Request], Response | Awaitable[Response]]
"""Plain or a coroutine function; may raise ``HttpError``."""


@dataclass(frozen=True, slots=True)
class Route:
    """One path and who answers. GET includes HEAD."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("GET",)


class HttpServer:
    """Serves routes on one or more addresses.

    :param routes: paths without the prefix.
    :param prefix: first part of every path, with or without slashes.
    :param stats: counters to use.
    :raises ValueError: two routes with the same path.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        prefix: str = "",
        limits: HttpLimits | None = None,
        stats: HttpStats | None = None,
    ) -> None:
        self.stats = stats or HttpStats()
        self.limits = limits or HttpLimits()
        self.prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
        self._routes: dict[str, Route] = {}
        for route in routes:
            if route.path in self._routes:
                raise ValueError(f"two routes for {route.path!r}")
            self._routes[route.path] = route
        self._servers: list[asyncio.Server] = []
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str | None, port: int, ssl: ssl.SSLContext | None = None) -> None:
        """Listen; may be called again for a further address.

        :param host: None or empty for all interfaces.
        :param port: 0 for any free port.
        :raises OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Connection(self, loop), host or None, port, ssl=ssl
        )
        self._servers.append(server)

    @property
    def port(self) -> int:
        """The port of the first address.

        :raises RuntimeError: the server does not listen.
        """
        if not self._servers:
            raise RuntimeError("the HTTP server is not started")
        return int(self._servers[0].sockets[0].getsockname()[1])

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of all sockets."""
        return [
            (str(name[0]), int(name[1]))
            for server in self._servers
            for name in (socket.getsockname() for socket in server.sockets)
        ]

    async def close(self) -> None:
        """Listen no more, cut all connections, and end the handlers that still run."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.abort()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def respond(self, request: Request) -> tuple[str, Response]:
        """Carry out one request; never raises but on cancellation.

        :param request: its path with the prefix.
        :returns: the route's path, for counting, and the response.
        """
        route = self._find(request.path)
        if route is None:
            where = f"; all paths begin with {self.prefix}/" if self.prefix else ""
            return _NO_ROUTE, text_response(f"no such page{where}", 404)
        if request.method not in _SAFE_METHODS and not _is_same_origin(request.headers):
            refusal = "a page of another origin must not change anything here"
            return route.path, text_response(refusal, 403)
        allowed = (*route.methods, "HEAD") if "GET" in route.methods else route.methods
        if request.method not in allowed:
            text = f"{route.path} takes {', '.join(allowed)}\n".encode()
            return route.path, Response(405, text, headers=(("Allow", ", ".join(allowed)),))
        try:
            answer = route.handler(replace(request, path=route.path))
            return route.path, (await answer if isawaitable(answer) else answer)
        except HttpError as exc:
            return route.path, text_response(exc.text, exc.status)
        except Exception:
            self.stats.handler_errors += 1
            logger.exception(
                "The HTTP request %s %s failed",
                request.method,
                route.path,
                extra={"fault": f"http {route.path}"},
            )
            refusal = "internal error; the scheduler's log has the reason"
            return route.path, text_response(refusal, 500)

    def _find(self, path: str) -> Route | None:
        if self.prefix:
            if path != self.prefix and not path.startswith(self.prefix + "/"):
                return None
            path = path[len(self.prefix) :]
        return self._routes.get(path.rstrip("/") or "/")


class _Connection(asyncio.Protocol):
    """One connection: reads a request, has it carried out, writes the response, and so on.

    Nothing is read while a request is carried out or a response waits for its reader, so a peer
    that sends without end holds one chunk of memory and no more.
    """

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self._transport: asyncio.Transport
        self._http = h11.Connection(
            h11.SERVER, max_incomplete_event_size=server.limits.max_header_bytes
        )
        self._peer = ""
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._is_busy = False
        self._is_write_paused = False
        self._is_ending = False
        self._unsent = 0

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not a subclass under uvloop.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        name = transport.get_extra_info("peername")
        self._peer = str(name[0]) if isinstance(name, tuple) else ""
        server = self._server
        if len(server.connections) >= self._limits.max_connections:
            server.stats.connections_refused += 1
            transport.write(_TOO_MANY)
            self._end()
            return
        server.connections.add(self)
        server.stats.connections += 1
        self._set_timer(self._limits.request_timeout_seconds, self._request_late)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        if not self._has_begun:
            # The whole request has this long; a byte now and then gains no time.
            self._has_begun = True
            self._set_timer(self._limits.request_timeout_seconds, self._request_late)
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        if self._is_ending:
            self._transport.close()
            return False
        self._http.receive_data(b"")
        self._advance()
        # Half closed: the response to the last request can still be sent.
        return self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ending = True
        self._cancel_timer()
        server = self._server
        if self in server.connections:
            server.connections.discard(self)
            server.stats.connections -= 1

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if not self._is_ending and not self._is_busy:
            self._next_request()

    # Orders of the server.

    def abort(self) -> None:
        """Cut the connection at once."""
        self._is_ending = True
        self._transport.abort()

    # Requests.

    def _advance(self) -> None:
        """Take in what has arrived, up to the end of one request."""
        http = self._http
        while not self._is_busy and not self._is_ending and not self._is_write_paused:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as exc:
                self._server.stats.protocol_errors += 1
                self._refuse(exc.error_status_hint, str(exc))
                return
            if isinstance(event, h11.Request):
                self._head = event
                self._body = bytearray()
                if event.http_version not in _VERSIONS:
                    self._refuse(505, "the version of HTTP must be 1.0 or 1.1")
                elif not self._limits.allow(event):
                    self._refuse(431, "the request has too many headers, or too long ones")
                elif _content_length(event) > self._limits.max_body_bytes:
                    self._refuse_body()
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._limits.max_body_bytes:
                    self._refuse_body()
            elif isinstance(event, h11.EndOfMessage):
                self._begin()
            elif isinstance(event, h11.ConnectionClosed):
                self._end()
            else:
                if http.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
                return

    def _begin(self) -> None:
        assert self._head is not None
        self._is_busy = True
        self._cancel_timer()
        self._transport.pause_reading()
        task = self._loop.create_task(self._carry_out(self._head, bytes(self._body)))
        self._server.tasks.add(task)
        task.add_done_callback(self._carried_out)

    async def _carry_out(self, head: h11.Request, body: bytes) -> None:
        method = head.method.decode("ascii")
        server = self._server
        try:
            request = _read_request(method, head, body, self._peer)
        except HttpError as exc:
            route, response = _NO_ROUTE, text_response(exc.text, exc.status)
        else:
            route, response = await server.respond(request)
        server.stats.responded(route, response.status)
        if self._is_ending:
            return
        self._write_response(response)
        self._is_busy = False
        if self._http.our_state is h11.MUST_CLOSE:
            self._end()
        else:
            self._http.start_next_cycle()
            self._next_request()

    def _carried_out(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        if task.cancelled():
            self.abort()
        elif (exc := task.exception()) is not None:
            self._server.stats.handler_errors += 1
            logger.error("An HTTP response could not be sent", exc_info=exc)
            self.abort()

    def _next_request(self) -> None:
        if self._is_write_paused:
            self._watch_write()
            return
        if self._transport.is_closing():
            return
        self._head = None
        self._has_begun = bool(self._http.trailing_data[0])
        if self._has_begun:
            self._set_timer(self._limits.request_timeout_seconds, self._request_late)
        else:
            self._set_timer(self._limits.idle_timeout_seconds, self._end)
        self._transport.resume_reading()
        self._advance()

    # Responses.

    def _write_response(self, response: Response, *extra: tuple[str, str]) -> None:
        headers: list[tuple[str, str]] = [
            ("Date", _http_date(time.time())),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            *_SECURITY_HEADERS,
            *response.headers,
            *extra,
        ]
        self._send(
            h11.Response(
                status_code=response.status,
                headers=headers,
                reason=_REASONS.get(response.status, ""),
            )
        )
        if self._head is None or self._head.method != b"HEAD":
            self._send(h11.Data(data=response.body))
        self._send(h11.EndOfMessage())

    def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._transport.write(data)

    def _refuse_body(self) -> None:
        self._refuse(413, f"a body may have at most {self._limits.max_body_bytes} bytes")

    def _refuse(self, status: int, text: str) -> None:
        """Answer a request that cannot be read to its end, and close."""
        self._server.stats.responded(_NO_ROUTE, status)
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        self._write_response(text_response(text, status), ("Connection", "close"))
        self._is_ending = True
        if self._transport.can_write_eof():
            # To close with unread data would reset the connection, and with it the response.
            self._transport.write_eof()
            self._set_timer(self._limits.linger_seconds, self._transport.abort)
        else:
            self._end()

    def _end(self) -> None:
        """Close when all is written."""
        self._is_ending = True
        self._transport.close()
        self._watch_write()

    # Timers: one at a time.

    def _request_late(self) -> None:
        self._server.stats.timeouts += 1
        self._refuse(408, "the request did not arrive in time")

    def _watch_write(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._set_timer(self._limits.write_timeout_seconds, self._check_write)

    def _check_write(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent:
            self._watch_write()
        else:
            self._server.stats.timeouts += 1
            self.abort()

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _read_request(method: str, head: h11.Request, body: bytes, peer: str) -> Request:
    """Take a request apart; raises HttpError."""
    target = head.target.decode("latin-1")
    if not target.startswith("/"):
        # The form that proxies are sent; other forms ask for no page.
        scheme, separator, rest = target.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise HttpError(400, "the request names no path")
        target = "/" + rest.partition("/")[2]
    path, _, query_text = target.partition("?")
    try:
        query = parse_qs(query_text, keep_blank_values=True, max_num_fields=100)
    except ValueError as exc:
        raise HttpError(400, f"the query cannot be read: {exc}") from exc
    headers: dict[str, str] = {}
    for raw_name, raw_value in head.headers:
        name = raw_name.decode("latin-1")
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(method, unquote(path), query, headers, body, peer)


def _content_length(head: h11.Request) -> int:
    for name, value in head.headers:
        if name == b"content-length":
            return int(value)
    return 0


def _http_date(seconds: float) -> str:
    moment = time.gmtime(seconds)
    return (
        f"{_DAYS[moment.tm_wday]}, {moment.tm_mday:02} {_MONTHS[moment.tm_mon - 1]} "
        f"{moment.tm_year} {moment.tm_hour:02}:{moment.tm_min:02}:{moment.tm_sec:02} GMT"
    )


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether the request comes from a page of this server, or from no page at all."""
    origin = headers.get("origin")
    if origin is None:
        return True
    scheme, separator, location = origin.partition("://")
    default_port = {"http": 80, "https": 443}.get(scheme.lower())
    theirs = _split_host(location)
    ours = _split_host(headers.get("host", ""))
    if not separator or default_port is None or theirs is None or ours is None:
        return False
    return theirs[0] == ours[0] and (theirs[1] or default_port) == (ours[1] or default_port)


def _split_host(text: str) -> tuple[str, int | None] | None:
    """Host, without brackets, and port of ``host[:port]``; None if it is neither."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return None
        port_text = rest[1:]
    else:
        host, _, port_text = text.partition(":")
    if not host:
        return None
    if not port_text:
        return host.lower(), None
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5):
        return None
    return host.lower(), int(port_text)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback

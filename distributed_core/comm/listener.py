"""Listening sockets.

Owns the caps on connections and on unfinished handshakes. Knows nothing of what travels. Called
by the server.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.errors import CommError
from distributed_core.comm.settings import CommSettings, CommStats
from distributed_core.protocol.addresses import Address, join_host_port

__all__ = ["Listener"]


class Listener:
    """Accepts connections on one host and port.

    :param on_ready: called with each connection whose handshake is done; returns its receiver.
    :param ssl_context: makes this a ``tls`` listener.
    :param on_failed: called with a connection that ended before its handshake, and why.
    """

    def __init__(
        self,
        settings: CommSettings,
        stats: CommStats,
        on_ready: Callable[[Connection], Receiver],
        ssl_context: ssl.SSLContext | None = None,
        on_failed: Callable[[Connection, Exception], None] | None = None,
    ) -> None:
        if ssl_context is None and settings.require_encryption:
            raise CommError("encryption is required: a tcp listener is not allowed")
        self._settings = settings
        self._stats = stats
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._ssl_context = ssl_context
        self._servers: list[asyncio.Server] = []
        self._handshaking: set[_Accepted] = set()
        self._ready: set[_Accepted] = set()
        self.scheme = "tcp" if ssl_context is None else "tls"
        self.addresses: list[Address] = []

    @property
    def port(self) -> int:
        """The port, the real one if 0 was asked for."""
        return self.addresses[0].port

    @property
    def connections(self) -> list[Connection]:
        """Open connections whose handshake is done."""
        return list(self._ready)

    @property
    def handshaking_count(self) -> int:
        """Connections whose handshake is not done yet."""
        return len(self._handshaking)

    async def start(self, host: str | None, port: int) -> None:
        """Listen.

        :param host: address or name; None or empty means all interfaces.
        :param port: zero means any free one, the same for all addresses of the host.
        :raises CommError: the host is unknown, or the port is taken.
        """
        loop = asyncio.get_running_loop()
        sockets: list[socket.socket] = []
        is_tls = self._ssl_context is not None
        handshake_timeout = self._settings.handshake_timeout_seconds if is_tls else None
        shutdown_timeout = self._settings.close_timeout_seconds if is_tls else None
        try:
            for family, location in await _locations(host, port):
                sockets.append(_bind(family, location, sockets))
            for one in sockets:
                server = await loop.create_server(
                    lambda: _Accepted(self),
                    sock=one,
                    backlog=self._settings.backlog,
                    ssl=self._ssl_context,
                    ssl_handshake_timeout=handshake_timeout,
                    ssl_shutdown_timeout=shutdown_timeout,
                )
                self._servers.append(server)
        except OSError as exc:
            for one in sockets:
                one.close()
            raise CommError(
                f"cannot listen on {self.scheme}://{join_host_port(host or '', port)}: {exc}"
            ) from exc
        for one in sockets:
            name = one.getsockname()
            self.addresses.append(Address(self.scheme, str(name[0]), int(name[1])))

    def stop(self) -> None:
        """Accept no more and drop unfinished handshakes; ready connections go on."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for connection in list(self._handshaking):
            connection.abort()

    async def close(self) -> None:
        """Stop, close all connections and wait for their end, which is bounded in time."""
        self.stop()
        for connection in self._ready:
            connection.close()
        for connection in list(self._ready | self._handshaking):
            await connection.wait_closed()


class _Accepted(Connection):
    """A connection that its listener counts."""

    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        super().__init__(
            listener._settings,
            listener._stats,
            is_listener=True,
            on_ready=self._became_ready,
            on_failed=listener._on_failed,
        )
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        listener = self._listener
        settings = listener._settings
        pending = len(listener._handshaking)
        if (
            pending >= settings.max_handshakes
            or pending + len(listener._ready) >= settings.max_connections
        ):
            listener._stats.connections_refused += 1
            self._closed = True
            transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
            transport.abort()
            return
        listener._handshaking.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        listener = self._listener
        if self not in listener._handshaking and self not in listener._ready:
            return
        listener._handshaking.discard(self)
        listener._ready.discard(self)
        super().connection_lost(exc)

    def _became_ready(self, connection: Connection) -> Receiver:
        self._listener._handshaking.discard(self)
        self._listener._ready.add(self)
        return self._listener._on_ready(connection)


async def _locations(host: str | None, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Families and socket names to bind, IPv4 first."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    unique = {
        (family, location): None
        for family, _, _, _, location in found
        if family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(unique, key=lambda item: item[0] != socket.AF_INET)


def _bind(family: int, location: tuple[object, ...], bound: list[socket.socket]) -> socket.socket:
    """Bind, to the port that the first socket got if any port would do."""
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        port = bound[0].getsockname()[1] if bound else location[1]
        one.bind((location[0], port, *location[2:]))
    except OSError:
        one.close()
        raise
    return one

"""Our own requests to workers and nannies.

Owns connections to their RPC side: made when needed, used by one request at a time, kept for the
next, dropped on any doubt. Never interprets a reply beyond "the peer's handler raised". Called by
the server.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from distributed_core.comm.connection import Connection, Receiver
from distributed_core.comm.errors import (
    CommClosedError,
    CommError,
    ConnectTimeout,
    RemoteError,
)
from distributed_core.comm.settings import CommSettings, CommStats
from distributed_core.protocol.addresses import Address, parse_address
from distributed_core.protocol.codec import DecodeError, Frame, decode, encode

__all__ = ["ConnectionPool"]

_BACKOFF_SECONDS = 0.01


class _Outgoing(Receiver):
    """One connection of the pool: at most one request under way."""

    __slots__ = ("_pool", "_reply", "address", "connection")

    def __init__(self, pool: ConnectionPool, address: str) -> None:
        self._pool = pool
        self._reply: asyncio.Future[list[bytes]] | None = None
        self.address = address
        self.connection: Connection

    async def exchange(self, frames: list[Frame]) -> list[bytes]:
        """Send a request and wait for its one reply."""
        self._reply = asyncio.get_running_loop().create_future()
        if not self.connection.write(frames):
            raise CommClosedError(f"connection to {self.address} is closed")
        try:
            return await self._reply
        finally:
            self._reply = None

    def frames_received(self, frames: list[bytes]) -> None:
        if self._reply is None or self._reply.done():
            self.connection.abort(CommError(f"{self.address} sent an answer nobody asked for"))
        else:
            self._reply.set_result(frames)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            why = f": {exc}" if exc else ""
            self._reply.set_exception(
                CommClosedError(f"connection to {self.address} was lost{why}")
            )
        self._pool._lost(self)


class ConnectionPool:
    """Requests to any number of addresses over a bounded number of connections.

    :param ssl_context: for ``tls`` addresses, see ``tls.client_context``.
    :param seed: of the jitter between attempts to connect.
    """

    def __init__(
        self,
        settings: CommSettings,
        stats: CommStats,
        ssl_context: ssl.SSLContext | None = None,
        seed: int | None = None,
    ) -> None:
        self._settings = settings
        self._stats = stats
        self._ssl_context = ssl_context
        self._random = random.Random(seed)
        self._slots = asyncio.Semaphore(settings.pool_limit)
        self._waiting = 0
        self._open: dict[_Outgoing, None] = {}
        # Oldest first, for the limit; and by address, for the next request.
        self._idle: OrderedDict[_Outgoing, None] = OrderedDict()
        self._idle_of: dict[str, list[_Outgoing]] = {}
        self._is_closed = False

    @property
    def open_count(self) -> int:
        """Connections that are open."""
        return len(self._open)

    @property
    def idle_count(self) -> int:
        """Open connections that no request uses."""
        return len(self._idle)

    async def call(
        self, address: str, message: Mapping[str, Any], timeout_seconds: float | None = None
    ) -> Any:
        """Send a request and return its decoded reply, payloads unopened.

        :param message: with ``op``; ``reply: true`` is added.
        :param timeout_seconds: for everything, connecting included; None waits for the peer.
        :raises RemoteError: the peer's handler raised.
        :raises CommClosedError: the connection was lost, or the pool closed.
        :raises ConnectTimeout: no connection in time.
        :raises TimeoutError: no reply in time.
        :raises CommError: no connection for another reason, or the reply cannot be decoded.
        """
        op = str(message.get("op"))
        async with asyncio.timeout(timeout_seconds):
            reply, outgoing = await self._exchange(address, {**message, "reply": True})
        self._give_back(outgoing)
        return _checked(address, op, reply)

    async def get_data(
        self,
        address: str,
        keys: Collection[Any],
        who: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Fetch keys from a worker: the exchange of three messages.

        :returns: ``{"status": "OK", "data": {key: Serialized}}``, keys that it does not hold
            left out, or ``{"status": "busy"}``.
        :raises: as ``call``.
        """
        request = {"op": "get_data", "keys": tuple(keys), "who": who, "reply": True}
        async with asyncio.timeout(timeout_seconds):
            reply, outgoing = await self._exchange(address, request)
        if isinstance(reply, dict) and reply.get("status") == "OK":
            # The worker counts the transfer as running until this arrives.
            outgoing.connection.write(encode("OK"))
        self._give_back(outgoing)
        return _checked(address, "get_data", reply)

    def close_address(self, address: str) -> None:
        """Drop all connections to a peer that is gone; requests under way fail at once."""
        for outgoing in [one for one in self._open if one.address == address]:
            outgoing.connection.abort(CommClosedError(f"{address} is gone"))

    async def close(self) -> None:
        """Drop all connections and refuse further requests."""
        self._is_closed = True
        everyone = list(self._open)
        for outgoing in everyone:
            outgoing.connection.abort(CommClosedError("the connection pool is closed"))
        for outgoing in everyone:
            await outgoing.connection.wait_closed()

    async def _exchange(self, address: str, message: dict[str, Any]) -> tuple[Any, _Outgoing]:
        frames = encode(message)
        outgoing = await self._acquire(address)
        try:
            answer = await outgoing.exchange(frames)
            reply = decode(answer)
        except DecodeError as exc:
            outgoing.connection.abort()
            raise CommError(f"{address} sent a reply that cannot be decoded: {exc}") from exc
        except BaseException:
            # A late reply would be taken for the answer to the next request.
            outgoing.connection.abort()
            raise
        return reply, outgoing

    async def _acquire(self, address: str) -> _Outgoing:
        if self._is_closed:
            raise CommClosedError("the connection pool is closed")
        idle = self._idle_of.get(address)
        while idle:
            outgoing = idle.pop()
            del self._idle[outgoing]
            if not idle:
                del self._idle_of[address]
            if not outgoing.connection.is_closed:
                return outgoing
        if self._slots.locked():
            self._drop_oldest()
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._connect(address)
        except BaseException:
            self._slots.release()
            raise

    def _give_back(self, outgoing: _Outgoing) -> None:
        if outgoing.connection.is_closed:
            return
        self._idle[outgoing] = None
        self._idle_of.setdefault(outgoing.address, []).append(outgoing)
        if self._waiting:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self._idle:
            next(iter(self._idle)).connection.abort()

    def _lost(self, outgoing: _Outgoing) -> None:
        if outgoing not in self._open:
            return
        del self._open[outgoing]
        self._slots.release()
        if outgoing in self._idle:
            del self._idle[outgoing]
            idle = self._idle_of[outgoing.address]
            idle.remove(outgoing)
            if not idle:
                del self._idle_of[outgoing.address]

    async def _connect(self, address: str) -> _Outgoing:
        """Connect, with attempts until the time is up; the first may use a fifth of it."""
        target = parse_address(address)
        context = self._context_for(target)
        loop = asyncio.get_running_loop()
        allowed = self._settings.connect_timeout_seconds
        deadline = loop.time() + allowed
        attempt_limit = allowed / 5
        failure: Exception | None = None
        attempt = 0
        while (left := deadline - loop.time()) > 0:
            if self._is_closed:
                raise CommClosedError("the connection pool is closed")
            try:
                async with asyncio.timeout(min(left, attempt_limit)):
                    return await self._attempt(address, target, context)
            except (OSError, ValueError) as exc:
                self._stats.connect_failures += 1
                if _is_final(exc):
                    raise CommError(f"cannot connect to {address}: {exc}") from exc
                failure = exc
            attempt_limit = allowed
            most = min(max(0.0, deadline - loop.time()), _BACKOFF_SECONDS * 2**attempt)
            attempt = min(attempt + 1, 16)
            await asyncio.sleep(self._random.uniform(0, most))
        why = "" if failure is None else f": {failure or type(failure).__name__}"
        raise ConnectTimeout(f"no connection to {address} within {allowed} s{why}") from failure

    def _context_for(self, target: Address) -> ssl.SSLContext | None:
        if target.scheme == "tls":
            if self._ssl_context is None:
                raise CommError(f"cannot connect to {target}: no certificates are configured")
            return self._ssl_context
        if self._settings.require_encryption:
            raise CommError(f"cannot connect to {target}: encryption is required")
        return None

    async def _attempt(
        self, address: str, target: Address, context: ssl.SSLContext | None
    ) -> _Outgoing:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        outgoing = _Outgoing(self, address)

        def on_ready(connection: Connection) -> Receiver:
            if not ready.done():
                ready.set_result(None)
            return outgoing

        def on_failed(connection: Connection, exc: Exception) -> None:
            if not ready.done():
                ready.set_exception(exc)

        connection = outgoing.connection = Connection(
            self._settings,
            self._stats,
            is_listener=False,
            on_ready=on_ready,
            on_failed=on_failed,
        )
        try:
            await loop.create_connection(
                lambda: connection,
                target.host,
                target.port,
                ssl=context,
                server_hostname=None if context is None else target.host,
            )
            await ready
            if connection.is_closed or self._is_closed:
                raise CommClosedError(f"connection to {address} was closed at once")
        except BaseException:
            if ready.done() and not ready.cancelled():
                # Looked at, so that the loop does not report it as forgotten.
                ready.exception()
            connection.abort()
            raise
        self._open[outgoing] = None
        return outgoing


def _is_final(exc: Exception) -> bool:
    """Whether the peer is there and would say the same again."""
    if isinstance(exc, CommClosedError):
        return False
    return isinstance(exc, (ssl.SSLError, CommError, ValueError))


def _checked(address: str, op: str, reply: Any) -> Any:
    if isinstance(reply, dict) and reply.get("status") == "uncaught-error":
        raise RemoteError(address, op, reply)
    return reply

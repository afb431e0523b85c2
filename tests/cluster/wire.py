"""A small codec of the Dask wire for tests, independent of both implementations.

Owns framing, the connection handshake and placeholders for opaque payloads. Must never import
`distributed` or `distributed_core`: it is the third opinion. Used by the harness (one-shot
requests), by the puppets and by tests that send deliberately broken bytes.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import msgpack

__all__ = [
    "HANDSHAKE",
    "Link",
    "LinkClosed",
    "Opaque",
    "decode",
    "encode",
    "host_port",
    "pickled",
    "request",
]

HANDSHAKE = {"compression": None, "python": [3, 11, 0], "pickle-protocol": 5}


class LinkClosed(ConnectionError):
    """The peer ended the connection."""


@dataclass
class Opaque:
    """A payload that travels in frames of its own: sub-header, frames, and which placeholder."""

    header: dict[str, Any]
    frames: list[bytes] = field(default_factory=list)
    placeholder: str = "__Serialized__"

    def value(self) -> Any:
        """Open the payload. Knows the pickle family and `bytes` of the dask family."""
        if self.placeholder == "__Pickled__":
            return pickle.loads(self.header["pickled-obj"], buffers=self.frames)
        if self.header["serializer"] == "pickle":
            return pickle.loads(self.frames[0], buffers=self.frames[1:])
        if self.header["serializer"] == "dask" and self.header["type"] == "builtins.bytes":
            return b"".join(self.frames)
        raise TypeError(f"cannot open a payload with header {self.header}")


def pickled(value: Any) -> Opaque:
    """`value` as a Serialized payload of the pickle family."""
    header = {"serializer": "pickle", "writeable": [], "num-sub-frames": 1}
    return Opaque(header, [pickle.dumps(value, 4)])


def encode(body: Any) -> bytes:
    """One message. `Opaque` objects and sets may stand anywhere in `body`."""
    frames: list[bytes] = [b""]

    def default(obj: Any) -> Any:
        if isinstance(obj, Opaque):
            index = len(frames)
            frames.append(msgpack.packb(obj.header, use_bin_type=True))
            frames.extend(obj.frames)
            return {obj.placeholder: index}
        if isinstance(obj, set):
            return {"__Set__": True, "as-list": list(obj)}
        raise TypeError(f"cannot send {obj!r}")

    frames[0] = msgpack.packb(body, use_bin_type=True, default=default)
    return frame(frames)


def frame(frames: list[bytes]) -> bytes:
    """The byte stream for ready frames."""
    count = len(frames)
    lengths = [len(f) for f in frames]
    first_block = 8 * (1 + count) + sum(lengths)
    return struct.pack(f"<QQ{count}Q", first_block, count, *lengths) + b"".join(frames)


def decode(frames: list[bytes]) -> Any:
    """The body of a message, with payloads as `Opaque`."""

    def hook(obj: dict[Any, Any]) -> Any:
        if "__Set__" in obj:
            return set(obj["as-list"])
        for name in ("__Serialized__", "__Pickled__"):
            if name in obj:
                index = obj[name]
                header = msgpack.unpackb(frames[index], raw=False, strict_map_key=False)
                count = header["num-sub-frames"]
                return Opaque(header, frames[index + 1 : index + 1 + count], name)
        return obj

    return msgpack.unpackb(
        frames[0], raw=False, use_list=False, strict_map_key=False, object_hook=hook
    )


def host_port(address: str) -> tuple[str, int]:
    """`tcp://127.0.0.1:8786` as a pair for the socket functions."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return host, int(port)


def request(address: str, op: str, limit: float = 10.0, **fields: Any) -> Any:
    """One request on a connection of its own; returns the reply within `limit` seconds."""
    with socket.create_connection(host_port(address), timeout=limit) as sock:
        sock.settimeout(limit)
        sock.sendall(encode(HANDSHAKE))
        stream = sock.makefile("rb")

        def exactly(count: int) -> bytes:
            data = stream.read(count)
            if len(data) != count:
                raise LinkClosed(f"{address} closed the connection during {op}")
            return data

        def message() -> Any:
            _, count = struct.unpack("<QQ", exactly(16))
            lengths = struct.unpack(f"<{count}Q", exactly(8 * count))
            return decode([exactly(n) for n in lengths])

        message()
        sock.sendall(encode({"op": op, "reply": True, **fields}))
        return message()


class Link:
    """One connection, asynchronous, handshake done."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str, handshake: Any = HANDSHAKE, limit: float = 10.0) -> Link:
        """Connect. With `handshake=None` nothing is sent nor read."""
        async with asyncio.timeout(limit):
            link = cls(*await asyncio.open_connection(*host_port(address), limit=2**26))
            if handshake is not None:
                await link.send(handshake)
                await link.receive()
        return link

    async def send(self, body: Any) -> None:
        await self.send_bytes(encode(body))

    async def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, limit: float | None = None) -> Any:
        """The next message. `LinkClosed` if the peer ended, `TimeoutError` after `limit` s."""
        async with asyncio.timeout(limit):
            try:
                _, count = struct.unpack("<QQ", await self.reader.readexactly(16))
                lengths = struct.unpack(f"<{count}Q", await self.reader.readexactly(8 * count))
                return decode([await self.reader.readexactly(n) for n in lengths])
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise LinkClosed(str(error)) from error

    async def call(self, op: str, limit: float = 10.0, **fields: Any) -> Any:
        """A request and its reply, within `limit` seconds."""
        await self.send({"op": op, "reply": True, **fields})
        return await self.receive(limit)

    async def wait_closed(self, limit: float = 10.0) -> None:
        """Read and drop until the peer closes; `TimeoutError` if it does not."""
        async with asyncio.timeout(limit):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                return

    def abort(self) -> None:
        self.writer.transport.abort()

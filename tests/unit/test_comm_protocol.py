"""Addresses, handshake and versions: no sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from distributed_core.protocol.addresses import (
    Address,
    AddressError,
    canonical_literal,
    coerce_worker,
    parse_address,
    resolve_address,
)
from distributed_core.protocol.codec import decode
from distributed_core.protocol.handshake import (
    Handshake,
    HandshakeError,
    local_handshake,
    read_handshake,
)
from distributed_core.protocol.versions import VersionBook, judge, local_versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://1.2.3.4:5", Address("tcp", "1.2.3.4", 5)),
        ("1.2.3.4:5", Address("tcp", "1.2.3.4", 5)),
        ("tls://host.name:8786", Address("tls", "host.name", 8786)),
        ("tcp://[::1]:9", Address("tcp", "::1", 9)),
    ],
)
def test_addresses_are_parsed(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tcp://host", "has no port"),
        ("ws://host:1", "scheme 'ws' is not one of tcp, tls"),
        ("tcp://:1", "has no valid host"),
        ("tcp://a b:1", "has no valid host"),
        ("tcp://host:70000", "is no port number"),
        ("tcp://host:x", "is no port number"),
        ("tcp://host:١", "is no port number"),
        ("tcp://::1:5", "needs brackets"),
        ("tcp://[::1:5", "malformed brackets"),
        ("", "has no valid host"),
        (5, "is a text, got int"),
    ],
)
def test_bad_addresses_are_named(text: Any, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        parse_address(text)


def test_canonical_form() -> None:
    assert canonical_literal("127.0.0.1:80") == "tcp://127.0.0.1:80"
    assert canonical_literal("tls://[0:0::1]:80") == "tls://[::1]:80"
    assert canonical_literal("localhost:80") is None
    assert parse_address("h", default_port=7).port == 7


def test_names_are_looked_up() -> None:
    assert asyncio.run(resolve_address("localhost:80")) == "tcp://127.0.0.1:80"
    assert asyncio.run(resolve_address("tcp://[::1]:80")) == "tcp://[::1]:80"
    with pytest.raises(AddressError, match=r"no\.such\.host\.invalid"):
        asyncio.run(resolve_address("tcp://no.such.host.invalid:80"))


def test_slow_lookup_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
        with pytest.raises(AddressError, match=r"not found within 0\.01 s"):
            await resolve_address("tcp://some.host:80", timeout_seconds=0.01)

    asyncio.run(main())


def test_ipv4_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(*args: Any, **kwargs: Any) -> Any:
        return [
            (socket.AF_INET6, 1, 6, "", ("::5", 0, 0, 0)),
            (socket.AF_INET, 1, 6, "", ("10.0.0.5", 0)),
        ]

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        assert await resolve_address("tcp://some.host:80") == "tcp://10.0.0.5:80"

    asyncio.run(main())


def test_workers_by_name_or_address() -> None:
    aliases: dict[Any, str] = {"alice": "tcp://10.0.0.1:5", 3: "tcp://10.0.0.3:5"}
    assert coerce_worker("alice", aliases) == "tcp://10.0.0.1:5"
    assert coerce_worker(3, aliases) == "tcp://10.0.0.3:5"
    assert coerce_worker("10.0.0.9:5", aliases) == "tcp://10.0.0.9:5"
    assert coerce_worker("tcp://10.0.0.9:5", aliases) == "tcp://10.0.0.9:5"
    assert coerce_worker("some-host", aliases) is None
    assert coerce_worker("10.0.0.9", aliases) is None
    assert coerce_worker(4, aliases) is None
    assert coerce_worker(["x"], aliases) is None


def test_our_handshake() -> None:
    ours = decode(local_handshake(is_listener=True))  # type: ignore[arg-type]
    assert ours["pickle-protocol"] == 5
    assert ours["compression"] is None
    assert ours["distributed-core"] == {"revision": 1, "features": ()}
    assert decode(local_handshake(is_listener=False))["pickle-protocol"] == 4  # type: ignore[arg-type]
    assert read_handshake(ours).revision == 1


def test_peer_handshakes() -> None:
    stock = {"compression": "lz4", "python": (3, 11, 7), "pickle-protocol": 5}
    assert read_handshake(stock) == Handshake(5, (3, 11, 7), "lz4")
    assert read_handshake({"pickle-protocol": 4}) == Handshake(4)
    ours = {"pickle-protocol": 5, "distributed-core": {"revision": 2, "features": ("a", 5)}}
    assert read_handshake(ours).features == {"a"}
    for odd in ("x", {"revision": "1"}, {"revision": 1, "features": 5}):
        message = {"pickle-protocol": 5, "python": "3.11", "distributed-core": odd}
        assert read_handshake(message) == Handshake(5)


@pytest.mark.parametrize(
    "message", [None, (), "x", {}, {"pickle-protocol": None}, {"pickle-protocol": True}]
)
def test_no_handshakes(message: Any) -> None:
    with pytest.raises(HandshakeError, match="handshake"):
        read_handshake(message)


def versions(**packages: str | None) -> dict[str, Any]:
    base: dict[str, str | None] = {
        "python": "3.11.7.final.0",
        "dask": "2026.8.0",
        "distributed": "2026.8.0",
        "numpy": "2.4.0",
        "cloudpickle": "3.1.0",
    }
    return {"host": {}, "packages": base | packages}


def test_own_versions() -> None:
    found = local_versions(["msgpack", "no-such-package"])
    assert found["packages"]["distributed"].startswith("2026.8.")
    assert found["packages"]["no-such-package"] is None
    assert found["host"]["python-bits"] == 64
    assert set(found["host"]) == {
        "python", "python-bits", "OS", "OS-release", "machine", "processor", "byteorder",
        "LC_ALL", "LANG",
    }  # fmt: skip


@pytest.mark.parametrize(
    "found", [versions(), versions(distributed="2026.8.3+dev"), {}, None, {"packages": {}}]
)
def test_versions_that_may_join(found: Any) -> None:
    assert judge(found, "client") is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (versions(distributed="2026.7.1"), "this client has distributed 2026.7.1"),
        (versions(distributed="2026.80.0"), "2026.80.0"),
        (versions(dask="2025.1.0"), "dask 2025.1.0"),
        (versions(distributed=("x",)), "speaks the protocol of distributed 2026.8"),  # type: ignore[arg-type]
    ],
)
def test_versions_that_may_not_join(found: Any, text: str) -> None:
    error = judge(found, "client")
    assert error is not None
    assert text in error


def test_warnings() -> None:
    book = VersionBook(versions())
    assert book.judge_client(versions()) == (None, None)
    assert book.judge_worker(versions()) == (None, None)
    # A package that we do not use ourselves differs from ours: no matter, until a worker has it.
    assert book.judge_client(versions(numpy="1.0")) == (None, None)
    book.add_worker("a", versions())
    error, warning = book.judge_client(versions(numpy="1.0"))
    assert error is None
    assert warning is not None
    assert "numpy" in warning
    assert "cloudpickle" not in warning
    _, warning = book.judge_worker(versions(cloudpickle="2.0"))
    assert warning is not None
    assert "| Worker" in warning
    error, warning = book.judge_client(versions(distributed="2020.1"))
    assert error is not None
    assert warning is None
    _, warning = book.judge_client({})
    assert warning is not None
    assert "UNKNOWN" in warning


def test_version_maps_are_interned() -> None:
    book = VersionBook(versions())
    for index in range(1000):
        book.add_worker(f"w{index}", versions())
    assert book.distinct_count == 1
    book.add_worker("odd", versions(numpy="1.0"))
    assert book.distinct_count == 2
    assert book.judge_client(versions())[1] is not None
    book.add_worker("odd", versions())
    assert book.distinct_count == 1
    assert book.judge_client(versions())[1] is None
    book.remove_worker("never seen")
    for index in range(1000):
        book.remove_worker(f"w{index}")
    book.remove_worker("odd")
    assert book.distinct_count == 0

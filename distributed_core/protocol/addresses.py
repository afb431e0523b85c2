"""Addresses of peers: parsing, the canonical form, and aliases of workers.

Owns the rule that a worker is known by ``scheme://ip:port``. Never blocks: a literal address is
canonical at once, a host name is looked up through the loop. Called by the server wherever a peer
names an address, and by ``comm``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "DEFAULT_SCHEDULER_PORT",
    "SCHEMES",
    "Address",
    "AddressError",
    "canonical_literal",
    "coerce_worker",
    "join_host_port",
    "parse_address",
    "resolve_address",
]

SCHEMES: Final = ("tcp", "tls")
"""Transports that we speak."""

DEFAULT_SCHEDULER_PORT: Final = 8786


class AddressError(ValueError):
    """A text that is no address, or a host that cannot be found; the text names it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens; ``host`` is without brackets."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{join_host_port(self.host, self.port)}"

    @property
    def is_literal(self) -> bool:
        """Whether the host is an IP address, not a name."""
        return _literal(self.host) is not None


def join_host_port(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(
    text: str, default_scheme: str = "tcp", default_port: int | None = None
) -> Address:
    """Take an address apart.

    :param text: ``[scheme://]host[:port]``; an IPv6 host in brackets.
    :param default_port: for a text without a port; without it the port is required.
    :raises AddressError: anything else.
    """
    if not isinstance(text, str):
        raise AddressError(f"an address is a text, got {type(text).__name__} {text!r:.100}")
    scheme, separator, location = text.rpartition("://")
    if not separator:
        scheme = default_scheme
    if scheme not in SCHEMES:
        raise AddressError(
            f"address {text!r:.200}: scheme {scheme!r:.50} is not one of {', '.join(SCHEMES)}"
        )
    host, port_text = _split_host_port(text, location)
    if port_text is None:
        if default_port is None:
            raise AddressError(f"address {text!r:.200} has no port")
        return Address(scheme, host, default_port)
    if not (port_text.isascii() and port_text.isdigit() and int(port_text[:6]) <= 65535):
        raise AddressError(f"address {text!r:.200}: {port_text!r:.50} is no port number")
    return Address(scheme, host, int(port_text))


def _split_host_port(text: str, location: str) -> tuple[str, str | None]:
    if location.startswith("["):
        host, bracket, rest = location[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise AddressError(f"address {text!r:.200}: malformed brackets")
        port = rest[1:] if rest else None
    else:
        host, colon, rest = location.partition(":")
        if ":" in rest:
            raise AddressError(f"address {text!r:.200}: an IPv6 host needs brackets, like [::1]")
        port = rest if colon else None
    if not host or len(host) > 255 or any(mark in host for mark in "/ @\x00"):
        raise AddressError(f"address {text!r:.200} has no valid host")
    return host, port


def _literal(host: str) -> str | None:
    """The host in its shortest form if it is an IP address."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def canonical_literal(text: str, default_scheme: str = "tcp") -> str | None:
    """The canonical form of an address whose host is an IP address; None if it is a name.

    :raises AddressError: not an address.
    """
    address = parse_address(text, default_scheme)
    host = _literal(address.host)
    return None if host is None else str(Address(address.scheme, host, address.port))


async def resolve_address(
    text: str, default_scheme: str = "tcp", timeout_seconds: float = 10.0
) -> str:
    """The canonical form of an address, its host name looked up.

    IPv4 is preferred, as stock does.

    :raises AddressError: not an address, or the name is unknown or not answered in time.
    """
    address = parse_address(text, default_scheme)
    host = _literal(address.host)
    if host is None:
        host = await _look_up(address.host, timeout_seconds)
    return str(Address(address.scheme, host, address.port))


async def _look_up(host: str, timeout_seconds: float) -> str:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_seconds):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except TimeoutError as exc:
        raise AddressError(f"host {host!r} was not found within {timeout_seconds} s") from exc
    except (OSError, UnicodeError) as exc:
        raise AddressError(f"host {host!r} was not found: {exc}") from exc
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    for family, _, _, _, location in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            return str(location[0])
    raise AddressError(f"host {host!r} has no IP address")


def coerce_worker(
    worker: object, aliases: Mapping[Hashable, str], default_scheme: str = "tcp"
) -> str | None:
    """The address that a client means by a worker's name or address.

    :param aliases: worker name to canonical address.
    :returns: a canonical address, whether or not such a worker exists; None for a host name or a
        text that is no address, which restricts to a host.
    """
    if isinstance(worker, Hashable):
        known = aliases.get(worker)
        if known is not None:
            return known
    if not isinstance(worker, str):
        return None
    try:
        return canonical_literal(worker, default_scheme) or str(
            parse_address(worker, default_scheme)
        )
    except AddressError:
        return None

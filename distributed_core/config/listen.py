"""Where to listen: host, port, interface, protocol and encryption put together.

Owns the rules of Dask's command line for these, with one difference: a plain scheduler that was not
told where to listen stays on loopback. Opens no socket; asks the system only for the address of a
named interface. Called by ``loader``.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar, cast

from distributed_core.config.flags import FLAGS, TLS_FLAGS
from distributed_core.config.schema import Endpoint, Origin

__all__ = ["DEFAULT_PORT", "Plan", "interface_address", "plan"]

DEFAULT_PORT = 8786
_SCHEMES = ("tcp", "tls")
_Item = TypeVar("_Item")
_HOW_TO_OPEN = (
    "only this machine can reach the scheduler, because no address was asked for and connections "
    "are not encrypted; use TLS (--tls-ca-file, --tls-cert, --tls-key), or --host or --interface "
    "(--host 0.0.0.0: every interface) to open it to the network"
)


class Plan(NamedTuple):
    """What follows from the settings; fields are those of the schema."""

    listen: tuple[Endpoint, ...]
    http_listen: tuple[Endpoint, ...]
    open_plain: bool
    encryption_required: bool
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(
    values: Mapping[str, object],
    origins: Mapping[str, Origin],
    address_of: Callable[[str], str],
) -> Plan:
    """Return where the wire and HTTP listen.

    ``values`` are parsed settings by dotted name; ``address_of`` gives an interface's address.
    Raises ValueError if the settings contradict each other, name an unknown scheme, or lack the
    certificates that they need.
    """
    notes: list[str] = []
    warnings: list[str] = []
    tls_flag = any(origins[key].kind == "flag" for key in TLS_FLAGS)
    required = values["comm.require-encryption"]
    encryption_required = tls_flag if required is None else bool(required)
    listen = _wire(values, origins, tls_flag or encryption_required, address_of)

    plain = [endpoint for endpoint in listen if endpoint.scheme == "tcp"]
    if plain and encryption_required:
        cause = (
            f"{_named('comm.require-encryption', origins)} is true"
            if required
            else "TLS flags were given"
        )
        raise ValueError(f"{cause}, but {plain[0]} is not encrypted: use the protocol tls")
    if len(plain) < len(listen):
        _check_certificates(values, origins)
    elif values["comm.tls.scheduler-cert"] is not None:
        warnings.append(
            "there is a certificate in comm.tls, but connections are not encrypted; "
            "set scheduler.protocol to tls or comm.require-encryption to true"
        )
    wide = [endpoint for endpoint in plain if not _is_loopback(endpoint.host)]
    if wide:
        warnings.append(
            f"anyone who can reach {wide[0]} can run code on the workers: "
            "connections are neither encrypted nor authenticated"
        )
    if plain and _said_host(values) is None and not values["scheduler.interface"]:
        notes.append(_HOW_TO_OPEN)
    return Plan(
        listen=listen,
        http_listen=_http(values, origins, listen[0].host) if values["http.enabled"] else (),
        open_plain=bool(wide),
        encryption_required=encryption_required,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises ValueError, with the names that there are, if it does not exist or has no address.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise ValueError(f"there is no network interface {name!r}; this machine has {known}")
    for address in interfaces[name]:
        if address.family == socket.AF_INET:
            return str(address.address)
    raise ValueError(f"the network interface {name!r} has no IPv4 address")


def _said_host(values: Mapping[str, object]) -> str | None:
    """Return the host that was asked for, without scheme and port; None if none was."""
    host = values["scheduler.host"]
    return _split_host(host)[1] or None if isinstance(host, str) else None


def _named(key: str, origins: Mapping[str, Origin]) -> str:
    """Return a setting's name, and where it was said if anywhere."""
    origin = origins[key]
    return key if origin.kind == "default" else f"{key} ({origin.text})"


def _wire(
    values: Mapping[str, object],
    origins: Mapping[str, Origin],
    encrypted: bool,
    address_of: Callable[[str], str],
) -> tuple[Endpoint, ...]:
    named = {
        name: _named(f"scheduler.{name}", origins)
        for name in ("host", "port", "interface", "protocol")
    }
    ports = cast("tuple[int, ...]", values["scheduler.port"] or ())
    protocols = cast("tuple[str, ...]", values["scheduler.protocol"] or ())
    interfaces = cast("tuple[str, ...]", values["scheduler.interface"] or ())
    with _naming(named["host"]):
        scheme, host, host_port = _split_host(cast("str", values["scheduler.host"] or ""))

    if host and interfaces:
        raise ValueError(f"give {named['host']} or {named['interface']}, not both")
    if len(protocols) > 1 and not ports and host_port is None:
        ports = (DEFAULT_PORT, *(0 for _ in protocols[1:]))
    if (len(protocols) > 1 or len(ports) > 1) and len(protocols) != len(ports):
        raise ValueError(
            f"{named['protocol']} and {named['port']} must both be lists of the same length, "
            f"got {list(protocols)} and {list(ports)}"
        )
    if len(interfaces) > 1 and len(protocols) > 1 and len(interfaces) != len(protocols):
        raise ValueError(
            f"{named['interface']} and {named['protocol']} must be lists of the same length, "
            f"got {list(interfaces)} and {list(protocols)}"
        )
    if host_port is not None and ports and set(ports) != {host_port}:
        raise ValueError(
            f"the port is given twice: {host_port} in {named['host']}, "
            f"{ports[0]} in {named['port']}"
        )

    count = max(len(protocols), len(ports), len(interfaces), 1)
    default_scheme = scheme or ("tls" if encrypted else str(values["comm.default-scheme"]))
    default_port = DEFAULT_PORT if host_port is None else host_port
    endpoints: list[Endpoint] = []
    for index in range(count):
        protocol = _pick(protocols, index, default_scheme)
        with _naming(named["protocol"]):
            own_scheme = _scheme(protocol)
        if scheme and own_scheme != scheme:
            raise ValueError(
                f"{named['host']} says {scheme}://, but {named['protocol']} says {own_scheme}"
            )
        with _naming(named["interface"]):
            own_host = address_of(_pick(interfaces, index, "")) if interfaces else host
        if not own_host and own_scheme == "tcp":
            own_host = "127.0.0.1"
        endpoint = Endpoint(own_scheme, own_host, _pick(ports, index, default_port))
        if endpoint.port and any(other[1:] == endpoint[1:] for other in endpoints):
            raise ValueError(f"{endpoint.host or 'every interface'}:{endpoint.port} is used twice")
        endpoints.append(endpoint)
    return tuple(endpoints)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put a setting's name before the message of what goes wrong inside."""
    try:
        yield
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from None


def _pick(items: tuple[_Item, ...], index: int, default: _Item) -> _Item:
    """Return the item for one of several addresses; a single item serves them all."""
    if not items:
        return default
    return items[index] if len(items) > 1 else items[0]


def _scheme(protocol: str) -> str:
    scheme = protocol.removesuffix("://")
    if scheme not in _SCHEMES:
        raise ValueError(f"the protocol {protocol!r} is not supported; use tcp or tls")
    return scheme


def _split_host(text: str) -> tuple[str, str, int | None]:
    """Return scheme (or empty), host (or empty) and port (or None) of what stands for a host."""
    before, mark, location = text.rpartition("://")
    scheme = _scheme(before) if mark else ""
    if _is_ipv6(location):
        return scheme, location, None
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s]*))(?::(\d{1,5}))?/?", location)
    if match is None:
        raise ValueError(f"cannot read {text!r}; an IPv6 address needs brackets")
    port = int(match[3]) if match[3] else None
    if port is not None and port > 65535:
        raise ValueError(f"no such port in {text!r}")
    return scheme, match[1] or match[2] or "", port


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _check_certificates(values: Mapping[str, object], origins: Mapping[str, Origin]) -> None:
    for flag in ("--tls-ca-file", "--tls-cert"):
        key = FLAGS[flag]
        if values[key] is None:
            raise ValueError(f"the protocol tls needs {key} (flag {flag})")
    for key in TLS_FLAGS:
        _check_file(key, values, origins)


def _check_file(key: str, values: Mapping[str, object], origins: Mapping[str, Origin]) -> None:
    path = values[key]
    if isinstance(path, str) and "\n" not in path and not os.path.isfile(path):
        raise ValueError(f"{origins[key].text}: {key}: there is no file {path!r}")


def _http(
    values: Mapping[str, object], origins: Mapping[str, Origin], wire_host: str
) -> tuple[Endpoint, ...]:
    scheme = "https" if values["http.tls.cert"] is not None else "http"
    if scheme == "https":
        for key in ("http.tls.ca-file", "http.tls.cert", "http.tls.key"):
            _check_file(key, values, origins)
    # As Dask: the flag without a host opens every (IPv4) interface, silence follows the wire.
    default = "0.0.0.0" if origins["http.address"].kind == "flag" else wire_host
    addresses = cast("tuple[tuple[str, int], ...]", values["http.address"])
    return tuple(Endpoint(scheme, host or default, port) for host, port in addresses)

"""The first message in each direction of a connection.

Owns what we say about ourselves and what we demand of the peer. Never negotiates compression:
we announce none, so nothing has to be compressed or decompressed here. Called by ``comm``.
"""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass
from typing import Any, Final

from distributed_core.protocol.codec import Frame, encode

__all__ = [
    "FEATURES",
    "REVISION",
    "Handshake",
    "HandshakeError",
    "local_handshake",
    "read_handshake",
]

REVISION: Final = 1
"""Revision of our own additions to the protocol."""

FEATURES: Final[tuple[str, ...]] = ()
"""Additions that this release understands, by name."""

OWN_FIELD: Final = "distributed-core"

# Results that a worker pickles for the scheduler to pass on reach clients of any Python, so the
# connecting side asks for the older protocol, as stock does.
_PICKLE_PROTOCOL_LISTENER: Final = 5
_PICKLE_PROTOCOL_CONNECTOR: Final = 4


class HandshakeError(ValueError):
    """The peer's first message is no handshake."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """What the peer said about itself.

    ``revision`` is zero and ``features`` empty for a stock peer; our own fields and ops go to no
    peer that did not name the feature.
    """

    pickle_protocol: int
    python: tuple[int, ...] = ()
    compression: str | None = None
    revision: int = 0
    features: frozenset[str] = frozenset()


def local_handshake(is_listener: bool) -> list[Frame]:
    """Our handshake, as the frames of a message."""
    protocol = _PICKLE_PROTOCOL_LISTENER if is_listener else _PICKLE_PROTOCOL_CONNECTOR
    return encode(
        {
            "compression": None,
            "python": tuple(sys.version_info[:3]),
            "pickle-protocol": protocol,
            OWN_FIELD: {"revision": REVISION, "features": list(FEATURES)},
        }
    )


def read_handshake(message: Any) -> Handshake:
    """Check the peer's first message.

    :raises HandshakeError: not a map, or without an integer ``pickle-protocol``.
    """
    if not isinstance(message, dict):
        raise HandshakeError(f"handshake must be a map, got {type(message).__name__}")
    protocol = message.get("pickle-protocol")
    if type(protocol) is not int or protocol < 0:
        raise HandshakeError(
            f"handshake needs an integer pickle-protocol, got {reprlib.repr(protocol)}"
        )
    python = message.get("python")
    if not (isinstance(python, tuple) and all(type(part) is int for part in python)):
        python = ()
    compression = message.get("compression")
    if not isinstance(compression, str):
        compression = None
    revision, features = _own_field(message.get(OWN_FIELD))
    return Handshake(protocol, python[:3], compression, revision, features)


def _own_field(found: Any) -> tuple[int, frozenset[str]]:
    """A malformed field of ours is the field of somebody else's: no features."""
    if not isinstance(found, dict):
        return 0, frozenset()
    revision = found.get("revision")
    features = found.get("features", ())
    if type(revision) is not int or not isinstance(features, (tuple, list)):
        return 0, frozenset()
    return revision, frozenset(name for name in features if isinstance(name, str))

"""Settings and counters of the transport; the server maps its configuration to them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CommSettings", "CommStats", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a peer may announce in one message, checked before any allocation."""

    max_frames: int
    max_frame_bytes: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class CommSettings:
    """How connections are made, kept and bounded. Times in seconds, sizes in bytes."""

    # Before the handshake a peer is a stranger: one small message and no more.
    handshake_limits: Limits = Limits(16, 64 * 1024, 64 * 1024)
    limits: Limits = Limits(4_000_000, 64 * 2**30, 128 * 2**30)
    handshake_timeout_seconds: float = 10.0
    connect_timeout_seconds: float = 30.0
    # How long a closing connection may take to flush what was written.
    close_timeout_seconds: float = 5.0
    tcp_timeout_seconds: float = 30.0
    backlog: int = 2048
    max_connections: int = 65_536
    max_handshakes: int = 4_096
    # The write buffer above which a peer counts as slow.
    write_high_bytes: int = 64 * 2**20
    # Requests of one peer that wait while one of its requests is carried out.
    max_queued_requests: int = 64
    pool_limit: int = 4_096
    require_encryption: bool = False


@dataclass(slots=True)
class CommStats:
    """Plain counters that metrics read."""

    connections_opened: int = 0
    connections_closed: int = 0
    connections_refused: int = 0
    handshake_failures: int = 0
    handshake_timeouts: int = 0
    frame_errors: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    messages_sent: int = 0
    connect_failures: int = 0

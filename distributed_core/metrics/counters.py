"""What the server counts beside the engine, and what the exporter may ask of the server.

Owns plain numbers in plain dicts, bounded in size: text that a peer chose never becomes a key. The
server bumps them, the exporter reads them. Never does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from distributed_core.comm.settings import CommStats
from distributed_core.materializer.pool import PoolStats
from distributed_core.metrics.monitors import GcMonitor, LagMonitor
from distributed_core.protocol.ops import TABLE, Reason

__all__ = [
    "KNOWN_OPS",
    "OTHER",
    "HttpStats",
    "MetricsSource",
    "SemaphoreFigures",
    "ServerCounters",
]

OTHER: Final = "other"
"""The label for whatever has no label of its own."""

KNOWN_OPS: Final = frozenset(row.name for row in TABLE)
"""Names of operations that may be labels."""

_PEERS: Final = frozenset({"client", "worker", "nanny", "tool", "unknown"})


@dataclass(slots=True)
class HttpStats:
    """Counters of one or more HTTP servers."""

    responses: dict[tuple[str, int], int] = field(default_factory=dict)
    """By route (the pattern, not the path asked for) and status."""
    handler_errors: int = 0
    connections: int = 0
    """Open now."""
    connections_refused: int = 0
    timeouts: int = 0
    protocol_errors: int = 0

    def responded(self, route: str, status: int) -> None:
        """Count one response."""
        key = (route, status)
        self.responses[key] = self.responses.get(key, 0) + 1


@dataclass(slots=True)
class SemaphoreFigures:
    """One semaphore, by the names that Dask's metrics use. Times in seconds."""

    max_leases: int = 0
    active_leases: int = 0
    pending_leases: int = 0
    acquired: int = 0
    released: int = 0
    average_pending_seconds: float = 0.0


@dataclass(slots=True)
class ServerCounters:
    """What the server counts. Keys come out of bounded sets only: use the methods."""

    messages_in: dict[tuple[str, str], int] = field(default_factory=dict)
    """By kind of peer and operation."""
    messages_out: dict[tuple[str, str], int] = field(default_factory=dict)
    rejected: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By kind of peer, operation and reason."""
    surplus_fields: dict[str, int] = field(default_factory=dict)
    """Requests with fields that nobody knows, by operation."""
    handler_seconds: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By operation: calls, and seconds for which they held the loop."""
    handler_errors: dict[str, int] = field(default_factory=dict)
    """By operation."""
    transition_errors: int = 0
    workers_added: int = 0
    workers_removed: int = 0
    clients_added: int = 0
    clients_removed: int = 0
    unknown_config_keys: int = 0
    plain_listener: bool = False
    """Whether an unencrypted listener is open to other machines."""
    semaphores: dict[str, SemaphoreFigures] = field(default_factory=dict)
    stealing: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By cost multiplier: requests, and their cost in seconds."""
    http: HttpStats = field(default_factory=HttpStats)

    def received(self, peer: str, op: str, n: int = 1) -> None:
        """Count ``n`` messages that a kind of peer sent."""
        key = (_peer(peer), _op(op))
        self.messages_in[key] = self.messages_in.get(key, 0) + n

    def sent(self, peer: str, op: str, n: int = 1) -> None:
        """Count ``n`` messages to a kind of peer."""
        key = (_peer(peer), _op(op))
        self.messages_out[key] = self.messages_out.get(key, 0) + n

    def reject(self, peer: str, op: str, reason: str) -> None:
        """Count a message that did not fit; ``op`` may be anything a peer wrote."""
        known = reason if reason in Reason.__members__.values() else OTHER
        key = (_peer(peer), _op(op), str(known))
        self.rejected[key] = self.rejected.get(key, 0) + 1

    def surplus(self, op: str) -> None:
        """Count a request with fields that nobody knows."""
        self.surplus_fields[_op(op)] = self.surplus_fields.get(_op(op), 0) + 1

    def handled(self, op: str, seconds: float, n: int = 1) -> None:
        """Count ``n`` calls of a handler that held the loop for ``seconds`` together."""
        known = _op(op)
        count, total = self.handler_seconds.get(known, (0, 0.0))
        self.handler_seconds[known] = (count + n, total + seconds)

    def handler_failed(self, op: str) -> None:
        """Count a handler that raised what it did not mean to."""
        self.handler_errors[_op(op)] = self.handler_errors.get(_op(op), 0) + 1


def _op(op: str) -> str:
    return op if op in KNOWN_OPS else OTHER


def _peer(peer: str) -> str:
    return peer if peer in _PEERS else OTHER


class MetricsSource(Protocol):
    """What the exporter reads; the server is one. Nothing here may cost more than O(workers)."""

    @property
    def machine(self) -> Any:
        """The ``SchedulerMachine``."""

    @property
    def counters(self) -> ServerCounters:
        """What the server counted."""

    @property
    def comm_stats(self) -> CommStats:
        """What the transport counted."""

    @property
    def loop_lag(self) -> LagMonitor:
        """The watch on the event loop."""

    @property
    def gc_monitor(self) -> GcMonitor:
        """The watch on the cycle collector."""

    def connection_counts(self) -> Mapping[str, int]:
        """Open connections by kind of peer (client, worker, nanny, tool, unknown)."""

    def outbox_bytes(self) -> Mapping[str, int]:
        """Bytes written that peers have not taken yet, by kind of peer."""

    def materializer_stats(self) -> PoolStats:
        """Figures of the materializer."""

"""What HTTP handlers and the exporter see of the server, and how HTTP is started.

Owns the adapter between the two. Called by the server when it starts.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from distributed_core.comm.errors import CommError
from distributed_core.comm.settings import CommStats
from distributed_core.engine.scheduler import explain
from distributed_core.materializer.pool import PoolStats
from distributed_core.metrics.counters import ServerCounters
from distributed_core.metrics.monitors import GcMonitor, LagMonitor
from distributed_core.server.http import HttpServer
from distributed_core.server.http_routes import RouteSettings, make_routes

if TYPE_CHECKING:
    from distributed_core.server.app import SchedulerServer

__all__ = ["WebSource", "start_http"]

logger = logging.getLogger(__name__)


class WebSource:
    """An ``HttpSource`` over a server."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server

    @property
    def machine(self) -> Any:
        """The scheduler machine."""
        return self._server.pump.machine

    @property
    def counters(self) -> ServerCounters:
        """What the server counted, with what compiled parts count for themselves."""
        server = self._server
        counters = server.counters
        counters.transition_errors = server.pump.transition_errors
        for op, n in server.worker_decoder.counts.items():
            counters.messages_in["worker", op] = n
        for op, n in server.pump.sink.counts.items():
            peer = "client" if op in _TO_CLIENTS else "worker"
            counters.messages_out[peer, op] = n
        return counters

    @property
    def comm_stats(self) -> CommStats:
        """What the transport counted."""
        return self._server.comm_stats

    @property
    def loop_lag(self) -> LagMonitor:
        """The watch on the event loop."""
        return self._server.loop_lag

    @property
    def gc_monitor(self) -> GcMonitor:
        """The watch on the cycle collector."""
        return self._server.gc_monitor

    def connection_counts(self) -> Mapping[str, int]:
        """Open connections by kind of peer."""
        return Counter(
            connection.kind
            for listener in self._server.listeners
            for connection in listener.connections
        )

    def outbox_bytes(self) -> Mapping[str, int]:
        """Bytes that peers have not taken yet, by kind of peer."""
        found: Counter[str] = Counter()
        for listener in self._server.listeners:
            for connection in listener.connections:
                found[connection.kind] += connection.buffered_bytes
        return found

    def materializer_stats(self) -> PoolStats:
        """Figures of the materializer."""
        return self._server.materializer.stats()

    @property
    def is_ready(self) -> bool:
        """Whether clients and workers are served."""
        return bool(self._server.listeners) and not self._server.finished.done()

    def problems(self) -> Sequence[str]:
        """Why the scheduler should be restarted, in words."""
        return self._server.problems()

    def identity(self, n_workers: int = -1) -> Mapping[str, Any]:
        """As the operation ``identity`` answers."""
        return self._server.identity(n_workers)

    def check_idle(self) -> float | None:
        """Since when there has been no work."""
        return self._server.check_idle()

    def retire_workers(self, addresses: list[str]) -> Awaitable[Mapping[str, Any]]:
        """Retire and close workers."""
        server = self._server
        return server.admin.retire(server.pump.workers_named(addresses))

    def explain(self, key: Any) -> Sequence[str]:
        """Sentences that say what a task waits for, or became of it."""
        return explain(self.machine, key)


_TO_CLIENTS = frozenset(
    {"key-in-memory", "task-erred", "lost-data", "task-retried", "cancelled-keys", "restart"}
)


async def start_http(server: SchedulerServer) -> HttpServer:
    """Listen on the configured addresses.

    :raises CommError: an address is taken and no other will do.
    """
    settings = server.config.http
    try:
        release = version("distributed-core")
    except PackageNotFoundError:
        release = "unknown"
    routes = make_routes(
        WebSource(server),
        RouteSettings(
            version=release,
            prefix=settings.prefix,
            namespace=server.config.metrics.namespace,
            max_prefix_labels=server.config.metrics.max_prefix_labels,
            dashboard=settings.dashboard,
            api=settings.api_enabled,
            allow_anonymous_api=settings.allow_anonymous_api,
        ),
    )
    http = HttpServer(routes, prefix=settings.prefix, stats=server.counters.http)
    for endpoint in settings.listen:
        context = _context(server) if endpoint.scheme == "https" else None
        try:
            await http.start(endpoint.host or None, endpoint.port, context)
        except OSError as exc:
            if not settings.free_port_if_taken:
                raise CommError(f"cannot listen on {endpoint}: {exc}") from exc
            await http.start(endpoint.host or None, 0, context)
            logger.warning("%s is taken (%s); HTTP is on port %d", endpoint, exc, http.port)
    for host, port in http.addresses:
        logger.info("HTTP at %s:%d", host, port)
    return http


def _context(server: SchedulerServer) -> ssl.SSLContext:
    tls = server.config.http.tls
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca_file)
    assert tls.cert is not None
    context.load_cert_chain(tls.cert, tls.key)
    return context
